from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.handler import exits
from sglang_crashkit.kernel import procfs
from unit.handler.launching import handling
from unit.targets import ARM
from unit.waiting import LONG, wait_until

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


def test_a_server_reaped_meanwhile_has_ended_before_its_rank(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with handling(SERVER, tmp_path, short_folder) as (handler, process):
        handler.look()
        rank = handler.tree.get(int(process.first_line))
        original = procfs.read_stat

        def read_stat(pid: int) -> procfs.ProcStat | None:
            """Have the server leave between two looks of the handler."""
            if pid == process.pid and process.returncode is None:
                process.communicate(b"\n", timeout=LONG)
                assert rank.handle.has_exited(LONG)
            return original(pid)

        monkeypatch.setattr(procfs, "read_stat", read_stat)
        handler.session.take_exit(rank)
        assert handler.session.run is None
        assert handler.tree.root.exited_at is not None
        assert not list(tmp_path.rglob("incident.json"))


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
def test_a_parent_says_how_one_ended_that_is_closed(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    asked = []
    # One that is not stuck may be slow.
    monkeypatch.setattr(exits, "_ASK_SECS", LONG if answers else 0.3)
    monkeypatch.setattr(exits, "ask_exit", lambda *arguments: asked.append(arguments[2]) or ask_exit(*arguments))
    folder, title = str(short_folder), "sglang::server"
    with handling(ARMED_SERVER, tmp_path, short_folder, folder, title=title) as (handler, process):
        handler.look()
        ranks = [handler.tree.get(int(pid)) for pid in process.first_line.split()]
        if not answers:
            os.kill(process.pid, signal.SIGSTOP)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
            wait_until(rank.handle.has_exited, "the rank has ended")
        # As of a process of other credentials, or one that is not dumpable: proc_pid_stat(5) has 0 for its status.
        read_stat = procfs.read_stat
        monkeypatch.setattr(procfs, "may_inspect", lambda _pid: False)
        without = lambda pid: (stat := read_stat(pid)) and dataclasses.replace(stat, wait_status=0)  # noqa: E731
        monkeypatch.setattr(procfs, "read_stat", without)
        handler.session.collect_exits()
        incident = handler.session.run.incident
        ends = [incident.process(rank.pid).exit for rank in ranks]
        if answers:
            assert incident.kind == "killed"
            assert [end.signal for end in ends] == ["SIGKILL", "SIGKILL"]
        else:
            assert [end.cause for end in ends] == ["unknown", "unknown"]
            assert "its parent did not answer" in str(ends[0])
        # One that is stuck is waited for once.
        assert len(asked) == (2 if answers else 1)
