"""A thread of this process that tells the crash handler the stacks of all others, and how its children ended.

It sleeps until it is asked, and needs the interpreter lock for as long as it answers. See `capture.responder` for the
other end. Meanwhile it waits for whatever else it is given.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_crashkit.capture.responder import EXIT, STACKS, peer_of
from sglang_crashkit.srt.paths import shorten

_ANSWER_SECS = 2.0
_PAUSE_SECS = 0.1
_BACKLOG = 8
_NAME = "crashkit-stacks"


def start(
    path: Path,
    watched: Mapping[int, Callable[[], bool]] | None = None,
) -> socket.socket:
    """Listen at `path` and answer in a thread of its own, until `stop`; return the socket, which is the thread's.

    Args:
        path: where to listen.
        watched: more descriptors, open until `stop`, and what is called in the thread, which lives on, when one has
            something to read; one for which that returns False is watched no longer.

    Raises:
        OSError: the path is taken or too long.
        RuntimeError: the system gives no thread.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        threading.Thread(target=_answer_all, args=(listener, dict(watched or {})), name=_NAME, daemon=True).start()
    except BaseException:
        listener.close()
        raise
    return listener


def stop(listener: socket.socket) -> None:
    """End the thread, which closes the socket."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)


def describe_threads() -> list[dict[str, Any]]:
    """Return the stacks of all Python threads but the caller's, in the form of ``py-spy dump --json``."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    frames: dict[int, FrameType] = sys._current_frames()
    threads = []
    for ident, frame in frames.items():
        if ident == threading.get_ident():
            continue
        thread = known.get(ident)
        stack = [(one.f_code.co_name, one.f_code.co_filename, line or 0) for one, line in traceback.walk_stack(frame)]
        threads.append(
            {
                "thread_name": thread.name if thread else None,
                "os_thread_id": thread.native_id if thread else None,
                "frames": [{"name": name, "filename": shorten(file), "line": line} for name, file, line in stack],
            }
        )
    return threads


def _answer_all(listener: socket.socket, watched: Mapping[int, Callable[[], bool]]) -> None:
    poller, own = select.poll(), listener.fileno()
    for descriptor in (own, *watched):
        poller.register(descriptor, select.POLLIN)
    with listener:
        while True:
            ready = {descriptor for descriptor, _events in poller.poll()}
            for descriptor in ready - {own}:
                if not watched[descriptor]():
                    poller.unregister(descriptor)
            if own in ready and not _answer_one(listener):
                return


def _answer_one(listener: socket.socket) -> bool:
    """Answer who asks; say whether others may ask."""
    try:
        connection, _address = listener.accept()
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EBADF):
            # It was shut down or closed.
            return False
        # No descriptor was left; there may be one again.
        time.sleep(_PAUSE_SECS)
        return True
    with connection:
        _answer(connection)
    return True


def _answer(connection: socket.socket) -> None:
    try:
        if peer_of(connection)[1] in (os.geteuid(), 0):
            connection.settimeout(_ANSWER_SECS)
            # As short as it is, it comes as a whole.
            question, _, argument = connection.recv(64).strip().partition(b" ")
            if question == STACKS:
                connection.sendall(json.dumps(describe_threads()).encode())
            elif question == EXIT:
                connection.sendall(b"%d" % _wait_status_of(int(argument)))
    except Exception:  # noqa: BLE001, S110 - whatever goes wrong, the next one is answered, and the log is the server's
        pass


def _wait_status_of(child: int) -> int:
    """Return how a child ended, which stays to be reaped by whoever started it.

    Raises:
        ChildProcessError: it is none, or was reaped.
        ValueError: it lives.
    """
    result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        raise ValueError(child)
    if result.si_code == os.CLD_EXITED:
        return result.si_status << 8
    return result.si_status | (0x80 if result.si_code == os.CLD_DUMPED else 0)
