from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.analysis.verdict import FailureEvent, judge, order_failures
from sglang_crashkit.model.incident import Collectives, Exit, Incident, ProcessReport, ServerInfo, Trigger
from sglang_crashkit.model.peers import LostPeer

ENDS: dict[str, Exit] = {
    "killed": Exit(None, "SIGKILL", "signal", "no OOM kill", "t"),
    "oom": Exit(None, "SIGKILL", "oom_kill", "1 more", "t"),
    "status": Exit(3, None, "exit_status", "no exception", "t"),
    "unknown": Exit(None, None, "unknown", "reaped", "t"),
    "orphaned": Exit(None, "SIGKILL", "parent_ended", "its parent ended", "t"),
}
LOST = "RuntimeError: [../gloo/pair.cc] Connection closed by peer [127.0.0.1]:4711"


def make_incident(**ends: str | None) -> Incident:
    """Return an incident of ranks named ``tp0``..., each with its end."""
    incident = Incident("id", "killed", Trigger("crash_dump", "t", 1, "server"), ServerInfo(1, "0", "0", "h"))
    for number, end in enumerate(ends.values()):
        report = ProcessReport(10 + number, f"sglang::scheduler_TP{number}", "scheduler", {"tp": number})
        report.exit = ENDS[end] if end else None
        incident.processes.append(report)
    return incident


def death(pid: int, seconds: float, **fields: Any) -> FailureEvent:
    return FailureEvent(pid, seconds, "exit", **({"fatal_signal": True} | fields))


def raised(pid: int, seconds: float, message: str = "ValueError: x") -> FailureEvent:
    return FailureEvent(pid, seconds, "exception", message)


def test_what_was_on_the_gpu_is_part_of_the_verdict() -> None:
    incident = make_incident(tp0=None, tp1="killed")
    incident.processes[0].gpu = ["kernel spin on GPU 0: grid 1x1x1, block 32x1x1, its name inferred"]
    incident.processes[1].gpu = ["no kernel on the GPU", "exception: warp assert (GPU 1, SM 3)"]
    verdict = judge(incident, [death(11, 1.0)])
    assert verdict.basis[-2:] == [
        "sglang::scheduler_TP0 (pid 10) had on its GPU: "
        "kernel spin on GPU 0: grid 1x1x1, block 32x1x1, its name inferred.",
        "sglang::scheduler_TP1 (pid 11) had on its GPU: exception: warp assert (GPU 1, SM 3).",
    ]


def test_a_killed_rank_is_the_first_failure_although_the_survivor_raised_first() -> None:
    # The survivor's exception may be stamped before the handler noticed the death.
    events = [raised(10, 1.000, LOST), death(11, 1.001)]
    verdict = judge(make_incident(tp0=None, tp1="killed"), events)
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (11, "signal", "established")
    assert verdict.text.startswith("sglang::scheduler_TP1 (pid 11) was killed by SIGKILL: no OOM kill. ")
    assert "sglang::scheduler_TP0 (pid 10) then raised RuntimeError" in verdict.text


@pytest.mark.parametrize(
    "message",
    [
        LOST,
        "ConnectionResetError: Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "RuntimeError: NCCL communicator was aborted on rank 1",
        "RuntimeError: recvValue failed on TCPStore(...)",
    ],
)
def test_a_lost_connection_is_a_consequence(message: str) -> None:
    assert order_failures([raised(10, 1.0, message), death(11, 1.1)])[0].pid == 11


@pytest.mark.parametrize("message", ["ValueError: bad shape", "torch.OutOfMemoryError: CUDA out of memory"])
def test_another_exception_that_came_first_is_the_cause(message: str) -> None:
    ordered = order_failures([death(11, 1.1), raised(10, 1.0, message)])
    assert ordered[0].pid == 10


def test_a_death_after_the_photograph_is_the_clean_up() -> None:
    events = [raised(10, 1.0, LOST), death(11, 2.0, before_photograph=False)]
    assert order_failures(events)[0].pid == 10


