from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.test.fail_fast import Watcher
from sglang_crashkit.test.test_utils import on_start_fail_fast_watcher, start_subprocess_fail_fast_watcher
from unit.support.waiting import LONG, wait_until
from unit.test.conftest import QUIET_SECS, Watch

SCRIPT = """
import subprocess, sys, time
from sglang_crashkit.test.test_utils import start_subprocess_fail_fast_watcher
sleep = [sys.executable, "-c", "import time; time.sleep(120)"]
victim = subprocess.Popen([sys.executable, "-c", {code!r}])
sibling = subprocess.Popen(sleep)
print(sibling.pid, flush=True)
stop = start_subprocess_fail_fast_watcher([("victim", victim), ("gone", None), ("sibling", sibling)])
{then}
time.sleep({seconds})
stop.set()
sibling.kill()
print("the end", flush=True)
"""


def run(code: str, then: str = "", seconds: float = 60) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    script = SCRIPT.format(code=textwrap.dedent(code), then=then, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG, check=False)
    return done, time.monotonic() - began


@pytest.mark.parametrize(
    ("code", "rc", "status"),
    [
        ("import sys; sys.exit(7)", 7, 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, 137),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, 143),
    ],
)
def test_the_run_ends_with_the_status_of_the_dead_process(code, rc, status):
    done, seconds = run(code)
    assert done.returncode == status
    lines = [line for line in done.stderr.splitlines() if line.startswith("[FIXTURE FAIL-FAST] victim (pid=")]
    assert len(lines) == 1
    assert lines[0].endswith(f") exited rc={rc}; aborting.")
    sibling = int(done.stdout.split()[0])
    assert procfs.read_stat(sibling) is None or procfs.read_stat(sibling).state == "Z"
    assert "the end" not in done.stdout
    assert seconds < 60


def test_the_run_goes_on_after_status_0_or_the_event():
    done, _ = run("", seconds=1)
    assert (done.returncode, "the end" in done.stdout, "FAIL-FAST" in done.stderr) == (0, True, False)
    done, _ = run("import time; time.sleep(120)", "stop.set(); victim.kill(); victim.wait()", seconds=0.5)
    assert (done.returncode, "the end" in done.stdout, "FAIL-FAST" in done.stderr) == (0, True, False)


def test_what_a_watch_covers_already_gets_no_second_watcher(tmp_path, start):
    process = start()
    watch = Watch(lambda: [("server", process), ("later", None)], tmp_path)
    stop = start_subprocess_fail_fast_watcher([("server", process), ("later", None)])
    assert stop is watch.watcher.stopped
    stop.set()
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    assert not watch.called.wait(QUIET_SECS)


def test_upstreams_own_watcher_starts_where_the_kit_is_off(monkeypatch):
    @on_start_fail_fast_watcher
    def start_watcher(named_procs):
        return "upstream's"

    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    assert start_watcher([]) == "upstream's"
    monkeypatch.delenv("SGLANG_CRASHKIT_ENABLED")
    event = start_watcher([])
    assert isinstance(event, threading.Event)
    event.set()


def test_a_restarted_process_is_followed_and_its_forerunner_forgotten(tmp_path, start):
    members = {"server": start()}
    watch = Watch(members.items, tmp_path)
    first = members["server"]
    members["server"] = second = start()
    wait_until(lambda: Watcher.covering([second]), "the second one is watched")
    first.kill()
    first.wait(LONG)
    assert not watch.called.wait(QUIET_SECS)
    second.kill()
    assert watch.death().pid == second.pid


def test_a_list_that_cannot_be_made_ends_no_watch(tmp_path, start):
    process, broken = start(), threading.Event()

    def members():
        if broken.is_set():
            raise AttributeError("half set up")
        return [("server", process)]

    watch = Watch(members, tmp_path)
    wait_until(lambda: Watcher.covering([process]), "the process is watched")
    broken.set()
    time.sleep(0.2)
    # Nor does it keep others from being watched.
    assert Watcher.covering([process]) is None
    process.kill()
    assert watch.death().name == "server"


def test_all_that_had_ended_are_named(tmp_path, start):
    first, second = start(), start()
    for process in (first, second):
        process.kill()
        process.wait(LONG)
    death = Watch([("first", first), ("second", second)], tmp_path).death()
    assert death.name == "first"
    assert death.others == (f"second (pid={second.pid}) exited rc=-9",)
