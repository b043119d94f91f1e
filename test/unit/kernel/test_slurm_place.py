from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang_crashkit.kernel.slurm_place import Place, other_place_of, place_of
from unit.waiting import LONG

HERE = Place("7", "n1")


@contextlib.contextmanager
def process(code: str, *arguments: str, **environ: str) -> Iterator[int]:
    """Run Python `code` that prints a pid, and end it by the end of its standard input."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    argv = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept | environ) as started:
        try:
            assert started.stdout is not None
            yield int(started.stdout.readline())
        finally:
            assert started.stdin is not None
            started.stdin.close()
            started.wait(LONG)


SELF = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"


def test_a_process_of_another_job_or_node_is_elsewhere() -> None:
    with process(SELF, SLURM_JOB_ID="7", SLURMD_NODENAME="n2") as pid:
        assert place_of(pid) == Place("7", "n2")
        assert other_place_of(pid, HERE) == Place("7", "n2")
        assert other_place_of(pid, Place("8", "n2")) == Place("7", "n2")
        assert other_place_of(pid, Place("7", "n2")) is None


def test_a_process_that_no_job_started_may_belong_to_any() -> None:
    with process(SELF) as pid:
        assert place_of(pid) is None
        assert other_place_of(pid, HERE) is None


def test_a_process_whose_title_has_overwritten_its_environment_is_where_its_launcher_is() -> None:
    launcher = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
    launcher += "sys.stdin.read(); child.wait()"
    told = "import os, sys, setproctitle; setproctitle.setproctitle('sglang::scheduler_TP0')\n"
    told += "print(os.getpid(), flush=True); sys.stdin.read()"
    with process(launcher, told, SLURM_JOB_ID="7", SLURMD_NODENAME="n2") as pid:
        assert b"SLURM_JOB_ID" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert other_place_of(pid, HERE) == Place("7", "n2")