@pytest.mark.parametrize("at", [0.999, 1.0, 1.001])
def test_who_ended_with_its_parent_is_never_the_first_whenever_that_was_noticed(at: float) -> None:
    verdict = judge(make_incident(tp0="orphaned", tp1="killed"), [death(10, at, with_parent=True), death(11, 1.0)])
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (11, "signal", "established")
    assert "sglang::scheduler_TP0 (pid 10) then ended with the process that had started it." in verdict.basis


def test_where_nobody_else_ended_that_a_parent_did_is_the_cause() -> None:
    verdict = judge(make_incident(tp0="orphaned"), [death(10, 1.0, fatal_signal=False, with_parent=True)])
    assert (verdict.kind, verdict.level) == ("parent_ended", "established")
    assert verdict.text == "sglang::scheduler_TP0 (pid 10) ended: its parent ended."


def test_without_a_death_the_earliest_exception_is_the_cause() -> None:
    verdict = judge(make_incident(tp0=None, tp1=None), [raised(11, 1.1, LOST), raised(10, 1.0)])
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (10, "exception", "established")


def test_two_failures_at_the_same_time_are_only_supported() -> None:
    for events in ([raised(10, 1.0), raised(11, 1.002)], [death(10, 1.0), death(11, 1.002)]):
        assert judge(make_incident(tp0="killed", tp1="killed"), events).level == "supported"


def test_an_exception_that_no_lost_connection_explains_and_that_came_first_leaves_a_death_only_supported() -> None:
    events = [raised(10, 1.0, "ValueError: bad shape"), death(11, 1.5), raised(12, 1.6, LOST)]
    verdict = judge(make_incident(tp0=None, tp1="killed", tp2=None), events)
    assert verdict.level == "supported"


@pytest.mark.parametrize(
    ("end", "kind", "level", "words"),
    [
        ("killed", "signal", "established", "was killed by SIGKILL"),
        ("oom", "oom_kill", "established", "was killed by the kernel for lack of memory: 1 more"),
        ("status", "exit_status", "established", "ended with exit status 3"),
        ("unknown", "unknown", "supported", "nobody could tell how"),
        (None, "unknown", "supported", "nobody could tell how"),
    ],
)
def test_the_cause_is_that_of_the_exit(end: str | None, kind: str, level: str, words: str) -> None:
    verdict = judge(make_incident(tp0=end), [death(10, 1.0)])
    assert (verdict.kind, verdict.level) == (kind, level)
    assert words in verdict.text


def test_unknown_is_the_verdict_without_a_failure() -> None:
    verdict = judge(make_incident(tp0=None), [])
    assert (verdict.kind, verdict.first_failure, verdict.level) == ("unknown", None, "unknown")
    assert verdict.text == "server reported crash_dump, but no process was seen to fail."


def test_a_lost_peer_is_the_verdict_where_no_process_failed() -> None:
    incident = make_incident(tp0=None)
    incident.peers = [LostPeer.of("h:1", "prefill", "refused", "t")]
    verdict = judge(incident, [])
    assert (verdict.kind, verdict.first_failure, verdict.level) == ("peer_lost", None, "established")
    assert verdict.text == "prefill server h:1 is gone; no request waits for it. Its port refuses connections."
    incident.peers.append(LostPeer.of("h:2", "prefill", "heartbeat", "t"))
    assert judge(incident, []).level == "supported"


def test_a_lost_peer_is_not_the_first_failure_where_a_process_failed() -> None:
    incident = make_incident(tp0="killed")
    incident.peers = [LostPeer.of("h:1", "prefill", "refused", "t")]
    verdict = judge(incident, [death(10, 1.0)])
    assert (verdict.kind, verdict.level) == ("signal", "established")
    assert verdict.basis[-1].startswith("prefill server h:1 is gone")


