from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.analysis.member import name_some
from sglang_crashkit.analysis.verdict import FailureEvent, Suspect, find_suspect, judge
from sglang_crashkit.model.incident import Collectives, Incident, ProcessReport, ServerInfo, Trigger
from sglang_crashkit.model.sample import Gil, Sample, Thread
from unit.analysis import real_stacks
from unit.analysis.real_stacks import stack

BROADCAST = "broadcast (torch/distributed/distributed_c10d.py:3787)"
ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:3913)"
SHARED_MEMORY = "all_reduce (sglang/srt/distributed/parallel_state.py:699)"
GPU = "synchronize (torch/cuda/streams.py:231)"
SPIN = "match (managers/schedule_batch.py:100)"


def rank(number: int, *frames: str, states: str = "", cpu_secs: float = 0.0, **ranks: int) -> ProcessReport:
    """Return a rank as it was seen at several looks; a frame or a state for each."""
    report = ProcessReport(10 + number, f"sglang::scheduler_TP{number}", "scheduler", {"tp": number} | ranks)
    states = states or "S" * max(len(frames), 1)
    for position, state in enumerate(states):
        frame = frames[position % len(frames)] if frames else ""
        report.samples.append(
            Sample(state=state, cpu_secs=cpu_secs * position, doing=(frame, "main (x.py:1)") if frame else ())
        )
    report.doing = list(report.samples[0].doing)
    return report


def named(*ranks: ProcessReport) -> tuple[int, str] | None:
    suspect: Suspect | None = find_suspect(ranks)
    return (suspect.process.rank["tp"], suspect.statement) if suspect else None


def test_a_rank_that_is_stopped_is_named_whatever_the_others_do() -> None:
    found = named(rank(0, BROADCAST, states="SSS"), rank(1, BROADCAST, states="TTT"), rank(2, SPIN, states="RRR"))
    assert found == (1, "sglang::scheduler_TP1 (pid 11) is stopped (state T) until somebody sends SIGCONT.")


def test_of_several_that_are_stopped_the_one_that_was_silent_first_is_named() -> None:
    found = named(rank(2, BROADCAST, states="T"), rank(0, BROADCAST, states="T"))
    assert found is not None
    assert found[0] == 2
    assert "TP2 (pid 12) and sglang::scheduler_TP0 (pid 10) are stopped" in found[1]


def test_a_rank_that_is_held_by_an_unknown_debugger_is_named() -> None:
    found = named(rank(0, BROADCAST, states="SSS"), rank(1, BROADCAST, states="ttt"))
    assert found == (1, "sglang::scheduler_TP1 (pid 11) is held by a debugger or tracer (state t).")


def test_a_rank_that_was_stopped_for_a_moment_only_is_not_named() -> None:
    assert named(rank(0, BROADCAST, states="SSS"), rank(1, BROADCAST, states="STS")) is None


def test_a_rank_in_uninterruptible_sleep_is_named_with_where_it_sleeps() -> None:
    sleeper = rank(1, BROADCAST, states="DDD")
    sleeper.state = {"wchan": "rpc_wait_bit_killable"}
    found = named(rank(0, BROADCAST, states="SSS"), sleeper)
    assert found is not None
    assert found[1] == (
        "sglang::scheduler_TP1 (pid 11) is in uninterruptible sleep (state D) in the kernel's rpc_wait_bit_killable."
    )


@pytest.mark.parametrize("states", ["D", "DSD"])
def test_a_moment_of_uninterruptible_sleep_says_nothing(states: str) -> None:
    assert named(rank(0, BROADCAST, states="S" * len(states)), rank(1, BROADCAST, states=states)) is None


@pytest.mark.parametrize("waiting", [BROADCAST, ALL_REDUCE, SHARED_MEMORY, GPU])
def test_the_one_that_is_elsewhere_while_the_others_wait_is_named(waiting: str) -> None:
    found = named(rank(0, waiting, waiting), rank(1, SPIN, SPIN, states="RR", cpu_secs=2.0))
    assert found is not None
    assert found[0] == 1
    assert f"was in {SPIN} at 2 looks and used 2.0 s of CPU time meanwhile" in found[1]
    assert f"while sglang::scheduler_TP0 (pid 10) waited in {waiting}." in found[1]


def test_one_that_moves_about_is_named_with_the_places_where_it_was_seen() -> None:
    found = named(rank(0, BROADCAST, BROADCAST), rank(1, SPIN, BROADCAST))
    assert found is not None
    assert f"was in {SPIN} and {BROADCAST}" in found[1]


