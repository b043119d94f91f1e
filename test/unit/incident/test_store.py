from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.errors import CrashkitError, NothingToDoError, UsageError
from sglang_crashkit.incident import store
from sglang_crashkit.incident.store import IncidentName, find_incidents, find_one, is_finished, parse_name, read_steps
from sglang_crashkit.model.step import Step
from unit.support.stored import NOON, make_incident
from unit.support.waiting import LONG


def test_incidents_are_found_from_every_folder_newest_first(tmp_path: Path) -> None:
    old = make_incident(tmp_path / "one" / "incidents")
    new = make_incident(tmp_path / "two" / "incidents", seconds=NOON + 2, kind="failed_start")
    torn = make_incident(tmp_path / "one" / "incidents", seconds=NOON + 1, publish=False)
    assert [found.path for found in find_incidents(tmp_path)] == [new, torn, old]
    assert [found.finished for found in find_incidents(tmp_path)] == [True, False, True]
    assert [found.path for found in find_incidents(tmp_path / "one")] == [torn, old]
    assert [found.path for found in find_incidents(tmp_path / "two" / "incidents")] == [new]
    (only,) = find_incidents(old)
    assert only.document is not None
    assert only.document["kind"] == "killed"


def test_one_incident_is_meant_by_folder_id_or_latest(tmp_path: Path) -> None:
    old = make_incident(tmp_path / "one" / "incidents")
    new = make_incident(tmp_path / "two" / "incidents", seconds=NOON + 1)
    make_incident(tmp_path / "two" / "incidents", seconds=NOON + 2, publish=False)
    meant = [find_one(text, tmp_path).path for text in ("latest", str(tmp_path), old.name[-8:], str(old))]
    assert meant == [new, new, old, old]
    with pytest.raises(NothingToDoError, match="no incident 00000000 below"):
        find_one("00000000", tmp_path)
    (new / "incident.json").write_text("{")
    with pytest.raises(CrashkitError, match=r"incident\.json cannot be read"):
        find_one("latest", tmp_path)


def test_an_id_may_be_cut_short_while_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for number, its_id in enumerate(("12345678", "12ab5678", "9a345678")):
        monkeypatch.setattr("unit.support.stored.new_id", lambda its_id=its_id: its_id)
        paths.append(make_incident(tmp_path / "one" / "incidents", seconds=NOON + number))
    for text, path in (("123", paths[0]), ("9", paths[2]), (paths[1].name, paths[1]), ("killed-12ab5678", paths[1])):
        assert find_one(text, tmp_path).path == path
    with pytest.raises(UsageError, match="the ids of 2 incidents begin with 12: 12ab5678, 12345678"):
        find_one("12", tmp_path)
    # The end of one says nothing: the newest of several would be shown.
    with pytest.raises(NothingToDoError, match="no incident 5678 below"):
        find_one("5678", tmp_path)


def test_what_a_killed_handler_left_is_meant_without_another(tmp_path: Path) -> None:
    torn = make_incident(tmp_path / "one" / "incidents", seconds=NOON + 1, publish=False)
    for text in ("latest", str(torn), torn.name[-8:]):
        assert find_one(text, tmp_path).path == torn
    finished = make_incident(tmp_path / "two" / "incidents")
    assert find_one("latest", tmp_path).path == finished
    assert find_one(str(torn)).path == torn
    (torn / "incident.json").unlink()
    with pytest.raises(NothingToDoError, match="no finished incident below"):
        find_one(str(torn))


def test_where_a_document_is_broken_its_summary_is_named(tmp_path: Path) -> None:
    path = make_incident(tmp_path)
    (path / "incident.json").write_text('{"torn": ')
    with pytest.raises(CrashkitError) as failed:
        find_one("latest", tmp_path)
    assert failed.value.next_step == f"cat {path}/summary.md   # says it in words"
    (path / "summary.md").unlink()
    with pytest.raises(CrashkitError) as failed:
        find_one("latest", tmp_path)
    assert str(failed.value.next_step).startswith(f"ls -l {path}")


