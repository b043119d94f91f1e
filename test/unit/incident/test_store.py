from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.errors import CrashkitError, NothingToDoError, UsageError
from sglang_crashkit.incident import store
from sglang_crashkit.incident.folder import IncidentFolder, NullFolder, new_id
from sglang_crashkit.incident.retention import NoRoomError
from sglang_crashkit.incident.store import find_incidents, find_one, read_steps
from sglang_crashkit.model.step import Step
from unit.support.stored import NOON, make_incident


def test_incidents_are_found_from_every_folder_newest_first(tmp_path: Path) -> None:
    old = make_incident(tmp_path / "one" / "incidents")
    new = make_incident(tmp_path / "two" / "incidents", seconds=NOON + 2, kind="failed_start")
    torn = make_incident(tmp_path / "one" / "incidents", seconds=NOON + 1, publish=False)
    assert [found.path for found in find_incidents(tmp_path)] == [new, torn, old]
    assert [found.finished for found in find_incidents(tmp_path)] == [True, False, True]
    assert [found.path for found in find_incidents(tmp_path / "one")] == [torn, old]
    assert [found.path for found in find_incidents(tmp_path / "two" / "incidents")] == [new]
    (only,) = find_incidents(old)
    assert only.document["kind"] == "killed"


def test_one_incident_is_meant_by_folder_id_or_latest(tmp_path: Path) -> None:
    old = make_incident(tmp_path / "one" / "incidents")
    new = make_incident(tmp_path / "two" / "incidents", seconds=NOON + 1)
    make_incident(tmp_path / "two" / "incidents", seconds=NOON + 2, publish=False)
    meant = [find_one(text, tmp_path).path for text in ("latest", str(tmp_path), old.name[-8:], str(old))]
    assert meant == [new, new, old, old]
    with pytest.raises(NothingToDoError, match="no incident 00000000 below"):
        find_one("00000000", tmp_path)


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
    (torn / "events.jsonl").unlink()
    with pytest.raises(NothingToDoError, match="no finished incident below"):
        find_one(str(torn))


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
def test_a_damaged_incident_is_listed_with_its_problem_and_its_summary_named(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = make_incident(tmp_path)
    (path / "incident.json").unlink()
    if content is not None:
        (path / "incident.json").write_bytes(content)
    (found,) = find_incidents(tmp_path)
    assert found.document is None
    assert found.problem.startswith(problem)
    for next_step in (f"cat {path}/summary.md   # says it in words", f"ls -l {path}"):
        with pytest.raises(CrashkitError) as failed:
            find_one("latest", tmp_path)
        assert str(failed.value.next_step).startswith(next_step)
        (path / "summary.md").unlink(missing_ok=True)


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


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path / "incidents", "killed", "0123abcd", NOON)
    assert folder.path.name == ".partial-20231114T221320.250Z-killed-0123abcd"
    folder.write_text("a/b.txt", "text")
    assert folder.publish() == tmp_path / "incidents" / "20231114T221320.250Z-killed-0123abcd"
    assert folder.publish() == folder.path
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == [folder.path.name]
    folder.write_text("a/later.txt", "text")
    assert (folder.path / "a" / "later.txt").read_text() == "text"


def test_everything_in_it_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = IncidentFolder(tmp_path / "crash" / "host" / "incidents", "killed", new_id(), NOON)
        folder.write_text("stacks/x.txt", "x")
        folder.write_json("ranks/x.json", {})
        make_incident(tmp_path / "crash" / "host" / "incidents")
    finally:
        os.umask(before)
    for path in (tmp_path / "crash").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_file_is_adopted_once(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path / "incidents", "killed", new_id(), NOON)
    (tmp_path / "record").write_text("mine")
    assert folder.adopt(tmp_path / "record", "ranks/record.json") == "ranks/record.json"
    assert (folder.path / "ranks" / "record.json").read_text() == "mine"
    assert not (tmp_path / "record").exists()
    with pytest.raises(FileNotFoundError):
        folder.adopt(tmp_path / "record", "ranks/record.json")


def test_a_link_that_somebody_put_into_it_is_not_followed(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path / "incidents", "killed", new_id(), NOON)
    (tmp_path / "elsewhere").mkdir()
    (folder.path / "stacks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CrashkitError):
        folder.write_text("stacks/x.txt", "x")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_evidence_is_refused_with_the_reason_and_nothing_else(tmp_path: Path) -> None:
    folder = NullFolder("no folder took it")
    record = tmp_path / "record"
    record.write_text("mine")
    for write in (
        lambda: folder.write_text("stacks/x.txt", "x"),
        lambda: folder.write_json("stacks/x.json", {}),
        lambda: folder.adopt(record, "ranks/x.json"),
    ):
        with pytest.raises(NoRoomError, match="no folder took it"):
            write()
    assert record.read_text() == "mine"
    folder.save({}, "")
    folder.publish()
    folder.discard()
    assert folder.problem == "no folder took it"
    assert len(folder.id) == 8


@pytest.mark.parametrize("what", ["host", "host/incidents"])
def test_a_link_made_after_the_start_takes_nothing_elsewhere(tmp_path: Path, what: str) -> None:
    incidents, elsewhere = tmp_path / "host" / "incidents", tmp_path / "elsewhere"
    (elsewhere / "incidents").mkdir(parents=True)
    folder = IncidentFolder(incidents, "killed", new_id(), NOON)
    (tmp_path / what).rename(tmp_path / "moved")
    (tmp_path / what).symlink_to(elsewhere)
    folder.write_text("requests/requests.jsonl", "a prompt")
    folder.save({"schema_version": 1}, "summary")
    folder.publish()
    assert list((tmp_path / "moved").rglob("requests.jsonl"))
    with pytest.raises(CrashkitError, match="is not a folder"):
        IncidentFolder(incidents, "killed", new_id(), NOON)
    assert [path for path in elsewhere.rglob("*") if path.name != "incidents"] == []
