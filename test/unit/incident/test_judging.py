from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.incident import judging
from sglang_crashkit.incident.judging import BUSY_TOO_LONG, UNHEALTHY, order_failures
from sglang_crashkit.model.incident import (
    CollectiveFinding,
    Collectives,
    Divergence,
    Exit,
    FailureEvent,
    Incident,
    LastSign,
    ProcessReport,
    ServerInfo,
    Trigger,
    Verdict,
)
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.model.sample import Gil, Sample, Thread
from sglang_crashkit.model.step import DivergenceKind
from sglang_crashkit.model.verdict import Level
from unit.judge.stack_events import TORCH_WRAPPER, frames

ENDS: dict[str, Exit] = {
    "killed": Exit(None, "SIGKILL", "signal", "no OOM kill", "t"),
    "oom": Exit(None, "SIGKILL", "oom_kill", "1 more", "t"),
    "status": Exit(3, None, "exit_status", "no exception", "t"),
    "unknown": Exit(None, None, "unknown", "reaped", "t"),
    "orphaned": Exit(None, "SIGKILL", "parent_ended", "its parent ended", "t"),
}
LOST = "RuntimeError: [../gloo/pair.cc] Connection closed by peer [127.0.0.1]:4711"
SYSTEM = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error"
HCCL = "RuntimeError: [ERROR] HCCL function error: a remote rank did not answer, timeout"
TIMED_OUT = "RuntimeError: [../gloo/unbound_buffer.cc] Timed out waiting 10000ms for recv operation"
SHAPE = "ValueError: bad shape"


def incident_of(*ranks: ProcessReport, trigger: str = "no_progress", pid: int = 1, title: str = "server") -> Incident:
    return Incident("id", "hang", Trigger(trigger, "t", pid, title), ServerInfo(1, "0", "0", "h"), list(ranks))


def ended(*ends: str | None) -> Incident:
    """Return an incident of ranks, each with its end."""
    reports = [ProcessReport(10 + n, f"sglang::scheduler_TP{n}", "scheduler", {"tp": n}) for n in range(len(ends))]
    for report, end in zip(reports, ends, strict=True):
        report.exit = ENDS[end] if end else None
    return incident_of(*reports, trigger="crash_dump")


def death(pid: int, seconds: float, **fields: Any) -> FailureEvent:
    return FailureEvent(pid, seconds, "exit", **({"fatal_signal": True} | fields))


def raised(pid: int, seconds: float, message: str = "ValueError: x") -> FailureEvent:
    return FailureEvent(pid, seconds, "exception", message)


def silent(*pids: int, message: str = "made no progress for 5.0 s") -> list[FailureEvent]:
    return [FailureEvent(pid, float(second), "hang", message) for second, pid in enumerate(pids)]


def judge(incident: Incident, failures: Sequence[FailureEvent]) -> Verdict:
    return judging.judge(msgspec.structs.replace(incident, failures=list(failures)), Path("no folder"))


def first(verdict: Verdict) -> int | None:
    return verdict.first_failure.pid if verdict.first_failure is not None else None


# -- who failed first

DEAD = FailureEvent(10, 1.0, "thread", "its thread Thread-5 (decode_thread), which raised ValueError: no such page")
GOES_ON = (
    "sglang::scheduler_TP0 (pid 10) goes on without its thread Thread-5 (decode_thread), which raised ValueError: no "
    "such page; what prefill servers report about KV transfers is no longer received, and their requests hang."
)
WAITS_FOR_IT, ELSEWHERE = "wait (threading.py:320)", "all_reduce (torch/distributed/distributed_c10d.py:3000)"


