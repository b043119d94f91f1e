"""What ``collect --slurm-job`` asks Slurm's commands for, here stand-ins, and what it makes of their answers."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_crashkit.cli import main
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem

RANK = Sample("host", 4711, 1, "sglang::scheduler_TP0", "scheduler", {"tp": 0}, 1.0, state="S")
ROUND = NodeSnapshot("host", 1.0, (RANK,))
FOUND = {"exit_code": 0, "snapshots": [], "processes": [], "rounds": [ROUND.to_json(), ROUND.to_json()]}
NOTHING = {"error": "there is no SGLang process on this host", "next": "x", "exit_code": 3}
REFUSED = {"error": "cannot write to /x", "next": "name another", "exit_code": 1}


class Slurm:
    """Stand-ins for Slurm's commands.

    Args:
        folder: where they are, and what they were asked is noted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._write("squeue", "echo '12|12|RUNNING|n[1-2]'")
        self._write("scontrol", "echo n1; echo n2")
        self.answer(n1=FOUND, n2=FOUND)

    def forget_the_job(self) -> None:
        self._write("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    def answer(self, **documents: object) -> None:
        for node, document in documents.items():
            (self._folder / f"{node}.json").write_text(json.dumps(document))
        find_node = "for a; do case $a in --nodelist=*) n=${a#*=};; esac; done"
        self._write("srun", f"cd {self._folder}; {find_node}; printf '%s\\n' \"$@\" >$n.asked; cat $n.json")

    def asked(self, node: str) -> list[str]:
        return (self._folder / f"{node}.asked").read_text().splitlines()

    def _write(self, name: str, script: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Slurm(folder)


def collect(tmp_path: Path, *arguments: str) -> int:
    return main.main(["collect", "--slurm-job=12", f"--output-dir={tmp_path / 'out'}", *arguments])


def test_each_node_runs_the_collector_in_its_container_with_its_own_folder(slurm: Slurm, tmp_path: Path) -> None:
    arguments = ["--container-name=sglang_{job_id}_{node}", "--snapshots=2", "--interval=0.5", "--all"]
    assert collect(tmp_path, *arguments, "--srun-option=--mem=0") == ExitCode.DONE
    for node in ("n1", "n2"):
        asked = slurm.asked(node)
        (step,) = [word for word in asked if word.startswith("--job-name=crashkit-")]
        assert step.endswith(f"-{node}")
        assert [word for word in asked if word != step] == [
            "--overlap",
            "--jobid=12",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            f"--container-name=sglang_12_{node}",
            "--mem=0",
            *("python3", "-m", "sglang_crashkit", "collect", "--json", "--with-snapshots"),
            *("--gathered-within=300", "--snapshots=2", "--interval=0.5", "--all", "--no-native"),
            f"--output-dir={tmp_path}/out/{node}",
        ]


def test_without_a_container_it_is_this_python_and_any_command_when_asked_for(slurm: Slurm, tmp_path: Path) -> None:
    collect(tmp_path, "--native")
    asked = slurm.asked("n1")
    assert "--native" in asked
    assert asked[asked.index("-m") - 1] == sys.executable
    assert not [word for word in asked if word.startswith("--container")]
    collect(tmp_path, "--remote-command=env 'X=a b' /opt/kit/bin/sglang-crashkit")
    asked = slurm.asked("n1")
    assert asked[asked.index("collect") - 3 : asked.index("collect")] == [
        "env",
        "X=a b",
        "/opt/kit/bin/sglang-crashkit",
    ]


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (FOUND, FOUND, ExitCode.DONE),
        (FOUND, NOTHING, ExitCode.DONE),
        (FOUND, FOUND | {"exit_code": 5}, ExitCode.PARTIAL),
        (FOUND, REFUSED, ExitCode.PARTIAL),
        (FOUND, "no object", ExitCode.PARTIAL),
        (FOUND, FOUND | {"snapshots": ["not-here.json"]}, ExitCode.PARTIAL),
        (NOTHING, NOTHING, ExitCode.NOTHING),
        (NOTHING, REFUSED, ExitCode.FAILED),
        (NOTHING, "no object", ExitCode.FAILED),
        ("no object", "no object", ExitCode.FAILED),
    ],
)
def test_the_status_says_whether_all_nodes_gave_what_they_have(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: object, second: object, status: ExitCode
) -> None:
    slurm.answer(n1=first, n2=second)
    assert collect(tmp_path, "--json") == status
    assert json.loads(capsys.readouterr().out)["exit_code"] == status


