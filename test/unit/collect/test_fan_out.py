"""What a node prints, or does not, holds up no other and fills no memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sglang_crashkit.collect.fan_out import Limits, NodeRun, run_on_nodes

#: A node that answers.
WELL = ["sh", "-c", "echo here; echo why >&2; exit 3"]
FOREVER = "import sys\nwhile True: sys.{stream}.write('x' * 9999)"
ONE_MIB = 1 << 20


def run_all(
    commands: dict[str, list[str]], output: Path, limits: Limits, given_up: list[str] | None = None
) -> dict[str, NodeRun]:
    ended: list[NodeRun] = []
    noted = [] if given_up is None else given_up
    arguments = {"log": "sh.log", "environ": {"PATH": os.environ["PATH"]}, "limits": limits}
    assert run_on_nodes(commands, ended.append, output=output, give_up=noted.append, **arguments) is None
    return {run.node: run for run in ended}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["sleep", "600"], "no answer within 2 s"),
        (["sh", "-c", "trap '' TERM INT; while :; do sleep 600; done"], "no answer within 2 s"),
        ([sys.executable, "-c", FOREVER.format(stream="stdout")], "printed more than 1 MiB"),
        ([sys.executable, "-c", FOREVER.format(stream="stderr")], "printed more than 1 MiB"),
        (["/no/kubectl"], "/no/kubectl: No such file or directory"),
    ],
    ids=["hangs", "ignores signals", "prints for ever", "complains for ever", "cannot be run"],
)
def test_a_node_that_does_not_end_well_is_given_up_alone(argv: list[str], problem: str, tmp_path: Path) -> None:
    given_up: list[str] = []
    limits = Limits(at_once=2, node_secs=2.0, max_output=ONE_MIB)
    runs = run_all({"bad": argv, "well": WELL}, tmp_path, limits, given_up)
    assert runs["bad"].status is None
    assert runs["bad"].problem.endswith(problem)
    assert runs["bad"].late == problem.startswith("no answer")
    assert given_up == ["bad"]
    well = runs["well"]
    assert (well.status, well.output, well.errors, well.problem) == (3, "here\n", "why\n", "")
    assert (tmp_path / "well/sh.log").read_text() == "why\n"
    assert len(runs["bad"].errors) <= ONE_MIB


def test_an_interruption_ends_what_runs_and_keeps_what_was_had(tmp_path: Path) -> None:
    ended: dict[str, NodeRun] = {}

    def on_end(run: NodeRun) -> None:
        if run.node not in ended and not ended:
            ended[run.node] = run
            raise KeyboardInterrupt
        ended.setdefault(run.node, run)

    commands = {"well": WELL, "hangs": ["sleep", "600"], "waits": ["touch", str(tmp_path / "asked")]}
    environ = {"PATH": os.environ["PATH"]}
    limits = Limits(at_once=2)
    interrupt = run_on_nodes(commands, on_end, output=tmp_path, log="sh.log", environ=environ, limits=limits)
    assert isinstance(interrupt, KeyboardInterrupt)
    assert set(ended) == {"well", "hangs", "waits"}
    assert ended["hangs"].problem == "interrupted"


def test_nothing_is_there_to_be_read(tmp_path: Path) -> None:
    (run,) = run_all({"a": ["cat"]}, tmp_path, Limits()).values()
    assert (run.status, run.output) == (0, "")


def test_nodes_whose_time_is_over_are_not_asked(tmp_path: Path) -> None:
    (run,) = run_all({"a": ["touch", str(tmp_path / "asked")]}, tmp_path, Limits(total_secs=0.0)).values()
    assert (run.status, run.problem, run.late) == (None, "not asked: the time for all nodes was over", True)
    assert not (tmp_path / "asked").exists()


def test_where_a_nodes_folder_cannot_be_made_it_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    (run,) = run_all({"a": ["touch", str(tmp_path / "asked")]}, tmp_path, Limits()).values()
    assert run.problem.startswith("touch was not started: ")
    assert not (tmp_path / "asked").exists()
