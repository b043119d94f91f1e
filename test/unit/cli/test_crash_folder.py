from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.cli import crash_folder
from sglang_crashkit.cli.commands import status
from sglang_crashkit.cli.commands.status import RunningServer
from sglang_crashkit.errors import NothingToDoError, UsageError
from unit.support import stored
from unit.support.stored import NOON, make_incident


def test_a_running_servers_folder_is_known_by_its_handlers_log(
    nothing_known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tmp_path / "crash" / "node7"
    host.mkdir(parents=True)
    server = RunningServer(1, "sglang::scheduler", "/run", os.getpid(), "")
    gone = RunningServer(2, "sglang::scheduler", "/run2", None, "its crash handler has ended")
    monkeypatch.setattr(status, "find_running_servers", lambda: [gone, server])
    with pytest.raises(NothingToDoError):
        crash_folder.known_folders()
    with (host / "crash_handler.log").open("w"):
        assert crash_folder.known_folders() == [tmp_path / "crash"]
        nothing_known.mkdir()
        assert crash_folder.known_folders() == [tmp_path / "crash", nothing_known]


def test_several_known_folders_are_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    ids = iter(("12345678", "12ab5678", "77777777"))
    monkeypatch.setattr(stored, "new_id", lambda: next(ids))
    hosts = [folder / "host" / "incidents" for folder in folders]
    old, new = make_incident(hosts[0], seconds=NOON - 60), make_incident(hosts[1])
    make_incident(hosts[2], seconds=NOON + 60, publish=False)
    monkeypatch.setattr(crash_folder, "known_folders", lambda: folders)
    assert crash_folder.find_incident("latest", None).path == new
    for text, folder in (("123", None), (str(old), None), ("latest", folders[0])):
        assert crash_folder.find_incident(text, folder).path == old
    with pytest.raises(UsageError, match="the ids of 2 incidents begin with 12: "):
        crash_folder.find_incident("12", None)
    with pytest.raises(NothingToDoError, match="no incident 00000000"):
        crash_folder.find_incident("00000000", None)
