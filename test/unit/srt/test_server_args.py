from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from sglang_crashkit.srt.server_args import (
    crash_dump_environ,
    in_place_of_crash_dump_env,
    set_crash_dump_env,
    withdraw_crash_dump_env,
)

NAMES = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
    "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION",
    "CUDA_COREDUMP_SHOW_PROGRESS",
    "CUDA_COREDUMP_GENERATION_FLAGS",
    "CUDA_COREDUMP_FILE",
    "CUDA_COREDUMP_PIPE",
    "TORCH_FR_BUFFER_SIZE",
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


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
@pytest.mark.parametrize("value", ["", " ", "many", "0", "0x7", "99999999999"])
def test_a_size_that_would_hang_pytorch_counts_as_unset(
    environ: MutableMapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    environ[name] = value
    set_crash_dump_env(args(tmp_path))
    # std::stoi takes what it can of a number. PyTorch's other name for the size counts, too.
    is_left = value in ("0", "0x7")
    sizes = {one: environ[one] for one in environ if one.endswith("_BUFFER_SIZE")}
    assert sizes == ({name: value} if is_left else {"TORCH_FR_BUFFER_SIZE": "2000"})
    assert (f"{name}={value!r} would hang PyTorch's gloo" in caplog.text) != is_left


@pytest.mark.parametrize("server_args", [args(None), args(""), object()])
def test_nothing_happens_without_a_crash_folder(environ: MutableMapping[str, str], server_args: object) -> None:
    before = dict(environ)
    # Another server's is not taken over.
    environ[OWN] = "/theirs"
    set_crash_dump_env(server_args)
    assert environ == before


def test_each_variable_is_set_and_said(
    environ: MutableMapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    environ[OWN] = "/theirs"
    # A relative folder is the same for every process.
    monkeypatch.chdir(tmp_path)
    set_crash_dump_env(args("crash"))
    assert environ.keys() >= NAMES
    assert environ["CUDA_COREDUMP_FILE"] == f"{tmp_path}/crash/%h/core.cuda.%t.%p"
    assert environ["CUDA_COREDUMP_PIPE"] == "/tmp/corepipe.cuda.%h.%p"
    assert environ["CUDA_COREDUMP_GENERATION_FLAGS"].split(",") == [
        "skip_nonrelocated_elf_images",
        "skip_global_memory",
        "skip_shared_memory",
        "skip_local_memory",
        "skip_constbank_memory",
    ]
    # Only the GPU's part is wanted: for the other the driver aborts the process.
    assert environ["CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION"] == "0"
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert environ[OWN] == f"{tmp_path}/crash/what-the-kernel-says/flight_recorder"
    for name in NAMES:
        assert f"Auto-set {name}={environ[name]} (from --crash-dump-folder)" in caplog.messages
    assert OWN not in caplog.text


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ([], {*NAMES, OWN}),
        (["SGLANG_CRASHKIT_ENABLED"], set()),
        (["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"], {"TORCH_FR_BUFFER_SIZE", OWN}),
        # Without a crash handler the recorder is left alone.
        (["SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH"], set()),
    ],
)
def test_upstreams_function_runs_only_where_left_to_it(
    environ: MutableMapping[str, str], tmp_path: Path, switches: list[str], expected: set[str]
) -> None:
    calls = []

    @in_place_of_crash_dump_env
    def handle_crash_dump_env(server_args: object) -> None:
        """Upstream's, from 0.5.13 on."""
        calls.append(server_args)

    environ |= dict.fromkeys(switches, "0")
    given = args(tmp_path / "crash")
    handle_crash_dump_env(given)
    set_crash_dump_env(given)
    assert calls == [given] * bool(switches)
    assert environ.keys() & {*NAMES, OWN} == expected
    # The crash folder is not touched.
    assert list(tmp_path.iterdir()) == []
    assert handle_crash_dump_env.__name__ == "handle_crash_dump_env"


def test_a_program_gives_what_it_starts_later_none_of_it(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    before = dict(environ)
    set_crash_dump_env(args(tmp_path))
    launched = dict(environ)
    for _ in range(2):
        withdraw_crash_dump_env()
        assert environ == before
    # Its own look for cores still knows where the driver of a rank listens.
    assert crash_dump_environ() == launched
    # The next launch has it again.
    set_crash_dump_env(args(tmp_path))
    assert environ == launched


def test_what_the_user_set_or_changed_is_not_withdrawn(environ: MutableMapping[str, str], tmp_path: Path) -> None:
    environ["CUDA_COREDUMP_PIPE"] = "theirs"
    set_crash_dump_env(args(tmp_path))
    environ["CUDA_COREDUMP_SHOW_PROGRESS"] = "0"
    withdraw_crash_dump_env()
    assert {name: environ[name] for name in environ if name.startswith(("CUDA_", "TORCH_", "SGLANG_"))} == {
        "CUDA_COREDUMP_PIPE": "theirs",
        "CUDA_COREDUMP_SHOW_PROGRESS": "0",
    }


def test_another_server_of_a_program_has_its_own(
    environ: MutableMapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_crash_dump_env(args(tmp_path / "first"))
    caplog.set_level(logging.INFO)
    set_crash_dump_env(args(tmp_path / "second"))
    assert environ["CUDA_COREDUMP_FILE"] == f"{tmp_path}/second/%h/core.cuda.%t.%p"
    # What stays as it was is not said again.
    assert [name for name in NAMES if f"Auto-set {name}=" in caplog.text] == ["CUDA_COREDUMP_FILE"]
    set_crash_dump_env(args(None))
    assert not environ.keys() & {*NAMES, OWN}
