from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.handler import folders
from sglang_crashkit.handler.folders import (
    Place,
    SharedMemory,
    keep,
    make_place,
)
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.unfinished import finish_abandoned, remove_runtime_folders
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.kernel.procfs import own_namespace, server_key
from sglang_crashkit.kernel.shared_memory import FOLDER
from sglang_crashkit.settings import RUN
from unit.support.small_disk import mounted
from unit.support.targets import nothing_where_forbidden
from unit.support.waiting import LONG, child

HOST = "what-the-kernel-says"
NAME = "core.cuda.%t.%p"


@pytest.fixture(autouse=True)
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(folders, "fallback_folder", lambda: tmp_path / "fallback")
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setenv("HOSTNAME", "host")
    before = os.umask(0)
    yield tmp_path / "fallback"
    os.umask(before)


def make(tmp_path: Path, **options: object) -> Place:
    crash = str(tmp_path / "crash")
    return make_place(crash, Path("1-2-3"), **({"secs": LONG} | options))  # type: ignore[arg-type]


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_what_the_kit_makes_is_for_its_owner_alone(tmp_path: Path) -> None:
    flight = tmp_path / "crash" / HOST / "flight_recorder"
    made = make(tmp_path, flight_folder=str(flight))
    assert (made.flight_folder, mode_of(flight)) == (flight, 0o700)
    assert made.host_folder == tmp_path / "crash" / "host"
    assert made.spool == made.host_folder / "incidents" / ".spool-1-2-3"
    assert {mode_of(path) for path in [made.host_folder, *made.host_folder.rglob("*")]} == {0o700}
    assert made.warnings == []


def test_an_operators_folder_keeps_its_permissions(tmp_path: Path) -> None:
    theirs = tmp_path / "crash" / "host"
    theirs.mkdir(parents=True, mode=0o755)
    made = make(tmp_path)
    assert made.host_folder == theirs
    assert mode_of(theirs) == 0o755
    assert mode_of(tmp_path / "crash") == 0o755 | (mode_of(tmp_path / "crash") & 0o022)
    assert mode_of(theirs / "incidents") == 0o700


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_folder_that_cannot_be_used_is_replaced(tmp_path: Path, fallback: Path, obstacle: str) -> None:
    (tmp_path / "crash").mkdir()
    if obstacle == "file":
        (tmp_path / "crash" / "host").touch()
    else:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "crash" / "host").symlink_to(tmp_path / "theirs")
    made = make(tmp_path)
    assert made.host_folder == fallback / "host"
    (warning,) = made.warnings
    assert warning.startswith(
        f"crash folder {tmp_path}/crash/host cannot be used ({tmp_path}/crash/host is not a folder"
    )
    assert not (tmp_path / "theirs").exists() or list((tmp_path / "theirs").iterdir()) == []


def test_a_read_only_folder_is_told_in_words(tmp_path: Path, fallback: Path) -> None:
    with mounted(tmp_path / "crash", "size=1m,mode=700,ro") as crash:
        made = make(tmp_path)
        assert made.host_folder == fallback / "host"
        assert made.warnings[0].startswith(f"crash folder {crash}/host cannot be used (Read-only file system: ")


def test_a_disk_that_does_not_answer_is_waited_for_once(
    tmp_path: Path, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = folders.make_private_folder, tmp_path / "asked"

    def stand_still(folder: Path) -> Path:
        if folder.is_relative_to(tmp_path / "crash"):
            with asked.open("a") as file:
                file.write("once\n")
            time.sleep(600)
        return real(folder)

    monkeypatch.setattr(folders, "make_private_folder", stand_still)
    core_file = f"{tmp_path}/crash/%h/{NAME}"
    made = make(tmp_path, core_file=core_file, flight_folder=f"{tmp_path}/crash/{HOST}/flight_recorder", secs=1.0)
    assert asked.read_text() == "once\n"
    assert made.host_folder == fallback / "host"
    assert made.core_file == f"{fallback}/%h/{NAME}"
    assert (fallback / HOST).is_dir()
    assert made.flight_folder == fallback / "host" / "flight_recorder"
    assert "did not answer within 1 s" in made.warnings[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _folder: time.sleep(600), "did not answer within"),
        (lambda _folder: os.kill(os.getpid(), 9), "the child process died"),
    ],
    ids=["no disk answers", "the child dies"],
)
def test_where_no_folder_can_be_made_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], words: str
) -> None:
    monkeypatch.setattr(folders, "make_private_folder", fault)
    with pytest.raises(OSError, match=words):
        make(tmp_path, secs=0.5)


def test_without_a_crash_folder_the_fallback_needs_no_warning(fallback: Path) -> None:
    made = make_place(None, Path("1-2-3"), secs=LONG)
    assert made.host_folder == fallback / "host"
    assert made.warnings == []


