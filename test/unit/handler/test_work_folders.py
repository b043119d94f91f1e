from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler import folders as folders_module
from sglang_crashkit.handler.folders import WorkFolders, make_within, make_work_folders
from unit.waiting import LONG, descriptors

HOST = "what-the-kernel-says"
NAME = "core.cuda.%t.%p"


@pytest.fixture(autouse=True)
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(folders_module, "fallback_folder", lambda: tmp_path / "fallback")
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setenv("HOSTNAME", "host")
    before = os.umask(0)
    yield tmp_path / "fallback"
    os.umask(before)


def make(tmp_path: Path, **options: object) -> WorkFolders:
    crash = str(tmp_path / "crash")
    return make_work_folders(crash, "1-2-3", **({"secs": LONG} | options))  # type: ignore[arg-type]


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_what_the_kit_makes_is_for_its_owner_alone(tmp_path: Path) -> None:
    folders = make(tmp_path)
    assert folders.host_folder == tmp_path / "crash" / "host"
    assert folders.spool == folders.host_folder / "incidents" / ".spool-1-2-3"
    assert {mode_of(path) for path in [folders.host_folder, *folders.host_folder.rglob("*")]} == {0o700}
    assert folders.warnings == []


def test_an_operators_folder_keeps_its_permissions(tmp_path: Path) -> None:
    theirs = tmp_path / "crash" / "host"
    theirs.mkdir(parents=True, mode=0o755)
    folders = make(tmp_path)
    assert folders.host_folder == theirs
    assert mode_of(theirs) == 0o755
    assert mode_of(tmp_path / "crash") == 0o755 | (mode_of(tmp_path / "crash") & 0o022)
    assert mode_of(theirs / "incidents") == 0o700


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_folder_that_cannot_be_used_is_said_and_another_one_is(tmp_path: Path, fallback: Path, obstacle: str) -> None:
    (tmp_path / "crash").mkdir()
    if obstacle == "file":
        (tmp_path / "crash" / "host").touch()
    else:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "crash" / "host").symlink_to(tmp_path / "theirs")
    folders = make(tmp_path)
    assert folders.host_folder == fallback / "host"
    (warning,) = folders.warnings
    assert warning.startswith(
        f"crash folder {tmp_path}/crash/host cannot be used ({tmp_path}/crash/host is not a folder"
    )
    assert not (tmp_path / "theirs").exists() or list((tmp_path / "theirs").iterdir()) == []


def test_a_disk_that_does_not_answer_is_waited_for_once(
    tmp_path: Path, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders_module.make_private_folder

    def stand_still(folder: Path) -> Path:
        if folder.is_relative_to(tmp_path / "crash"):
            time.sleep(600)
        return real(folder)

    monkeypatch.setattr(folders_module, "make_private_folder", stand_still)
    began = time.monotonic()
    core_file = f"{tmp_path}/crash/%h/{NAME}"
    folders = make(tmp_path, core_file=core_file, flight_folder=f"{tmp_path}/crash/{HOST}/flight_recorder", secs=1.0)
    assert time.monotonic() - began < 5.0
    assert folders.host_folder == fallback / "host"
    assert folders.core_file == f"{fallback}/%h/{NAME}"
    assert (fallback / HOST).is_dir()
    assert folders.flight_folder == fallback / "host" / "flight_recorder"
    assert "did not answer within 1 s" in folders.warnings[0]


def test_where_no_disk_answers_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module, "make_private_folder", lambda _folder: time.sleep(600))
    with pytest.raises(OSError, match="did not answer within"):
        make(tmp_path, secs=0.2)


