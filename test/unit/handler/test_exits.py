"""Exits that the handler sees in an order that the kernel does not vouch for."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from sglang_crashkit.core import procfs
from sglang_crashkit.core.armed import DEFAULT_PARENT_SIGNAL
from sglang_crashkit.core.channel import Mailbox
from sglang_crashkit.core.incident_store import find_incidents
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.handler import exits
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.handler.place import Place
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


def test_an_incident_is_of_the_kind_of_its_first_failure_although_a_consequence_was_told_before(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A large process takes longer to die than its ranks are believed.
    monkeypatch.setattr(exits, "_PARENT_SECS", 0.0)
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(REPLICAS) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        handler.look()
        controller, rank = (handler._tree.get(int(pid)) for pid in process.first_line.split())
        assert controller is not None
        assert rank is not None
        os.kill(rank.pid, DEFAULT_PARENT_SIGNAL)
        wait_until(rank.handle.has_exited, "the rank has ended")
        handler.collect_exits()
        (stored,) = find_incidents(tmp_path)
        assert "-exited-" in stored.name
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(controller.handle.has_exited, "the controller has ended")
        handler.collect_exits()
        handler._current.finish()
        (stored,) = find_incidents(tmp_path)
        assert "-killed-" in stored.name
        assert stored.finished
        assert stored.document is not None
        assert stored.document["kind"] == "killed"
        assert stored.document["trigger"]["pid"] == rank.pid
        assert stored.document["verdict"]["first_failure"]["pid"] == controller.pid
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()