@pytest.mark.parametrize(
    ("doing", "later", "is_first"),
    [
        (WAITS_FOR_IT, [FailureEvent(10, 5000.0, "hang", "made no progress for 60.0 s")], True),
        (ELSEWHERE, [FailureEvent(10, 5000.0, "hang", "made no progress for 60.0 s")], False),
        (ELSEWHERE, [FailureEvent(10, 2.0, "hang", "made no progress for 60.0 s")], True),
        (ELSEWHERE, [raised(10, 2.0)], True),
        (WAITS_FOR_IT, [raised(10, 5000.0)], False),
        (WAITS_FOR_IT, [FailureEvent(11, 2.0, "hang", "made no progress for 60.0 s")], False),
    ],
)
def test_a_thread_comes_first_of_what_its_process_then_waits_for(
    doing: str, later: list[FailureEvent], is_first: bool
) -> None:
    incident = ended(None, None)
    incident.processes[0].doing = [doing]
    verdict = judge(incident, [DEAD, *later])
    assert (verdict.kind == "thread_died") is is_first
    assert (GOES_ON in verdict.basis) is is_first
    assert not is_first or (verdict.level, first(verdict)) == ("supported", 10)


@pytest.mark.parametrize(
    ("ends", "events", "expected", "words"),
    [
        # The survivor's exception may be stamped before the handler noticed the death.
        (
            [None, "killed"],
            [raised(10, 1.0, LOST), death(11, 1.001)],
            (11, "signal", "established"),
            "TP1 (pid 11) was killed by SIGKILL: no OOM kill. sglang::scheduler_TP0 (pid 10) then raised RuntimeError",
        ),
        # So may it where the other one ended itself.
        (
            [None, "status"],
            [raised(10, 1.0, LOST), death(11, 1.001, fatal_signal=False)],
            (11, "exit_status", "supported"),
            "TP0 (pid 10) then raised RuntimeError",
        ),
        (
            [None, "status"],
            [raised(10, 1.0, LOST), raised(11, 1.1, LOST), death(11, 1.2, fatal_signal=False)],
            (10, "lost_peer", "supported"),
            "",
        ),
        # Words of a prompt.
        ([None], [raised(10, 1.0, "ValueError: 'Connection reset by peer'")], (10, "exception", "established"), ""),
        # A socket that is no rank's, such as that of a log.
        ([None], [raised(10, 1.0, "BrokenPipeError: [Errno 32] Broken pipe")], (10, "exception", "established"), ""),
        # What NCCL's call of CUDA failed of is the rank's own.
        ([None], [raised(10, 1.0, "X: NCCL unhandled cuda error")], (10, "exception", "established"), ""),
        # So is a call of its own that failed.
        ([None], [raised(10, 1.0, f"{SYSTEM}: No space left on device")], (10, "exception", "established"), ""),
        ([None], [raised(10, 1.0, SYSTEM)], (10, "exception", "established"), ""),
        ([None], [raised(10, 1.0, f"{SYSTEM} Connection closed by remote peer")], (10, "lost_peer", "supported"), ""),
        ([None, "killed"], [raised(10, 1.0, SYSTEM), death(11, 1.1)], (11, "signal", "established"), ""),
        # Another library of collectives.
        ([None, "killed"], [raised(10, 1.0, HCCL), death(11, 1.1)], (11, "signal", "established"), ""),
        # Another exception that came first is the cause.
        (
            [None, "killed"],
            [death(11, 1.1), raised(10, 1.0, SHAPE)],
            (10, "exception", "established"),
            "TP1 (pid 11) then ended by SIGKILL.",
        ),
        (
            [None, "killed", None],
            [raised(10, 1.0, SHAPE), death(11, 1.5), raised(12, 1.6, LOST)],
            (11, "signal", "supported"),
            "",
        ),
        # A death after the capture is the server's own clean-up.
        (
            [None, "killed"],
            [raised(10, 1.0, LOST), death(11, 2.0, before_capture=False)],
            (10, "lost_peer", "supported"),
            "lost the connection to a peer",
        ),
        # Who ended with its parent is never the first, whenever that was noticed.
        (
            ["orphaned", "killed"],
            [death(10, 0.999, with_parent=True), death(11, 1.0)],
            (11, "signal", "established"),
            "TP0 (pid 10) then ended with the process that had started it.",
        ),
        (["orphaned"], [death(10, 1.0, with_parent=True)], (10, "parent_ended", "established"), "its parent ended."),
        ([None, None], [raised(11, 1.1, LOST), raised(10, 1.0)], (10, "exception", "established"), ""),
        # Two at the same time.
        (["killed", "killed"], [raised(10, 1.0), raised(11, 1.002)], (10, "exception", "supported"), ""),
        (["killed", "killed"], [death(10, 1.0), death(11, 1.002)], (10, "signal", "supported"), ""),
        # A main process that names a rank, although its end was seen first.
        (
            ["status", "killed"],
            [FailureEvent(10, 1.0, "exit", is_answer=True), death(11, 1.001)],
            (11, "signal", "established"),
            "",
        ),
        (["oom"], [death(10, 1.0)], (10, "oom_kill", "established"), "for lack of memory: 1 more"),
        (["status"], [death(10, 1.0)], (10, "exit_status", "established"), "ended with exit status 3"),
        (["unknown"], [death(10, 1.0)], (10, "unknown", "supported"), "it is not known how"),
        ([None], [death(10, 1.0)], (10, "unknown", "supported"), "it is not known how"),
        ([None], [death(99, 1.0), raised(98, 2.0)], (99, "unknown", "supported"), ""),
        ([None], [], (None, "unknown", "unknown"), "server reported crash_dump, but no process was seen to fail."),
    ],
)
def test_who_failed_first(
    ends: list[str | None], events: list[FailureEvent], expected: tuple[int | None, str, str], words: str
) -> None:
    verdict = judge(ended(*ends), events)
    assert (first(verdict), verdict.kind, verdict.level) == expected
    assert words in verdict.text


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        (LOST, True),
        ("ConnectionResetError: Connection reset by peer", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError: NCCL communicator was aborted on rank 1", True),
        ("RuntimeError: recvValue failed on TCPStore(...)", True),
        ("RuntimeError: [/x/gloo/pair.cc:538] Read error [127.0.0.1]:9: Connection timed out", True),
        (f"Exception: Capture cuda graph failed: {LOST.removeprefix('RuntimeError: ')}", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ('RuntimeError: Failed to parse a tool call: \'{"q": "connection reset by peer"}\'', False),
        ("RuntimeError: [user] connection closed by peer", False),
        ("Exception: Connection closed by peer", False),
        ("jinja2.exceptions.TemplateError: no remote process may be asked for", False),
    ],
)
def test_a_lost_connection_is_a_consequence(message: str, is_lost: bool) -> None:
    assert order_failures([raised(10, 1.0, message), death(11, 1.1)])[0].pid == (11 if is_lost else 10)


