"""How steps take their turns; what they do on a real Slurm is in ``test/slurm/test_steps.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.collect.slurm_job import Job
from sglang_crashkit.collect.slurm_steps import NodeRun, Steps

NODES = ("n1", "n2", "n3")


@pytest.fixture(autouse=True)
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what would ask Slurm to cancel a step."""
    for name in ("squeue", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def run(folder: Path, deadline_secs: float, **scripts: str) -> list[NodeRun]:
    """Run a script for each node, one at a time; gives what became of them, in the order in which they ended."""
    ended: list[NodeRun] = []
    steps = Steps(
        Job("7", "7", NODES),
        step="crashkit",
        folders={node: folder / "out" / node for node in NODES},
        deadline_secs=deadline_secs,
        at_once=1,
        silent_secs=0.5,
    )
    steps.run({node: ["sh", "-c", script] for node, script in scripts.items()}, ended.append)
    return ended


def test_a_silent_node_holds_up_no_other_one(tmp_path: Path) -> None:
    ended = run(tmp_path, 5.0, n1="exec sleep 600", n2="exec sleep 600", n3="echo here")
    assert ended[0] == NodeRun("n3", 0, b"here\n", "", secs=ended[0].secs)
    assert {(one.node, one.late, one.problem) for one in ended[1:]} == {
        (node, True, "no answer within 5 s") for node in ("n1", "n2")
    }


def test_one_that_says_that_it_is_there_keeps_its_turn(tmp_path: Path) -> None:
    times = tmp_path / "times"
    # Rather more than the time after which a silent one is passed over.
    script = f"echo here; echo begun >>{times}; sleep 1.5; echo ended >>{times}"
    ended = run(tmp_path, 30.0, n1=script, n2=script)
    assert [(one.status, one.output) for one in ended] == [(0, b"here\n")] * 2
    assert times.read_text().split() == ["begun", "ended"] * 2


def test_no_silence_outlasts_the_deadline(tmp_path: Path) -> None:
    (ended,) = run(tmp_path, 0.2, n1="exec sleep 600")
    assert (ended.late, ended.secs < 10) == (True, True)
