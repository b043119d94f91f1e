from __future__ import annotations

import pytest

from sglang_crashkit.analysis.verdict import UNHEALTHY, FailureEvent, judge
from sglang_crashkit.model.incident import Incident, ProcessReport, ServerInfo, Trigger, Verdict
from sglang_crashkit.model.sample import Sample, Thread
from unit.analysis import real_stacks
from unit.analysis.real_stacks import stack


def process(pid: int, title: str, role: str, frames: tuple[str, ...], states: str = "SS") -> ProcessReport:
    """Return a process as the handler sees it at two looks."""
    rank = {"tp": pid - 10} if role == "scheduler" else {}
    doing = [str(frame) for frame in stack(*frames)[:4]]
    threads = (Thread("MainThread", pid, active=False, owns_gil=False, frames=stack(*frames)),)
    samples = [
        Sample(pid=pid, time=1000.0 + at, state=state, doing=tuple(doing), threads=threads)
        for at, state in enumerate(states)
    ]
    return ProcessReport(pid, f"sglang::{title}", role, rank, doing=doing, samples=samples)


def scheduler(number: int, frames: tuple[str, ...], states: str = "SS") -> ProcessReport:
    return process(10 + number, f"scheduler_TP{number}", "scheduler", frames, states)


def detokenizer(states: str) -> ProcessReport:
    return process(20, "detokenizer", "detokenizer", real_stacks.SPIN, states)


def verdict_on(*processes: ProcessReport) -> Verdict:
    trigger = Trigger(UNHEALTHY, "t", 1, "python")
    return judge(Incident("id", "hang", trigger, ServerInfo(1, "0", "0", "h"), processes=list(processes)), [])


def named(verdict: Verdict) -> int | None:
    return verdict.first_failure.pid if verdict.first_failure else None


def test_the_scheduler_that_is_stopped_is_named() -> None:
    verdict = verdict_on(scheduler(0, real_stacks.BROADCAST), scheduler(1, real_stacks.BROADCAST, "TT"))
    assert (verdict.kind, named(verdict), verdict.level) == ("hang", 11, "established")


def test_the_scheduler_that_is_elsewhere_while_the_others_wait_is_named() -> None:
    verdict = verdict_on(scheduler(0, real_stacks.BROADCAST), scheduler(1, real_stacks.SPIN, "RR"), detokenizer("SS"))
    assert (named(verdict), verdict.level) == (11, "supported")


@pytest.mark.parametrize("others", [(), (detokenizer("TT"),)])
def test_nobody_is_named_where_all_schedulers_are_stopped(others: tuple[ProcessReport, ...]) -> None:
    verdict = verdict_on(*(scheduler(number, real_stacks.BATCH, "TT") for number in range(2)), *others)
    assert (verdict.kind, named(verdict), verdict.level) == ("hang", None, "established")
    assert verdict.text == (
        "sglang::scheduler_TP0 (pid 10) and sglang::scheduler_TP1 (pid 11) are all stopped (state T)"
        " until somebody sends SIGCONT: no single rank looks responsible."
    )


def test_what_the_kernel_says_of_another_process_counts_more_than_stacks() -> None:
    ranks = scheduler(0, real_stacks.BROADCAST), scheduler(1, real_stacks.SPIN, "RR")
    assert named(verdict_on(*ranks, detokenizer("TT"))) == 20


def test_one_that_is_at_work_is_not_named_by_its_stack_alone() -> None:
    verdict = verdict_on(scheduler(0, real_stacks.BATCH), detokenizer("SR"))
    assert (verdict.kind, named(verdict), verdict.level) == ("unknown", None, "unknown")
    assert verdict.basis[0] == (
        "The health check of python (pid 1) had failed, but no process was seen to stand still."
    )


def test_it_is_said_that_the_health_check_failed_where_nothing_was_looked_at() -> None:
    assert verdict_on().basis == [
        "The health check of python (pid 1) had failed, but no process was seen to stand still."
    ]


def test_a_failure_that_was_seen_counts_more() -> None:
    ranks = [scheduler(0, real_stacks.BATCH), scheduler(1, real_stacks.BATCH)]
    trigger = Trigger(UNHEALTHY, "t", 1, "python")
    incident = Incident("id", "hang", trigger, ServerInfo(1, "0", "0", "h"), processes=ranks)
    verdict = judge(incident, [FailureEvent(11, 1.0, "hang", "made no progress for 5.0 s")])
    assert named(verdict) == 11
