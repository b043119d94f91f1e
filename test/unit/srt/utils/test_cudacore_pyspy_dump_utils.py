from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from sglang_crashkit.srt import server_args
from sglang_crashkit.srt.utils import cudacore_pyspy_dump_utils as dump_utils
from unit.srt.conftest import Listener
from unit.support.waiting import child


def process_of(pid: int = 2**22 + 1, cwd: str | Exception = "/work") -> Any:
    """Return what the functions ask of ``psutil.Process``."""
    return SimpleNamespace(pid=pid, cwd=mock.Mock(side_effect=[cwd]))


@pytest.fixture(autouse=True)
def no_core_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_COREDUMP_PIPE", raising=False)
    # What a launch in another test of this process set.
    monkeypatch.setattr(server_args, "set_here", {})
    monkeypatch.setenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "1")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    processes = [process_of(2**22 + 1), process_of(2**22 + 2)]
    monkeypatch.setattr(dump_utils, "collect_scheduler_processes", lambda: processes)
    return processes


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each succeeds."""
    seen: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        assert "shell" not in options
        assert 0 < options["timeout"] <= 5
        seen.append(command[1:])
        return SimpleNamespace(stdout=f"stack of {command[-1]}")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


# -- which processes


def test_schedulers_are_told_by_their_titles() -> None:
    with contextlib.ExitStack() as stack:
        titles = ("sglang::scheduler_TP0", "sglang::scheduler", "sglang::detokenizer", "not sglang::scheduler")
        pids = [stack.enter_context(child(SLEEPER, title=title)).pid for title in titles]
        assert {process.pid for process in dump_utils.collect_scheduler_processes()} == set(pids[:2])


# -- py-spy


def test_without_schedulers_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dump_utils, "collect_scheduler_processes", list)
    dump_utils.pyspy_dump_schedulers(scheduler_only=True)
    dump_utils.diagnose_schedulers()
    assert commands == []
    assert caplog.messages == [
        "No sglang scheduler processes found for py-spy dump.",
        "No live scheduler processes found; skipping py-spy and CUDA coredump.",
    ]


def test_all_together_have_a_deadline(two: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "0.1")
    slept: list[float] = []

    def hang(command: list[str], *, timeout: float, **_options: object) -> None:
        slept.append(timeout)
        time.sleep(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    started = time.monotonic()
    dump_utils.pyspy_dump_schedulers(scheduler_only=True)
    assert time.monotonic() - started < 20
    assert len(slept) == 1


SLEEPER = "ready(); pause()"


# -- the crash handler comes first


@pytest.mark.parametrize("answer", [{"captured": 4, "incident": "abc"}, {"captured": 0, "incident": None}, {}])
def test_the_handler_is_asked_first(
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    commands: list[list[str]],
    two: list[Any],
    answer: dict[str, object],
) -> None:
    upstream = []
    hooked = dump_utils.on_pyspy_dump(lambda scheduler_only=False: upstream.append(scheduler_only))
    with Listener(short_folder / "sock", {"stacks_wanted": answer}) as handler:
        monkeypatch.setenv("SGLANG_CRASHKIT_SOCKET", str(handler.path))
        hooked(scheduler_only=True)
        assert handler.heard()["event"] == "stacks_wanted"
        dump_utils.pyspy_dump_schedulers(scheduler_only=True)
    assert upstream == ([] if answer.get("captured") else [True])
    assert len(commands) == (0 if answer.get("captured") else 2)


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_the_old_place_is_this_modules(
    two: list[Any], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, enabled: str
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", enabled)
    old = dump_utils.in_place_of_pyspy_dump(lambda: "upstream's")
    assert old() == ("upstream's" if enabled == "0" else None)
    assert len(commands) == int(enabled)
    old(scheduler_only=True)
    assert len(commands) == int(enabled) + 2


# -- GPU cores


@pytest.mark.parametrize(
    ("template", "cwd", "expected"),
    [
        (None, "/srv", "/srv/corepipe.cuda.{host}.{pid}"),
        # One whose folder is not known is looked for in that of this process.
        *((None, error, "{here}/corepipe.cuda.{host}.{pid}") for error in (psutil.AccessDenied(7), OSError())),
        ("/tmp/%h.%p.%t", "/srv", "/tmp/{host}.{pid}.123"),
    ],
)
def test_where_the_pipe_is(
    monkeypatch: pytest.MonkeyPatch, template: str | None, cwd: str | Exception, expected: str
) -> None:
    if template is not None:
        monkeypatch.setenv("CUDA_COREDUMP_PIPE", template)
    monkeypatch.setattr(time, "time", lambda: 123.9)
    process = process_of(2**22 + 1, cwd=cwd)
    whole = expected.format(host=os.uname().nodename, pid=process.pid, here=Path.cwd())
    assert dump_utils._resolve_cuda_coredump_pipe_path(process) == Path(whole)


def test_the_time_in_a_pipes_name_is_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_COREDUMP_PIPE", f"{tmp_path}/pipe.%p.%t")
    pipe = tmp_path / f"pipe.{os.getpid()}.1700000000"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert dump_utils._resolve_cuda_coredump_pipe_path(process_of(os.getpid())) == pipe
    finally:
        os.close(reader)


def test_each_pipe_gets_a_byte(
    two: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_COREDUMP_PIPE", f"{tmp_path}/%p")
    readers = []
    for process in two:
        os.mkfifo(tmp_path / str(process.pid))
        readers.append(os.open(tmp_path / str(process.pid), os.O_RDONLY | os.O_NONBLOCK))
    assert dump_utils.trigger_cuda_user_coredump(scheduler_only=True) == 2
    assert [os.read(reader, 16) for reader in readers] == [b"1", b"1"]
    for reader in readers:
        os.close(reader)
    assert caplog.text.count("Triggered CUDA user coredump for PID ") == 2


def test_pipes_that_do_not_answer_are_named_one_by_one(
    two: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_COREDUMP_PIPE", f"{tmp_path}/%p")
    monkeypatch.delenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP")
    os.mkfifo(tmp_path / str(two[1].pid))
    dump_utils.trigger_cuda_user_coredump(scheduler_only=True)
    first, second = (f"for PID {process.pid}: {tmp_path / str(process.pid)}" for process in two)
    assert f"CUDA coredump pipe not found {first}. Ensure CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 was set" in caplog.text
    assert f"CUDA coredump pipe has no reader {second}" in caplog.text
    assert "CUDA user-triggered coredump is not enabled." in caplog.text


# -- both


@pytest.mark.parametrize("stacks", ["0", "1"])
@pytest.mark.parametrize("cores", ["0", "1"])
@pytest.mark.parametrize("answering", [0, 2])
def test_each_diagnostic_has_its_flag(monkeypatch: pytest.MonkeyPatch, stacks: str, cores: str, answering: int) -> None:
    done: list[object] = []
    monkeypatch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", stacks)
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", cores)
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "30")
    monkeypatch.setattr(dump_utils, "collect_scheduler_processes", lambda: [process_of()])
    for name, what in (("pyspy_dump_schedulers", "stacks"), ("trigger_cuda_user_coredump", "cores")):
        monkeypatch.setattr(dump_utils, name, lambda scheduler_only, what=what: done.append(what) or answering)
    monkeypatch.setattr(time, "sleep", done.append)
    dump_utils.diagnose_schedulers()
    waits = cores == "1" and answering
    assert done == ["stacks"] * int(stacks) + ["cores"] * int(cores) + ([30.0] if waits else [])