def test_what_a_node_could_not_do_is_told_with_its_name(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answer(n2=REFUSED)
    collect(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "job 12 on 2 nodes",
        "n1  TP0          pid 4711     S  no Python frame",
        "n2  the collector failed there",
    ]
    assert lines[3:5] == ["node n2: cannot write to /x", "  next: name another"]


def test_snapshots_of_a_node_that_has_no_such_folder_are_written_here(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answer(n2=FOUND | {"snapshots": ["snapshot_host_1.json"], "output_dir": "/no/elsewhere"})
    assert collect(tmp_path) == ExitCode.PARTIAL
    said = capsys.readouterr().out
    assert "they are where the collector ran, in /no/elsewhere, which cannot be seen here" in said
    assert sorted(path.name for path in (tmp_path / "out/n2").glob("*.json")) == ["snapshot.1.json", "snapshot.2.json"]


def test_a_job_that_there_is_not_is_told_before_the_wait(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.forget_the_job()
    assert collect(tmp_path, "--wait-seconds=3600") == ExitCode.NOTHING
    assert "Slurm knows no job 12, or no longer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (FOUND | {"rounds": [ROUND.to_json() | {"schema_version": 99}]}, "the snapshot has schema_version 99"),
        (FOUND | {"rounds": 5}, "not iterable"),
        (FOUND | {"rounds": [5]}, "not a snapshot"),
        (FOUND | {"processes": [{}]}, "files"),
        (FOUND | {"snapshots": ["x" * 9999]}, "File name too long"),
    ],
)
def test_an_answer_that_is_not_understood_is_told_and_holds_up_nothing(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, object], why: str
) -> None:
    slurm.answer(n2=document)
    assert collect(tmp_path) == ExitCode.PARTIAL
    lines = capsys.readouterr().out.splitlines()
    assert "n1  TP0          pid 4711     S  no Python frame" in lines
    (problem,) = [line for line in lines if line.startswith("a snapshot of node n2: ")]
    assert why in problem


def test_the_snapshots_of_all_nodes_are_explained_as_one(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN nodes that name themselves alike, as containers do
    looks = [replace(RANK, ranks={"tp": 1}, state="T", problem="not allowed", time=time) for time in (1.0, 2.0)]
    problem = Problem("stacks", "not allowed")
    rounds = [NodeSnapshot("host", look.time, (look,), (problem,)).to_json() for look in looks]
    slurm.answer(n2=FOUND | {"rounds": rounds})
    assert collect(tmp_path) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "n1  TP0          pid 4711     S  no Python frame",
        "n2  TP1          pid 4711     T  not allowed",
        "node n2: stacks: not allowed",
    ]
    assert "(pid 4711 on n2) is stopped (state T)" in lines[-1]


def test_of_very_many_lines_some_are_printed_and_all_are_in_a_file(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = tuple(replace(RANK, host="n1", pid=pid, ranks={"tp": pid}) for pid in range(300))
    node = NodeSnapshot("n1", 1.0, ranks, tuple(Problem(f"pid {pid}", "it hides") for pid in range(500)))
    slurm.answer(n1=FOUND | {"rounds": [node.to_json()]}, n2=NOTHING)
    assert collect(tmp_path) == ExitCode.DONE
    path = tmp_path / "out/explanation.txt"
    lines, text = capsys.readouterr().out.splitlines(), path.read_text()
    assert len(lines) == 205
    assert lines[101] == f"... and 201 lines more in {path}"
    assert lines[202] == f"... and 400 lines more in {path}"
    assert lines[203] == f"files: {tmp_path}/out/<node>/, {path}"
    assert len([line for line in text.splitlines() if line.startswith("n1  TP")]) == 300
    assert len([line for line in text.splitlines() if line.startswith("node n1: pid")]) == 500
    assert path.stat().st_mode & 0o777 == 0o600
    verdict = json.loads((tmp_path / "out/verdict.json").read_text())["verdict"]
    summary = (tmp_path / "out/summary.md").read_text()
    assert summary.startswith(f"# {verdict['kind']} ({verdict['level']})\n\n**{verdict['statement']}**\n")


@pytest.mark.parametrize(
    "arguments",
    [["--pid=1"], ["--remote-command="], ["--remote-command='"], ["--container-name={rank}"]],
    ids=["pid", "no command", "quote", "pattern"],
)
def test_what_makes_no_sense_for_a_job_is_refused_before_any_node_is_asked(
    slurm: Slurm, tmp_path: Path, arguments: list[str]
) -> None:
    assert collect(tmp_path, *arguments) == ExitCode.USAGE
    with pytest.raises(FileNotFoundError):
        slurm.asked("n1")
