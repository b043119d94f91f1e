from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglang_crashkit.cli import main
from sglang_crashkit.cli.main import Terminated, ends_with_reader
from unit.support.waiting import LONG

FULL = "sglang-crashkit: the standard output cannot be written: No space left on device\n"


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": request.param}


def run(arguments: list[str], environ: dict[str, str], shell: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-m", "sglang_crashkit", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["incidents", "--help"]], ids=" ".join)
def test_a_full_disk_is_one_line_and_a_failure(environ: dict[str, str], arguments: list[str]) -> None:
    done = run(arguments, environ, ">/dev/full")
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("shell", [">&-", ">&- 2>&-", "| :"])
def test_nobody_who_reads_changes_no_status(environ: dict[str, str], shell: str) -> None:
    code = "import sys; from sglang_crashkit.cli import main; from sglang_crashkit.cli.commands import status; "
    code += "status.run = lambda _: (print('x' * 200_000), 5)[1]; sys.exit(main.main(['status']))"
    command = f'exec {sys.executable} -c "$0" {shell}'
    if shell == "| :":
        reads, writes = os.pipe()
        os.close(reads)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, stdout=writes, stderr=subprocess.PIPE, timeout=60, check=False
        )
        os.close(writes)
    else:
        done = subprocess.run(["sh", "-c", command, code], env=environ, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (5, b"")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the reading and the writing end of a pipe, which is looked at all the time."""
    monkeypatch.setattr(main, "LOOK_SECS", 0.01)
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