def test_a_main_process_that_tells_of_a_rank_is_not_first_although_its_end_was_seen_first() -> None:
    incident = make_incident(tp0="status", tp1="killed")
    answer = FailureEvent(10, 1.0, "exit", is_answer=True)
    verdict = judge(incident, [answer, death(11, 1.001)])
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (11, "signal", "established")
    alone = judge(incident, [answer])
    assert alone.first_failure is not None
    assert alone.first_failure.pid == 10


def test_a_failure_of_a_process_that_nobody_knows_is_judged() -> None:
    verdict = judge(make_incident(tp0=None), [death(99, 1.0), raised(98, 2.0)])
    assert verdict.first_failure is not None
    assert verdict.first_failure.pid == 99


def test_the_survivor_is_said_to_have_been_doing_something() -> None:
    incident = make_incident(tp0=None, tp1="killed")
    incident.processes[0].doing = ["all_reduce (dist.py:3)", "main (x.py:1)"]
    assert judge(incident, [death(11, 1.0)]).basis[-1] == (
        "sglang::scheduler_TP0 (pid 10) was in all_reduce (dist.py:3)."
    )


events_of_three = st.lists(
    st.builds(
        FailureEvent,
        pid=st.sampled_from([10, 11, 12]),
        seconds=st.sampled_from([1.0, 1.001, 2.0, 3.0]),
        kind=st.sampled_from(["exit", "exception"]),
        message=st.sampled_from(["ValueError: x", LOST]),
        fatal_signal=st.booleans(),
        before_photograph=st.booleans(),
        with_parent=st.booleans(),
        is_answer=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda event: (event.pid, event.kind, event.message),
)


@given(events_of_three.flatmap(lambda events: st.tuples(st.just(events), st.permutations(events))))
def test_the_order_in_which_events_come_in_does_not_change_the_verdict(
    orders: tuple[list[FailureEvent], list[FailureEvent]],
) -> None:
    incident = make_incident(tp0="killed", tp1="status", tp2=None)
    assert judge(incident, orders[0]) == judge(incident, orders[1])


@given(events_of_three)
def test_the_first_failure_is_one_of_the_failures_and_each_is_ordered_once(events: list[FailureEvent]) -> None:
    verdict = judge(make_incident(tp0="killed", tp1="status", tp2=None), events)
    ordered = order_failures(events)
    assert sorted(map(repr, ordered)) == sorted(map(repr, events))
    assert (verdict.first_failure is None) == (not events)
    if events:
        assert verdict.first_failure is not None
        assert verdict.first_failure.pid == ordered[0].pid


@given(events_of_three)
def test_a_lost_connection_is_never_first_where_a_rank_was_killed_before_the_photograph(
    events: list[FailureEvent],
) -> None:
    deaths = [event for event in events if event.kind == "exit" and event.fatal_signal and event.before_photograph]
    if any(not (event.with_parent or event.is_answer) for event in deaths):
        first = order_failures(events)[0]
        assert not (first.kind == "exception" and first.message == LOST)


def finding(statement: str, kind: str = "behind", level: str = "established", *pids: int) -> dict[str, Any]:
    return {"kind": kind, "level": level, "statement": statement, "pids": list(pids)}


def test_what_the_collectives_show_is_told_with_the_first_failure_and_does_not_change_it() -> None:
    incident = make_incident(tp0=None, tp1="killed")
    incident.collectives = Collectives(
        [
            finding("One is behind.", "behind", "supported", 10),
            finding("A wait of a moment.", "behind", "unknown", 10),
            finding("Nobody waits.", "in_step", "supported"),
        ]
    )
    verdict = judge(incident, [death(11, 1.0)])
    assert verdict.first_failure is not None
    assert (verdict.first_failure.pid, verdict.level) == (11, "established")
    assert verdict.basis[1:] == ["One is behind."]


def test_of_many_process_groups_the_verdict_tells_the_first() -> None:
    incident = make_incident(tp0=None, tp1="killed")
    incident.collectives = Collectives([finding(f"Group {number}.") for number in range(9)])
    assert judge(incident, [death(11, 1.0)]).text.endswith(". Group 0. Group 1.")
