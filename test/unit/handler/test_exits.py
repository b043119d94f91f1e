"""Exits that the handler sees in an order that the kernel does not vouch for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.handler import exits
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.policy import Event
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import Settings
from unit.handler.launching import launch
from unit.targets import ARM
from unit.waiting import LONG, child, wait_until

#: A main process with a rank that the kernel ends with it; it leaves with status 0 when it is told to.
SERVER = """
import ctypes, subprocess
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
title = "import setproctitle; setproctitle.setproctitle('sglang::scheduler_TP0')"
code = f"{title}; import signal; print(flush=True); signal.pause()"
rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=die_with_parent)
rank.stdout.readline()
ready(rank.pid)
sys.stdin.readline()
os._exit(0)
"""


def test_a_server_that_is_reaped_while_it_is_looked_at_has_ended_before_its_rank(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(SERVER) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        launch(handler, int(process.first_line))
        handler.look()
        rank = handler._tree.get(int(process.first_line))
        assert rank is not None

        def read_stat(pid: int) -> procfs.ProcStat | None:
            """Have the server leave between two looks of the handler."""
            if pid == process.pid and process.returncode is None:
                process.communicate(b"\n", timeout=LONG)
                assert rank is not None
                assert rank.handle.has_exited(LONG)
            return original(pid)

        original = procfs.read_stat
        monkeypatch.setattr(procfs, "read_stat", read_stat)
        handler._exits.take(rank)
        assert handler._current.run is None
        assert handler._tree.root.exited_at is not None
        assert not list(tmp_path.rglob("incident.json"))
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()


#: A main process with a data-parallel controller, and a rank below that.
REPLICAS = """
import setproctitle, subprocess
code = "import os, setproctitle, signal; setproctitle.setproctitle('sglang::data_parallel_controller'); "
code += "pid = os.fork(); pid or setproctitle.setproctitle('sglang::scheduler_DP0'); "
code += "pid or print(os.getppid(), os.getpid(), flush=True); signal.pause()"
controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
ready(controller.stdout.readline().strip())
sys.stdin.readline()
"""


@contextlib.contextmanager
def handled_replicas(
    tmp_path: Path, short_folder: Path
) -> Iterator[tuple[CrashHandler, TrackedProcess, TrackedProcess]]:
    """Yield the handler of a server with a data-parallel controller, the controller, and its one rank."""
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(REPLICAS) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        launch(handler, *(int(pid) for pid in process.first_line.split()))
        handler.look()
        controller, rank = (handler._tree.get(int(pid)) for pid in process.first_line.split())
        assert controller is not None
        assert rank is not None
        try:
            yield handler, controller, rank
        finally:
            # It outlives its controller.
            with contextlib.suppress(ProcessLookupError):
                rank.handle.send_signal(signal.SIGKILL)
            for one in handler._tree:
                one.handle.close()
            handler._selector.close()


@pytest.mark.parametrize("event", ["crash_dump", "child_failed"])
def test_an_incident_that_the_main_process_told_first_is_of_the_kind_of_the_first_failure(
    tmp_path: Path, short_folder: Path, event: str
) -> None:
    with handled_replicas(tmp_path, short_folder) as (handler, controller, _rank):
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(controller.handle.has_exited, "the controller has ended")
        handler._current.join("child_failure", event, handler._tree.root, time.time(), Event.FAILED)
        (stored,) = find_incidents(tmp_path)
        assert "-child_failure-" in stored.name
        handler.collect_exits()
        handler._current.finish()
        (stored,) = find_incidents(tmp_path)
        assert "-killed-" in stored.name
        assert stored.document is not None
        assert (stored.document["kind"], stored.document["trigger"]["event"]) == ("killed", event)
        assert stored.document["verdict"]["first_failure"]["pid"] == controller.pid


#: An armed main process with two ranks that die with it, and that it never reaps.
ARMED_SERVER = (
    ARM
    + """
import ctypes, subprocess
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
def start(rank):
    code = f"import setproctitle; setproctitle.setproctitle('sglang::scheduler_TP{rank}'); "
    code += "import signal; print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=die_with_parent)
    process.stdout.readline()
    return process
ranks = [start(0), start(1)]
ready(f"{ranks[0].pid} {ranks[1].pid}")
pause()
"""
)


@pytest.mark.parametrize("answers", [True, False])
def test_of_whom_it_may_not_trace_the_parent_says_how_it_ended(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    asked = []
    monkeypatch.setattr(exits, "ask_exit", lambda *arguments: asked.append(arguments[2]) or ask_exit(*arguments))
    with (
        child(ARMED_SERVER, str(short_folder), title="sglang::server") as process,
        Mailbox.bind(short_folder / "sock") as receiver,
    ):
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        launch(handler, *(int(pid) for pid in process.first_line.split()))
        handler.look()
        ranks = [handler._tree.get(int(pid)) for pid in process.first_line.split()]
        if not answers:
            os.kill(process.pid, signal.SIGSTOP)
        for rank in ranks:
            assert rank is not None
            os.kill(rank.pid, signal.SIGKILL)
            wait_until(rank.handle.has_exited, "the rank has ended")
        # As of a process of other credentials, or one that is not dumpable: proc_pid_stat(5) has 0 for its status.
        monkeypatch.setattr(procfs, "may_inspect", lambda _pid: False)
        monkeypatch.setattr(procfs, "read_stat", without_status(procfs.read_stat))
        handler.collect_exits()
        assert handler._current.run is not None
        incident = handler._current.run.incident
        reports = [incident.process(rank.pid) for rank in ranks if rank is not None]
        ends = [report.exit for report in reports if report is not None]
        assert len(ends) == 2
        if answers:
            assert incident.kind == "killed"
            assert [end and end.signal for end in ends] == ["SIGKILL", "SIGKILL"]
            assert len(asked) == 2
        else:
            assert [end and end.cause for end in ends] == ["unknown", "unknown"]
            assert "its parent did not answer" in str(ends[0])
            # One that is stuck is waited for once.
            assert len(asked) == 1
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()


def without_status(read_stat: Callable[[int], procfs.ProcStat | None]) -> Callable[[int], procfs.ProcStat | None]:
    def read(pid: int) -> procfs.ProcStat | None:
        stat = read_stat(pid)
        return None if stat is None else dataclasses.replace(stat, wait_status=0)

    return read
