from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from sglang_crashkit.srt.server_args import in_place_of_crash_dump_env, set_crash_dump_env

NAMES = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
    "CUDA_COREDUMP_SHOW_PROGRESS",
    "CUDA_COREDUMP_GENERATION_FLAGS",
    "CUDA_COREDUMP_FILE",
    "CUDA_COREDUMP_PIPE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
}
OWN = "SGLANG_CRASHKIT_FLIGHT_FOLDER"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[MutableMapping[str, str]]:
    """The environment, with nothing in it that this is about."""
    monkeypatch.setattr(socket, "gethostname", lambda: "what-the-kernel-says")
    with patch.dict(os.environ, {"HOSTNAME": "what-the-shell-says"}, clear=True):
        yield os.environ


def args(folder: object) -> SimpleNamespace:
    return SimpleNamespace(crash_dump_folder=str(folder) if folder else None)


@pytest.mark.parametrize("folder", ["crash", None])
def test_another_servers_folder_of_dumps_is_not_taken_over(
    environ: MutableMapping[str, str], tmp_path: Path, folder: str | None
) -> None:
    environ[OWN] = "/theirs"
    set_crash_dump_env(args(folder and tmp_path / folder))
    assert environ.get(OWN) == (folder and f"{tmp_path}/crash/what-the-kernel-says/flight_recorder")


def test_pytorchs_other_name_for_the_recorders_size_is_the_users_word(
    environ: MutableMapping[str, str], tmp_path: Path
) -> None:
    environ["TORCH_FR_BUFFER_SIZE"] = "0"
    set_crash_dump_env(args(tmp_path))
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ


def test_without_a_crash_handler_the_recorder_is_left_alone(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    environ |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false"}
    set_crash_dump_env(args(tmp_path))
    assert environ.keys() & {"TORCH_NCCL_TRACE_BUFFER_SIZE", OWN} == set()
    assert "CUDA_COREDUMP_FILE" in environ


@pytest.mark.parametrize("folder", [None, ""])
def test_nothing_happens_without_a_crash_folder(environ: MutableMapping[str, str], folder: str | None) -> None:
    before = dict(environ)
    set_crash_dump_env(args(folder))
    assert environ == before


def test_each_variable_is_set_and_said(
    environ: MutableMapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    set_crash_dump_env(args(tmp_path))
    assert environ.keys() >= NAMES
    assert environ["CUDA_COREDUMP_FILE"] == f"{tmp_path}/%h/core.cuda.%t.%p"
    assert environ["CUDA_COREDUMP_PIPE"] == "/tmp/corepipe.cuda.%h.%p"
    assert environ["CUDA_COREDUMP_GENERATION_FLAGS"].split(",") == [
        "skip_nonrelocated_elf_images",
        "skip_global_memory",
        "skip_shared_memory",
        "skip_local_memory",
        "skip_constbank_memory",
    ]
    assert environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert environ["SGLANG_CRASHKIT_FLIGHT_FOLDER"] == f"{tmp_path}/what-the-kernel-says/flight_recorder"
    for name in NAMES:
        assert f"Auto-set {name}={environ[name]} (from --crash-dump-folder)" in caplog.messages


@pytest.mark.parametrize("name", sorted(NAMES - {"CUDA_COREDUMP_FILE"}))
@pytest.mark.parametrize("value", ["0", ""])
def test_what_the_user_set_stays(environ: MutableMapping[str, str], tmp_path: Path, name: str, value: str) -> None:
    environ[name] = value
    set_crash_dump_env(args(tmp_path))
    assert environ[name] == value
    assert environ.keys() >= NAMES


def test_the_folder_is_the_one_that_the_driver_writes_to(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        set_crash_dump_env(args(tmp_path / "new"))
    finally:
        os.umask(before)
    written_to = Path(environ["CUDA_COREDUMP_FILE"].replace("%h", "what-the-kernel-says")).parent
    assert written_to.is_dir()
    assert stat.S_IMODE(written_to.stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["what-the-kernel-says"]


def test_the_folder_of_the_users_own_file_is_created(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    environ["CUDA_COREDUMP_FILE"] = f"{tmp_path}/cores/%h/core.%p"
    set_crash_dump_env(args(tmp_path / "crash"))
    assert (tmp_path / "cores" / "what-the-kernel-says").is_dir()
    assert not (tmp_path / "crash").exists()


@pytest.mark.parametrize("template", ["core.%p", "| gzip > core.%h", "fifo"])
def test_a_core_without_a_folder_needs_none(environ: MutableMapping[str, str], tmp_path: Path, template: str) -> None:
    if template == "fifo":
        template = str(tmp_path / "fifo")
        os.mkfifo(template)
    environ["CUDA_COREDUMP_FILE"] = template
    before = sorted(tmp_path.iterdir())
    set_crash_dump_env(args(tmp_path / "crash"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_only_the_driver_can_name_is_an_error_that_names_it(
    environ: MutableMapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ["CUDA_COREDUMP_FILE"] = f"{tmp_path}/%p/core"
    set_crash_dump_env(args(tmp_path))
    assert f"{tmp_path}/%p/core" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_an_error_that_names_it(
    environ: MutableMapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    set_crash_dump_env(args(tmp_path / "file" / "below"))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert str(tmp_path / "file" / "below" / "what-the-kernel-says") in errors[0]
    assert environ.keys() >= NAMES


def test_a_folder_that_is_there_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "what-the-kernel-says"
    folder.mkdir(mode=0o755)
    set_crash_dump_env(args(tmp_path))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_link_in_a_shared_crash_folder_gets_no_cores(
    environ: MutableMapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "what-the-kernel-says").symlink_to(tmp_path / "theirs")
    set_crash_dump_env(args(tmp_path))
    safe = tmp_path / "temp" / f"sglang-crashkit-{os.geteuid()}"
    assert environ["CUDA_COREDUMP_FILE"] == f"{safe}/%h/core.cuda.%t.%p"
    assert environ["SGLANG_CRASHKIT_FLIGHT_FOLDER"] == f"{safe}/what-the-kernel-says/flight_recorder"
    assert (safe / "what-the-kernel-says").is_dir()
    assert "is not a folder of this user" in caplog.text


def test_arguments_of_another_shape_do_not_stop_the_server(environ: MutableMapping[str, str]) -> None:
    set_crash_dump_env(object())
    assert not environ.keys() & NAMES


def test_it_is_a_method_where_upstream_has_none(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    class ServerArgs:
        crash_dump_folder = str(tmp_path)
        _handle_crash_dump_env = set_crash_dump_env

    ServerArgs()._handle_crash_dump_env()
    assert environ.keys() >= NAMES


def test_upstreams_function_runs_only_when_the_kit_is_off(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    calls = []

    @in_place_of_crash_dump_env
    def handle_crash_dump_env(server_args: object) -> None:
        """Upstream's."""
        calls.append(server_args)

    handle_crash_dump_env(args(tmp_path))
    assert calls == []
    assert environ.keys() >= NAMES
    environ.clear()
    environ["SGLANG_CRASHKIT_ENABLED"] = "0"
    given = args(tmp_path)
    handle_crash_dump_env(given)
    set_crash_dump_env(given)
    assert calls == [given]
    assert not environ.keys() & NAMES
    assert handle_crash_dump_env.__name__ == "handle_crash_dump_env"
