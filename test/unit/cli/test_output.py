from __future__ import annotations

import os
import subprocess
import sys

import pytest

FULL = "sglang-crashkit: the standard output cannot be written: No space left on device\n"


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": request.param}


def run(arguments: list[str], environ: dict[str, str], shell: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-m", "sglang_crashkit", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["incidents", "--help"], ["quarantine", "list", "/"]], ids=" ".join)
def test_a_full_disk_is_one_line_and_a_failure(environ: dict[str, str], arguments: list[str]) -> None:
    done = run(arguments, environ, ">/dev/full")
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("shell", [">&-", ">&- 2>&-", "| :"])
def test_nobody_who_reads_changes_no_status(environ: dict[str, str], shell: str) -> None:
    code = (
        "import sys; from sglang_crashkit.cli.reporters.style import is_coloured; from sglang_crashkit.cli import main"
    )
    code += "; main._run = lambda _: (is_coloured(), print('x' * 200_000), 5)[2]; sys.exit(main.main([]))"
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
