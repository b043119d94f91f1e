from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.analysis.explain import Explanation
from sglang_crashkit.analysis.explain import explain as explain_sightings
from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from unit.analysis.real_stacks import (
    ALL_REDUCE,
    BROADCAST,
    CHECK,
    COMPILE,
    DECODE,
    HOLD_GIL,
    LOAD,
    MATMUL,
    ON_IDLE,
    RECEIVE,
    SPIN,
    STORE,
    SYNCHRONIZE,
    process,
    rounds,
)


def explain(nodes: Sequence[NodeSnapshot]) -> Explanation:
    return explain_sightings(Sightings.of(nodes))


def pids(explanation: Explanation) -> list[int]:
    return [member.source.pid for member in explanation.named]


def looks(count: int = 3, **ranks: Any) -> list[list[Sample]]:
    """Return looks at ``TP0``, ``TP1``... each given as the frames, or as fields beside the frames."""
    made = []
    for position in range(count):
        row = []
        for name, told in ranks.items():
            number = int(name.removeprefix("tp"))
            fields = dict(told) if isinstance(told, dict) else {"frames": told}
            cpu = fields.pop("cpu", 0.0) * position
            frames = fields.pop("frames", ())
            if frames and not isinstance(frames[0], str):
                frames = frames[position]
            row.append(process(10 + number, frames, tp=number, cpu_secs=cpu, **fields))
        made.append(row)
    return made


EIGHT: dict[str, Any] = {f"tp{number}": ALL_REDUCE for number in range(8)}


# -- two ranks, one of which keeps the other waiting


@pytest.mark.parametrize("waiting", [ALL_REDUCE, BROADCAST])
def test_a_stopped_rank_is_named(waiting: tuple[str, ...]) -> None:
    told = explain(rounds(*looks(tp0=waiting, tp1={"frames": waiting, "state": "T"})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "established", [11])
    assert told.statement == "sglang::scheduler_TP1 (pid 11) is stopped (state T) until somebody sends SIGCONT."
    assert any("TP0 (pid 10) waited in a collective in" in line for line in told.findings[0].evidence)


def test_a_rank_that_spins_in_python_is_named() -> None:
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1={"frames": SPIN, "cpu": 5.0, "state": "R"})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [11])
    assert "was in spin (sitecustomize.py:12) at 3 looks and used 10.0 s of CPU time meanwhile" in told.statement
    assert "while sglang::scheduler_TP0 (pid 10) waited in all_reduce" in told.statement
    assert any("it spun there, busy all the time" in line for line in told.findings[0].evidence)


def test_a_first_rank_that_spins_while_it_takes_in_requests_is_named() -> None:
    spin = ("spin (sitecustomize.py:12)", "on_stick (sitecustomize.py:32)", *RECEIVE)
    told = explain(rounds(*looks(tp0={"frames": spin, "cpu": 5.0, "state": "R"}, tp1=BROADCAST)))
    assert (told.kind, pids(told)) == ("outlier", [10])


def test_a_rank_in_uninterruptible_sleep_is_named() -> None:
    asleep = {"frames": BROADCAST, "state": "D", "wchan": "kernel_clone"}
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1=asleep)))
    assert (told.kind, told.level, pids(told)) == ("outlier", "established", [11])
    assert "in uninterruptible sleep (state D) in the kernel's kernel_clone" in told.statement


def test_a_rank_that_holds_the_interpreter_lock_in_native_code_is_named() -> None:
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1={"frames": HOLD_GIL, "owns_gil": True})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [11])
    assert "hold_gil" in told.statement
    assert any("it was stuck there" in line for line in told.findings[0].evidence)
    assert "holding the GIL in native code" in told.statement


def test_a_rank_held_by_a_debugger_is_named_with_the_debugger() -> None:
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1={"frames": ALL_REDUCE, "state": "t", "tracer": 77})))
    assert (pids(told), told.level) == ([11], "established")
    assert "is held by process 77, a debugger or tracer" in told.statement


@pytest.mark.parametrize("frames", [LOAD, COMPILE, MATMUL])
def test_a_rank_that_stays_behind_is_named_with_what_it_does(frames: tuple[str, ...]) -> None:
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1=frames)))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [11])
    assert frames[0] in told.statement


def test_a_rank_that_died_between_the_looks_is_named() -> None:
    both = looks(2, tp0=ALL_REDUCE, tp1=ALL_REDUCE)
    told = explain(rounds(both[0], both[1][:1]))
    assert (told.kind, told.level, pids(told)) == ("outlier", "established", [11])
    assert "is gone" in told.statement


