from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.incident import retention
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.retention import (
    MB,
    CrashFile,
    DiskLimits,
    Ledger,
    NoRoomError,
    find_crash_files,
    is_of_living_server,
    named_in,
    remove_incident,
    size_of,
    status_of,
)
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import FolderLock
from unit.support.small_disk import fill, mounted
from unit.support.stored import NOON, make_incident
from unit.support.waiting import child

KB = 1024
OWN = "20400101T000000.000Z-killed-0123abcd"


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    """The folder of all incidents of a host, in a crash folder."""
    folder = tmp_path / "host" / "incidents"
    folder.mkdir(parents=True)
    return folder


def old_incidents(incidents: Path, count: int, size: int = 100 * KB) -> list[Path]:
    """Write incidents of the same size, the oldest first."""
    pieces = {"stacks/x.txt": "x" * size}
    limits = DiskLimits(max_use=1000 * MB, keep_free=0)
    return [make_incident(incidents, seconds=NOON + n, pieces=pieces, limits=limits) for n in range(count)]


def left(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


def test_limits_are_read_from_the_environment() -> None:
    assert DiskLimits.from_environ({}) == DiskLimits(None, None, 256 * MB)
    environ = {
        "SGLANG_CRASHKIT_MAX_USE_MB": "10",
        "SGLANG_CRASHKIT_KEEP_FREE_MB": "0",
        "SGLANG_CRASHKIT_MAX_INCIDENT_MB": "0.5",
    }
    assert DiskLimits.from_environ(environ) == DiskLimits(10 * MB, 0, MB // 2)
    bad = dict.fromkeys(environ, "much") | {"SGLANG_CRASHKIT_MAX_INCIDENT_MB": "-1"}
    assert DiskLimits.from_environ(bad) == DiskLimits()


def test_the_oldest_incidents_make_room(tmp_path: Path) -> None:
    old = old_incidents(tmp_path, 4)
    ledger = Ledger(tmp_path, OWN, DiskLimits(max_use=700 * KB, keep_free=0))
    ledger.charge("a", 200 * KB)
    assert left(old) == [True] * 4
    ledger.charge("b", 200 * KB)
    assert left(old) == [False, False, True, True]
    assert ledger.own == 400 * KB
    assert size_of(tmp_path) + ledger.own <= 700 * KB


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (DiskLimits(max_use=MB, keep_free=0), "incidents would take more than SGLANG_CRASHKIT_MAX_USE_MB (1 MB)"),
        (DiskLimits(100 * MB, 0, MB), "the incident would take more than SGLANG_CRASHKIT_MAX_INCIDENT_MB (1 MB)"),
        (DiskLimits(100 * MB, 1 << 60), "less than SGLANG_CRASHKIT_KEEP_FREE_MB"),
    ],
)
def test_without_room_the_limit_is_named(tmp_path: Path, limits: DiskLimits, reason: str) -> None:
    ledger = Ledger(tmp_path, OWN, limits)
    with pytest.raises(NoRoomError) as raised:
        ledger.charge("big", 2 * MB)
    assert str(raised.value).startswith(reason)
    assert raised.value.errno == errno.ENOSPC
    assert status_of(raised.value) == "skipped"
    assert status_of(OSError("x")) == "failed"
    assert ledger.own == 0
    ledger.charge("incident.json", 2 * MB, essential=True)
    assert ledger.own == 2 * MB


def test_what_essential_files_took_is_made_up_for(tmp_path: Path) -> None:
    old = old_incidents(tmp_path, 4)
    ledger = Ledger(tmp_path, OWN, DiskLimits(max_use=600 * KB, keep_free=0))
    ledger.charge("incident.json", 250 * KB, essential=True)
    assert left(old) == [True] * 4
    ledger.make_room(0)
    assert left(old) == [False, True, True, True]


def test_on_a_disk_filled_by_others_older_incidents_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = old_incidents(tmp_path, 6)
    before = size_of(tmp_path)
    free = [50 * MB]
    monkeypatch.setattr(retention, "_space_of", lambda folder: (1000 * MB, free[0] + before - size_of(tmp_path)))
    ledger = Ledger(tmp_path, OWN, DiskLimits(max_use=1000 * MB, keep_free=100 * MB))
    ledger.charge("a", 150 * KB)
    assert left(old) == [False, False, False, True, True, True], "256 KB at a time"
    free[0] -= 150 * KB
    ledger.charge("b", 100 * KB)
    assert left(old) == [False, False, False, True, True, True]
    free[0] -= 100 * KB
    ledger.charge("c", 90 * KB)
    assert left(old) == [False] * 5 + [True]
    with pytest.raises(NoRoomError):
        ledger.charge("d", 10 * MB)