def test_without_a_crash_folder_the_fallback_is_no_matter_of_warning(fallback: Path) -> None:
    folders = make_work_folders(None, "1-2-3", secs=LONG)
    assert folders.host_folder == fallback / "host"
    assert folders.warnings == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/x"), "[Errno 28] No space left on device: '/x'"),
        (CrashkitError("/x is not a folder", next_step="remove it"), "/x is not a folder next: remove it"),
        (ValueError("odd"), "ValueError: odd"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_what_goes_wrong_in_the_child_is_told(error: BaseException, words: str) -> None:
    def fail() -> None:
        raise error

    assert make_within(LONG, fail) == words


def test_a_child_that_dies_is_told() -> None:
    assert make_within(LONG, lambda: os.kill(os.getpid(), 9)) == "the process that tried died"


def test_the_child_holds_nothing_of_its_parent_and_leaves_nothing(tmp_path: Path) -> None:
    before = descriptors()
    held = tmp_path / "held"
    assert make_within(LONG, lambda: held.write_text(str(len(list(Path("/proc/self/fd").iterdir()))))) == ""
    # The way to answer, and what lists them.
    assert int(held.read_text()) <= 3
    assert descriptors().items() <= before.items()


# -- GPU cores, whose folder the driver does not make


def test_the_folder_of_cores_is_the_one_that_the_driver_writes_to(tmp_path: Path) -> None:
    folders = make(tmp_path, core_file=f"{tmp_path}/crash/%h/{NAME}")
    assert folders.core_file == f"{tmp_path}/crash/%h/{NAME}"
    assert mode_of(tmp_path / "crash" / HOST) == 0o700


def test_the_folder_of_the_users_own_file_is_made(tmp_path: Path) -> None:
    folders = make(tmp_path, core_file=f"{tmp_path}/cores/%h/core.%p")
    assert (tmp_path / "cores" / HOST).is_dir()
    assert folders.warnings == []


def test_a_folder_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "crash" / HOST).mkdir(parents=True, mode=0o755)
    assert make(tmp_path, core_file=f"{tmp_path}/crash/%h/{NAME}").warnings == []
    assert mode_of(tmp_path / "crash" / HOST) == 0o755


@pytest.mark.parametrize("template", ["| gzip > core.%h", "fifo", ""])
def test_a_core_without_a_folder_needs_none(tmp_path: Path, template: str) -> None:
    if template == "fifo":
        template = str(tmp_path / "fifo")
        os.mkfifo(template)
    folders = make(tmp_path, core_file=template)
    assert folders.warnings == []
    assert not (tmp_path / "crash" / HOST).exists()


@pytest.mark.parametrize("template", ["%p/core", "file/below/core"])
def test_the_users_folder_that_cannot_be_made_is_named_and_the_name_stays(tmp_path: Path, template: str) -> None:
    (tmp_path / "file").touch()
    folders = make(tmp_path, core_file=f"{tmp_path}/{template}")
    (warning,) = folders.warnings
    # The words are upstream's.
    assert warning.startswith(f"Failed to create CUDA coredump directory {(tmp_path / template).parent}: ")
    assert folders.core_file == f"{tmp_path}/{template}"


def test_a_link_in_a_shared_crash_folder_gets_no_cores_and_no_dumps(tmp_path: Path, fallback: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "crash").mkdir()
    (tmp_path / "crash" / HOST).symlink_to(tmp_path / "theirs")
    flight = f"{tmp_path}/crash/{HOST}/flight_recorder"
    folders = make(tmp_path, core_file=f"{tmp_path}/crash/%h/{NAME}", flight_folder=flight)
    assert folders.core_file == f"{fallback}/%h/{NAME}"
    assert mode_of(fallback / HOST) == 0o700
    assert folders.flight_folder == tmp_path / "crash" / "host" / "flight_recorder"
    assert list((tmp_path / "theirs").iterdir()) == []


def test_the_flight_recorders_folder_is_made_ahead(tmp_path: Path) -> None:
    flight = tmp_path / "crash" / HOST / "flight_recorder"
    assert make(tmp_path, flight_folder=str(flight)).flight_folder == flight
    assert mode_of(flight) == 0o700
