from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.model.sample import parse_pyspy
from sglang_crashkit.srt import responder
from sglang_crashkit.srt.paths import shorten
from unit.waiting import LONG, child, wait_until


def ask(path: Path, question: bytes = b"stacks") -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LONG)
        connection.connect(str(path))
        connection.sendall(question + b"\n")
        answer = b""
        while chunk := connection.recv(1 << 16):
            answer += chunk
        return answer


@pytest.fixture
def path(short_folder: Path):
    listener = responder.start(short_folder / "sock")
    yield short_folder / "sock"
    responder.stop(listener)


def test_all_threads_but_the_asked_one_are_described(path: Path) -> None:
    done = threading.Event()
    worker = threading.Thread(target=done.wait, name="worker")
    worker.start()
    try:
        threads = {thread.name: thread for thread in parse_pyspy(ask(path).decode())}
    finally:
        done.set()
        worker.join()
    assert "crashkit-stacks" not in threads
    assert threads["worker"].native_id == worker.native_id
    assert threads["worker"].frames[0].function == "wait"
    assert {"ask", "test_all_threads_but_the_asked_one_are_described"} <= {
        frame.function for frame in threads["MainThread"].frames
    }


def test_it_answers_again_and_others_at_once(path: Path) -> None:
    # One that asks and never reads is given up; those after it have their answer.
    with socket.socket(socket.AF_UNIX) as idle:
        idle.connect(str(path))
        idle.sendall(b"stacks\n")
        for _ in range(5):
            assert parse_pyspy(ask(path).decode())


def test_whatever_goes_wrong_it_answers_the_next_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(responder, "describe_threads", lambda: 1 / 0)
        assert ask(path) == b""
    assert parse_pyspy(ask(path).decode())


@pytest.mark.parametrize(("code", "status"), [("exit 3", 3 << 8), ("kill -9 $$", 9), ("kill -37 $$", 37)])
def test_it_says_how_a_child_ended_and_leaves_it_to_be_reaped(path: Path, code: str, status: int) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {code}"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        # That it lives, or is no child, is no answer.
        assert ask(path, b"exit %d" % process.pid) == b""
        assert ask(path, b"exit 1") == b""
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ask(path, b"exit %d" % process.pid) == b"%d" % status
        assert ask_exit(path, os.getpid(), process.pid, LONG) == ExitStatus.from_wait_status(status)
        assert process.wait(LONG) == (status >> 8 or -status)
    assert ask_exit(path, os.getpid(), process.pid, LONG) is None


@pytest.mark.parametrize("question", [b"", b"exit", b"exit x", b"other", b"\xff" * 60])
def test_what_it_does_not_understand_it_does_not_answer(path: Path, question: bytes) -> None:
    assert ask(path, question) == b""
    assert parse_pyspy(ask(path).decode())


def test_a_taken_path_leaves_no_thread(path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="Address already in use"):
        responder.start(path)
    assert threading.active_count() == before


def test_its_thread_ends_with_its_socket(short_folder: Path) -> None:
    before = set(threading.enumerate())
    listener = responder.start(short_folder / "another")
    (thread,) = set(threading.enumerate()) - before
    responder.stop(listener)
    thread.join(LONG)
    assert not thread.is_alive()
    assert listener.fileno() < 0


def test_it_says_once_that_the_handler_is_gone_and_answers_on(short_folder: Path) -> None:
    told: list[str] = []
    with child("ready(); pause()") as handler:
        pidfd = os.pidfd_open(handler.pid)
        watched = {pidfd: lambda: told.append(threading.current_thread().name) is not None}
        listener = responder.start(short_folder / "watching", watched)
        try:
            assert parse_pyspy(ask(short_folder / "watching").decode())
            assert told == []
            handler.kill()
            wait_until(lambda: told, "it notices")
            assert parse_pyspy(ask(short_folder / "watching").decode())
        finally:
            responder.stop(listener)
            os.close(pidfd)
    assert told == ["crashkit-stacks"]


def test_paths_are_those_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["", "/a", "/a/b/", "/c"])
    assert shorten("/a/b/sglang/x.py") == "sglang/x.py"
    assert shorten("/a/other.py") == "other.py"
    assert shorten("/elsewhere/y.py") == "/elsewhere/y.py"
    assert shorten("<string>") == "<string>"