def test_one_look_names_who_is_elsewhere_but_is_not_sure() -> None:
    told = explain(rounds(*looks(1, tp0=ALL_REDUCE, tp1=SPIN)))
    assert (told.kind, told.level, pids(told)) == ("outlier", "unknown", [11])


def test_a_rank_that_goes_on_while_the_other_rests_is_named() -> None:
    moving = {"frames": [SPIN, ("helper (sitecustomize.py:40)", *SPIN), SPIN], "cpu": 5.0, "state": "R"}
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1=moving)))
    assert (told.kind, pids(told)) == ("outlier", [11])
    assert any("it moved below spin" in line for line in told.findings[0].evidence)


# -- where nobody may be named


def test_of_two_that_wait_for_each_other_at_startup_nobody_is_named() -> None:
    told = explain(rounds(*looks(tp0=STORE, tp1=STORE)))
    assert (told.kind, told.level, pids(told)) == ("waiting", "unknown", [])
    assert "waited for the others through the store, as at startup" in told.statement
    assert "no single rank looks responsible" in told.statement


def test_of_two_in_different_collectives_nobody_is_named_but_both_are_told() -> None:
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1=BROADCAST)))
    assert (told.kind, pids(told)) == ("waiting", [])
    assert "each waits elsewhere" in told.statement


@pytest.mark.parametrize(
    ("tp0", "tp1"),
    [
        # The first asks its socket again and again.
        ({"frames": [RECEIVE, BROADCAST, ON_IDLE], "cpu": 5.0}, {"frames": BROADCAST, "cpu": 0.5}),
        ({"frames": BROADCAST, "cpu": 5.0}, {"frames": BROADCAST, "cpu": 0.5}),
        # By chance it is found in the same function of the loop at each look.
        ({"frames": CHECK, "cpu": 5.0}, {"frames": BROADCAST, "cpu": 2.0}),
        ({"frames": BROADCAST, "cpu": 2.0}, {"frames": [CHECK, BROADCAST, CHECK], "cpu": 2.0}),
        # It sleeps until a request comes.
        (RECEIVE, BROADCAST),
    ],
)
def test_an_idle_server_does_not_hang(tp0: Any, tp1: Any) -> None:
    told = explain(rounds(*looks(tp0=tp0, tp1=tp1)))
    assert (told.kind, pids(told)) == ("idle", [])
    assert "no hang is seen" in told.statement


def test_an_idle_server_seen_once_does_not_hang_either() -> None:
    assert explain(rounds(*looks(1, tp0=RECEIVE, tp1=BROADCAST))).kind == "idle"