def test_nobody_is_named_where_all_wait_or_several_are_elsewhere() -> None:
    assert named(rank(0, BROADCAST), rank(1, ALL_REDUCE)) is None
    assert named(rank(0, BROADCAST), rank(1, ALL_REDUCE), rank(2, BROADCAST)) is None
    assert named(rank(0, BROADCAST), rank(1, SPIN), rank(2, "f (y.py:1)")) is None
    assert named(rank(0, "f (x.py:1)"), rank(1, "g (y.py:2)")) is None
    assert named(rank(0, BROADCAST)) is None
    assert named() is None


def test_nobody_is_named_where_a_stack_is_missing() -> None:
    # The one without a stack may be the one.
    assert named(rank(0, BROADCAST), rank(1, SPIN), rank(2)) is None


def test_the_odd_one_of_three_is_named_where_nobody_waits_in_a_known_place() -> None:
    same = [rank(number, f"forward (model.py:{number})") for number in (0, 2, 3)]
    found = named(*same, rank(1, "load (cache.py:9)"))
    assert found is not None
    assert found[0] == 1
    assert "were all in forward (model.py:0)" in found[1]
    assert named(*same, rank(1, "load (cache.py:9)"), rank(4, "store (cache.py:9)")) is None


@given(
    st.lists(st.sampled_from([BROADCAST, ALL_REDUCE, SPIN, "f (x.py:1)", ""]), max_size=6),
    st.text(alphabet="SRDTt", min_size=3, max_size=3),
)
def test_whoever_is_named_is_one_of_them_and_not_one_that_waits(frames: list[str], states: str) -> None:
    ranks = [rank(number, *([frame] * 3 if frame else []), states=states) for number, frame in enumerate(frames)]
    suspect = find_suspect(ranks)
    if suspect is not None:
        assert suspect.process in ranks
        assert suspect.process.title in suspect.statement
        if states not in ("TTT", "DDD", "ttt"):
            assert not suspect.process.samples[0].doing[0].startswith(("broadcast", "all_reduce"))


