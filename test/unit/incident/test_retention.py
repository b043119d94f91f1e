from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident import retention
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.retention import BLOCK, MB, DiskLimits, NoRoomError, Retention, size_of, status_of
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.model.incident_log import LOG
from unit.support.small_disk import fill, mounted
from unit.support.stored import NOON, make_incident

KB = 1024
FULL_USE = "incidents would take more than SGLANG_CRASHKIT_MAX_USE_MB"


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    """The folder of all incidents of a host, in a crash folder."""
    folder = tmp_path / "host" / "incidents"
    folder.mkdir(parents=True)
    return folder


def retain(incidents: Path, *, server: int = 0, **limits: Any) -> Retention:
    made = DiskLimits(**{"max_use": 1000 * MB, "keep_free": 0} | limits)
    return Retention(incidents, incidents.parent, "0123abcd", made, server)


def old_incidents(incidents: Path, count: int, size: int = 100 * KB) -> list[Path]:
    """Write incidents of the same size, the oldest first."""
    pieces, limits = {"stacks/x.txt": "x" * size}, DiskLimits(max_use=1000 * MB, keep_free=0)
    return [make_incident(incidents, seconds=NOON + n, pieces=pieces, limits=limits) for n in range(count)]


def left(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


def test_the_oldest_incidents_make_room(incidents: Path) -> None:
    old = old_incidents(incidents, 4)
    kept = retain(incidents, max_use=700 * KB)
    kept.take(200 * KB)
    assert left(old) == [True] * 4
    kept.take(200 * KB)
    assert left(old) == [False, False, True, True]
    assert kept.own == 400 * KB
    assert size_of(incidents) + kept.own <= 700 * KB


def test_the_oldest_of_too_many_and_the_too_old_go(incidents: Path) -> None:
    old = old_incidents(incidents, 4)
    retain(incidents, max_count=3).take(1)
    assert left(old) == [False, True, True, True]
    retain(incidents, max_age_secs=time.time() - NOON - 1.5).take(1)
    assert left(old) == [False, False, True, True]
    retain(incidents, max_count=0).take(1)
    assert left(old) == [False, False, True, True]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_use": MB}, f"{FULL_USE} (1 MB)"),
        ({"max_incident": MB}, "the incident would take more than SGLANG_CRASHKIT_MAX_INCIDENT_MB (1 MB)"),
        ({"keep_free": 1 << 60}, "less than SGLANG_CRASHKIT_KEEP_FREE_MB"),
    ],
)
def test_without_room_the_limit_is_named(incidents: Path, limits: dict[str, int], reason: str) -> None:
    kept = retain(incidents, **limits)
    with pytest.raises(NoRoomError) as raised:
        kept.take(2 * MB)
    assert str(raised.value).startswith(reason)
    assert (raised.value.errno, status_of(raised.value), kept.own) == (errno.ENOSPC, "skipped", 0)
    kept.take(2 * MB, essential=True)
    assert kept.own == 2 * MB


