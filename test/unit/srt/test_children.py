from __future__ import annotations

from pathlib import Path

from sglang_crashkit.srt.children import Child
from unit.support.locked_memory import locked_process


def test_a_title_that_comes_too_late_is_given_up(tmp_path: Path) -> None:
    with locked_process(tmp_path, title="sglang::scheduler_TP0") as target:
        found = Child("Rank 0 scheduler", target.pid)
        found.look_up_title()
        assert (found.has_title, found.label()) == (True, f"Rank 0 scheduler (pid {target.pid})")