@pytest.mark.parametrize(
    ("message", "states", "named"),
    [
        ("RuntimeError: Timed out waiting 10000ms for recv operation", ("S", "T (stopped)"), 11),
        ("RuntimeError: Timed out waiting 10000ms for recv operation", ("S", "S (sleeping)"), 10),
        ("RuntimeError: Timed out waiting 10000ms for recv operation", ("S", "S (frozen)"), 11),
        (SHAPE, ("S", "T (stopped)"), 10),
    ],
)
def test_a_stopped_rank_is_the_peer_waited_for_in_vain(message: str, states: tuple[str, str], named: int) -> None:
    incident = ended(None, None)
    for report, state in zip(incident.processes, states, strict=True):
        report.state = {"State": state} | ({"wchan": "do_freezer_trap"} if "frozen" in state else {})
    verdict = judge(incident, [raised(10, 1.0, message)])
    assert first(verdict) == named
    assert f"raised {message}." in verdict.text
    words = "is stopped (frozen by its cgroup" if "frozen" in states[1] else "is stopped (state T, until"
    assert (f"(pid 11) {words}" in verdict.text) == (named == 11)


def test_a_lost_peer_is_the_verdict_where_no_process_failed() -> None:
    incident = ended("killed")
    incident.peers = [LostPeer("h:1", "prefill", "heartbeat", "t")]
    text = "prefill server h:1 missed SGLang's heartbeats; no request waits for it."
    assert judge(incident, []) == Verdict("peer_lost", None, "supported", text, [text])
    assert judge(incident, [death(10, 1.0)]).basis[-1] == text


