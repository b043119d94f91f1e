"""A sleep that ends when a process ends, on kernels that give a pidfd and on those that do not."""

from __future__ import annotations

import errno
import os
import time
from unittest import mock

import psutil
import pytest

from sglang_crashkit.srt.reaping import DeathAlarm
from unit.waiting import LONG, child, descriptors

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


def test_a_process_held_for_alive_after_its_end_does_not_keep_the_caller_spinning():
    naps = []
    with child(SLEEPER) as process, DeathAlarm() as alarm:
        known = psutil.Process(process.pid)
        alarm.sleep([known], 0.0, no_nap)
        process.kill()
        process.wait(LONG)
        alarm.sleep([known], LONG, no_nap)
        alarm.sleep([known], 0.1, naps.append)
    assert naps == [0.1]


def test_one_process_without_a_pidfd_does_not_make_the_others_wait():
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
