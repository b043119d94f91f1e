"""The watcher on real child processes: what it notices, what it leaves alone, what it collects, how it ends a run."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from sglang_crashkit.test.fail_fast import Watcher
from unit.support.waiting import LONG, child, wait_until
from unit.test.conftest import QUIET_SECS, Watch


@pytest.mark.parametrize(
    ("code", "returncode", "status"), [("os._exit(3)", 3, 3), ("os.abort()", -6, 134), ("os._exit(0)", 0, 1)]
)
def test_an_unexpected_exit_is_told_with_its_status(tmp_path, capsys, code, returncode, status):
    with child(f"ready(); sys.stdin.readline(); {code}") as process:
        watch = Watch([("server", process), ("none", None)], tmp_path)
        assert process.stdin is not None
        process.stdin.close()
        death = watch.death()
    assert (death.name, death.pid, death.returncode, death.exit_status) == ("server", process.pid, returncode, status)
    assert f"[FIXTURE FAIL-FAST] server (pid={process.pid}) exited rc={returncode}; aborting.\n" in (
        capsys.readouterr().err
    )


def test_status_0_can_be_left_alone(tmp_path, start):
    process = start([sys.executable, "-c", "print('ready', flush=True)"])
    other = start()
    watch = Watch([("server", process), ("other", other)], tmp_path, any_status=False)
    process.wait(LONG)
    assert not watch.called.wait(QUIET_SECS)
    other.kill()
    assert watch.death().name == "other"


def test_a_watch_that_was_ended_is_quiet(tmp_path, start):
    process = start()
    watch = Watch([("server", process)], tmp_path)
    watch.watcher.stopped.set()
    process.kill()
    process.wait(LONG)
    assert not watch.called.wait(QUIET_SECS)
    wait_until(lambda: not watch.watcher._thread.is_alive(), "the watcher's thread ends")


def test_a_restarted_process_is_followed_and_its_forerunner_forgotten(tmp_path, start):
    members = {"server": start()}
    watch = Watch(members.items, tmp_path)
    first = members["server"]
    members["server"] = second = start()
    wait_until(lambda: id(second) in watch.watcher._held, "the second one is watched")
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
    wait_until(lambda: watch.watcher._held, "the process is watched")
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