def test_many_names_are_not_all_listed() -> None:
    assert name_some(["a"]) == "a"
    assert name_some(["a", "b", "c"]) == "a, b and c"
    assert name_some([str(n) for n in range(100)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 92 more"


# -- what holds the one that is named


def looked_at(
    number: int, *stacks: tuple[str, ...], states: str = "RRR", cpu_secs: float = 0.0, gil: Gil = ""
) -> ProcessReport:
    """Return a rank as the handler sees it, every 2 s; a stack for each look, or the same at all."""
    report = ProcessReport(10 + number, f"sglang::scheduler_TP{number}", "scheduler", {"tp": number})
    for position, state in enumerate(states):
        frames = stack(*stacks[position % len(stacks)])
        report.samples.append(
            Sample(
                time=1000.0 + 2 * position,
                pid=10 + number,
                state=state,
                cpu_secs=cpu_secs * position,
                doing=tuple(map(str, frames[:4])),
                gil=gil,
                threads=(Thread("MainThread", 10 + number, active=False, owns_gil=False, frames=frames),),
            )
        )
    report.doing = list(report.samples[0].doing)
    return report


WAITS = looked_at(0, real_stacks.BROADCAST, states="SSS")


def said_of(rank: ProcessReport) -> str:
    """Return what is said of a rank that another one waits for."""
    found = named(WAITS, rank)
    assert found is not None
    assert found[0] == rank.rank["tp"]
    return found[1]


def test_one_that_is_busy_at_the_same_place_all_the_time_is_said_to_spin() -> None:
    assert said_of(looked_at(1, real_stacks.SPIN, cpu_secs=1.9, gil="main")) == (
        "sglang::scheduler_TP1 (pid 11) was in spin (sitecustomize.py:12) at 3 looks and used 3.8 s of CPU time"
        f" meanwhile, while sglang::scheduler_TP0 (pid 10) waited in {real_stacks.BROADCAST[0]}."
        " sglang::scheduler_TP1 (pid 11) spun there, busy all the time."
    )


def test_one_that_sleeps_does_not_spin_whatever_its_other_threads_use() -> None:
    assert "spun" not in said_of(looked_at(1, real_stacks.SPIN, states="SSS", cpu_secs=1.9))


def test_one_that_rests_at_the_same_place_is_said_to_be_stuck() -> None:
    said = said_of(looked_at(1, real_stacks.SPIN, states="SSS"))
    assert said.endswith(". sglang::scheduler_TP1 (pid 11) was stuck there.")


def test_one_that_goes_round_is_said_to_move_with_the_function_that_it_does_not_leave() -> None:
    # Deeper than what the incident shows of it.
    stacks = [(*(f"f{depth}_{look} (x.py:1)" for depth in range(8)), *real_stacks.BATCH) for look in range(3)]
    said = said_of(looked_at(1, *stacks, cpu_secs=1.9))
    assert said.endswith(". sglang::scheduler_TP1 (pid 11) moved below LlamaModel.forward.")


def test_one_that_sleeps_with_the_interpreter_lock_is_said_to_hold_it() -> None:
    said = said_of(looked_at(1, real_stacks.SPIN, states="SSS", gil="main"))
    assert "was in spin (sitecustomize.py:12), holding the GIL in native code at 3 looks" in said


@pytest.mark.parametrize("gil", ["main", "taken"])
def test_a_lock_that_was_held_at_some_of_the_looks_only_is_not_said_to_be(gil: Gil) -> None:
    rank = looked_at(1, real_stacks.SPIN, states="SSS", gil=gil)
    rank.samples[1] = replace(rank.samples[1], gil="")
    assert "GIL" not in said_of(rank)
    assert "GIL" not in said_of(looked_at(1, real_stacks.SPIN, states="S", gil=gil))


def test_where_it_is_not_seen_who_holds_the_lock_it_is_said_that_it_was_not_to_be_had() -> None:
    said = said_of(looked_at(1, real_stacks.SPIN, states="SSS", gil="taken"))
    assert said.endswith(" No other thread of sglang::scheduler_TP1 (pid 11) got the GIL in time to answer.")


def test_of_one_that_is_stopped_nothing_more_is_said() -> None:
    said = said_of(looked_at(1, real_stacks.SPIN, states="TTT", gil="taken"))
    assert said == "sglang::scheduler_TP1 (pid 11) is stopped (state T) until somebody sends SIGCONT."


def test_where_the_times_are_not_known_nothing_is_said_of_motion() -> None:
    assert said_of(rank(1, SPIN, SPIN, states="RR", cpu_secs=2.0)).endswith(f"waited in {real_stacks.BROADCAST[0]}.")


# -- the verdict


def silent(pid: int, seconds: float, message: str = "made no progress for 5.0 s") -> FailureEvent:
    return FailureEvent(pid, seconds, "hang", message)


def incident_of(*ranks: ProcessReport) -> Incident:
    trigger = Trigger("no_progress", "t", ranks[0].pid, ranks[0].title)
    return Incident("id", "hang", trigger, ServerInfo(1, "0", "0", "h"), processes=list(ranks))


def test_the_verdict_names_the_rank_to_look_at_and_not_the_one_that_waits() -> None:
    ranks = rank(0, BROADCAST, states="SS"), rank(1, BROADCAST, states="TT")
    verdict = judge(incident_of(*ranks), [silent(10, 1.0), silent(11, 2.0)])
    assert verdict.first_failure is not None
    assert (verdict.kind, verdict.first_failure.pid, verdict.level) == ("hang", 11, "supported")
    assert verdict.basis == [
        "sglang::scheduler_TP1 (pid 11) is stopped (state T) until somebody sends SIGCONT.",
        "sglang::scheduler_TP0 (pid 10) and sglang::scheduler_TP1 (pid 11) made no progress for 5.0 s.",
        f"sglang::scheduler_TP0 (pid 10) was in {BROADCAST}.",
    ]


def test_a_watchdog_of_the_waiting_rank_does_not_make_it_the_cause() -> None:
    ranks = rank(0, ALL_REDUCE, states="S"), rank(1, ALL_REDUCE, states="T")
    verdict = judge(incident_of(*ranks), [silent(10, 1.0, "made no progress: its watchdog timed out")])
    assert verdict.first_failure is not None
    assert verdict.first_failure.pid == 11


def test_nobody_is_named_where_all_are_stopped() -> None:
    ranks = rank(0, BROADCAST, states="TTT"), rank(1, BROADCAST, states="TTT")
    verdict = judge(incident_of(*ranks), [silent(10, 1.0), silent(11, 1.0)])
    assert (verdict.kind, verdict.first_failure, verdict.level) == ("hang", None, "established")
    assert "are all stopped (state T)" in verdict.basis[0]
    assert "made no progress for 5.0 s" in verdict.basis[1]


def test_the_only_one_is_named_where_it_is_stopped() -> None:
    verdict = judge(incident_of(rank(0, BROADCAST, states="TTT")), [silent(10, 1.0)])
    assert verdict.first_failure is not None
    assert verdict.first_failure.pid == 10


def test_the_verdict_is_unknown_where_all_wait() -> None:
    ranks = rank(0, BROADCAST), rank(1, BROADCAST)
    verdict = judge(incident_of(*ranks), [silent(10, 1.0), silent(11, 1.0)])
    assert (verdict.kind, verdict.first_failure, verdict.level) == ("hang", None, "unknown")
    assert verdict.text.startswith("2 processes made no progress, and no single rank looks responsible. ")
    assert BROADCAST in verdict.text


def test_the_only_one_that_makes_no_progress_is_named() -> None:
    verdict = judge(incident_of(looked_at(0, real_stacks.SPIN, cpu_secs=1.9)), [silent(10, 1.0)])
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.level) == (10, "supported")
    assert verdict.basis == [
        "sglang::scheduler_TP0 (pid 10) made no progress for 5.0 s.",
        "sglang::scheduler_TP0 (pid 10) was in spin (sitecustomize.py:12) at 3 looks and used 3.8 s of CPU time"
        " meanwhile.",
        "sglang::scheduler_TP0 (pid 10) spun there, busy all the time.",
    ]


def test_the_only_one_is_named_where_it_was_not_looked_at() -> None:
    verdict = judge(incident_of(ProcessReport(10, "sglang::scheduler_TP0", "scheduler", {})), [silent(10, 1.0)])
    assert verdict.basis == ["sglang::scheduler_TP0 (pid 10) made no progress for 5.0 s."]


def test_ranks_of_another_group_are_not_compared_with() -> None:
    # The replica that is idle stands out, and has nothing to do with it.
    ranks = rank(0, BROADCAST, dp=0), rank(1, BROADCAST, dp=0), rank(2, SPIN, dp=1)
    assert judge(incident_of(*ranks), [silent(10, 1.0), silent(11, 1.0)]).first_failure is None


def test_ranks_whose_attention_alone_is_replicated_are_compared() -> None:
    ranks = [rank(number, SPIN if number == 2 else BROADCAST, dp=number) for number in range(4)]
    failure = judge(incident_of(*ranks), [silent(10, 1.0)]).first_failure
    assert failure is not None
    assert failure.pid == 12


def test_what_came_after_the_hang_is_told_after_it() -> None:
    ranks = rank(0, BROADCAST, states="SS"), rank(1, BROADCAST, states="TT")
    events = [silent(10, 1.0), FailureEvent(10, 9.0, "exception", "RuntimeError: Connection closed by peer")]
    verdict = judge(incident_of(*ranks), events)
    assert verdict.first_failure is not None
    assert verdict.first_failure.pid == 11
    assert "sglang::scheduler_TP0 (pid 10) then raised RuntimeError" in verdict.text


def test_ranks_that_compile_are_told_to() -> None:
    ranks = [rank(number, *["_try_wait (subprocess.py:2004)"] * 3, states="SSS") for number in range(2)]
    for each in ranks:
        each.doing = [each.doing[0], "compile (torch/_inductor/codecache.py:1)"]
    verdict = judge(incident_of(*ranks), [FailureEvent(each.pid, 1.0, "hang", "made no progress") for each in ranks])
    assert "sglang::scheduler_TP1 (pid 11) compiled a kernel in _try_wait (subprocess.py:2004)." in verdict.basis


def behind(*pids: int, level: str = "established") -> Collectives:
    return Collectives([{"kind": "behind", "level": level, "statement": "One is behind.", "pids": list(pids)}])


def test_where_all_wait_the_one_that_is_behind_in_its_collectives_is_named() -> None:
    incident = incident_of(rank(0, GPU), rank(1, GPU))
    incident.collectives = behind(11)
    verdict = judge(incident, [silent(10, 1.0), silent(11, 1.0)])
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.level) == (11, "supported")
    assert verdict.basis[0] == "One is behind."


@pytest.mark.parametrize("told", [behind(10, 11), behind(), behind(11, level="unknown"), Collectives()])
def test_collectives_that_name_no_one_rank_name_nobody(told: Collectives) -> None:
    incident = incident_of(rank(0, GPU), rank(1, GPU))
    incident.collectives = told
    assert judge(incident, [silent(10, 1.0), silent(11, 1.0)]).first_failure is None


def test_a_rank_that_is_stopped_is_named_whatever_the_collectives_show() -> None:
    incident = incident_of(rank(0, BROADCAST, states="SS"), rank(1, BROADCAST, states="TT"))
    incident.collectives = behind(10)
    verdict = judge(incident, [silent(10, 1.0), silent(11, 2.0)])
    assert verdict.first_failure is not None
    assert verdict.first_failure.pid == 11
    assert "One is behind." in verdict.basis
