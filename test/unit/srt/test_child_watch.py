"""See test/unit/handler/test_no_handler.py for a whole server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit import settings
from sglang_crashkit.incident.exit_status import OUT_OF_MEMORY, ServerExit
from sglang_crashkit.kernel import cgroup
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.srt import child_watch, crash_exit
from sglang_crashkit.srt.child_watch import ChildWatch
from unit.waiting import LONG, child, descriptors, wait_until

SLEEPER = "ready(); pause()"
TITLE = "sglang::scheduler_TP1"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this process would end with; it has a server, and serves."""
    told: list[int] = []
    monkeypatch.setattr(crash_exit, "is_serving", lambda: True)
    monkeypatch.setattr(crash_exit, "begin", lambda status, _secs: told.append(int(status)))
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: None)
    monkeypatch.delenv(settings.SOCKET_VARIABLE, raising=False)
    monkeypatch.setenv(settings.MODE_VARIABLE, "server")
    monkeypatch.setattr(child_watch, "_watch", None)
    return told


@pytest.fixture
def make(ends: list[int]) -> Iterator[Callable[[int | None], ChildWatch]]:
    made: list[ChildWatch] = []

    def make(handler_pid: int | None = None) -> ChildWatch:
        made.append(child_watch.replace(handler_pid))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def look_until(watch: ChildWatch, condition: Callable[[], object]) -> None:
    wait_until(lambda: (watch.look(), condition())[1], "it looks")


def test_nothing_is_done_while_the_crash_handler_lives(make: Callable[..., ChildWatch], ends: list[int]) -> None:
    with child(SLEEPER) as handler, child(SLEEPER, title=TITLE) as worker:
        watch = make(handler.pid)
        worker.kill()
        assert watch.look() is None
        handler.kill()
        handler.wait(LONG)
        (take_over,) = [what for number, what in watch.watched.items() if descriptors()[number].endswith("[pidfd]")]
        assert take_over() is False
        look_until(watch, lambda: ends)
    assert ends == [ServerExit.KILLED]


def test_nor_where_a_handler_answers_that_was_started_since(
    make: Callable[..., ChildWatch], ends: list[int], short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SOCKET_VARIABLE, str(short_folder / "handler.sock"))
    with child(SLEEPER, title=TITLE) as worker:
        watch = make()
        worker.kill()
        with Mailbox.bind(short_folder / "handler.sock"):
            assert watch.look() == 1.0
            assert list(watch._workers) == []
        look_until(watch, lambda: ends)


def test_a_kill_that_the_memory_cgroup_counts_is_told_from_another(
    make: Callable[..., ChildWatch], ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 1\n")
    monkeypatch.setattr(cgroup, "find_counter", lambda _pid: cgroup.OomCounter(events, 1))
    with child(SLEEPER, title=TITLE) as worker:
        watch = make()
        events.write_text("oom_kill 2\n")
        worker.kill()
        look_until(watch, lambda: ends)
    assert ends == [OUT_OF_MEMORY]


def test_a_count_of_long_ago_is_forgotten(
    make: Callable[..., ChildWatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 1\n")
    monkeypatch.setattr(
        cgroup, "find_counter", lambda _pid: cgroup.OomCounter(events, int(events.read_text().split()[1]))
    )
    watch = make()
    events.write_text("oom_kill 2\n")
    assert watch._was_out_of_memory()
    monkeypatch.setattr(child_watch, "_OOM_AGE_SECS", 0.0)
    watch.look()
    assert watch._was_out_of_memory()
    watch.look()
    assert not watch._was_out_of_memory()


def test_those_that_this_process_ends_itself_are_excused(make: Callable[..., ChildWatch], ends: list[int]) -> None:
    with child(SLEEPER, title=TITLE) as worker, child(SLEEPER, title=TITLE) as another:
        watch = make()
        child_watch.excuse(worker.pid)
        worker.kill()
        look_until(watch, lambda: [each for each in watch._workers if each.done])
        assert ends == []
        another.kill()
        look_until(watch, lambda: ends)


@pytest.mark.parametrize("follows", [True, False])
def test_a_scheduler_of_a_following_node_may_end_well(
    make: Callable[..., ChildWatch], ends: list[int], follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_END_SECS", "0.1")
    with child("ready(); sys.stdin.read(1); os._exit(0)", title=TITLE) as worker:
        watch = make()
        watch.follows = follows
        assert worker.stdin is not None
        worker.stdin.close()
        look_until(watch, lambda: ends or [each for each in watch._workers if each.done])
    assert ends == ([] if follows else [ServerExit.EXITED])


def test_what_fails_in_a_look_is_told_and_tried_again(
    make: Callable[..., ChildWatch], ends: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watch = make()
    with monkeypatch.context() as broken:
        broken.setattr(watch._workers, "find", lambda: 1 / 0)
        assert watch.look() == 1.0
    assert "crash kit: the workers could not be looked at: ZeroDivisionError" in capfd.readouterr().err
    with child(SLEEPER, title=TITLE) as worker:
        worker.kill()
        look_until(watch, lambda: ends)


def test_it_runs_in_a_thread_of_its_own_where_nobody_runs_it(ends: list[int]) -> None:
    before, opened = set(threading.enumerate()), descriptors()
    child_watch.ensure(follows=False)
    child_watch.ensure(follows=True)
    (thread,) = set(threading.enumerate()) - before
    watch = child_watch._watch
    assert watch is not None
    assert watch.follows
    with child(SLEEPER, title=TITLE) as worker:
        wait_until(lambda: list(watch._workers), "it looks")
        worker.kill()
        wait_until(lambda: ends, "it sees the end")
    watch.close()
    thread.join(LONG)
    assert not thread.is_alive()
    assert descriptors().items() <= opened.items()


def test_a_copy_of_this_process_does_not_take_it_for_its_own(make: Callable[..., ChildWatch]) -> None:
    watch = make()
    assert watch.lives
    pid = os.fork()
    if pid == 0:
        os._exit(watch.lives)
    assert os.waitpid(pid, 0)[1] == 0
