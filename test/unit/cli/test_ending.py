from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from sglang_crashkit.cli import ending
from sglang_crashkit.cli.ending import Terminated, ends_with_reader
from unit.waiting import LONG


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the reading and the writing end of a pipe, which is looked at all the time."""
    monkeypatch.setattr(ending, "_LOOK_SECS", 0.01)
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def wait_for_its_end() -> None:
    """Wait for longer than any test may take; a signal that ends nothing does not end it."""
    signal.sigtimedwait([], LONG)
    pytest.fail("it did not end")


def test_it_ends_where_nobody_reads_any_more(pipe: list[int]) -> None:
    with ends_with_reader(pipe[1], LONG):
        os.close(pipe.pop(0))
        with pytest.raises(Terminated):
            wait_for_its_end()


def test_it_ends_at_its_deadline_though_somebody_reads(pipe: list[int]) -> None:
    with pytest.raises(Terminated), ends_with_reader(pipe[1], 0.0):
        wait_for_its_end()


@pytest.mark.parametrize("path", [os.devnull, __file__])
def test_what_is_no_pipe_has_no_reader_to_lose(path: str, pipe: list[int]) -> None:
    looks = iter(range(5))
    before = signal.getsignal(signal.SIGALRM)
    with open(path, "rb") as file, ends_with_reader(file.fileno(), LONG):  # noqa: PTH123 - a device, too
        while next(looks, None) is not None:
            signal.sigtimedwait([], 0.02)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_its_own_end_is_not_cut_short(pipe: list[int]) -> None:
    with ends_with_reader(pipe[1], 0.0):
        with pytest.raises(Terminated):
            wait_for_its_end()
        signal.sigtimedwait([], 0.1)
