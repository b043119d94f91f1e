from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.folder import IncidentFolder, NullFolder, new_id
from sglang_crashkit.incident.retention import NoRoomError
from sglang_crashkit.settings import DiskLimits
from unit.support.stored import NOON, make_incident


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path / "incidents", "killed", "0123abcd", NOON)
    assert folder.path.name == ".partial-20231114T221320.250Z-killed-0123abcd"
    folder.write_text("a/b.txt", "text")
    assert folder.publish() == tmp_path / "incidents" / "20231114T221320.250Z-killed-0123abcd"
    assert folder.publish() == folder.path
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == [folder.path.name]
    folder.write_text("a/later.txt", "text")
    assert (folder.path / "a" / "later.txt").read_text() == "text"


def test_a_renamed_folder_tells_its_name_and_is_not_removed(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path, "exited", "0123abcd", NOON, DiskLimits(max_use=0, keep_free=0))
    folder.rename("killed")
    assert folder.name == "20231114T221320.250Z-killed-0123abcd"
    assert folder.path.name == ".partial-20231114T221320.250Z-exited-0123abcd"
    folder.save({}, "")
    assert folder.publish() == tmp_path / folder.name
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


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


def test_a_discarded_folder_leaves_nothing(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path, "killed", new_id(), NOON)
    folder.write_text("a/b/c.txt", "x")
    folder.write_text("d.txt", "x")
    folder.discard()
    assert list(tmp_path.iterdir()) == []
    folder.discard()


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
