"""The handler's reaction to single messages, in this process and in a fixed order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.core import procfs
from sglang_crashkit.core.channel import Mailbox, Message
from sglang_crashkit.core.incident_store import find_incidents
from sglang_crashkit.core.pidfd import ProcessHandle
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.handler.place import Place
from unit.waiting import child, wait_until

#: A main process with two children: one that has its title, and one that has not got so far.
LAUNCHER = """
import ctypes, subprocess
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
def start(code):
    command = [sys.executable, "-c", code + "; import sys; print(flush=True); sys.stdin.read()"]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
    started.stdout.readline()
    return started.pid
titled = start("import setproctitle; setproctitle.setproctitle('sglang::scheduler_TP0')")
ready(f"{titled} {start('from multiprocessing.spawn import spawn_main')}")
pause()
"""


class Case:
    """A handler that watches a launching server whose second rank died before it had its title."""

    def __init__(self, handler: CrashHandler, titled: int, starting: int) -> None:
        self.handler = handler
        self.titled = titled
        self.starting = starting

    def fail(self, titles: Any, event: str = "launch_failed", **fields: Any) -> dict[str, str]:
        """Let the server say that its launch failed, and return the titles in the incident by pid."""
        tree = self.handler._tree
        fields |= {"titles": titles, "message": "died"}
        message = Message(event, fields, tree.root.pid, os.getuid(), None)
        self.handler._reactions.take(message, tree.root)
        run = self.handler._current.run
        assert run is not None
        assert run.finished
        return {str(process.pid): process.title for process in run.incident.processes}

    def kill(self, pid: int) -> None:
        """Kill a rank, and have the handler take in its end."""
        os.kill(pid, signal.SIGKILL)
        rank = self.handler._tree.get(pid)
        assert rank is not None
        wait_until(rank.handle.has_exited, "the rank is dead")
        self.handler.collect_exits()

    def failures(self) -> list[int]:
        """Return the processes that the incident takes for failed, in the order that it learned of them."""
        run = self.handler._current.run
        assert run is not None
        return [event.pid for event in run._failures]

    def verdict(self) -> Any:
        """Return the incident's verdict."""
        run = self.handler._current.run
        assert run is not None
        return run.incident.verdict


@contextlib.contextmanager
def watched(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(LAUNCHER) as process, Mailbox.bind(short_folder / "sock") as receiver:
        titled, starting = (int(pid) for pid in process.first_line.split())
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        yield Case(handler, titled, starting)
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()


@pytest.fixture
def launching(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    with watched(tmp_path, short_folder) as case:
        case.handler.look()
        yield case


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


def test_of_what_was_dead_when_it_was_first_seen_and_is_not_named_no_failure_comes(early_case: Case) -> None:
    early_case.fail({})
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


def test_a_time_that_is_no_time_is_now(launching: Case) -> None:
    launching.fail({}, time=10**400)
    assert launching.verdict().first_failure is None


def test_a_message_that_cannot_be_taken_in_does_not_end_the_handler(
    launching: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(launching.handler._reactions, "take", fail)
    message = Message("teardown", {}, launching.titled, os.getuid(), None)
    monkeypatch.setattr(launching.handler._mailbox, "receive", lambda **_: [message])
    launching.handler._take_messages()
    assert "message 'teardown'" in caplog.text
    assert "unforeseen" in caplog.text


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


def test_what_strangers_say_is_ignored_and_told_ever_more_rarely(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    message = Message("x" * 500, {}, os.getpid(), os.getuid(), None)
    for _ in range(1234):
        case.handler._reactions.take(message, None)
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert [text[text.index("ignored") :] for text in told] == [
        f"ignored ({count} so far)" for count in (1, 10, 100, 1000)
    ]
    assert max(map(len, told)) < 300


#: A main process that ends with status 7 when it is told of a death, and a rank.
SERVING = LAUNCHER.replace("import ctypes", "signal.signal(signal.SIGQUIT, lambda *_: os._exit(7))\nimport ctypes")
PEER = {"role": "prefill", "address": "10.0.0.1:8998", "sign": "refused", "waiting": [], "count": 0}


@pytest.mark.parametrize(
    ("event", "fields", "kind"),
    [
        ("peer_lost", PEER, "peer_lost"),
        ("watchdog_timeout", {"name": "Scheduler", "soft": True}, "hang"),
        ("stacks_wanted", {}, "snapshot"),
    ],
)
def test_a_death_while_an_incident_of_a_server_that_goes_on_is_opened_ends_the_server(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, event: str, fields: dict[str, Any], kind: str
) -> None:
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(SERVING) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        handler.look()
        (rank,) = (one for one in handler._tree if one.title == "sglang::scheduler_TP0")

        def look_and_kill() -> None:
            if not rank.handle.has_exited():
                os.kill(rank.pid, signal.SIGKILL)
                wait_until(rank.handle.has_exited, "the rank is dead")

        monkeypatch.setattr(handler, "look", look_and_kill)
        message = Message(event, fields, process.pid, os.getuid(), None)
        handler._reactions.take(message, handler._tree.root)
        found = {stored.document["kind"]: stored.document for stored in find_incidents(tmp_path) if stored.document}
        assert set(found) == {kind, "killed"}
        assert found["killed"]["verdict"]["first_failure"]["pid"] == rank.pid
        assert found["killed"]["peers"] == []
        assert found[kind]["complete"] is True
        wait_until(lambda: handler._current.act_on_time() or process.poll() is not None, "the server is told")
        assert process.poll() == 7
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()
