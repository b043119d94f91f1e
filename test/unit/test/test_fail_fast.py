from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.test.fail_fast import Death, Watcher
from sglang_crashkit.test.server_fixtures import disaggregation_fixture
from sglang_crashkit.test.test_utils import on_start_fail_fast_watcher, start_subprocess_fail_fast_watcher
from unit.support.server_driver import Server
from unit.support.targets import make_tool
from unit.support.waiting import LONG, child, spawned, wait_until

SLEEP = [sys.executable, "-c", "import time\nprint('ready', flush=True)\ntime.sleep(120)"]
QUIET_SECS = 0.4


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:
        yield lambda argv=SLEEP: stack.enter_context(spawned(argv))


def watch(source: Any, folder: Path) -> Watcher:
    """Begin to watch, without an end of this process."""
    return Watcher(source, lambda _death: None, folder=folder).start()


def death_of(watcher: Watcher) -> Death:
    return wait_until(lambda: watcher.death, "a process has ended")


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
    assert not procfs.is_running(sibling)
    assert "the end" not in done.stdout
    assert seconds < 60


def test_the_run_goes_on_after_status_0_or_the_event():
    done, _ = run("", seconds=1)
    assert (done.returncode, "the end" in done.stdout, "FAIL-FAST" in done.stderr) == (0, True, False)
    done, _ = run("import time; time.sleep(120)", "stop.set(); victim.kill(); victim.wait()", seconds=0.5)
    assert (done.returncode, "the end" in done.stdout, "FAIL-FAST" in done.stderr) == (0, True, False)


def test_what_a_watch_covers_already_gets_no_second_watcher(tmp_path, start):
    process = start()
    watcher = watch(lambda: [("server", process), ("later", None)], tmp_path)
    stop = start_subprocess_fail_fast_watcher([("server", process), ("later", None)])
    assert stop is watcher.stopped
    stop.set()
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    time.sleep(QUIET_SECS)
    assert watcher.death is None


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
    watcher = watch(members.items, tmp_path)
    first = members["server"]
    members["server"] = second = start()
    wait_until(lambda: Watcher.covering([second]), "the second one is watched")
    first.kill()
    first.wait(LONG)
    time.sleep(QUIET_SECS)
    assert watcher.death is None
    second.kill()
    assert death_of(watcher).pid == second.pid


def test_a_list_that_cannot_be_made_ends_no_watch(tmp_path, start):
    process, broken = start(), threading.Event()

    def members():
        if broken.is_set():
            raise AttributeError("half set up")
        return [("server", process)]

    watcher = watch(members, tmp_path)
    wait_until(lambda: Watcher.covering([process]), "the process is watched")
    broken.set()
    time.sleep(0.2)
    # Nor does it keep others from being watched.
    assert Watcher.covering([process]) is None
    process.kill()
    assert death_of(watcher).name == "server"


def test_all_that_had_ended_are_named(tmp_path, start):
    first, second = start(), start()
    for process in (first, second):
        process.kill()
        process.wait(LONG)
    death = death_of(watch([("first", first), ("second", second)], tmp_path))
    assert death.name == "first"
    assert death.others == (f"second (pid={second.pid}) exited rc=-9",)


# -- what is known of a death


GRANDCHILD = """
import subprocess, sys, time
def serve_requests():
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]).pid, flush=True)
    time.sleep(120)
serve_requests()
"""


def test_the_survivors_are_captured_and_then_killed_with_their_children(tmp_path, start):
    victim = start()
    with child("ready(); pause()") as unwatched:
        survivor = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE)
        with survivor:
            grandchild = int(survivor.stdout.readline())
            watcher = watch([("victim", victim), ("survivor", survivor)], tmp_path / "evidence")
            wait_until(lambda: Watcher.covering([victim, survivor]), "both are watched")
            victim.kill()
            death = death_of(watcher)
            assert survivor.wait(LONG) == -9
        wait_until(lambda: not procfs.is_running(grandchild), "its child is killed, too")
        assert unwatched.poll() is None
    doing = {int(re.search(r"\(pid (\d+)\)", one)[1]): one for one in death.survivors}
    assert {survivor.pid, grandchild} == set(doing)
    assert death.folder.parent == tmp_path / "evidence"
    assert death.folder.stat().st_mode & 0o077 == 0
    texts = [path.read_text() for path in death.folder.glob("*.txt")]
    assert len(texts) == 2
    assert any("serve_requests" in text for text in texts)
    lines = list(death.lines())
    assert lines[0] == f"victim (pid={victim.pid}) exited rc=-9"
    assert any(
        line.startswith(f"meanwhile: survivor: python -c ... (pid {survivor.pid}): serve_requests (") for line in lines
    )


def test_a_tool_that_hangs_does_not_hold_the_message_up(tmp_path, start, monkeypatch):
    slow = make_tool(tmp_path, "exec sleep 60")
    monkeypatch.setattr("sglang_crashkit.capture.pyspy.find_pyspy", lambda: slow)
    victim, survivor = start(), start()
    watcher = watch([("victim", victim), ("survivor", survivor)], tmp_path / "evidence")
    victim.kill()
    death = death_of(watcher)
    assert "did not end within" in death.survivors[0]


def test_the_dead_servers_own_incident_is_named(tmp_path, short_folder, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    server = Server(short_folder, crash_folder=None)
    try:
        watcher = watch([("server", server.process)], tmp_path)
        server.kill("scheduler_TP1")
        server.process.wait(LONG)
        death = death_of(watcher)
        incident = server.wait_for_the_end()
    finally:
        server.close()
    assert death.incident.path == incident.path
    assert "scheduler_TP1" in death.verdict
    assert f"[FIXTURE FAIL-FAST] incident: {death.verdict}" in capsys.readouterr().err


# -- the fixture of a pair


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What the fixture calls to watch."""
    found = mock.Mock()
    monkeypatch.setattr(disaggregation_fixture, "watch", found)
    return found


def test_a_pair_is_watched_until_it_is_torn_down(watched: mock.Mock) -> None:
    class Fixture:
        process_prefill = None

    disaggregation_fixture.on_pd_setup(Fixture)
    (members,) = watched.call_args.args
    assert members() == [("prefill", None), ("decode", None), ("lb", None)]
    Fixture.process_prefill = restarted = object()  # type: ignore[assignment]
    assert members()[0] == ("prefill", restarted)
    disaggregation_fixture.on_pd_teardown(Fixture)
    assert watched.return_value.stop.call_count == 1


def test_nothing_is_watched_where_the_kit_is_off_and_a_broken_watch_fails_no_test(
    watched: mock.Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.side_effect = OSError("no descriptors left")
    disaggregation_fixture.on_pd_setup(type("Fixture", (), {}))
    assert "are not watched" in caplog.text
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    disaggregation_fixture.on_pd_setup(type("Fixture", (), {}))
    assert watched.call_count == 1
