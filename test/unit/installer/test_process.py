import os
import sys
import time

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.installer.process import run_tool


def test_what_a_program_prints_and_its_exit_code_come_back():
    finished = run_tool(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], timeout=30
    )
    assert (finished.exit_code, finished.stdout, finished.stderr) == (3, "out\n", "err\n")


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(CrashkitError, match="cannot run /no/such: No such file"):
        run_tool(["/no/such"], timeout=1)


def test_at_the_deadline_the_program_and_its_children_are_killed(tmp_path):
    file = tmp_path / "pids"
    text = (
        "import os, sys, time; child = os.fork()\n"
        "if child: open(sys.argv[1], 'w').write(f'{os.getpid()} {child}')\n"
        "time.sleep(600)"
    )
    started = time.monotonic()
    with pytest.raises(CrashkitError, match=r"did not end within 1\.5 s"):
        run_tool([sys.executable, "-c", text, str(file)], timeout=1.5)
    assert time.monotonic() - started < 30
    for pid in file.read_text().split():
        assert _is_gone(int(pid))


def _is_gone(pid: int) -> bool:
    """Return whether the process ends; what its parent has not collected yet counts as ended."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - shorter
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
