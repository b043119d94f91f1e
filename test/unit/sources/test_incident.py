"""The events that an incident on disk holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.model.case import case_of
from sglang_crashkit.sources.incident import is_incident, read_incident

DATA = Path(__file__).parents[1] / "incident" / "data"


@pytest.mark.parametrize(
    ("name", "exits", "headline"),
    [
        ("killed", ["TP1"], "TP1 ended by SIGKILL: its memory cgroup counts no OOM kill"),
        # What the server killed as it ended did not fail.
        ("exception", [], "TP1 raised RuntimeError in _trigger_crash_for_tests ("),
        ("stopped", [], "TP1 is stopped (state T, until somebody sends SIGCONT), while TP0 waits in all_reduce in "),
    ],
)
def test_a_real_incident_has_its_verdict(name: str, exits: list[str], headline: str, tmp_path: Path) -> None:
    shutil.copyfile(DATA / f"{name}.json", tmp_path / "incident.json")
    case = case_of(read_incident(tmp_path))
    assert judge(case).headline.startswith(headline)
    assert [one.who for one in case.processes.values() if one.exits] == exits
    assert bool(case.processes["TP0"].raised) is (name != "stopped")
    assert (case.release, case.arguments["tp_size"], case.is_started) == ("0.5.23", 2, True)


def test_the_files_of_stacks_have_more_frames_than_the_document(tmp_path: Path) -> None:
    names = [
        "own (sglang_crashkit/srt/hooks.py:1)",
        "wait (torch/x.py:2)",
        "run_batch (sglang/srt/managers/scheduler.py:3)",
    ]
    frames = [
        {"function": one.partition(" ")[0], "file": one[one.index("(") + 1 : -3], "line": int(one[-2])} for one in names
    ]
    process = {"pid": 7, "role": "scheduler", "looks": [{"state": "S", "doing": ["wait (torch/x.py:2)"]}] * 2}
    process["evidence"] = [{"kind": "stack", "path": "stacks/a-7.txt"}, {"kind": "stack", "path": "stacks/gone.txt"}]
    (tmp_path / "incident.json").write_text(json.dumps({"processes": [process]}))
    (tmp_path / "stacks").mkdir()
    threads = [{"name": "MainThread", "native_id": 7, "frames": frames}]
    (tmp_path / "stacks" / "a-7.json").write_text(json.dumps({"threads": threads}))
    threads = [one.sample.threads[0] for one in case_of(read_incident(tmp_path)).processes["scheduler"].stacks]
    assert [[str(frame) for frame in one.frames] for one in threads] == [names[1:], names[1:2]]


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"processes": [{"pid": []}], "timeline": [{"event": "exception", "pid": []}]},
        {"processes": [None, 3, {"pid": 1}], "timeline": "x"},
        {"processes": [{"pid": 1, "looks": [[], {"doing": [7]}]}], "gpus": {"xids": [4]}},
        {"timeline": [{"event": "exception", "pid": 1, "message": None, "time": 5}], "environment": []},
        {"verdict": 5, "processes": [None, {}], "timeline": [1, {"event": "exception"}], "gpus": {"xid": "x"}},
        {"verdict": {"kind": "hang"}, "processes": [{"role": "scheduler", "doing": 1, "state": 2, "looks": [3]}]},
        {"verdict": {"basis": 3, "first_failure": {"pid": []}, "level": 4}, "processes": [{"pid": 1, "exit": 2}]},
        {"kind": "hang", "divergence": [], "collectives": {"findings": 1}},
    ],
)
def test_a_document_of_another_shape_has_a_verdict(document: object, tmp_path: Path) -> None:
    environment = {"shared_memory": {"used_bytes": "x"}, "command_line": 4, "arguments": []}
    for told in ([], environment):
        (tmp_path / "incident.json").write_text(json.dumps(document))
        (tmp_path / "environment.json").write_text(json.dumps(told))
        assert is_incident(tmp_path)
        assert judge(case_of(read_incident(tmp_path))).kind in load("classes")


def test_one_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "incident.json").write_text("{")
    with pytest.raises(CrashkitError, match=r"incident\.json cannot be read"):
        list(read_incident(tmp_path))


def test_a_record_outside_the_incident_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "incident"
    folder.mkdir()
    (tmp_path / "secret.json").write_text(json.dumps({"message": "Stolen: secret"}))
    evidence = [{"kind": "exception", "status": "captured", "path": "../secret.json"}]
    document = {
        "processes": [{"pid": 1, "role": "scheduler", "evidence": evidence}],
        "timeline": [{"event": "exception", "pid": 1, "message": "ValueError: seen"}],
    }
    (folder / "incident.json").write_text(json.dumps(document))
    assert [one.error.type for one in case_of(read_incident(folder)).processes["scheduler"].raised] == ["ValueError"]
