"""See test/unit/handler/stories/test_no_handler.py for a whole server without a crash handler."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit import settings
from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.entrypoints import engine
from sglang_crashkit.srt.entrypoints.engine import Following
from sglang_crashkit.srt.supervisor import MEMBERS_VARIABLE, Serving
from unit.support.fake_ranks import FakeClock, FakeRank, WaitsForEverError
from unit.support.waiting import LONG, child, close_all_but, descriptors

TITLE, CONTROLLER = "sglang::scheduler_TP1", "sglang::data_parallel_controller"
JOIN = "from sglang_crashkit.srt.supervisor import join\njoin()\n"
SLEEPER = "ready(); pause()"
#: Has a process below it say that it is there, and tells its pid.
BELOW = f"""
import ctypes, setproctitle
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    setproctitle.setproctitle({TITLE!r})
    from sglang_crashkit.srt.supervisor import join
    join()
    ready(os.getpid())
    pause()
pause()
"""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> list[tuple[int, float]]:
    """What this server program, which serves, would end with, and when."""
    told: list[tuple[int, float]] = []
    crash_exit.note_started()
    monkeypatch.setattr(crash_exit, "has_begun", lambda: bool(told))
    monkeypatch.setattr(crash_exit, "begin", lambda status, _secs: told.append((int(status), clock.time - 1000.0)))
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: None)
    monkeypatch.setattr(supervisor, "current", None)
    monkeypatch.setenv(settings.MODE_VARIABLE, "server")
    monkeypatch.setenv(MEMBERS_VARIABLE, "")
    monkeypatch.setenv("SGLANG_CRASHKIT_END_SECS", "10")
    return told


@pytest.fixture
def serving(ends: list[Any], clock: FakeClock) -> Iterator[Serving]:
    """A main process without a crash handler; no one runs it but the test."""
    before = descriptors()
    serving = Serving(clock)
    serving.begin(None, follows=False)
    yield serving
    serving.close()
    close_all_but(before)


# -- who is the server's


def known(serving: Serving) -> list[str]:
    serving.read_registered()
    return sorted(found.title for found in serving.registered.values())


@pytest.mark.parametrize(
    ("code", "title", "titles"),
    [
        (JOIN + SLEEPER, TITLE, [TITLE]),
        # The title alone says nothing.
        (SLEEPER, TITLE, []),
        (JOIN + BELOW, CONTROLLER, [CONTROLLER, TITLE]),
        # Another server's.
        (BELOW, CONTROLLER, []),
    ],
)
def test_who_joins_below_the_server_is_known(serving: Serving, code: str, title: str, titles: list[str]) -> None:
    with child(code, title=title):
        assert known(serving) == titles


def test_it_is_told_once_when_all_schedulers_are_ready(serving: Serving, clock: FakeClock) -> None:
    told: list[str] = []
    serving.when_ready = lambda: told.append("ready")
    ready = JOIN + "ready(); sys.stdin.readline(); join(is_ready=True); ready(); pause()"
    with child(ready, title=TITLE) as one, child(ready, title="sglang::scheduler_TP0") as other:
        for process, expected in ((one, []), (other, ["ready"])):
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ready\n"
            with contextlib.suppress(WaitsForEverError):
                serving.turn()
            assert told == expected


def test_a_stand_in_for_a_process_is_registered(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "current", serving)
    with child(SLEEPER) as one, child(SLEEPER) as other:
        # It allows no weak reference.
        supervisor.register([SimpleNamespace(pid=process.pid) for process in (one, other)])
        assert len(known(serving)) == 2
        with pytest.raises(ValueError, match=str(one.pid)):
            supervisor.wait_status(one.pid)


@pytest.mark.parametrize("what", ["file", "pipe", "nothing"])
def test_another_file_of_that_name_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    inode = (tmp_path / "file").stat().st_ino
    monkeypatch.setenv(MEMBERS_VARIABLE, f"{tmp_path / what} {inode}")
    supervisor.join()
    assert (tmp_path / "file").read_bytes() == b""
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_one_below_a_wrapper_is_known(serving: Serving) -> None:
    code = f"import setproctitle, time\nsetproctitle.setproctitle({TITLE!r})\n{JOIN}print(flush=True)\ntime.sleep(60)"
    script = '"$1" -c "$2" & trap "kill -9 $!" TERM; wait'
    with subprocess.Popen(["sh", "-c", script, "sh", sys.executable, code], stdout=subprocess.PIPE) as wrapper:
        try:
            assert wrapper.stdout.readline() == b"\n"
            assert known(serving) == [TITLE]
        finally:
            wrapper.terminate()
            wrapper.wait(LONG)


# -- a node of a rank above 0


@pytest.mark.parametrize(
    ("scripts", "seconds", "events", "said"),
    [
        ([(5.0, -9), (9.0, -9)], 5.1, ["child_failed"], "Rank 0 scheduler (sglang::scheduler_TP0, pid"),
        ([(9.0, 0), (5.0, 3)], 5.0, ["child_failed"], "ended with exit status 3"),
        ([(9.0, 1), (5.0, 0)], 9.0, ["draining", "child_failed"], "ended with exit status 1"),
        ([(5.0, 0), (99.0, 0)], 15.0, ["draining", "child_failed"], "; these processes did not end with it: Rank 1 "),
        ([(5.0, 0), (9.0, 0)], 9.0, ["draining"], ""),
    ],
)
def test_a_following_node_ends_with_any_of_its_schedulers(
    clock: FakeClock,
    ends: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    scripts: list[Any],
    seconds: float,
    events: list[str],
    said: str,
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(engine, "notify", lambda event: told.append((event, "")))
    monkeypatch.setattr(crash_exit, "report", lambda event, message: told.append((event, message)))
    Following([FakeRank(number, clock, script).child() for number, script in enumerate(scripts)], clock).run()
    assert clock.time == pytest.approx(1000.0 + seconds)
    assert [event for event, _message in told] == events
    assert bool(ends) is ("child_failed" in events)
    assert said in told[-1][1]