def test_a_rank_that_spins_in_the_loop_for_requests_while_the_other_rests_is_named() -> None:
    spin = ("spin (sitecustomize.py:12)", "on_stick (sitecustomize.py:32)", *CHECK)
    told = explain(rounds(*looks(tp0=BROADCAST, tp1={"frames": spin, "cpu": 5.0, "state": "R"})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [11])


def test_one_look_at_the_loop_for_requests_shows_nothing() -> None:
    assert pids(explain(rounds(*looks(1, tp0=CHECK, tp1=BROADCAST)))) == []
    assert pids(explain(rounds(*looks(1, tp0=SPIN, tp1=BROADCAST)))) == [10]


def test_ranks_that_pass_on_requests_and_show_no_sign_of_life_are_not_called_idle() -> None:
    told = explain(rounds(*looks(tp0=BROADCAST, tp1=BROADCAST)))
    assert (told.kind, told.level, pids(told)) == ("waiting", "unknown", [])


def test_a_server_at_work_does_not_hang() -> None:
    tp0 = {"frames": [ALL_REDUCE, MATMUL, BROADCAST], "cpu": 4.0}
    tp1 = {"frames": [MATMUL, ALL_REDUCE, ALL_REDUCE], "cpu": 4.0}
    told = explain(rounds(*looks(tp0=tp0, tp1=tp1)))
    assert (told.kind, pids(told)) == ("moving", [])


def test_a_rank_at_work_is_not_blamed_for_one_that_is_seen_in_a_collective_only() -> None:
    tp0, tp1 = {"frames": ALL_REDUCE, "cpu": 4.0}, {"frames": [MATMUL, ALL_REDUCE, MATMUL], "cpu": 4.0}
    assert explain(rounds(*looks(tp0=tp0, tp1=tp1))).kind == "moving"


def test_nothing_is_claimed_of_nothing() -> None:
    assert explain([]).kind == "unclear"
    assert explain([NodeSnapshot("n1", 1.0)]).statement == "No process was seen."
    told = explain(rounds(*looks(tp0={"problem": "py-spy may not trace it"}, tp1={"problem": "the same"})))
    assert (told.kind, told.level, pids(told)) == ("unclear", "unknown", [])


def test_a_rank_without_a_stack_does_not_hide_who_is_elsewhere_but_makes_it_less_certain() -> None:
    told = explain(rounds(*looks(tp0=ALL_REDUCE, tp1=SPIN, tp2={"problem": "no py-spy"})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "unknown", [11])
    assert told.statement.endswith("Of sglang::scheduler_TP2 (pid 12) no stack was seen.")


def test_a_rank_without_a_stack_may_be_the_one_where_all_others_wait() -> None:
    told = explain(rounds(*looks(**EIGHT | {"tp3": {"problem": "no py-spy"}})))
    assert (told.kind, told.level, pids(told)) == ("unclear", "unknown", [])
    assert "7 ranks (TP0-2,4-7) waited in a collective in all_reduce" in told.statement
    assert "Of sglang::scheduler_TP3 (pid 13) no stack was seen: for it the others may wait." in told.statement


def test_nobody_is_named_where_most_have_no_stack() -> None:
    unseen = {f"tp{number}": {"problem": "no py-spy"} for number in range(2, 8)}
    assert pids(explain(rounds(*looks(**EIGHT | {"tp1": SPIN} | unseen)))) == []


# -- eight ranks, few of which keep the others waiting


@pytest.mark.parametrize("frames", [BROADCAST, STORE, SYNCHRONIZE])
def test_the_one_that_waits_elsewhere_than_most_is_named(frames: tuple[str, ...]) -> None:
    told = explain(rounds(*looks(**EIGHT | {"tp5": frames})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [15])
    assert frames[0] in told.statement
    assert "while 7 ranks (TP0-4,6-7) waited in all_reduce" in told.statement


def test_several_that_wait_elsewhere_than_most_are_named_together() -> None:
    told = explain(rounds(*looks(**EIGHT | {"tp5": BROADCAST, "tp2": STORE, "tp6": BROADCAST})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [12, 15, 16])


def test_nobody_is_named_where_half_wait_elsewhere() -> None:
    half = {f"tp{number}": BROADCAST for number in range(4)}
    told = explain(rounds(*looks(**EIGHT | half)))
    assert (told.kind, pids(told)) == ("waiting", [])


def test_nobody_is_named_where_most_wait_for_their_gpu() -> None:
    most = {f"tp{number}": SYNCHRONIZE for number in range(7)}
    assert pids(explain(rounds(*looks(**EIGHT | most)))) == []


def test_who_waits_elsewhere_is_not_named_of_one_look_or_where_somebody_goes_on() -> None:
    assert pids(explain(rounds(*looks(1, **EIGHT | {"tp5": BROADCAST})))) == []
    inner = ("helper (x.py:1)", *ALL_REDUCE[1:])
    moving = {"frames": [ALL_REDUCE, (ALL_REDUCE[0], *inner), ALL_REDUCE]}
    assert pids(explain(rounds(*looks(**EIGHT | {"tp5": BROADCAST, "tp6": moving})))) == []


def test_several_that_do_not_wait_are_named_together() -> None:
    spinning = {"frames": SPIN, "cpu": 5.0, "state": "R"}
    told = explain(rounds(*looks(**EIGHT | {"tp2": spinning, "tp5": spinning})))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [12, 15])
    assert "TP2 (pid 12) and sglang::scheduler_TP5 (pid 15) were in spin (sitecustomize.py:12)" in told.statement
    assert "while 6 ranks (TP0-1,3-4,6-7) waited in all_reduce" in told.statement


def test_who_does_not_wait_is_named_before_who_waits_elsewhere() -> None:
    assert pids(explain(rounds(*looks(**EIGHT | {"tp2": SPIN, "tp5": BROADCAST})))) == [12]


def test_nobody_is_named_where_as_many_wait_as_do_not() -> None:
    half = {f"tp{number}": SPIN if number % 2 else MATMUL for number in range(4)}
    assert pids(explain(rounds(*looks(**EIGHT | half)))) == []


# -- groups


def two_groups(axis: str, odd: tuple[str, ...] = SPIN) -> list[list[Sample]]:
    made = []
    for _look in range(3):
        row = [
            process(10 + 10 * group + tp, odd if (group, tp) == (1, 2) else ALL_REDUCE, tp=tp, **{axis: group})
            for group in range(2)
            for tp in range(4)
        ]
        made.append(row)
    return made


@pytest.mark.parametrize(("axis", "name"), [("pp", "PP1"), ("dp", "DP1")])
def test_of_eight_ranks_in_two_groups_the_odd_one_of_its_group_is_named(axis: str, name: str) -> None:
    told = explain(rounds(*two_groups(axis)))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [22])
    assert [finding.kind for finding in told.findings] == ["outlier", "waiting"]
    assert told.findings[0].group == name
    assert told.statement.startswith(f"{name}: sglang::scheduler_")


def test_groups_are_not_mixed() -> None:
    # A replica that is idle is not the odd one of another.
    busy = [[process(10 + tp, ALL_REDUCE, dp=0, tp=tp) for tp in range(2)] for _look in range(3)]
    for row in busy:
        row += [process(20 + tp, BROADCAST if tp else RECEIVE, dp=1, tp=tp) for tp in range(2)]
    told = explain(rounds(*busy))
    assert [(finding.group, finding.kind) for finding in told.findings] == [("DP0", "waiting"), ("DP1", "idle")]
    assert pids(told) == []


def test_replicas_of_the_attention_alone_are_one_group() -> None:
    row = [process(10 + tp, SPIN if tp == 2 else ALL_REDUCE, dp=tp, tp=tp, ep=tp) for tp in range(4)]
    told = explain(rounds(row, row))
    assert pids(told) == [12]
    assert len(told.findings) == 1


def test_servers_of_one_host_are_not_mixed() -> None:
    row = [process(10 + tp, ALL_REDUCE, tp=tp, server=1) for tp in range(2)]
    row += [process(20 + tp, SPIN if tp else ALL_REDUCE, tp=tp, server=2) for tp in range(2)]
    told = explain(rounds(row, row))
    assert pids(told) == [21]
    assert told.findings[0].group == "n1:2"


def test_ranks_of_one_server_on_several_hosts_are_one_group() -> None:
    def host(number: int) -> list[Sample]:
        return [
            process(10 + tp, SPIN if tp == 6 else ALL_REDUCE, tp=tp, server=5, rendezvous="10.0.0.1:5000")
            for tp in range(4 * number, 4 * number + 4)
        ]

    nodes = [node for n in range(2) for node in rounds(host(n), host(n), host(n), host=f"n{n}")]
    told = explain(nodes)
    assert pids(told) == [16]
    assert "sglang::scheduler_TP6 (pid 16 on n1)" in told.statement
    assert "while 7 ranks (TP0-5,7) waited in all_reduce" in told.statement
    assert len(told.findings) == 1


def test_a_stage_for_which_all_others_wait_is_named() -> None:
    def row() -> list[Sample]:
        frames = {0: ALL_REDUCE, 1: MATMUL, 2: ALL_REDUCE}
        return [process(10 + pp, frames[pp], pp=pp) for pp in range(3)]

    told = explain(rounds(row(), row(), row()))
    assert (told.kind, told.level, pids(told)) == ("outlier", "supported", [11])
    assert "All of PP0, PP2 waited meanwhile." in told.statement


# -- prefill and decode


def test_a_prefill_side_that_died_is_named() -> None:
    decode, prefill = process(20, DECODE, side="decode", server=2), process(10, BROADCAST, side="prefill", server=1)
    told = explain(rounds([decode, prefill], [decode], [decode]))
    assert (told.kind, told.level, pids(told)) == ("outlier", "established", [10])
    assert told.statement.startswith("prefill n1:1: sglang::scheduler (pid 10) of the prefill side is gone")


@pytest.mark.parametrize(("side", "other"), [("decode", "prefill"), ("prefill", "decode")])
def test_an_idle_side_of_a_pair_of_which_the_other_side_is_not_found_is_not_said_not_to_hang(
    side: str, other: str
) -> None:
    one = process(20, DECODE, side=side, server=2)
    told = explain(rounds([one], [one]))
    assert (told.kind, told.level, pids(told)) == ("unclear", "unknown", [])
    assert told.statement.endswith(
        "waited for requests or for the other side of its pair, as when there are none. "
        f"No process of the {other} side was found: whether that hangs, or is gone, is not seen."
    )


def test_of_an_untitled_side_of_a_pair_the_same_is_said() -> None:
    frames = (*DECODE, "run_scheduler_process (scheduler.py:4045)")
    one = process(20, frames, side="decode", role="starting")
    assert explain(rounds([one], [one])).kind == "unclear"
    prefill = process(10, DECODE, side="prefill")
    assert explain(rounds([one, prefill], [one, prefill])).kind == "idle"


def test_a_side_of_stages_that_is_idle_is_not_named_where_the_other_side_is_not_found() -> None:
    row = [process(20 + pp, DECODE if pp == 0 else BROADCAST, pp=pp, side="decode") for pp in range(2)]
    assert pids(explain(rounds(row, row))) == []


def test_a_side_that_goes_on_is_not_said_to_be_without_a_hang_unless_it_works() -> None:
    helpers = [("helper (x.py:1)", *DECODE[1:]), ("other (x.py:2)", *DECODE[1:])]
    looks = [[process(20, frames, side="decode")] for frames in helpers]
    assert explain(rounds(*looks)).kind == "unclear"
    looks = [[process(20, frames, side="decode")] for frames in (MATMUL, ALL_REDUCE)]
    assert explain(rounds(*looks)).kind == "moving"


def test_a_side_that_waits_is_told_with_the_other_side_that_is_not_found() -> None:
    one = process(20, BROADCAST, side="decode", server=2)
    told = explain(rounds([one], [one]))
    assert told.kind == "waiting"
    assert "No process of the prefill side was found." in told.findings[0].evidence


def test_a_decode_side_that_goes_round_is_not_said_to_wait_for_requests_only() -> None:
    decode, prefill = process(20, DECODE, side="decode", server=2), process(10, BROADCAST, side="prefill", state="T")
    told = explain(rounds([decode, prefill], [decode, prefill]))
    assert pids(told) == [10]
    (idle,) = [finding for finding in told.findings if finding.kind == "idle"]
    assert (
        "of the decode side waited for requests or for the other side of its pair, as when there are none"
        in idle.statement
    )


def test_a_stopped_process_that_is_no_rank_is_named() -> None:
    row = [
        process(10, RECEIVE),
        process(5, ("poll (x.py:1)",), title="sglang::detokenizer", role="detokenizer", state="T"),
    ]
    told = explain(rounds(row, row))
    assert (told.kind, pids(told)) == ("outlier", [5])


def test_a_helper_that_ended_is_not_named() -> None:
    rank, helper = process(10, RECEIVE), process(6, (), title="cc1plus", role="helper")
    assert explain(rounds([rank, helper], [rank], [rank])).kind == "idle"


# -- the whole


def test_it_is_the_same_in_whatever_order_snapshots_come() -> None:
    nodes = rounds(*two_groups("pp")) + rounds(*two_groups("pp", odd=ALL_REDUCE), host="n2")
    first = explain(nodes).to_json()
    for order in itertools.islice(itertools.permutations(nodes), 0, 720, 60):
        assert explain(order).to_json() == first


def test_as_json_it_says_who_is_named_and_what_is_missing() -> None:
    nodes = rounds(*looks(tp0=ALL_REDUCE, tp1={"frames": SPIN, "cpu": 5.0}))
    nodes[0] = replace(nodes[0], problems=(Problem("pid 12", "it ended", ""),))
    document = json.loads(json.dumps(explain(nodes).to_json()))
    assert document["schema_version"] == 1
    (named,) = document["named"]
    assert (named["host"], named["pid"], named["title"]) == ("n1", 11, "sglang::scheduler_TP1")
    assert document["groups"][0]["named"] == document["named"]
    assert document["problems"] == [{"what": "pid 12", "why": "it ended", "next": ""}]


STATES = st.sampled_from(["S", "R", "T", "D", "t", "Z", ""])
STACKS = st.sampled_from([(), ALL_REDUCE, BROADCAST, RECEIVE, SPIN, STORE, COMPILE, LOAD, MATMUL])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.tuples(STATES, STACKS, st.floats(0, 50)), min_size=1, max_size=4), min_size=1, max_size=3))
def test_whatever_is_seen_somebody_is_named_only_as_odd_and_who_only_waits_only_beside_more(told: Any) -> None:
    row = [
        [process(10 + tp, frames, tp=tp, state=state, cpu_secs=cpu) for tp, (state, frames, cpu) in enumerate(look)]
        for look in told
    ]
    explanation = explain(rounds(*row))
    assert bool(explanation.named) == (explanation.kind == "outlier")
    for member in explanation.named:
        is_among_few = 2 * len(explanation.named) < explanation.processes
        assert explanation.level == "established" or not member.waits() or is_among_few
    assert explanation.statement.endswith(".")
    json.dumps(explanation.to_json())
