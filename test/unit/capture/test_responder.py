from __future__ import annotations

import contextlib
import os
import signal
import socketserver
import threading
from pathlib import Path

import pytest

from sglang_crashkit.capture.responder import ask_responders
from sglang_crashkit.kernel.stack_hooks import HookFiles
from unit.support.targets import SLEEPER, functions_of, hooked, settle
from unit.support.waiting import LONG

TWO_THREADS = """
import threading
def wait_in_a_thread(): threading.Event().wait()
threading.Thread(target=wait_in_a_thread, name="worker").start()
"""


def sock(folder: Path, pid: int, start: int) -> Path:
    return HookFiles.of(folder, pid, start).socket


@pytest.fixture
def impostor(runtime: Path):
    """Listen where this process would answer, and answer as it is told."""

    def make(answer: bytes) -> Path:
        class Impostor(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                # The client may hang up on a part of the answer.
                with contextlib.suppress(OSError):
                    self.request.recv(64)
                    self.request.sendall(answer)

        server = stack.enter_context(socketserver.UnixStreamServer(str(runtime / "impostor.sock"), Impostor))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        thread.start()
        return runtime / "impostor.sock"

    with contextlib.ExitStack() as stack:
        yield make


def test_a_process_names_its_threads_and_what_each_does(runtime: Path) -> None:
    with hooked(runtime, TWO_THREADS + SLEEPER) as target:
        settle(target.pid, "S")
        (sample,) = ask_responders({target.pid: sock(runtime, target.pid, target.start_ticks)}, LONG)
    assert (sample.problem, sample.source) == ("", "in-process")
    assert sample.threads
    main, worker = sorted(sample.threads, key=lambda thread: thread.name)
    assert (main.name, main.native_id) == ("MainThread", target.pid)
    assert [frame.function for frame in main.frames] == ["inner_function", "outer_function", "<module>"]
    assert main.frames[0].line > 0
    assert worker.name == "worker"
    assert worker.native_id not in (None, target.pid)
    assert ("threading.py", "wait") in {(frame.file, frame.function) for frame in worker.frames}
    # The thread that answers is not among them.
    assert "describe_threads" not in functions_of(sample.threads)


def test_a_process_that_was_stopped_answers_once_it_goes_on(runtime: Path) -> None:
    with hooked(runtime, SLEEPER) as target:
        sockets = {target.pid: sock(runtime, target.pid, target.start_ticks)}
        os.kill(target.pid, signal.SIGSTOP)
        settle(target.pid, "T")
        assert ask_responders(sockets, 0.1)[0].threads == ()
        os.kill(target.pid, signal.SIGCONT)
        # The client that asked before has hung up, and is not waited for.
        assert ask_responders(sockets, LONG)[0].threads


@pytest.mark.parametrize("answer", [b"", b"rubbish", b"{}", b"[]", b'[{"frames": []}]', b"[" * 100_000])
def test_rubbish_is_named(impostor, answer: bytes) -> None:
    (sample,) = ask_responders({os.getpid(): impostor(answer)}, LONG)
    assert not sample.threads
    assert sample.problem


def test_whoever_listens_in_a_processs_place_is_not_asked(impostor) -> None:
    (sample,) = ask_responders({1: impostor(b"[]")}, LONG)
    assert "No such process" in sample.problem
