"""What the collector on a node of a job sends, and when."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.analysis.explain import explain
from sglang_crashkit.cli import main, node_answer
from sglang_crashkit.collect.slurm_answer import PENDING
from sglang_crashkit.collect.slurm_gather import read_document
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.model.snapshot import parse
from unit.targets import SLEEPER, functions_of, settle_in_sleep
from unit.waiting import LONG, child

RANK = "sglang::scheduler_TP0"
QUICK = ("--json", "--snapshots=1", "--gathered-within=600")


@pytest.fixture
def debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for cuda-gdb."""
    tool = tmp_path / "cuda-gdb"
    tool.write_text("#!/bin/sh\necho 'Thread 1 (LWP 1):'\necho '#0  0x01 in poll () from /lib/libc.so.6'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tool


def documents_in(printed: str) -> list[dict[str, Any]]:
    greeting, *documents = printed.splitlines()
    assert greeting.startswith("collecting on ")
    return [json.loads(line) for line in documents]


def test_all_but_the_debuggers_part_is_sent_before_they_run(debugger: Path, tmp_path: Path) -> None:
    debugger.write_text("#!/bin/sh\nexec sleep 600\n")
    with child(SLEEPER, title=RANK) as rank:
        settle_in_sleep(rank.pid)
        argv = [sys.executable, "-m", "sglang_crashkit", "collect", *QUICK, "--native", f"--pid={rank.pid}"]
        with subprocess.Popen([*argv, f"--output-dir={tmp_path}/out"], stdout=subprocess.PIPE, text=True) as collector:
            assert collector.stdout is not None
            (document,) = documents_in(collector.stdout.readline() + collector.stdout.readline())
            # WHEN the step is given up
            collector.kill()
            assert collector.communicate(timeout=LONG)[0] == ""
    assert (document["exit_code"], document[PENDING]) == (0, True)
    result, sightings = read_document(next(iter(document["sightings"]["rounds"])), document, tmp_path / "out")
    assert [seen.process.title for seen in result.processes] == [RANK]
    assert (result.visible, len(result.files)) == (True, 2)
    (seen,) = sightings.processes()
    assert "inner_function" in [frame.function for sight in seen.in_order() for frame in sight.frames]


def test_after_the_debuggers_all_is_sent(debugger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(SLEEPER, title=RANK) as rank:
        settle_in_sleep(rank.pid)
        arguments = [*QUICK, "--native", f"--pid={rank.pid}", f"--output-dir={tmp_path}/out"]
        assert main.main(["collect", *arguments]) == ExitCode.DONE
    before, after = documents_in(capsys.readouterr().out)
    assert [before[PENDING], after[PENDING]] == [True, False]
    assert [len(one["processes"][0]["files"]) for one in (before, after)] == [1, 2]
    (seen,) = (parse(text).processes[0] for text in after["rounds"])
    assert "inner_function" in functions_of(seen.threads)
    assert "poll" in functions_of(seen.native)


def test_without_debuggers_there_is_one_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(SLEEPER, title=RANK) as rank:
        main.main(["collect", *QUICK, f"--pid={rank.pid}", f"--output-dir={tmp_path}/out"])
    (only,) = documents_in(capsys.readouterr().out)
    assert only[PENDING] is False


def test_a_node_without_a_process_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(SLEEPER) as other:
        assert main.main(["collect", *QUICK, f"--pid={other.pid}", f"--output-dir={tmp_path}/out"]) == ExitCode.NOTHING
    (only,) = documents_in(capsys.readouterr().out)
    assert (only["exit_code"], PENDING in only) == (ExitCode.NOTHING, False)


def test_the_debuggers_end_before_the_node_is_given_up() -> None:
    assert node_answer.debugger_secs(300, 12) == 238
    assert node_answer.debugger_secs(20, 12) == 0


def test_a_node_on_which_the_folder_cannot_be_made_sends_its_snapshots_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments = ["--json", "--with-snapshots", "--snapshots=1", "--output-dir=/proc/no/folder"]
    with child("ready(); pause()", title="sglang::scheduler_TP0") as rank:
        assert main.main(["collect", f"--pid={rank.pid}", *arguments]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    # This process is taken for its server, so another child of it may be there too.
    assert rank.pid in [process["pid"] for process in document["rounds"][0]["processes"]]
    assert Path(document["output_dir"]).parent == tmp_path


def test_in_a_step_of_a_job_the_collector_merges_under_slurms_name_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    arguments = ["--json", "--with-snapshots", "--snapshots=2", "--interval=0"]
    with child("ready(); pause()", title="sglang::scheduler_TP0") as rank:
        assert main.main(["collect", f"--pid={rank.pid}", f"--output-dir={tmp_path}", *arguments]) == ExitCode.DONE
        document = json.loads(capsys.readouterr().out)
        result, sightings = read_document("n7", {**document, "rounds": []}, tmp_path)
    assert list(sightings.rounds) == ["n7"]
    (seen,) = [seen for seen in result.processes if seen.process.pid == rank.pid]
    assert (seen.process.host, len(seen.sights)) == ("n7", 2)
    assert document["verdict"]["named"] == explain(sightings).to_json()["named"]