def test_what_the_others_and_the_gpus_did_is_told() -> None:
    incident = ended(None, "killed")
    incident.processes[0].doing = ["all_reduce (dist.py:3)", "main (x.py:1)"]
    incident.processes[0].gpu = ["kernel spin on GPU 0: grid 1x1x1, block 32x1x1, its name inferred"]
    incident.processes[1].gpu = ["no kernel on the GPU", "exception: warp assert (GPU 1, SM 3)"]
    assert judge(incident, [death(11, 1.0)]).basis[-3:] == [
        "sglang::scheduler_TP0 (pid 10) was in all_reduce (dist.py:3).",
        "sglang::scheduler_TP0 (pid 10) had on its GPU: "
        "kernel spin on GPU 0: grid 1x1x1, block 32x1x1, its name inferred.",
        "sglang::scheduler_TP1 (pid 11) had on its GPU: exception: warp assert (GPU 1, SM 3).",
    ]


def test_collectives_are_told_and_do_not_change_the_first_failure() -> None:
    incident = ended(None, "killed")
    shown = [("A wait.", "behind", "unknown")]
    shown += [(f"Group {number}.", "behind", "supported") for number in range(9)]
    incident.collectives = Collectives(
        [CollectiveFinding(kind=kind, level=level, statement=text, pids=[10]) for text, kind, level in shown]
    )
    verdict = judge(incident, [death(11, 1.0)])
    assert (first(verdict), verdict.basis[1:]) == (11, ["Group 0.", "Group 1."])


events_of_three = st.lists(
    st.builds(
        FailureEvent,
        pid=st.sampled_from([10, 11, 12]),
        seconds=st.sampled_from([1.0, 1.001, 2.0, 3.0]),
        kind=st.sampled_from(["exit", "exception"]),
        message=st.sampled_from(["ValueError: x", LOST]),
        fatal_signal=st.booleans(),
        before_capture=st.booleans(),
        with_parent=st.booleans(),
        is_answer=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda event: (event.pid, event.kind, event.message),
)


@given(events_of_three.flatmap(lambda events: st.tuples(st.just(events), st.permutations(events))))
def test_the_verdict_does_not_depend_on_the_order_of_events(
    orders: tuple[list[FailureEvent], list[FailureEvent]],
) -> None:
    incident, (events, others) = ended("killed", "status", None), orders
    ordered = order_failures(events)
    assert judge(incident, events) == judge(incident, others)
    assert sorted(map(repr, ordered)) == sorted(map(repr, events))
    assert first(judge(incident, events)) == (ordered[0].pid if events else None)
    deaths = [event for event in events if event.kind == "exit" and event.fatal_signal and event.before_capture]
    if any(not (event.with_parent or event.is_answer) for event in deaths):
        # A lost connection is never first where a rank was killed before the capture.
        assert not (ordered[0].kind == "exception" and ordered[0].message == LOST)


# -- a hang


LOOP = ("Scheduler.event_loop_overlap (scheduler.py:1596)", "run_scheduler_process (scheduler.py:4045)")
BATCH = ("LlamaModel.forward (llama.py:381)", "Scheduler.run_batch (scheduler.py:3043)", *LOOP)
ALL_REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3075)", TORCH_WRAPPER, *BATCH)
INGEST = ("SchedulerRequestReceiver.recv_requests (scheduler_components/request_receiver.py:90)", *LOOP)
BROADCAST = ("broadcast (torch/distributed/distributed_c10d.py:2974)", TORCH_WRAPPER, *INGEST)
SPIN = ("spin (sitecustomize.py:12)", "on_stick (sitecustomize.py:32)", *BATCH)


