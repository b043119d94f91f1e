"""What the server says of ranks that failed while it started, in this process and in a fixed order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ProcessHandle
from unit.handler.launching import Case, watched
from unit.waiting import wait_until


@pytest.fixture
def case(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    with watched(tmp_path, short_folder) as case:
        case.handler.look()
        os.kill(case.starting, signal.SIGKILL)
        found = {one.pid: one for one in case.handler._tree}
        assert (found[case.titled].title, found[case.starting].role) == ("sglang::scheduler_TP0", "starting")
        wait_until(found[case.starting].handle.has_exited, "the rank is dead")
        case.handler.collect_exits()
        yield case


@pytest.fixture(params=["seen", "not seen", "seen before it was executed"])
def early_case(request: pytest.FixtureRequest, tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    """The second rank was dead when the handler looked for the first time, before or after it heard of the failure.

    Or it had not replaced the launcher's program by its own then.
    """
    with watched(tmp_path, short_folder) as case:
        if request.param == "seen before it was executed":
            case.handler.look()
            found = {one.pid: one for one in case.handler._tree}
            found[case.starting].title = case.handler._tree.root.title
        os.kill(case.starting, signal.SIGKILL)
        wait_until(lambda: not procfs.read_cmdline(case.starting), "the rank is dead")
        if request.param != "not seen":
            case.handler.look()
            wait_until({one.pid: one for one in case.handler._tree}[case.starting].handle.has_exited, "it has ended")
            case.handler.collect_exits()
        yield case


def test_a_rank_that_died_before_it_had_its_title_gets_the_servers_word_for_it(case: Case) -> None:
    titles = case.fail({str(case.starting): "Rank 1 scheduler", "1": "somebody else's"})
    assert titles[str(case.starting)] == "Rank 1 scheduler"
    verdict = case.verdict()
    assert (verdict.first_failure.pid, verdict.first_failure.title) == (case.starting, "Rank 1 scheduler")
    assert (verdict.kind, verdict.level) == ("signal", "established")
    assert "Rank 1 scheduler (pid" in verdict.text


def test_so_does_one_that_was_dead_when_it_was_first_seen(early_case: Case) -> None:
    assert (
        early_case.fail({str(early_case.starting): "Rank 1 scheduler"})[str(early_case.starting)] == "Rank 1 scheduler"
    )
    verdict = early_case.verdict()
    assert (verdict.first_failure.pid, verdict.first_failure.title) == (early_case.starting, "Rank 1 scheduler")
    assert (verdict.kind, verdict.level) == ("signal", "established")


def test_of_what_was_dead_when_it_was_first_seen_no_failure_comes_where_others_are_named(early_case: Case) -> None:
    early_case.fail({str(early_case.titled): "Rank 0 scheduler"})
    assert early_case.verdict().first_failure is None


#: No process has it: the kernel gives pids up to 4194304 (proc_sys_kernel(5), pid_max).
REAPED = 5_000_000


def test_a_rank_that_was_reaped_before_it_could_be_seen_is_told_by_the_servers_word(launching: Case) -> None:
    titles = launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes={str(REAPED): -signal.SIGKILL})
    assert titles[str(REAPED)] == "Rank 1 scheduler"
    verdict = launching.verdict()
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (REAPED, "signal", "established")
    assert f"Rank 1 scheduler (pid {REAPED}) was killed by SIGKILL" in verdict.text


def test_so_it_is_in_an_incident_that_was_begun_before_and_first_of_all(launching: Case) -> None:
    launching.kill(launching.titled)
    assert launching.handler._current.run is not None
    titles = launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes={str(REAPED): 3})
    assert titles[str(REAPED)] == "Rank 1 scheduler"
    verdict = launching.verdict()
    # The others were alive when they were seen, and all are started in one moment.
    assert (verdict.first_failure.pid, verdict.level) == (REAPED, "supported")
    assert f"Rank 1 scheduler (pid {REAPED}) ended with exit status 3" in verdict.text


def test_that_it_is_said_twice_makes_no_second_failure(launching: Case) -> None:
    for _ in range(2):
        launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes={str(REAPED): 3})
    assert launching.failures() == [REAPED]
    # What stands for it is dropped with the others.
    launching.handler._current._forget()
    assert REAPED not in launching.handler._tree
    launching.handler.look()


def test_one_whose_end_was_announced_did_not_fail(launching: Case) -> None:
    launching.handler._outlook.expected.add(REAPED)
    launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes={str(REAPED): 3})
    assert launching.verdict().first_failure is None


def test_how_a_rank_ended_that_was_seen_but_not_how_is_the_servers_word(
    launching: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a kernel that does not tell of a process that was reaped
    monkeypatch.setattr(ProcessHandle, "_from_zombie", lambda _: None)
    monkeypatch.setattr(ProcessHandle, "_from_kernel", lambda _: None)
    launching.kill(launching.starting)
    launching.fail({str(launching.starting): "Rank 1 scheduler"}, exit_codes={str(launching.starting): -9})
    verdict = launching.verdict()
    assert (verdict.first_failure.pid, verdict.kind) == (launching.starting, "signal")
    assert launching.failures() == [launching.starting]


def test_a_rank_that_was_taken_for_a_helper_in_an_incident_at_hand_is_a_failure_of_it(launching: Case) -> None:
    launching.kill(launching.titled)
    starting = launching.handler._tree.get(launching.starting)
    assert starting is not None
    starting.title = launching.handler._tree.root.title
    launching.kill(launching.starting)
    assert launching.failures() == [launching.titled]
    launching.fail({str(launching.starting): "Rank 1 scheduler"}, exit_codes={str(launching.starting): -9})
    assert launching.failures() == [launching.titled, launching.starting]


@pytest.mark.parametrize("pid", ["0", "-1", "x", "٣", "9" * 5000, str(10**11)], ids=lambda pid: pid[:12])
def test_what_is_no_pid_is_passed_over(launching: Case, pid: str) -> None:
    assert pid not in launching.fail({pid: "Rank 1 scheduler"}, exit_codes={pid: 3})


@pytest.mark.parametrize("code", [10**400, -(10**9), 256])
def test_what_is_no_exit_code_is_passed_over(launching: Case, code: int) -> None:
    assert str(REAPED) not in launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes={str(REAPED): code})


@pytest.mark.parametrize("codes", [None, [], {}, {str(REAPED): "-9"}, {str(REAPED): True}], ids=repr)
def test_a_rank_that_nobody_saw_is_not_made_up(launching: Case, codes: Any) -> None:
    assert str(REAPED) not in launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes=codes)


def test_a_rank_without_a_title_when_the_start_takes_too_long_gets_the_servers_word_for_it(launching: Case) -> None:
    titles = launching.fail({str(launching.starting): "Rank 1 scheduler"}, event="startup_timeout")
    assert titles[str(launching.starting)] == "Rank 1 scheduler"
    # That is not undone by its command line.
    launching.handler.look()
    rank = launching.handler._tree.get(launching.starting)
    assert rank is not None
    assert (rank.title, rank.matters) == ("Rank 1 scheduler", True)
    # WHEN the server goes on, and the rank is killed later
    launching.handler._current._forget()
    launching.kill(launching.starting)
    # THEN that is one failure, of another incident
    assert launching.failures() == [launching.starting]


@pytest.mark.parametrize("event", ["child_failed", "launch_failed"])
def test_where_a_child_failed_and_nobody_is_known_to_have_the_one_without_a_title_did(
    early_case: Case, event: str
) -> None:
    # However long ago that is: other ranks take minutes to load, and only then the server looks at its children.
    for one in early_case.handler._tree:
        one.exited_at = one.exited_at and one.exited_at - 1800.0
    early_case.handler.look()
    early_case.fail({}, event=event)
    verdict = early_case.verdict()
    assert (verdict.first_failure.pid, verdict.kind) == (early_case.starting, "signal")
    assert early_case.failures() == [early_case.starting]


def test_who_is_known_to_have_failed_is_preferred_to_one_without_a_title(launching: Case) -> None:
    starting = launching.handler._tree.get(launching.starting)
    assert starting is not None
    starting.title = launching.handler._tree.root.title
    os.kill(launching.starting, signal.SIGKILL)
    wait_until(starting.handle.has_exited, "the child is dead")
    launching.handler._exits.take(starting)
    launching.kill(launching.titled)
    launching.fail({}, event="child_failed")
    assert launching.failures() == [launching.titled]


def test_a_helper_that_died_is_not_taken_for_a_worker(launching: Case) -> None:
    starting = launching.handler._tree.get(launching.starting)
    assert starting is not None
    starting.title, starting.is_nameless = "ldconfig", True
    os.kill(launching.starting, signal.SIGKILL)
    wait_until(starting.handle.has_exited, "the helper is dead")
    launching.handler._exits.take(starting)
    launching.fail({}, event="child_failed")
    assert launching.verdict().first_failure is None


def test_a_rank_that_has_its_title_keeps_it(case: Case) -> None:
    titles = case.fail({str(case.titled): "Rank 0 scheduler"})
    assert titles[str(case.titled)] == "sglang::scheduler_TP0"


NAMES: list[Callable[[int], Any]] = [
    lambda pid: None,
    lambda pid: [str(pid)],
    lambda pid: {str(pid): 7},
    lambda pid: {str(pid): ""},
    lambda pid: {pid: None, "x": "y"},
]


@pytest.mark.parametrize("names", NAMES, ids=["none", "list", "number", "empty", "others"])
def test_what_is_no_title_is_passed_over(case: Case, names: Callable[[int], Any]) -> None:
    assert case.fail(names(case.starting))[str(case.starting)].endswith("-c multiprocessing.spawn")


def test_a_title_is_cut_and_can_be_written(case: Case) -> None:
    assert case.fail({str(case.starting): "\udcff" + "x" * 500})[str(case.starting)] == "\\udcff" + "x" * 119