@pytest.mark.parametrize("moment", ["is_dir", "read_regular"])
def test_an_incident_that_is_finished_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    partial = make_incident(tmp_path, publish=False)
    published = partial.with_name(partial.name.removeprefix(store.PARTIAL))
    owner = Path if moment == "is_dir" else store
    original = getattr(owner, moment)

    def publish_first(path: Path, *arguments: Any) -> Any:
        if partial.exists():
            partial.rename(published)
        return original(path, *arguments)

    monkeypatch.setattr(owner, moment, publish_first)
    (found,) = find_incidents(tmp_path)
    assert (found.path, found.finished, found.problem) == (published, True, "")


def test_what_is_no_incident_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "incidents" / ".spool-1-2").mkdir(parents=True)
    (tmp_path / "incidents" / "20231114T221320.250Z-killed-0123abcd").write_text("a file")
    (tmp_path / "crash_dump.pkl").write_text("")
    assert find_incidents(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "has no incident.json"),
        (b"{", "incident.json cannot be read"),
        (b"\xff", "incident.json cannot be read"),
        (b"[]", "incident.json is not an object"),
    ],
)
def test_a_damaged_incident_is_listed_with_its_problem(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = make_incident(tmp_path)
    (path / "incident.json").unlink()
    if content is not None:
        (path / "incident.json").write_bytes(content)
    (found,) = find_incidents(tmp_path)
    assert found.document is None
    assert found.problem.startswith(problem)


def test_no_folder_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(NothingToDoError, match="absent is not a folder"):
        find_incidents(tmp_path / "absent")


def test_a_killed_writers_folder_is_known_as_unfinished(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from sglang_crashkit.incident.folder import IncidentFolder
folder = IncidentFolder(Path(sys.argv[1]), "killed", "0123abcd", 1.0)
folder.write_text("stacks/x.txt", "x")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=LONG)
    (found,) = find_incidents(tmp_path)
    assert (found.finished, found.document, found.problem) == (False, None, "has no incident.json")
    assert found.name == "19700101T000001.000Z-killed-0123abcd"


@pytest.mark.parametrize("seconds", [0.0, 1.0005, 1_700_000_000.25, 1_700_000_000.9999])
def test_a_name_tells_time_kind_id_and_whether_finished(seconds: float) -> None:
    name = IncidentName(seconds, "failed_start", "0123abcd")
    for mark, finished in (("", True), (".partial-", False)):
        found = parse_name(f"{mark}{name}")
        assert found is not None
        assert (found.kind, found.id) == (name.kind, name.id)
        assert 0 <= seconds - found.seconds < 0.00101
        assert is_finished(f"{mark}{name}") is finished
    assert not is_finished(f".removing-{name}")


@pytest.mark.parametrize("name", ["", "faults.json", ".spool-1-2", "20239914T221320.250Z-killed-0123abcd"])
def test_other_names_are_none(name: str) -> None:
    assert parse_name(name) is None


def line(number: int) -> str:
    return json.dumps(Step(number, 1.0, 1.5, "processed", "decode", (), 0, 0).to_json()) + "\n"


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    # Two records of one ring may come in another order, and a killed handler leaves a torn last line.
    (ranks / "scheduler_TP1-12.steps.jsonl").write_text(line(4) + line(3) + '{"number": 5, "mo')
    (ranks / "scheduler_TP0-11.steps.jsonl").write_text(line(3))
    (ranks / "scheduler_TP0-11.exception.txt").write_text("no steps")
    return tmp_path


def test_steps_come_by_rank_and_number_without_torn_lines(incident: Path) -> None:
    first, second = read_steps(incident)
    assert (first.title, first.pid, first.ranks, first.unread) == ("sglang::scheduler_TP0", 11, {"tp": 0}, 0)
    assert ([step.number for step in second.steps], second.unread) == ([3, 4], 1)


def test_one_step_is_read_alone(incident: Path) -> None:
    assert [[step.number for step in rank.steps] for rank in read_steps(incident, 4)] == [[], [4]]


def test_what_cannot_be_read_is_named(incident: Path) -> None:
    (incident / "ranks" / "x.steps.jsonl").mkdir()
    with pytest.raises(CrashkitError, match=f"{incident} cannot be read"):
        read_steps(incident)
