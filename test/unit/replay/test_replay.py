from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.cli.main import main
from unit.replay.breakable import BY_PARAMETERS, POISON, incident
from unit.support.waiting import LONG


def test_replay_tells_whether_the_fault_came_back(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = incident(tmp_path / "crash", {"text": "a", **POISON})
    command = ["replay", str(path), "--max-gap", "0", "--serve", serve(BY_PARAMETERS)]
    assert main([*command, "-o", str(tmp_path / "all")]) == 5
    assert "the same fault: It raised." in capsys.readouterr().out
    assert main([*command, "-o", str(tmp_path / "one"), "--only", "3"]) == 0
    assert "not reproduced: it serves on" in capsys.readouterr().out
    assert main([*command, "-o", str(tmp_path / "none"), "--suspects"]) == 3


@pytest.mark.parametrize(
    ("rid", "outcome", "status"), [("0", "the same fault: It raised.", 5), ("3", "not reproduced: it serves on", 0)]
)
def test_replay_tells_a_program_in_json_alone(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str], rid: str, outcome: str, status: int
) -> None:
    path = incident(tmp_path / "crash", {"text": "a", **POISON})
    command = ["replay", str(path), "--only", rid, "--json", "--serve", serve(BY_PARAMETERS)]
    assert main([*command, "-o", str(tmp_path / "own")]) == status
    *answers, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["rid"] for one in answers] in ([rid], [])
    assert (last["outcome"], last["is_same"], bool(last["incident"])) == (outcome, status == 5, status == 5)


def test_nothing_that_was_started_is_left(tmp_path: Path, serve: Any) -> None:
    path = incident(tmp_path / "crash", {"text": "a"})
    command = [sys.executable, "-m", "sglang_crashkit", "replay", str(path), "--max-gap", "0", "-o", "out"]
    done = subprocess.run([*command, "--serve", serve("False")], cwd=tmp_path, timeout=LONG, check=False)
    assert done.returncode == 0
    found = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True, timeout=LONG)
    assert str(tmp_path / "out") not in found.stdout
