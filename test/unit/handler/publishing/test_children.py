from __future__ import annotations

import sys
from pathlib import Path

from sglang_crashkit.handler.publishing.children import Child
from unit.waiting import wait_until

#: Starts another, and waits for it.
WAITS = """
import subprocess, sys
other = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(str(other.pid))
other.wait()
"""


def test_it_ends_well() -> None:
    child = Child([sys.executable, "-c", "pass"])
    child.wait()
    assert child.has_ended()
    assert child.problem == ""


def test_how_it_failed_is_known() -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(3)"])
    child.wait()
    assert child.has_ended()
    assert child.problem == "ended with status 3"


def test_at_its_deadline_all_that_it_started_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = Child([sys.executable, "-c", WAITS, str(file)], 3.0)
    wait_until(lambda: file.exists() and file.read_text(), "it has started another")
    child.wait()
    assert child.has_ended()
    assert child.problem == "did not end within 3 s"
    wait_until(lambda: not Path(f"/proc/{file.read_text()}").exists(), "that is gone, too")


def test_one_that_is_left_works_on(tmp_path: Path) -> None:
    file = tmp_path / "done"
    Child([sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(file)]).leave()
    wait_until(file.exists, "it is done")
