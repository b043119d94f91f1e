from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.srt.own_workers import OwnWorkers, Worker
from unit.waiting import LONG, child, wait_until

SLEEPER = "ready(); pause()"
TITLE, CONTROLLER = "sglang::scheduler_TP1", "sglang::data_parallel_controller"
#: Runs this Python code in a process below, whose pid it tells; `title` is of that one.
BELOW = """
import ctypes
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if title:
        setproctitle.setproctitle(title)
    pause()
"""
TELL = "import time; time.sleep(0.3); ready(pid)\npause()"


@pytest.fixture
def workers() -> Iterator[OwnWorkers]:
    found = OwnWorkers()
    yield found
    found.close()


def titles_of(workers: OwnWorkers) -> list[str]:
    workers.find()
    return [worker.title for worker in workers]


def only(workers: OwnWorkers) -> Worker:
    workers.find()
    (worker,) = workers
    return worker


def below(title: str) -> str:
    return f"import setproctitle\ntitle = {title!r}\n" + BELOW + TELL


@pytest.mark.parametrize(
    "title", [TITLE, "sglang::detokenizer", "sglang::detokenizer_router", CONTROLLER, "sglang::scheduler"]
)
def test_a_worker_is_found_once(workers: OwnWorkers, title: str) -> None:
    with child(SLEEPER, title=title) as process:
        (found,) = workers.find()
        assert (found.pid, found.title) == (process.pid, title)
        assert workers.find() == []
        assert not found.has_ended()
        assert not found.exit_status().known


@pytest.mark.parametrize("title", ["python", "sglang::tokenizer_worker:1", "sglang::crash_handler", "sglang"])
def test_nothing_else_is(workers: OwnWorkers, title: str) -> None:
    with child(SLEEPER, title=title):
        assert titles_of(workers) == []


def test_one_that_has_ended_and_was_not_reaped_is_found_by_what_is_left_of_its_title(workers: OwnWorkers) -> None:
    with child(SLEEPER, title=TITLE) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = only(workers)
        assert found.title == TITLE[:15]
        assert found.has_ended()
        assert found.exit_status() == ExitStatus(signal="SIGKILL")
        assert process.wait(LONG) == -signal.SIGKILL


@pytest.mark.parametrize("with_pidfd", [True, False])
@pytest.mark.parametrize(
    ("code", "status"), [("os._exit(3)", ExitStatus(code=3)), (None, ExitStatus(signal="SIGKILL"))]
)
def test_it_is_known_how_one_ended(
    workers: OwnWorkers,
    monkeypatch: pytest.MonkeyPatch,
    with_pidfd: bool,
    code: str | None,
    status: ExitStatus,
) -> None:
    with child(f"ready(); sys.stdin.read(1); {code or 'pause()'}", title=TITLE) as process:
        if not with_pidfd:
            monkeypatch.setattr(os, "pidfd_open", lambda *_: os.open("/nonexistent", os.O_RDONLY))
        found = only(workers)
        assert (found.handle is not None) == with_pidfd
        assert not found.has_ended()
        assert process.stdin is not None
        process.stdin.close()
        if code is None:
            process.kill()
        wait_until(found.has_ended, "it has ended")
        assert found.exit_status() == status
        process.wait(LONG)
        assert found.has_ended()


def test_ranks_of_the_data_parallel_controller_count(workers: OwnWorkers) -> None:
    with child(below("sglang::scheduler_DP0"), title=CONTROLLER):
        assert sorted(titles_of(workers)) == [CONTROLLER, "sglang::scheduler_DP0"]


@pytest.mark.parametrize("parent", [TITLE, CONTROLLER])
def test_what_a_worker_has_just_forked_does_not(workers: OwnWorkers, parent: str) -> None:
    with child(below(""), title=parent):
        assert titles_of(workers) == [parent]


def test_another_servers_do_not(workers: OwnWorkers) -> None:
    with child(below(TITLE)):
        assert titles_of(workers) == []


def test_one_below_a_wrapper_counts(workers: OwnWorkers, tmp_path: os.PathLike[str]) -> None:
    sleeper = tmp_path / "sleeper.py"  # type: ignore[operator]
    sleeper.write_text(
        f"import setproctitle, time\nsetproctitle.setproctitle({TITLE!r})\nprint(flush=True)\ntime.sleep(60)"
    )
    script = '"$1" "$2" & trap "kill -9 $!" TERM; wait'
    with subprocess.Popen(["sh", "-c", script, "sh", sys.executable, str(sleeper)], stdout=subprocess.PIPE) as wrapper:
        try:
            assert wrapper.stdout is not None
            assert wrapper.stdout.readline() == b"\n"
            assert titles_of(workers) == [TITLE]
        finally:
            wrapper.terminate()
            wrapper.wait(LONG)


def test_one_that_is_gone_and_done_with_is_dropped(workers: OwnWorkers) -> None:
    with child(SLEEPER, title=TITLE) as process:
        found = only(workers)
        process.kill()
        process.wait(LONG)
        workers.find()
        assert list(workers) == [found]
        found.done = True
        workers.find()
        assert list(workers) == []
