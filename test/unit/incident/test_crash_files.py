from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from sglang_crashkit.incident.crash_files import CrashFile, find_crash_files, is_of_living_server, named_in
from sglang_crashkit.kernel import procfs
from unit.waiting import child

CORE, DUMP = "core.cuda.1795000000.77", "crash_dump_2026-11-21_01-26-13.pkl"


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x" * 5000)


def incident(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text(text)
    return folder


def names(files: list[CrashFile]) -> list[str]:
    return sorted(file.path.name for file in files)


def test_cores_and_dumps_beside_the_incidents_are_found(tmp_path: Path) -> None:
    incidents = tmp_path / "host" / "incidents"
    write(tmp_path / "host", CORE, DUMP, "crash_handler.log", "weights.pkl", ".crash_dump_x.12.partial", "core.1")
    (tmp_path / "host" / "core.cuda.1.2").symlink_to(tmp_path / "host" / CORE)
    (tmp_path / "host" / "core.cuda.1.3").mkdir()
    # The driver names the folder by the host's own name.
    write(tmp_path / socket.gethostname(), "core.cuda.5.6")
    found = find_crash_files([incidents, tmp_path / "none" / "incidents"])
    assert names(found) == sorted([CORE, DUMP, "core.cuda.5.6"])
    assert {file.size for file in found} == {8192}
    assert all(0 <= file.age_secs < 60 for file in found)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users")
def test_another_users_file_is_none_of_it(tmp_path: Path) -> None:
    write(tmp_path, CORE)
    os.chown(tmp_path / CORE, 65534, 65534)
    assert find_crash_files([tmp_path / "incidents"]) == []


def test_a_file_is_the_first_incidents_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, CORE, DUMP, "core.cuda.1.7", "core.cuda.1.77")
    files = find_crash_files([tmp_path / "incidents"])
    newer = incident(tmp_path / "incidents" / "b", json.dumps({"reason": f"cut short: {tmp_path / DUMP} has 8 bytes"}))
    older = incident(tmp_path / "incidents" / "a", json.dumps({"path": f"../../{CORE}", "requests": DUMP}))
    # The name of one begins with that of another.
    other = incident(tmp_path / "incidents" / "c", json.dumps({"path": "../../core.cuda.1.77"}))
    empty = tmp_path / "incidents" / "d"
    empty.mkdir()
    found = named_in([newer, older, other, empty], files)
    assert {path.name: names(its) for path, its in found.items()} == {
        "b": [DUMP],
        "a": [CORE],
        "c": ["core.cuda.1.77"],
    }
    assert named_in([newer], []) == {}


def test_only_the_file_that_was_found_is_removed(tmp_path: Path) -> None:
    write(tmp_path, CORE, DUMP)
    core, dump = sorted(find_crash_files([tmp_path / "incidents"]), key=lambda file: file.path.name)
    write(tmp_path, "another")
    (tmp_path / "another").replace(core.path)
    core.remove()
    dump.remove()
    dump.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == [CORE]


def test_an_incident_of_a_living_server_is_known(tmp_path: Path) -> None:
    with child("ready()\npause()") as process:
        stat = procfs.read_stat(process.pid)
        assert stat is not None
        server = {"pid": stat.pid, "start_ticks": stat.start_ticks}
        path = incident(tmp_path / "a", json.dumps({"server": server}))
        earlier = incident(tmp_path / "b", json.dumps({"server": server | {"start_ticks": stat.start_ticks - 1}}))
        assert is_of_living_server(path, but=0)
        assert not is_of_living_server(path, but=stat.pid)
        assert not is_of_living_server(earlier, but=0)
    assert not is_of_living_server(path, but=0)
    for number, text in enumerate(("", "[]", '{"server": {"pid": "x"}}', "[" * 100_000)):
        assert not is_of_living_server(incident(tmp_path / f"c{number}", text), but=0)