def rank(
    number: int, *stacks: tuple[str, ...], states: str = "SSS", cpu: float = 0.0, gil: Gil = "", **ranks: int
) -> ProcessReport:
    """Return a rank as the handler sees it every 2 s; a stack for each sample, or the same in all."""
    report = ProcessReport(10 + number, f"sglang::scheduler_TP{number}", "scheduler", {"tp": number} | ranks)
    for at, state in enumerate(states):
        seen = frames(*stacks[at % len(stacks)]) if stacks else ()
        threads = (Thread("MainThread", report.pid, active=False, owns_gil=False, frames=seen),) if seen else ()
        doing = tuple(map(str, seen[:4]))
        sample = Sample(pid=report.pid, time=1000.0 + 2 * at, state=state, cpu_secs=cpu * at, threads=threads)
        report.samples.append(Sample(**{**vars(sample), "gil": gil, "doing": doing}))
    report.doing = list(report.samples[0].doing)
    return report


@pytest.mark.parametrize(
    ("message", "doing", "named"),
    [
        (TIMED_OUT, ["spin (x.py:1)", "run_batch (scheduler.py:2)"], 11),
        (TIMED_OUT, [], 10),
        (TIMED_OUT, ["all_reduce (torch/distributed/distributed_c10d.py:3)"], 10),
        (LOST, ["spin (x.py:1)"], 10),
        ("ValueError: cannot parse 'Timed out waiting for the bus'", ["spin (x.py:1)"], None),
    ],
)
def test_a_rank_elsewhere_is_whom_another_waited_for(message: str, doing: list[str], named: int | None) -> None:
    made = ended(None, None)
    made.processes[1].doing = doing
    verdict = judge(made, [raised(10, 1.0, message)])
    assert (first(verdict), verdict.kind == "lost_peer") == (named or 10, named is not None)
    assert ("was in spin (x.py:1) while" in verdict.text) == (named == 11)


def test_a_long_exception_is_judged_in_time() -> None:
    began = time.process_time()
    judge(ended(None), [raised(10, 1.0, "DistStoreError: " + "store nccl " * 100_000)])
    assert time.process_time() - began < 2


def test_nobody_waits_for_a_rank_of_another_replica() -> None:
    made = ended(None, None)
    for dp, process in enumerate(made.processes):
        process.rank = {"dp": dp}
    made.processes[1].doing = ["spin (x.py:1)"]
    assert first(judge(made, [raised(10, 1.0, TIMED_OUT)])) == 10


@pytest.mark.parametrize(("seconds", "named"), [(1.4, 11), (4.0, 10)])
def test_an_end_long_after_a_lost_connection_is_its_consequence(seconds: float, named: int) -> None:
    assert order_failures([raised(10, 1.0, LOST), death(11, seconds, fatal_signal=False)])[0].pid == named


TP1 = "sglang::scheduler_TP1 (pid 11)"
DEEP = [(*(f"f{depth}_{look} (x.py:1)" for depth in range(8)), *BATCH) for look in range(3)]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            rank(1, SPIN, states="RRR", cpu=1.9, gil="main"),
            f". {TP1} spun in {SPIN[0]}, busy all the time and held the GIL in each sample.",
        ),
        # One that sleeps does not spin whatever its other threads use.
        (
            rank(1, SPIN, cpu=1.9),
            f"TP0 waits in broadcast in {BROADCAST[0]}. sglang::scheduler_TP0 (pid 10) made no progress",
        ),
        (rank(1, SPIN), f". {TP1} was stuck in {SPIN[0]}."),
        (rank(1, *DEEP, states="RRR", cpu=1.9), f". {TP1} moved below LlamaModel.forward."),
        (rank(1, SPIN, gil="taken"), f" {TP1} let no other thread have the GIL in time to answer."),
        (rank(1, SPIN, states="TTT", gil="taken"), "TP1 is stopped (state T, until somebody sends SIGCONT), while"),
    ],
)
def test_what_holds_it_is_told(one: ProcessReport, words: str) -> None:
    assert words in judge(incident_of(rank(0, BROADCAST), one), silent(10)).text