def test_the_defaults_fit_a_small_file_system(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def have(free: int) -> None:
        status = os.statvfs_result((1, 1, 100 * MB, free, free, 9, 9, 9, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _folder: status)

    have(50 * MB)
    kept = Retention(incidents, incidents.parent, "0123abcd", DiskLimits())
    kept.take(9 * MB)
    with pytest.raises(NoRoomError, match="MAX_USE_MB \\(10 MB\\)"):
        kept.take(2 * MB)
    have(5 * MB + 100 * KB)
    with pytest.raises(NoRoomError, match="KEEP_FREE_MB \\(5 MB\\)"):
        Retention(incidents, incidents.parent, "0123abcd", DiskLimits()).take(101 * KB)


def test_only_finished_incidents_of_this_user_are_removed(incidents: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    unfinished = make_incident(incidents, seconds=1.0, publish=False, pieces={"stacks/x": "x" * MB})
    link = incidents / "20231114T221320.250Z-killed-0123abc0"
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
    (gone / "link").symlink_to(elsewhere)
    with pytest.raises(NoRoomError):
        retain(incidents, max_use=MB).take(10 * KB)
    assert not gone.exists()
    assert all(path.exists() for path in (unfinished, link, in_the_way, *foreign, elsewhere / "kept"))
    assert theirs.exists() == (os.geteuid() == 0)


def test_while_another_makes_room_nothing_is_removed(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "LOCK_SECS", 0.05)
    old, lock = old_incidents(incidents, 3), FolderLock(incidents)
    lock.acquire()
    with pytest.raises(NoRoomError):
        retain(incidents, max_use=310 * KB).take(100 * KB)
    assert left(old) == [True] * 3
    lock.release()
    retain(incidents, max_use=310 * KB).take(100 * KB)
    assert left(old)[0] is False


def test_a_pipe_in_place_of_an_incidents_file_is_not_waited_for(incidents: Path) -> None:
    (old,) = old_incidents(incidents, 1)
    (old / "incident.json").unlink()
    os.mkfifo(old / "incident.json")
    (incidents.parent / "crash_dump_1.pkl").write_bytes(b"x")
    retain(incidents, max_use=50 * KB).take(10 * KB)
    assert not old.exists()


# -- a real file system that has no more room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small") as folder:
        yield folder / "incidents"


def test_a_disk_that_fills_midway_takes_the_essential_files(small_disk: Path) -> None:
    folder = IncidentFolder(small_disk, "killed", "0123abcd", NOON, DiskLimits(keep_free=0, max_use=100 * MB))
    folder.write_text("stacks/a.txt", "a" * 100_000)
    fill(small_disk.parent)
    with pytest.raises(NoRoomError):
        folder.write_text("stacks/b.txt", "b" * 100_000)
    document = {"schema_version": 1, "processes": ["x" * 100_000]}
    for stage in range(5):
        folder.save(document | {"stage": stage}, f"summary {stage}")
        fill(small_disk.parent)
    path = folder.publish()
    (found,) = find_incidents(small_disk)
    assert (found.path, found.document) == (path, document | {"stage": 4})
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()) == [
        "incident.json",
        "stacks/a.txt",
        "summary.md",
    ]


@pytest.mark.parametrize("blocks", range(30, 61, 3))
def test_evidence_that_takes_all_the_room_leaves_what_the_whole_incident_needs(small_disk: Path, blocks: int) -> None:
    small_disk.mkdir()
    fill(small_disk.parent)
    (filling,) = small_disk.parent.glob("filling-*")
    os.truncate(filling, filling.stat().st_size - blocks * BLOCK)
    folder = IncidentFolder(small_disk, "killed", "0123abcd", NOON, DiskLimits(keep_free=0, max_use=100 * MB))
    document = {"schema_version": 1, "processes": ["x" * 30_000]}
    folder.save(document, "y" * 6_000)
    for stage in range(3):
        with contextlib.suppress(NoRoomError):
            for number in range(60):
                folder.write_text(f"stacks/{stage}-{number}.txt", "z" * 500)
        with contextlib.suppress(OSError):
            folder.append(LOG, ['{"seconds": 1}'] * 1500)
        folder.save(document | {"stage": stage}, f"summary {stage} " + "y" * 6_000)
    path = folder.publish()
    (found,) = find_incidents(small_disk)
    assert (found.path, found.document) == (path, document | {"stage": 2})
    assert (path / "summary.md").read_text().startswith("summary 2")


def test_what_must_stay_free_stays_free(small_disk: Path) -> None:
    limits = DiskLimits(max_use=100 * MB, keep_free=MB)
    for number in range(20):
        make_incident(small_disk, seconds=NOON + number, pieces={"stacks/x.txt": "x" * 500 * KB}, limits=limits)
        status = os.statvfs(small_disk)
        assert status.f_bavail * status.f_frsize >= MB - 64 * KB
    assert 3 <= len(find_incidents(small_disk)) <= 6
    assert find_incidents(small_disk)[0].name.startswith("20231114T221339")


def test_a_full_disk_takes_an_incident_in_place_of_the_oldest_one_or_none(small_disk: Path) -> None:
    old = old_incidents(small_disk, 3, 500 * KB)
    fill(small_disk.parent)
    folder = IncidentFolder(small_disk, "killed", "0123abcd", NOON + 9, DiskLimits(max_use=100 * MB, keep_free=0))
    assert left(old) == [False, True, True]
    fill(small_disk.parent)
    folder.save({"schema_version": 1}, "summary")
    assert (folder.publish() / "summary.md").read_text() == "summary"
    for path in (*old[1:], folder.path):
        path.rename(small_disk / f"mine-{path.name}")
    fill(small_disk.parent)
    with pytest.raises(NoRoomError, match="the disk is full"):
        IncidentFolder(small_disk, "killed", "0123abce", NOON)
    assert not list(small_disk.glob(".partial-*"))


def with_core(incidents: Path, number: int, *, server: dict[str, int] | None = None, age_secs: float = 7200.0) -> Path:
    """Write a finished incident that names a core and a dump beside it, of 1 MB each, and return its folder."""
    core, dump = incidents.parent / f"core.cuda.179500000{number}.77", incidents.parent / f"crash_dump_{number}.pkl"
    for path in (core, dump):
        path.write_bytes(os.urandom(MB))
        os.utime(path, (time.time() - age_secs,) * 2)
    process = {"evidence": [{"kind": "cuda_core", "status": "captured", "path": f"../../{core.name}"}]}
    fields = {"processes": [process], "requests": {"path": str(dump)}} | ({"server": server} if server else {})
    limits = DiskLimits(max_use=1000 * MB, keep_free=0)
    return make_incident(incidents, seconds=time.time() - age_secs + number, limits=limits, **fields)


def beside(incidents: Path) -> list[str]:
    return sorted(path.name for path in incidents.parent.iterdir() if path != incidents)


def test_an_incident_goes_with_its_cores_and_dumps(incidents: Path) -> None:
    old = [with_core(incidents, number) for number in range(3)]
    for name in ("core.cuda.5.5", "core.cuda.1795000000.7", "notes.pkl"):
        (incidents.parent / name).write_bytes(b"x" * MB)
    retain(incidents, max_use=5 * MB).take(100 * KB)
    assert left(old) == [False, True, True]
    stay = [f"core.cuda.179500000{n}.77" for n in (1, 2)] + ["crash_dump_1.pkl", "crash_dump_2.pkl"]
    assert beside(incidents) == sorted([*stay, "core.cuda.5.5", "core.cuda.1795000000.7", "notes.pkl"])


def test_what_no_incident_names_counts_for_cores_and_never_goes(incidents: Path) -> None:
    (incidents.parent / "core.cuda.5.5").write_bytes(b"x" * 3 * MB)
    (incidents.parent / "core.cuda.5.7").symlink_to("/etc/hostname")
    kept = retain(incidents, max_use=4 * MB)
    # Who died of what has room.
    kept.take(MB)
    assert kept.make_room(0, incidents.parent) == ""
    assert kept.make_room(MB, incidents.parent) == f"{FULL_USE} (4 MB)"
    # One that grows on.
    (incidents.parent / "core.cuda.5.6").write_bytes(b"x" * MB)
    assert kept.make_room(0, incidents.parent) == f"{FULL_USE} (4 MB)"
    assert beside(incidents) == ["core.cuda.5.5", "core.cuda.5.6", "core.cuda.5.7"]


def test_what_may_be_written_still_stays(incidents: Path) -> None:
    old = [with_core(incidents, 0, age_secs=10.0), with_core(incidents, 1)]
    retain(incidents, max_use=3 * MB).take(100 * KB)
    assert left(old) == [True, False]


def test_what_another_server_left_stays_while_it_lives_or_may_live(incidents: Path) -> None:
    stat = procfs.read_stat(os.getpid())
    own = {"pid": stat.pid, "start_ticks": stat.start_ticks, "pid_namespace": procfs.own_namespace()}
    old = [with_core(incidents, 0, server=own)]
    with pytest.raises(NoRoomError):
        retain(incidents, max_use=MB, server=1).take(100 * KB)
    assert left(old) == [True]
    retain(incidents, max_use=MB, server=stat.pid).take(100 * KB)
    assert left(old) == [False]
    # One of another container cannot be seen.
    unseen = own | {"pid_namespace": 1, "start_ticks": 1}
    old = [with_core(incidents, 0, server=unseen, age_secs=600.0), with_core(incidents, 1, server=unseen)]
    retain(incidents, max_use=3 * MB).take(100 * KB)
    assert left(old) == [True, False]