@pytest.mark.parametrize(
    ("template", "folder", "mode"),
    [
        # The driver's own, the user's, and one that is there, which is taken as it is.
        (f"crash/%h/{NAME}", "crash", 0o700),
        ("cores/%h/core.%p", "cores", 0o700),
        (f"crash/%h/{NAME}", "crash", 0o755),
    ],
)
def test_the_folder_that_cores_are_written_to_is_made(tmp_path: Path, template: str, folder: str, mode: int) -> None:
    if mode == 0o755:
        (tmp_path / folder / HOST).mkdir(parents=True, mode=mode)
    made = make(tmp_path, core_file=f"{tmp_path}/{template}")
    assert (made.core_file, made.warnings) == (f"{tmp_path}/{template}", [])
    assert mode_of(tmp_path / folder / HOST) == mode


# -- GPU cores, whose folder the driver does not make


@pytest.mark.parametrize("template", ["| gzip > core.%h", "fifo", ""])
def test_a_core_without_a_folder_needs_none(tmp_path: Path, template: str) -> None:
    if template == "fifo":
        template = str(tmp_path / "fifo")
        os.mkfifo(template)
    made = make(tmp_path, core_file=template)
    assert made.warnings == []
    assert not (tmp_path / "crash" / HOST).exists()


@pytest.mark.parametrize("template", ["%p/core", "file/below/core"])
def test_the_users_folder_that_cannot_be_made_is_named(tmp_path: Path, template: str) -> None:
    (tmp_path / "file").touch()
    made = make(tmp_path, core_file=f"{tmp_path}/{template}")
    (warning,) = made.warnings
    # The words are upstream's.
    assert warning.startswith(f"Failed to create CUDA coredump directory {(tmp_path / template).parent}: ")
    assert made.core_file == f"{tmp_path}/{template}"


def test_a_link_in_a_shared_folder_gets_no_cores(tmp_path: Path, fallback: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "crash").mkdir()
    (tmp_path / "crash" / HOST).symlink_to(tmp_path / "theirs")
    flight = f"{tmp_path}/crash/{HOST}/flight_recorder"
    made = make(tmp_path, core_file=f"{tmp_path}/crash/%h/{NAME}", flight_folder=flight)
    assert made.core_file == f"{fallback}/%h/{NAME}"
    assert mode_of(fallback / HOST) == 0o700
    assert made.flight_folder == tmp_path / "crash" / "host" / "flight_recorder"
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "sglang-crashkit-0" / RUN / "1-2-3"
    folder.mkdir(parents=True)
    return folder