@pytest.mark.parametrize("gil", ["main", "taken"])
def test_a_gil_held_in_some_samples_is_not_reported(gil: Gil) -> None:
    one = rank(1, SPIN, gil=gil)
    assert "GIL" in judge(incident_of(rank(0, BROADCAST), one), silent(10)).text
    one.samples[1] = rank(1, SPIN).samples[1]
    for seen in (one, rank(1, SPIN, states="S", gil=gil)):
        assert "GIL" not in judge(incident_of(rank(0, BROADCAST), seen), silent(10)).text


def test_own_code_where_a_rank_takes_in_requests_is_what_the_others_wait_for() -> None:
    receiver = "sglang/srt/managers/scheduler_components/request_receiver.py"
    taken_in = (f"_broadcast_reqs_across_ranks ({receiver}:206)", f"recv_requests ({receiver}:90)")
    held = ("hold_gil (sitecustomize.py:19)", *taken_in, "event_loop_overlap (sglang/srt/managers/scheduler.py:1500)")
    verdict = judge(incident_of(rank(0, ALL_REDUCE), rank(1, held, gil="main")), silent(10, 11))
    assert (verdict.kind, first(verdict)) == ("hang", 11)
    assert f"{TP1} was stuck in hold_gil (sitecustomize.py:19) and held the GIL in each sample." in verdict.text


STOPPED = [rank(0, BROADCAST, states="SS"), rank(1, BROADCAST, states="TT")]


@pytest.mark.parametrize(
    ("ranks", "events", "expected", "words"),
    [
        (STOPPED, silent(10, 11), (11, "established"), "TP1 (pid 11) made no progress for 5.0 s."),
        # A watchdog of the waiting rank does not make it the cause.
        (STOPPED, silent(10), (11, "established"), f"TP0 waits in broadcast in {BROADCAST[0]}."),
        (STOPPED, [*silent(10), raised(10, 9.0, LOST)], (11, "established"), "TP0 (pid 10) then raised RuntimeError"),
        (
            [rank(n, SPIN, states="TT") for n in range(2)],
            silent(10, 11),
            (None, "established"),
            "TP0 and TP1 are stopped",
        ),
        ([rank(0, BROADCAST, states="TTT")], silent(10), (10, "established"), "is stopped"),
        (
            [rank(0, BROADCAST), rank(1, BROADCAST)],
            silent(10, 11),
            (None, "supported"),
            "TP0 and TP1 wait in broadcast",
        ),
        ([rank(0, SPIN, states="RRR", cpu=1.9)], silent(10), (10, "supported"), "(pid 10) spun in "),
        ([ProcessReport(10, "sglang::scheduler_TP0", "scheduler", {})], silent(10), (10, "unknown"), "no progress"),
        # The replica that is idle has nothing to do with it; where the attention alone is replicated, it has.
        (
            [rank(0, BROADCAST, dp=0), rank(1, BROADCAST, dp=0), rank(2, SPIN, dp=1)],
            silent(10, 11),
            (None, "supported"),
            "DP0 TP0 and DP0 TP1 wait in broadcast",
        ),
        ([rank(n, SPIN if n == 2 else BROADCAST, dp=n) for n in range(4)], silent(10), (12, "supported"), ""),
    ],
)
def test_the_verdict_on_a_hang(
    ranks: list[ProcessReport], events: list[FailureEvent], expected: tuple[int | None, str], words: str
) -> None:
    verdict = judge(incident_of(*ranks), events)
    assert (verdict.kind, first(verdict), verdict.level) == ("hang", *expected)
    assert words in verdict.text


def behind(*pids: int, level: Level = "established", waiting: tuple[int, ...] = ()) -> Collectives:
    found = CollectiveFinding(kind="behind", level=level, statement="One is behind.", pids=list(pids))
    found.waiting_pids = list(waiting)
    return Collectives([found])


def both(*told: Collectives) -> Collectives:
    return Collectives([finding for one in told for finding in one.findings])


