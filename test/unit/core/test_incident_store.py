from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_crashkit.core.incident import Incident, ServerInfo, Trigger
from sglang_crashkit.core.incident_store import IncidentFolder, find_incidents, new_id, wait_for_incident
from sglang_crashkit.errors import CrashkitError, NothingToDoError
from unit.waiting import LONG

NOON = 1_700_000_000.25


def make_incident(incidents: Path, *, seconds: float = NOON, kind: str = "killed", publish: bool = True) -> Path:
    incident = Incident(
        new_id(), kind, Trigger("process_exited", "2023", 7, "sglang::x"), ServerInfo(1, "0.5.23", "0.1", "h")
    )
    folder = IncidentFolder(incidents, kind, incident.id, seconds)
    folder.save(incident, "words \udcff\n")
    return folder.publish() if publish else folder.path


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


def test_text_that_is_not_utf_8_is_written_escaped(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path, "killed", new_id(), NOON)
    folder.write_text("x.txt", "a\udcffb")
    assert (folder.path / "x.txt").read_text() == "a\\udcffb"


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


def test_a_discarded_folder_leaves_nothing(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path, "killed", new_id(), NOON)
    folder.write_text("a/b/c.txt", "x")
    folder.write_text("d.txt", "x")
    folder.discard()
    assert list(tmp_path.iterdir()) == []
    folder.discard()


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


def test_an_incident_is_found_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_incident(tmp_path)
    monkeypatch.chdir(path)
    assert [found.document is not None for found in find_incidents(Path())] == [True]
    monkeypatch.chdir(tmp_path)
    assert len(find_incidents(Path())) == 1


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


def test_ids_differ() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 8 and int(each, 16) >= 0 for each in ids)


def test_waiting_ends_with_the_first_finished_incident(tmp_path: Path) -> None:
    make_incident(tmp_path, publish=False)
    timer = threading.Timer(0.1, make_incident, [tmp_path])
    timer.start()
    found = wait_for_incident(tmp_path, LONG)
    timer.join(LONG)
    assert found is not None
    assert found.finished


def test_waiting_has_an_end(tmp_path: Path) -> None:
    make_incident(tmp_path, publish=False)
    assert wait_for_incident(tmp_path, 0.05) is None
    assert wait_for_incident(tmp_path / "absent", 0.05) is None


def test_a_killed_writer_leaves_a_folder_that_is_known_as_unfinished(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from sglang_crashkit.core.incident_store import IncidentFolder
folder = IncidentFolder(Path(sys.argv[1]), "killed", "0123abcd", 1.0)
folder.write_text("stacks/x.txt", "x")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=LONG)
    (found,) = find_incidents(tmp_path)
    assert (found.finished, found.document, found.problem) == (False, None, "has no incident.json")
    assert found.name == "19700101T000001.000Z-killed-0123abcd"


def test_incident_json_begins_with_its_version(tmp_path: Path) -> None:
    path = make_incident(tmp_path)
    document = json.loads((path / "incident.json").read_text())
    assert next(iter(document)) == "schema_version"
    assert document["complete"] is False
