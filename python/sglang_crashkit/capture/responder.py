"""Query processes: each has a thread that answers at a socket in the runtime folder.

There are three questions. The stacks come in the format of ``py-spy dump --json``, without permission to trace. The
collectives come as `capture.flight_request` describes. The exit of a child comes as a status of waitpid(2), which the
kernel gives to a parent or a tracer only. A stopped process, or one whose GIL is held, connects but never answers.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.model.sample import Gil, Sample, Thread, parse_pyspy

#: The questions, each followed by a newline; after ``exit`` comes the pid of the child.
STACKS, EXIT, COLLECTIVES = b"stacks", b"exit", b"collectives"

_MAX_BYTES = 16 << 20
_PEER = struct.Struct("3i")  # pid, uid, gid


class Conversation:
    """A question that was sent to process `pid` at its socket, and its answer so far.

    Raises:
        OSError: the process does not listen there.
    """

    def __init__(self, path: Path, pid: int, question: bytes) -> None:
        self.pid, self.answer = pid, bytearray()
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self.connection = socket.socket(socket.AF_UNIX, kind)
        try:
            self.connection.connect(str(path))
            # The kernel remembers who listened: one that was forked since is not asked in the process's place.
            if peer_of(self.connection)[0] != pid:
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
            self.connection.sendall(question + b"\n")
        except OSError:
            self.connection.close()
            raise

    def read(self) -> str | None:
        """Read the next part; return None while the answer is incomplete, then why it failed, empty if it did not."""
        try:
            chunk = self.connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError as error:
            return error.strerror or str(error)
        if not chunk:
            return "" if self.answer else "it had no answer"
        self.answer += chunk
        return "it answered more than 16 MiB" if len(self.answer) > _MAX_BYTES else None


def ask_responders(sockets: Mapping[int, Path], deadline_secs: float) -> list[Sample]:
    """Ask all processes for their stacks, in parallel; return a result for each, in the order given."""
    started = time.monotonic()
    results: dict[int, Sample] = {}

    def finish(pid: int, answer: bytes | None, problem: str, gil: Gil = "") -> None:
        threads: tuple[Thread, ...] = ()
        if answer is not None:
            try:
                threads = parse_pyspy(answer.decode(errors="replace"))
            except ValueError as error:
                problem = str(error)
        seconds = round(time.monotonic() - started, 4)
        results[pid] = Sample(pid=pid, threads=threads, problem=problem, source="in-process", seconds=seconds, gil=gil)

    with selectors.DefaultSelector() as selector:
        for pid, path in sockets.items():
            try:
                conversation = Conversation(path, pid, STACKS)
            except OSError as error:
                finish(pid, None, f"{path.name}: {error.strerror or error}")
            else:
                selector.register(conversation.connection, selectors.EVENT_READ, conversation)
        while selector.get_map():
            remaining = max(0.0, started + deadline_secs - time.monotonic())
            ready = selector.select(remaining)
            if not ready and not remaining:
                # Even after the deadline, answers that came while this process could not run are read first.
                break
            for key, _events in ready:
                conversation = key.data
                reason = conversation.read()
                if reason is not None:
                    selector.unregister(conversation.connection)
                    conversation.connection.close()
                    finish(conversation.pid, None if reason else bytes(conversation.answer), reason)
        for key in list(selector.get_map().values()):
            key.data.connection.close()
            reason = f"no answer within {deadline_secs:g} s: the GIL is not to be had"
            finish(key.data.pid, None, reason, "taken")
    return [results[pid] for pid in sockets]


def ask_exit(path: Path, pid: int, child: int, deadline_secs: float) -> ExitStatus | None:
    """Ask process `pid`, at its socket, for the status of its child, which has exited.

    Returns:
        None if there is no answer within `deadline_secs`: it cannot be reached, is stuck, or has reaped the child.
    """
    try:
        with Conversation(path, pid, EXIT + b" %d" % child).connection as connection:
            connection.settimeout(deadline_secs)
            return ExitStatus.from_wait_status(int(connection.recv(16)))
    except (OSError, ValueError):
        return None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _gid = _PEER.unpack(raw)
    return pid, uid