@pytest.mark.parametrize(
    ("kind", "in_hang", "in_crash"),
    [("mode", True, True), ("hash", True, True), ("ended_earlier", True, False), ("none", True, False)],
)
def test_where_the_ranks_diverged_is_part_of_the_verdict(kind: DivergenceKind, in_hang: bool, in_crash: bool) -> None:
    hung = incident_of(*STOPPED)
    crashed = ended("killed", None)
    hung.divergence = crashed.divergence = Divergence(kind, "established", "They did.")
    verdict = judge(hung, silent(10, 11))
    assert first(verdict) == 11
    assert (verdict.text.count("They did."), "They did." in verdict.basis) == (int(in_hang), in_hang)
    assert ("They did." in judge(crashed, [death(10, 1.0)]).basis) == in_crash


def test_diverged_ranks_that_wait_alike_have_a_reason() -> None:
    hung = incident_of(rank(0, BROADCAST), rank(1, BROADCAST))
    hung.divergence = Divergence("requests", "established", "They did.")
    verdict = judge(hung, silent(10, 11))
    assert (first(verdict), verdict.level) == (None, "established")
    assert verdict.text.startswith("They did. ")
    hung.divergence = Divergence("none", "established", "They did.")
    assert judge(hung, silent(10, 11)).text.startswith("TP0 and TP1 wait in broadcast")


@pytest.mark.parametrize(
    ("ranks", "told", "named"),
    [
        ([rank(0, ALL_REDUCE), rank(1, ALL_REDUCE)], behind(11), 11),
        ([rank(0, ALL_REDUCE), rank(1, ALL_REDUCE)], behind(10, 11), None),
        ([rank(0, ALL_REDUCE), rank(1, ALL_REDUCE)], behind(11, level="unknown"), None),
        ([rank(0, ALL_REDUCE), rank(1, ALL_REDUCE)], Collectives(), None),
        # The one waits over NCCL for the other, which waits over gloo for it, or for a third.
        ([rank(n, ALL_REDUCE) for n in (0, 1)], both(behind(10, waiting=(11,)), behind(11, waiting=(10,))), None),
        ([rank(n, ALL_REDUCE) for n in (0, 1, 2)], both(behind(11, waiting=(10,)), behind(12, waiting=(11,))), 12),
        (STOPPED, behind(10), 11),
    ],
)
def test_where_all_wait_the_rank_behind_in_collectives_is_named(
    ranks: list[ProcessReport], told: Collectives, named: int | None
) -> None:
    incident = incident_of(*ranks)
    incident.collectives = told
    assert first(judge(incident, silent(10, 11))) == named


# -- ranks that are at work

COMPILES = ("make_llir (triton/backends/nvidia/compiler.py:400)", "compile (triton/compiler/compiler.py:280)")
LOADS = ("clone (torch/_tensor.py:9)", "load_weights (models/llama.py:700)")
EXPORTS = ("save (torch/profiler/profiler.py:1)", "export_chrome_trace (torch/profiler/profiler.py:212)")
STOPS = ("stop (torch/profiler/profiler.py:1)", "_stop_profile (managers/scheduler_components/profiler_manager.py:361)")
ATTENDS = ("forward_extend (layers/attention/torch_native_backend.py:99)", "run_batch (managers/scheduler.py:9)")
ON_GPU = ("synchronize (torch/cuda/streams.py:231)", "process_batch_result_prefill (managers/x.py:1)")


def busy(number: int, frames: tuple[str, ...], states: str = "RRR", cpu: float = 2.0, tokens: int = 0) -> ProcessReport:
    report = rank(number, frames, states=states, cpu=cpu) if frames else rank(number)
    report.last_sign = LastSign("batch 20", 20, 1, "extend", tokens, 5.0)
    return report


