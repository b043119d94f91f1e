from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sglang_crashkit.kernel import procfs, signals
from unit.support.waiting import LONG, child, wait_until

PARENT = """
import subprocess
below = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]).pid for _ in range(2)]
ready(" ".join(map(str, below)))
pause()
"""


def test_this_process_is_told_in_its_main_thread() -> None:
    code = """
import signal, sys, threading, time
from sglang_crashkit.kernel import signals
signal.signal(signal.SIGQUIT, lambda *_: sys.exit(9 if threading.current_thread() is threading.main_thread() else 1))
threading.Thread(target=signals.send_itself_sigquit).start()
while True:
    # A pause would sleep through a signal that came just before it.
    time.sleep(0.01)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=LONG, check=False).returncode == 9


def test_all_below_are_killed_but_those_that_are_spared() -> None:
    with child(PARENT) as process:
        skipped, other = map(int, process.first_line.split())  # type: ignore[attr-defined]
        try:
            signals.kill_below(process.pid, [skipped])
            wait_until(lambda: not procfs.is_running(other), "it is dead")
            assert procfs.is_running(skipped)
            assert process.poll() is None
        finally:
            os.kill(skipped, signal.SIGKILL)


@pytest.mark.parametrize("kill", [lambda pid: signals.kill_all([1 << 30, pid]), signals.kill_group])
def test_one_that_is_gone_keeps_no_other_alive(kill: object) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True) as process:
        kill(process.pid)  # type: ignore[operator]
        assert process.wait(LONG) == -signal.SIGKILL