def test_room_for_others_on_the_disk_costs_the_oldest_incidents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_incidents(tmp_path, 6)
    before = size_of(tmp_path)
    monkeypatch.setattr(retention, "_space_of", lambda folder: (1000 * MB, 50 * MB + before - size_of(tmp_path)))
    ledger = Ledger(tmp_path, OWN, DiskLimits(max_use=1000 * MB, keep_free=10 * MB))
    assert ledger.make_room_beside(tmp_path, 40 * MB) == ""
    assert left(old) == [True] * 6
    assert ledger.make_room_beside(tmp_path, 40 * MB + 150 * KB) == ""
    assert left(old) == [False, False, True, True, True, True]
    assert ledger.make_room_beside(tmp_path, 100 * MB) == f"there is no room for 100 MB in {tmp_path}"
    missing = tmp_path / "none"
    assert ledger.make_room_beside(missing, 1) == f"{missing} cannot be written to: No such file or directory"
    assert ledger.own == 0


def test_the_defaults_fit_a_small_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_space_of", lambda folder: (100 * MB, 50 * MB))
    ledger = Ledger(tmp_path, OWN, DiskLimits())
    ledger.charge("a", 9 * MB)
    with pytest.raises(NoRoomError, match="MAX_USE_MB \\(10 MB\\)"):
        ledger.charge("b", 2 * MB)
    monkeypatch.setattr(retention, "_space_of", lambda folder: (100 * MB, 5 * MB + 100 * KB))
    ledger = Ledger(tmp_path, OWN, DiskLimits())
    with pytest.raises(NoRoomError, match="KEEP_FREE_MB \\(5 MB\\)"):
        ledger.charge("a", 101 * KB)


def test_only_finished_incidents_of_this_user_are_removed(incidents: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, "kept")
    unfinished = make_incident(incidents, seconds=1.0, publish=False, pieces={"stacks/x": "x" * MB})
    link = incidents / "20231114T221320.250Z-killed-0123abcd"
    link.symlink_to(elsewhere)
    foreign = [incidents / "20231114T221320.250Z-notes", incidents / "mine", incidents / ".spool-1-2"]
    for path in foreign:
        path.mkdir()
        (path / "data").write_text("x" * MB)
    in_the_way = incidents / "20231114T221320.250Z-killed-0123abce"
    in_the_way.write_text("a file")
    theirs = incidents / "20231114T221320.250Z-killed-0123abcf"
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    (gone,) = old_incidents(incidents, 1)
    ledger = Ledger(incidents, OWN, DiskLimits(max_use=MB, keep_free=0))
    with pytest.raises(NoRoomError):
        ledger.charge("a", 10 * KB)
    assert not gone.exists()
    assert all(path.exists() for path in (unfinished, link, in_the_way, *foreign, elsewhere / "kept"))
    assert theirs.exists() == (os.geteuid() == 0)


def test_an_incident_with_links_in_it_takes_nothing_else_along(tmp_path: Path) -> None:
    path = make_incident(tmp_path / "incidents")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x" * MB)
    (path / "stacks").symlink_to(tmp_path / "kept")
    assert size_of(path) < 100 * KB
    assert remove_incident(path)
    assert (tmp_path / "kept" / "file").exists()
    assert list((tmp_path / "incidents").iterdir()) == []
    assert not remove_incident(path)


def test_while_another_makes_room_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_LOCK_SECS", 0.05)
    old = old_incidents(tmp_path, 3)
    lock = FolderLock(tmp_path)
    lock.acquire()
    ledger = Ledger(tmp_path, OWN, DiskLimits(max_use=310 * KB, keep_free=0))
    with pytest.raises(NoRoomError):
        ledger.charge("a", 100 * KB)
    assert left(old) == [True] * 3
    lock.release()
    ledger.charge("a", 100 * KB)
    assert left(old)[0] is False


# -- a real file system that has no more room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small") as folder:
        yield folder


def test_a_disk_that_fills_midway_takes_the_essential_files(small_disk: Path) -> None:
    incidents = small_disk / "incidents"
    folder = IncidentFolder(incidents, "killed", "0123abcd", NOON, DiskLimits(keep_free=0, max_use=100 * MB))
    folder.write_text("stacks/a.txt", "a" * 100_000)
    fill(small_disk)
    with pytest.raises(NoRoomError):
        folder.write_text("stacks/b.txt", "b" * 100_000)
    assert not (folder.path / "stacks" / "b.txt").exists()
    document = {"schema_version": 1, "processes": ["x" * 100_000]}
    for stage in range(5):
        folder.save(document | {"stage": stage}, f"summary {stage}")
        fill(small_disk)
    path = folder.publish()
    (found,) = find_incidents(incidents)
    assert found.path == path
    assert found.document == document | {"stage": 4}
    assert (path / "summary.md").read_text() == "summary 4"
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()) == [
        "incident.json",
        "stacks/a.txt",
        "summary.md",
    ]


