from __future__ import annotations

import os
import signal
import time

import pytest

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.watch.deaths import Death, DeathWatch
from unit.waiting import LONG, child

PAUSE = "ready(); pause()"


def test_who_ends_alone_is_told_with_how_it_ended() -> None:
    with child(PAUSE) as first, child(PAUSE) as second:
        watch = DeathWatch(second.pid)
        watch.follow({first.pid: "first", second.pid: "second"})
        watch.wait(0)
        assert watch.deaths == []
        first.send_signal(signal.SIGSEGV)
        watch.wait(LONG)
        (death,) = watch.deaths
        assert (death.pid, death.title, death.end.signal, death.alone) == (first.pid, "first", "SIGSEGV", True)
        assert str(death) == f"first (pid {first.pid}) was killed by SIGSEGV"
        first.wait(LONG)
        watch.follow({first.pid: "first"})
        second.kill()
        watch.wait(LONG)
        assert [(one.title, one.alone) for one in watch.deaths] == [("first", True), ("second", False)]
        watch.close()


def test_those_that_are_killed_together_end_together() -> None:
    # GIVEN processes that are ended as upstream does it, one signal after the other
    with child(PAUSE) as first, child(PAUSE) as second, child(PAUSE) as root:
        watch = DeathWatch(root.pid)
        watch.follow({root.pid: "root", first.pid: "first", second.pid: "second"})
        for process in (first, second, root):
            process.kill()
        while len(watch.deaths) < 3:
            watch.wait(LONG)
        assert [death.alone for death in watch.deaths] == [False] * 3
        watch.close()


def test_where_several_ended_in_one_moment_their_parent_was_not_the_first() -> None:
    with child(PAUSE) as root, child(PAUSE) as worker, child(PAUSE):
        watch = DeathWatch(root.pid)
        watch.follow({root.pid: "root", worker.pid: "worker"})
        for process in (root, worker):
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        watch.wait(LONG)
        assert [death.title for death in watch.deaths] == ["worker", "root"]
        watch.close()


def test_one_that_is_gone_is_not_followed_and_the_wait_has_an_end() -> None:
    with child("ready()") as process:
        process.wait(LONG)
    watch = DeathWatch(1)
    watch.follow({process.pid: "gone"})
    began = time.monotonic()
    watch.wait(0.1)
    assert time.monotonic() - began >= 0.09
    assert watch.deaths == []
    watch.close()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ExitStatus(code=3), "ended with exit status 3"),
        (ExitStatus(), "ended by itself"),
        (ExitStatus(signal="SIGKILL"), "was killed by SIGKILL"),
    ],
)
def test_how_it_ended_in_words(end: ExitStatus, words: str) -> None:
    assert str(Death(7, "sglang::scheduler", 0.0, end)) == f"sglang::scheduler (pid 7) {words}"