@pytest.mark.parametrize(
    ("ranks", "is_busy"),
    [
        *[([busy(0, ALL_REDUCE, cpu=0.0), busy(1, frames)], True) for frames in (COMPILES, LOADS, EXPORTS, STOPS)],
        ([busy(0, ALL_REDUCE, "S"), busy(1, COMPILES, "R")], True),
        ([busy(0, LOADS), busy(1, LOADS)], True),
        ([], False),
        ([busy(0, ALL_REDUCE), busy(1, SPIN)], False),
        ([busy(0, ALL_REDUCE), busy(1, COMPILES, cpu=0.01)], False),
        ([busy(0, ALL_REDUCE), busy(1, COMPILES, "TTT")], False),
        ([busy(0, ALL_REDUCE), busy(1, COMPILES), busy(2, COMPILES, "TTT")], False),
        ([busy(0, ALL_REDUCE), busy(1, COMPILES), busy(2, SPIN)], False),
        ([busy(0, ALL_REDUCE), busy(1, COMPILES), busy(2, ())], False),
        ([busy(0, ALL_REDUCE), busy(1, ALL_REDUCE)], False),
        # A long prompt in one piece.
        ([busy(0, ATTENDS, tokens=40_000), busy(1, ALL_REDUCE, tokens=40_000)], True),
        ([busy(0, ON_GPU, cpu=0.0, tokens=40_000), busy(1, ON_GPU, tokens=40_000)], True),
        ([busy(0, ATTENDS, tokens=8_192), busy(1, ALL_REDUCE, tokens=8_192)], False),
        ([busy(0, ATTENDS, cpu=0.0, tokens=40_000), busy(1, ALL_REDUCE, tokens=40_000)], False),
    ],
)
def test_an_awaited_rank_may_be_at_work(ranks: list[ProcessReport], is_busy: bool) -> None:
    assert (judge(incident_of(*ranks), silent(*(one.pid for one in ranks))).kind == "busy") is is_busy


@pytest.mark.parametrize(
    ("trigger", "kind"),
    [
        ("no_progress", "busy"),
        ("silent_at_sigterm", "busy"),
        (BUSY_TOO_LONG, "hang"),
        # The server ends for it.
        ("watchdog_timeout", "hang"),
    ],
)
def test_the_verdict_on_work_blames_nobody(trigger: str, kind: str) -> None:
    incident = incident_of(busy(0, ALL_REDUCE), busy(1, COMPILES), trigger=trigger)
    found = judge(incident, silent(10, 11))
    assert (found.kind, found.level, found.first_failure is None) == (kind, "supported", kind == "busy")
    assert "compiles a kernel in make_llir" in found.text
    # A death is no work.
    assert judge(incident, [*silent(10), death(11, 2.0)]).kind == "hang"


# -- a server whose health check failed


def detokenizer(states: str) -> ProcessReport:
    report = rank(10, SPIN, states=states)
    report.title, report.role, report.rank = "sglang::detokenizer", "detokenizer", {}
    return report


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([rank(0, BROADCAST, states="SS"), rank(1, BROADCAST, states="TT")], ("hang", 11, "established")),
        ([rank(0, BROADCAST), rank(1, SPIN, states="RRR"), detokenizer("SS")], ("hang", 11, "supported")),
        ([rank(n, BATCH, states="TT") for n in range(2)], ("hang", None, "established")),
        # What the kernel says of another process counts more than stacks; its stack alone does not.
        ([rank(0, BROADCAST), rank(1, SPIN, states="RRR"), detokenizer("TT")], ("hang", 20, "established")),
        ([rank(0, BATCH), detokenizer("SR")], ("hang", 10, "supported")),
        ([], ("unknown", None, "unknown")),
    ],
)
def test_the_verdict_on_a_server_whose_health_check_failed(
    processes: list[ProcessReport], expected: tuple[str, int | None, str]
) -> None:
    incident = incident_of(*processes, trigger=UNHEALTHY, title="python")
    verdict = judge(incident, [])
    assert (verdict.kind, first(verdict), verdict.level) == expected
    if verdict.kind == "unknown":
        assert verdict.basis[0] == (
            "The health check of python (pid 1) had failed: no process was seen to stand still."
        )
    if processes:
        # A failure that was seen counts more.
        assert judge(incident, [raised(10, 1.0)]).kind == "exception"