def test_what_must_stay_free_stays_free(small_disk: Path) -> None:
    incidents = small_disk / "incidents"
    limits = DiskLimits(max_use=100 * MB, keep_free=MB)
    for number in range(20):
        make_incident(incidents, seconds=NOON + number, pieces={"stacks/x.txt": "x" * 500 * KB}, limits=limits)
        status = os.statvfs(small_disk)
        assert status.f_bavail * status.f_frsize >= MB - 64 * KB
    assert 3 <= len(find_incidents(incidents)) <= 6
    assert find_incidents(incidents)[0].name.startswith("20231114T221339")


def test_a_disk_without_any_room_takes_no_incident(small_disk: Path) -> None:
    incidents = small_disk / "incidents"
    incidents.mkdir()
    fill(small_disk)
    with pytest.raises(NoRoomError, match="the disk is full"):
        IncidentFolder(incidents, "killed", "0123abcd", NOON)
    assert list(incidents.iterdir()) == []


def test_on_a_full_disk_essentials_replace_the_oldest_incident(small_disk: Path) -> None:
    incidents = small_disk / "incidents"
    old = old_incidents(incidents, 3, 500 * KB)
    fill(small_disk)
    folder = IncidentFolder(incidents, "killed", "0123abcd", NOON + 9, DiskLimits(max_use=100 * MB, keep_free=0))
    assert left(old) == [False, True, True]
    fill(small_disk)
    folder.save({"schema_version": 1}, "summary")
    assert (folder.publish() / "summary.md").read_text() == "summary"


def with_core(incidents: Path, number: int, *, server: dict[str, int] | None = None, age_secs: float = 3600.0) -> Path:
    """Write a finished incident that names a core and a dump beside it, of 1 MB each, and return its folder."""
    core, dump = incidents.parent / f"core.cuda.179500000{number}.77", incidents.parent / f"crash_dump_{number}.pkl"
    for path in (core, dump):
        path.write_bytes(os.urandom(MB))
        os.utime(path, (time.time() - age_secs,) * 2)
    process = {"evidence": [{"kind": "cuda_core", "status": "captured", "path": f"../../{core.name}"}]}
    fields = {"processes": [process], "requests": {"path": str(dump)}}
    return make_incident(
        incidents,
        seconds=NOON + number,
        limits=DiskLimits(max_use=1000 * MB, keep_free=0),
        **(fields | ({"server": server} if server else {})),
    )


def beside(incidents: Path) -> list[str]:
    return sorted(path.name for path in incidents.parent.iterdir() if path != incidents)


def test_an_incident_goes_with_its_cores_and_dumps(incidents: Path) -> None:
    old = [with_core(incidents, number) for number in range(3)]
    (incidents.parent / "core.cuda.5.5").write_bytes(b"x" * MB)
    (incidents.parent / "notes.pkl").write_bytes(b"x" * MB)
    ledger = Ledger(incidents, OWN, DiskLimits(max_use=5 * MB, keep_free=0))
    ledger.charge("stacks/x", 100 * KB)
    assert left(old) == [False, True, True]
    stay = [f"core.cuda.179500000{n}.77" for n in (1, 2)] + ["core.cuda.5.5", "crash_dump_1.pkl", "crash_dump_2.pkl"]
    assert beside(incidents) == [*stay, "notes.pkl"]


def test_what_nobody_names_counts_for_cores_and_never_goes(incidents: Path) -> None:
    (incidents.parent / "core.cuda.5.5").write_bytes(b"x" * 3 * MB)
    ledger = Ledger(incidents, OWN, DiskLimits(max_use=4 * MB, keep_free=0))
    # Who died of what has room.
    ledger.charge("stacks/x", MB)
    assert ledger.make_room_beside(incidents.parent, 0) == ""
    reason = "incidents would take more than SGLANG_CRASHKIT_MAX_USE_MB (4 MB)"
    assert ledger.make_room_beside(incidents.parent, MB) == reason
    # One that grows on.
    (incidents.parent / "core.cuda.5.6").write_bytes(b"x" * MB)
    assert ledger.make_room_beside(incidents.parent, 0) == reason
    assert beside(incidents) == ["core.cuda.5.5", "core.cuda.5.6"]


def test_what_may_be_written_still_stays(incidents: Path) -> None:
    old = [with_core(incidents, 0, age_secs=10.0), with_core(incidents, 1)]
    ledger = Ledger(incidents, OWN, DiskLimits(max_use=3 * MB, keep_free=0))
    ledger.charge("stacks/x", 100 * KB)
    assert left(old) == [True, False]