def may_be_cleaned(folder: Path) -> bool:
    """Say whether ``systemd-tmpfiles`` would go into a folder: where it can lock it for itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_no_cleaner_goes_into_a_working_handlers_folder_nor_those_above(runtime: Path) -> None:
    other = runtime.with_name("4-5-6")
    other.mkdir()
    folders_of_the_kit = (runtime, other, runtime.parent, runtime.parent.parent)
    one, another = keep(runtime), keep(other)
    assert may_be_cleaned(runtime.parent.parent.parent)
    for locks, left in (([], [False] * 4), (one, [True, False, False, False]), (another, [True] * 4)):
        for lock in locks:
            lock.release()
        assert [may_be_cleaned(folder) for folder in folders_of_the_kit] == left


DEAD = f"4194305-1-{own_namespace()}"


@pytest.fixture
def living() -> str:
    stat = procfs.read_stat(os.getpid())
    return server_key(stat.pid, stat.start_ticks)


def make_left(parent: Path, *names: str, file: str = "") -> None:
    for name in names:
        (parent / name).mkdir()
        if file:
            (parent / name / file).touch()
        os.utime(parent / name, (time.time() - 60,) * 2)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def held(folder: Path) -> FolderLock:
    """Return the lock of a folder that somebody works in."""
    lock = FolderLock(folder)
    assert lock.acquire() == "held"
    return lock


def test_only_empty_spools_of_servers_that_are_gone_are_removed(tmp_path: Path, living: str) -> None:
    kept = [f".spool-{living}", ".spool-in-use", "20261121T012613.582Z-killed-56e794fa"]
    make_left(tmp_path, f".spool-{DEAD}", ".spool-1-2-3", *kept)
    make_left(tmp_path, ".spool-4-5-6", file="exception-8.json")
    (tmp_path / ".spool-just-made").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / ".spool-7-8-9").symlink_to(tmp_path / "theirs")
    lock = held(tmp_path / ".spool-in-use")
    assert finish_abandoned(tmp_path) == []
    assert names_in(tmp_path) == {*kept, ".spool-4-5-6", ".spool-just-made", "theirs", ".spool-7-8-9"}
    # A record that no one took in.
    assert names_in(tmp_path / ".spool-4-5-6") == {"exception-8.json"}
    lock.release()


def test_runtime_folders_of_servers_that_are_gone_are_removed(tmp_path: Path, living: str) -> None:
    """A server that lives on without its handler has its sockets there; one of another namespace cannot be seen."""
    at_work = DEAD.replace("-1-", "-2-", 1)
    make_left(tmp_path, DEAD, at_work, living, "1-2-3", "notes", file="handler.pid")
    lock = held(tmp_path / at_work)
    remove_runtime_folders(tmp_path)
    assert names_in(tmp_path) == {at_work, living, "1-2-3", "notes"}
    lock.release()


def test_nothing_of_a_server_with_equal_pids_is_removed(tmp_path: Path) -> None:
    """Hosts may share a name and a crash folder, and each main process may be process 1."""
    places = [Place(tmp_path, tmp_path / "incidents" / f".spool-1-5-{n}", tmp_path / "run" / f"1-5-{n}") for n in "12"]
    for place in places:
        place.spool.mkdir(parents=True)
        place.runtime.mkdir(parents=True)
    dump = tmp_path / ".crash_dump_x.pkl.1-5-2.partial"
    dump.write_text("")
    places[0].clean_up(["1-5-1"])
    assert [place.spool.exists() for place in places] == [False, True]
    assert [place.runtime.exists() for place in places] == [False, True]
    assert dump.exists()


def test_what_the_servers_processes_could_not_finish_is_removed(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "incidents" / ".spool", tmp_path / "run")
    (tmp_path / "run").mkdir()
    kept = [
        "crash_dump_2026-11-21_01-26-13.pkl",
        ".crash_dump_2026-11-21_01-26-13.pkl.7-5-2.partial",
        ".crash_dump_2026-11-21_01-26-13.pkl.7-6-1.partial",
        ".crash_dump_2026-11-21_01-26-13.pkl.partial",
        ".crash_dump_x.pkl.\N{SUPERSCRIPT TWO}.partial",
    ]
    torn = [".crash_dump_2026-11-21_01-26-13.pkl.7-5-1.partial", ".crash_dump_2026-11-21_01-26-13.1.pkl.8-5-1.partial"]
    for name in [*kept, *torn]:
        (tmp_path / name).write_text("")
    flight = tmp_path / "flight_recorder"
    flight.mkdir()
    for key in ("7-5-1", "7-5-2", "7-6-1"):
        (flight / f"{key}-rank0").write_text("")
    place.clean_up(["7-5-1", "8-5-1", "9-5-1"])
    assert sorted(path.name for path in flight.iterdir()) == ["7-5-2-rank0", "7-6-1-rank0"]
    shutil.rmtree(flight)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


#: A server and its rank, each with a segment; the rank outlives the server for as long as its input is open.
SHARING = """
import mmap
def make():
    name = f"torch_{os.getpid()}_77_1"
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return name, mmap.mmap(file.fileno(), 0)
reading, writing = os.pipe()
rank = os.fork()
name, view = make()
if rank == 0:
    os.write(writing, name.encode())
    pause()
ready(f"{name} {os.read(reading, 100).decode()} {rank}")
pause()
"""


def test_nothing_is_removed_before_the_last_process_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "read_maps", nothing_where_forbidden(procfs.read_maps))
    with child(SHARING) as process:
        *names, rank = process.first_line.split()  # type: ignore[attr-defined]
        paths = [FOLDER / name for name in names]
        tree = ProcessTree(process.pid)
        tree.refresh()
        tree.register(int(rank), 0)
        leftovers = SharedMemory(tree)
        leftovers.note()
        try:
            # WHEN all live
            removed, left = leftovers.clear()
            assert removed == []
            assert {one.name: one.why for one in left} == dict.fromkeys(names, "a process of the server lives")
            # WHEN the main process is dead, and a rank lives
            process.kill()
            process.wait(LONG)
            tree.root.exited_at = 1.0
            assert leftovers.clear()[0] == []
            # WHEN the handler let go of the rank, which lives nonetheless
            found = tree.get(int(rank))
            tree.forget(found)
            assert leftovers.clear()[0] == []
            assert all(path.exists() for path in paths)
        finally:
            tree.root.handle.close()
            # It is not this process's child.
            orphan = ProcessHandle(int(rank))
            orphan.send_signal(signal.SIGKILL)
            assert orphan.has_exited(LONG)
            orphan.close()
        # WHEN no one is left
        try:
            removed, left = leftovers.clear()
            assert sorted(removed) == sorted(names)
            assert left == []
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
