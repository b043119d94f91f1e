from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.trigger import CoreRequest, NoCoreError, is_whole_core
from sglang_crashkit.kernel.procfs import open_files
from unit.capture.cuda_core import cuda_driver
from unit.capture.cuda_core.synthetic_core import core_bytes
from unit.support.waiting import spawned, wait_until

Start = Callable[..., CoreRequest]


ENABLED = {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process with a driver that answers one trigger, and return a request for its core."""
    stack = contextlib.ExitStack()

    def start_driver(name: str = "corepipe.%p", pipe: str | None = None) -> CoreRequest:
        written = tmp_path / name
        template = str(tmp_path / "core.cuda.%t.%p")
        argv = [sys.executable, cuda_driver.__file__, written, template]
        process = stack.enter_context(spawned(argv, cwd=tmp_path))
        environ = ENABLED | {"CUDA_COREDUMP_PIPE": pipe or str(written), "CUDA_COREDUMP_FILE": template}
        return CoreRequest(process.pid, environ)

    with stack:
        yield start_driver


def test_what_is_written_of_a_core_grows(tmp_path: Path) -> None:
    (tmp_path / "core.1").write_bytes(core_bytes())
    request = CoreRequest(os.getpid(), {"CUDA_COREDUMP_FILE": str(tmp_path / "core.%t")})
    assert not request.join()
    assert request.written == 0, "it was there before"
    path = tmp_path / "core.2"
    path.touch()
    sizes = [request.written]
    with path.open("r+b", buffering=0) as file:
        file.truncate(1 << 20)
        sizes.append(request.written)
        for start in (0, 1 << 19):
            file.seek(start)
            file.write(b"g" * 8192)
            sizes.append(request.written)
    assert sizes == sorted(set(sizes)), "each of the steps is seen, also where a hole is filled"


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ("switched off", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 was not set"),
        ("nothing", r"there is no pipe .*pipe\.\d+: CUDA was not initialised"),
        ("pipe", "it has no reader"),
        ("file", "is not a pipe of the process's own user"),
        ("link", "is not a pipe of the process's own user"),
    ],
)
def test_who_cannot_be_asked_is_left_alone_and_named(tmp_path: Path, there: str, why: str) -> None:
    pipe, victim = tmp_path / f"pipe.{os.getpid()}", tmp_path / "victim"
    victim.write_text("untouched")
    if there == "pipe":
        os.mkfifo(pipe)
    elif there in ("file", "link"):
        pipe.hardlink_to(victim) if there == "file" else pipe.symlink_to(victim)
    environ = {} if there == "switched off" else ENABLED
    request = CoreRequest(os.getpid(), environ | {"CUDA_COREDUMP_PIPE": str(tmp_path / "pipe.%p")})
    with pytest.raises(NoCoreError, match=why):
        request.send()
    assert request.leftover() == "no file appeared"
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize(("name", "template"), [("corepipe_host_%p", "left"), ("corepipe.%t.%p", "corepipe.%t.%p")])
def test_a_pipe_of_another_name_is_found_among_open_files(
    start: Start, tmp_path: Path, name: str, template: str
) -> None:
    # As with some drivers; an earlier process left one of the name that the driver's own would have.
    request = start(name=name, pipe=str(tmp_path / template))
    os.mkfifo(tmp_path / "left")
    # A driver holds its pipe open; here somebody writes to it already.
    with next(tmp_path.glob("corepipe*")).open("wb", buffering=0):
        wait_until(lambda: "corepipe" in str([path for _link, path in open_files(request.pid)]), "the driver opened it")
        request.send()
        assert wait_until(request.look, "the core is whole")


def test_nothing_more_of_an_ended_process_is_waited_for(tmp_path: Path) -> None:
    template = {"CUDA_COREDUMP_FILE": str(tmp_path / "core.%p")}
    request, path = CoreRequest(os.getpid(), template), tmp_path / f"core.{os.getpid()}"
    assert request.look(has_ended=True) is None
    path.write_bytes(core_bytes())
    assert CoreRequest(os.getpid(), template).look() is None, "it may grow still"
    assert request.look(has_ended=True) == path
    path.write_bytes(core_bytes()[:-1])
    with pytest.raises(NoCoreError, match="is no whole core"):
        request.look(has_ended=True)


def test_what_the_driver_wrote_by_itself_is_found(tmp_path: Path) -> None:
    request = CoreRequest(os.getpid(), {"CUDA_COREDUMP_FILE": str(tmp_path / "core.%t.%p")})
    assert request.written_since(0.0) is None
    for seconds in (1000, 3000, 2000):
        path = tmp_path / f"core.{seconds}.{os.getpid()}"
        path.touch()
        os.utime(path, (seconds, seconds))
    (tmp_path / f"core.4000.{os.getpid()}").symlink_to(path)
    assert request.written_since(1500.0) == tmp_path / f"core.3000.{os.getpid()}"
    assert request.written_since(5000.0) is None


def test_an_earlier_core_is_not_taken_for_the_new_one(start: Start, tmp_path: Path) -> None:
    request = start()
    old = tmp_path / f"core.cuda.1.{request.pid}"
    old.write_bytes(core_bytes())
    request.send()
    assert wait_until(request.look, "the core is whole") != old


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_pipe_of_another_user_is_not_written_to(start: Start, tmp_path: Path) -> None:
    request = start()
    os.chown(next(tmp_path.glob("corepipe*")), 65534, 65534)
    with pytest.raises(NoCoreError, match="is not a pipe of the process's own user"):
        request.send()


@pytest.mark.parametrize("template", ["| gzip > core", "fifo"])
def test_a_core_that_goes_elsewhere_cannot_be_watched(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert not CoreRequest(os.getpid(), ENABLED | {"CUDA_COREDUMP_FILE": template}).is_watchable
    assert CoreRequest(os.getpid(), ENABLED).is_watchable


@pytest.mark.parametrize("many_sections", [False, True])
def test_a_core_is_whole_with_its_last_byte(tmp_path: Path, many_sections: bool) -> None:
    path, data = tmp_path / "core", core_bytes(200, many_sections=many_sections)
    for size in (0, 10, 63, 64, 100, len(data) - 1):
        path.write_bytes(data[:size])
        assert not is_whole_core(path), size
    path.write_bytes(data)
    assert is_whole_core(path)


def test_what_is_no_core_is_none_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "core"
    no_offset = b"\x7fELF\x02\x01".ljust(40, b"\0") + b"\xff" * 8 + bytes(16)
    for hostile in (b"", no_offset, b"\x7fELF" + b"\xff" * 60, b"\x7fELF\x02\x01" + b"\xff" * 500, b"x" * 5000):
        path.write_bytes(hostile)
        assert not is_whole_core(path)
    assert not is_whole_core(tmp_path)
    assert not is_whole_core(tmp_path / "none")
    # The pipe has no writer.
    os.mkfifo(tmp_path / "pipe")
    assert not is_whole_core(tmp_path / "pipe")
    path.write_bytes(core_bytes())
    (tmp_path / "link").symlink_to(path)
    assert (is_whole_core(path), is_whole_core(tmp_path / "link")) == (True, False)