def test_what_another_living_server_left_stays(incidents: Path) -> None:
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    old = [with_core(incidents, 0, server={"pid": stat.pid, "start_ticks": stat.start_ticks})]
    ledger = Ledger(incidents, OWN, DiskLimits(max_use=MB, keep_free=0), server=1)
    with pytest.raises(NoRoomError):
        ledger.charge("stacks/x", 100 * KB)
    assert left(old) == [True]
    Ledger(incidents, OWN, DiskLimits(max_use=MB, keep_free=0), server=stat.pid).charge("stacks/x", 100 * KB)
    assert left(old) == [False]


def test_incidents_elsewhere_count_and_go_too(incidents: Path, tmp_path: Path) -> None:
    fallback = tmp_path / "fallback" / "incidents"
    fallback.mkdir(parents=True)
    newer, older = with_core(incidents, 5), with_core(fallback, 1)
    limits = DiskLimits(max_use=3 * MB, keep_free=0)
    elsewhere = [fallback, tmp_path / "none" / "incidents"]
    Ledger(incidents, OWN, limits, elsewhere).charge("stacks/x", 100 * KB)
    assert left([older, newer]) == [False, True]
    assert beside(fallback) == []
    # On another file system they make no room for it there.
    older = with_core(fallback, 2)
    ledger = Ledger(incidents, OWN, DiskLimits(max_use=1000 * MB, keep_free=1 << 60), elsewhere)
    entry = retention._Entry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "_space_of", lambda folder: (1 << 50, 0))
        patch.setattr(retention, "_Entry", lambda own, _device, files=(): entry(own, -1, files))
        ledger.make_room(1)
    assert left([older, newer]) == [True, True]


CORE, DUMP = "core.cuda.1795000000.77", "crash_dump_2026-11-21_01-26-13.pkl"


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x" * 5000)


def with_document(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text(text)
    return folder


def names(files: list[CrashFile]) -> list[str]:
    return sorted(file.path.name for file in files)


def test_cores_and_dumps_beside_the_incidents_are_found(incidents: Path, tmp_path: Path) -> None:
    write(tmp_path / "host", CORE, DUMP, "crash_handler.log", "weights.pkl", ".crash_dump_x.12.partial", "core.1")
    (tmp_path / "host" / "core.cuda.1.2").symlink_to(tmp_path / "host" / CORE)
    (tmp_path / "host" / "core.cuda.1.3").mkdir()
    # The driver names the folder by the host's own name.
    write(tmp_path / socket.gethostname(), "core.cuda.5.6")
    found = find_crash_files([incidents, tmp_path / "none" / "incidents"])
    assert names(found) == sorted([CORE, DUMP, "core.cuda.5.6"])
    assert {file.size for file in found} == {8192}
    assert all(0 <= file.age_secs < 60 for file in found)


def test_a_file_is_the_first_incidents_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, CORE, DUMP, "core.cuda.1.7", "core.cuda.1.77")
    files = find_crash_files([tmp_path / "incidents"])
    newer = with_document(
        tmp_path / "incidents" / "b", json.dumps({"reason": f"cut short: {tmp_path / DUMP} has 8 bytes"})
    )
    older = with_document(tmp_path / "incidents" / "a", json.dumps({"path": f"../../{CORE}", "requests": DUMP}))
    # The name of one begins with that of another.
    other = with_document(tmp_path / "incidents" / "c", json.dumps({"path": "../../core.cuda.1.77"}))
    empty = tmp_path / "incidents" / "d"
    empty.mkdir()
    found = named_in([newer, older, other, empty], files)
    assert {path.name: names(its) for path, its in found.items()} == {
        "b": [DUMP],
        "a": [CORE],
        "c": ["core.cuda.1.77"],
    }
    assert named_in([newer], []) == {}


def test_an_incident_of_a_living_server_is_known(tmp_path: Path) -> None:
    with child("ready()\npause()") as process:
        stat = procfs.read_stat(process.pid)
        assert stat is not None
        server = {"pid": stat.pid, "start_ticks": stat.start_ticks}
        path = with_document(tmp_path / "a", json.dumps({"server": server}))
        earlier = with_document(tmp_path / "b", json.dumps({"server": server | {"start_ticks": stat.start_ticks - 1}}))
        assert is_of_living_server(path, but=0)
        assert not is_of_living_server(path, but=stat.pid)
        assert not is_of_living_server(earlier, but=0)
    assert not is_of_living_server(path, but=0)
    for number, text in enumerate(("", "[]", '{"server": {"pid": "x"}}', "[" * 100_000)):
        assert not is_of_living_server(with_document(tmp_path / f"c{number}", text), but=0)
