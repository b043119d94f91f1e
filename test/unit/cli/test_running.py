from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sglang_crashkit.cli.main import Terminated, end_with_reader, terminable
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


@pytest.mark.parametrize("shell", [">&-", ">&- 2>&-", ""])
def test_nobody_who_reads_changes_no_status(environ: dict[str, str], shell: str) -> None:
    code = "import sys; from sglang_crashkit.cli import main; from sglang_crashkit.cli.commands import status; "
    code += "status.run = lambda _: (print('x' * 200_000), 5)[1]; sys.exit(main.main(['status']))"
    command = ["sh", "-c", f'exec {sys.executable} -c "$0" {shell}', code]
    # Where it is not closed, the standard output is a pipe without a reader.
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, env=environ, stdout=writes, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (5, b"")


def wait_for_its_end(descriptor: int, secs: float) -> None:
    """Wait for longer than any test may take; a signal that ends nothing does not end it."""
    with terminable():
        end_with_reader(descriptor, secs)
        signal.sigtimedwait([], LONG)
        pytest.fail("it did not end")


@pytest.mark.parametrize("is_read", [True, False], ids=["at its deadline", "with its reader"])
def test_it_ends_with_its_reader_and_at_its_deadline(is_read: bool) -> None:
    reads, writes = os.pipe()
    if not is_read:
        os.close(reads)
    with pytest.raises(Terminated):
        wait_for_its_end(writes, 0.1 if is_read else LONG)
    os.close(writes)
    if is_read:
        os.close(reads)
