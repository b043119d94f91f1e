from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from sglang_crashkit import settings
from sglang_crashkit.kernel import procfs
from sglang_crashkit.srt.utils.common import DeathAlarm, on_kill_process_tree
from unit.srt.conftest import Listener
from unit.waiting import LONG, child, descriptors


@on_kill_process_tree
def kill(parent_pid: int | None, include_parent: bool = True, *rest: Any, **more: Any) -> tuple[Any, ...]:
    """Stand for upstream's function, and tell how it was called."""
    return (parent_pid, include_parent, rest, more)


def test_everything_is_passed_through() -> None:
    assert kill(1) == (1, True, (), {})
    assert kill(parent_pid=1, include_parent=False) == (1, False, (), {})
    assert kill(None, False, 3, skip_pid=4) == (None, False, (3,), {"skip_pid": 4})
    assert kill.__doc__ == "Stand for upstream's function, and tell how it was called."


def test_what_upstream_raises_is_raised() -> None:
    @on_kill_process_tree
    def broken(parent_pid: int | None) -> None:
        raise ProcessLookupError(parent_pid)

    with pytest.raises(ProcessLookupError):
        broken(1)


def test_the_handler_is_told_first(listener: Listener) -> None:
    @on_kill_process_tree
    def kill_and_listen(parent_pid: int | None, skip_pid: int | None = None) -> Any:
        return listener.heard()

    told = kill_and_listen(None)
    assert (told["event"], told["pid"]) == ("teardown", os.getpid())
    with child("ready(); pause()") as process:
        assert kill_and_listen(process.pid)["pid"] == process.pid


def test_another_servers_handler_is_told_of_its_end(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    with child("ready(); pause()") as server:
        stat = procfs.read_stat(server.pid)
        path = settings.socket_path(server.pid, stat.start_ticks)
        path.parent.mkdir(parents=True)
        other = Listener(path, {})
        try:
            kill(server.pid)
            assert other.heard()["pid"] == server.pid
        finally:
            other.kill()
            other.process.stdout.close()
        # A socket that was left behind does not keep the tree from being killed.
        assert kill(server.pid)[0] == server.pid


@pytest.mark.parametrize("pid", [-1, 0, 2**40, "x", 1.5])
def test_a_pid_that_is_none_is_upstreams_to_refuse(pid: Any) -> None:
    assert kill(pid)[0] == pid


def test_a_process_that_is_gone_is_upstreams_to_find_out() -> None:
    process = subprocess.Popen(["true"])
    process.wait(LONG)
    assert kill(process.pid)[0] == process.pid


SLEEPER = "ready(); pause()"


def no_nap(seconds: float) -> None:
    raise AssertionError(f"napped for {seconds} s although a pidfd was to be had")


def test_a_sleep_ends_when_the_process_ends():
    with child(SLEEPER) as process, DeathAlarm() as alarm:
        known = psutil.Process(process.pid)
        alarm.sleep([known], 0.01, no_nap)
        process.kill()
        began = time.monotonic()
        alarm.sleep([known], LONG, no_nap)
        assert time.monotonic() - began < LONG / 2


def test_a_sleep_lasts_no_longer_than_asked_while_all_live():
    with child(SLEEPER) as process, DeathAlarm() as alarm:
        began = time.monotonic()
        alarm.sleep([psutil.Process(process.pid)], 0.05, no_nap)
        assert 0.045 <= time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("code", ["EINVAL", "ESRCH", "ENOSYS", "EPERM", "EMFILE"])
def test_without_a_pidfd_it_looks_again_once_and_then_naps(code):
    naps = []
    failing = mock.patch.object(os, "pidfd_open", side_effect=OSError(getattr(errno, code), code))
    with child(SLEEPER) as process, failing, DeathAlarm() as alarm:
        known = psutil.Process(process.pid)
        alarm.sleep([known], 0.1, naps.append)
        assert naps == []
        alarm.sleep([known], 0.1, naps.append)
        assert naps == [0.1]


def test_a_python_without_pidfd_open_naps(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    naps = []
    myself = psutil.Process()
    with DeathAlarm() as alarm:
        for _ in range(2):
            alarm.sleep([myself], 0.1, naps.append)
    assert naps == [0.1]


def test_what_is_no_process_of_psutil_is_napped_for():
    naps = []
    with DeathAlarm() as alarm:
        alarm.sleep([mock.Mock(spec=psutil.Process, pid=os.getpid())], 0.1, naps.append)
    assert naps == [0.1]


def test_a_recycled_pid_is_not_watched():
    naps = []
    with child(SLEEPER) as process, DeathAlarm() as alarm:
        known = psutil.Process(process.pid)
        with mock.patch.object(psutil.Process, "is_running", return_value=False):
            before = descriptors()
            alarm.sleep([known], 0.1, naps.append)
            assert descriptors().items() <= before.items()
        alarm.sleep([known], 0.1, naps.append)
    assert naps == [0.1]


def test_a_lingering_process_does_not_keep_the_caller_spinning():
    naps = []
    with child(SLEEPER) as process, DeathAlarm() as alarm:
        known = psutil.Process(process.pid)
        alarm.sleep([known], 0.0, no_nap)
        process.kill()
        process.wait(LONG)
        alarm.sleep([known], LONG, no_nap)
        alarm.sleep([known], 0.1, naps.append)
    assert naps == [0.1]


def test_one_without_a_pidfd_does_not_delay_the_others():
    real = os.pidfd_open
    with child(SLEEPER) as first, child(SLEEPER) as second, DeathAlarm() as alarm:
        known = [psutil.Process(first.pid), psutil.Process(second.pid)]

        def only_the_second(pid: int) -> int:
            if pid == first.pid:
                raise OSError(errno.EINVAL, "EINVAL")
            return real(pid)

        with mock.patch.object(os, "pidfd_open", side_effect=only_the_second):
            alarm.sleep(known, 0.1, no_nap)
            second.kill()
            alarm.sleep(known, LONG, no_nap)


def test_no_descriptor_is_left_open():
    before = descriptors()
    with child(SLEEPER) as process:
        during = set(descriptors())
        with DeathAlarm() as alarm:
            alarm.sleep([psutil.Process(process.pid)], 0.0, no_nap)
            assert set(descriptors()) != during
        assert set(descriptors()) <= during
    assert set(descriptors()) <= set(before)
