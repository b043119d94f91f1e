"""Prepare a process of the server so that its stacks can be read without tracing it; see `kernel.stack_hooks`.

In SGLang, faulthandler writes a scheduler's fatal error to standard error. With the kit it writes to a private file,
for the incident; the server's main process copies the file to standard error as soon as the rank is dead.

A thread sleeps until the crash handler (`capture.responder`) asks it for the stacks of all other threads, for the
process's collectives, or how a child ended. In the main process it also writes the handler's messages to the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_crashkit.capture.responder import COLLECTIVES, EXIT, STACKS, peer_of
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.kernel.stack_hooks import (
    DEFAULT_SIGNAL,
    FAULT,
    HookFiles,
    StackHooks,
    describe,
    read_handler_pid,
)
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import SOCKET_VARIABLE, Settings, published, socket_of
from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.exception_record import tell_uncaught, watch_threads
from sglang_crashkit.srt.flight_recorder import describe_collectives, prepare_flight_recorder
from sglang_crashkit.srt.hooks import Function, after, after_construction, never_raises, notify, say, say_line, shorten
from sglang_crashkit.srt.log_handler import keep_log_records
from sglang_crashkit.srt.managers.loop_heartbeat import start_detokenizer_heartbeat, start_loop_heartbeat
from sglang_crashkit.srt.managers.rust_server import journal_rust_server
from sglang_crashkit.srt.managers.scheduler import watch_caught_exceptions
from sglang_crashkit.srt.managers.scheduler_heartbeat import known_gpu
from sglang_crashkit.srt.metrics import show_gauges

logger = logging.getLogger(__name__)

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h; the Yama module's
_MAX_BYTES = 1 << 18
_ANSWER_SECS = 2.0
_PAUSE_SECS = 0.1
_BACKLOG = 8
_THREAD = "crashkit-stacks"


@dataclass
class _State:
    """What this process has installed, and a forked child must undo."""

    signal: int
    descriptors: list[int]
    listener: socket.socket | None
    mailbox: socket.socket | None
    had_faulthandler: bool
    enabled_faulthandler: bool = False


_state: _State | None = None
_reported: set[Path] = set()


def on_configure_logger(configure: Function) -> Function:
    """Wrap ``configure_logger``, which a worker calls after it sets its title, and a launcher before any worker."""

    def launch_or_install(_result: Any, server_args: Any = None, *_args: Any, **_kwargs: Any) -> None:
        (crash_exit.state.launch or install_in_worker)(server_args)

    return after(configure, launch_or_install)


def on_tokenizer_worker(worker: type) -> type:
    """Extend ``TokenizerWorker`` in place: its hooks are installed after construction, when the ranks are ready."""

    def install(constructed: Any) -> None:
        crash_exit.note_started()
        start_loop_heartbeat(constructed)
        install_in_worker(getattr(constructed, "server_args", None))

    after_construction(worker, install)
    return worker


@never_raises
def install_in_worker(server_args: Any = None, *, title: str = "") -> None:
    """Install the hooks if this process is a worker of SGLang, by `title` or, if that is empty, its own title."""
    named = {"title": title} if title else {}
    # Not by setproctitle: asking it for the title rewrites the process's command line.
    title = title or procfs.read_title(os.getpid())
    if title.startswith(titles.PREFIX) and Settings.from_environ().enabled:
        notify("member", **named)
        tell_uncaught(known_gpu)
        watch_threads(of_all=True)
        keep_log_records(server_args, of_all=True)
        supervisor.join()
        prepare_flight_recorder()
        role = titles.role_of(title)
        if role == "detokenizer":
            start_detokenizer_heartbeat()
        elif role == "scheduler":
            watch_caught_exceptions()
            journal_rust_server(server_args)
        _install(takes_over=True)


@never_raises
def install_in_server() -> None:
    """Install the hooks of the server's main process. A user's program keeps its own use of faulthandler."""
    watch_threads(of_all=crash_exit.state.is_program)
    _install(takes_over=False)


@never_raises
def report_faults() -> None:
    """Copy to standard error, once for each worker, what faulthandler wrote when a fatal signal ended the worker.

    Call it in the server's main process; in any other process it does nothing.
    """
    own = socket_of(os.getpid())
    if own is None or not published(SOCKET_VARIABLE):
        return
    for path in sorted(own.parent.glob("*.fault")):
        if path in _reported or not path.stat().st_size:
            continue
        _reported.add(path)
        text = read_regular(path, _MAX_BYTES)
        heading = f"crash kit: process {path.name.partition('-')[0]} of this server wrote before it died:\n"
        say(heading.encode() + text)


def _install(*, takes_over: bool) -> None:
    global _state
    settings, socket_path = Settings.from_environ(), published(SOCKET_VARIABLE)
    if not (settings.enabled and settings.stacks and socket_path):
        return
    folder, stat = Path(socket_path).parent, procfs.read_stat(os.getpid())
    if stat is None or not folder.is_dir():
        return
    files = HookFiles.of(folder, stat.pid, stat.start_ticks)
    if _state is not None and files.description.exists():
        return
    if takes_over:
        # Not in a main process: it may be a user's program, which decides itself who may trace it.
        allow_tracing(folder)
    if _state is not None and _state.listener is not None:
        stop_answering(_state.listener)
        _state.listener = None
    _remove()
    state = _state = _State(0, [], None, None, faulthandler.is_enabled())
    # Not in a user's program: a runtime that it embeds, such as a JVM, may cause and handle faults on purpose.
    if takes_over or (crash_exit.state.is_program and not state.had_faulthandler):
        faulthandler.enable(file=_open(state, files.fault))
        state.enabled_faulthandler = True
    if not takes_over:
        try:
            state.mailbox = Mailbox.bind(files.say)
        except OSError as error:
            logger.warning("crash kit: hangs are not reported in this log: %s", error)
    state.listener = start_answering(files.socket, Mailbox(state.mailbox) if state.mailbox is not None else None)
    if procfs.catches_signal(stat.pid, DEFAULT_SIGNAL) or signal.getsignal(DEFAULT_SIGNAL) != signal.SIG_DFL:
        logger.warning("crash kit: signal %d is already in use in this process, so it writes no stacks", DEFAULT_SIGNAL)
    else:
        state.signal = DEFAULT_SIGNAL
        faulthandler.register(state.signal, file=_open(state, files.stack), all_threads=True, chain=False)
    main_thread = threading.main_thread().ident or 0
    path = tuple(root for root in sys.path if isinstance(root, str))
    hooks = StackHooks(stat.pid, stat.start_ticks, main_thread, state.signal, path)
    describe(folder, hooks)


def _say_all(mailbox: Mailbox) -> None:
    for message in mailbox.receive():
        if message.event == FAULT:
            report_faults()
        if message.event == "metrics":
            show_gauges(message.fields.get("gauges"))
        text = message.fields.get("text")
        if isinstance(text, str):
            say_line(text)


def _open(state: _State, path: Path) -> int:
    # Close-on-exec: programs that this process runs must not inherit it. Append mode: the handler truncates the file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    state.descriptors.append(descriptor)
    return descriptor


def allow_tracing(folder: Path) -> None:
    """Let the crash handler and its descendants trace this process even if Yama lets only ancestors do so."""
    pid = read_handler_pid(folder)
    if pid is not None:
        # Without Yama this fails with EINVAL, and the permission is not needed.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _leave_to_parent() -> None:
    """In a forked child, remove what the parent installed: the child must not write to the parent's files."""
    with contextlib.suppress(Exception):
        _remove()


os.register_at_fork(after_in_child=_leave_to_parent)


def _remove() -> None:
    global _state
    state, _state = _state, None
    if state is None:
        return
    if state.signal:
        faulthandler.unregister(state.signal)
    if state.enabled_faulthandler:
        faulthandler.disable()
        if state.had_faulthandler:
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                faulthandler.enable()
    for its in (state.listener, state.mailbox):
        if its is not None:
            its.close()
    for descriptor in state.descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def start_answering(path: Path, mailbox: Mailbox | None = None) -> socket.socket:
    """Listen at `path` and answer in a separate thread, until `stop_answering`; return the thread's socket.

    The texts of messages to `mailbox` are written to the log.

    Raises:
        OSError, RuntimeError: the path is taken or too long, or the system gives no thread.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        threading.Thread(target=_answer_all, args=(listener, mailbox), name=_THREAD, daemon=True).start()
    except BaseException:
        listener.close()
        raise
    return listener


def stop_answering(listener: socket.socket) -> None:
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


def _answer_all(listener: socket.socket, mailbox: Mailbox | None) -> None:
    poller, own = select.poll(), listener.fileno()
    poller.register(own, select.POLLIN)
    if mailbox is not None:
        poller.register(mailbox, select.POLLIN)
    with listener:
        while True:
            ready = {descriptor for descriptor, _events in poller.poll()}
            if mailbox is not None and ready - {own}:
                _say_all(mailbox)
            if own not in ready:
                continue
            try:
                connection, _address = listener.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):
                    # The socket was shut down or closed.
                    return
                # No descriptor is left; one may be free later.
                time.sleep(_PAUSE_SECS)
                continue
            with connection:
                _answer(connection)


def _answer(connection: socket.socket) -> None:
    try:
        if peer_of(connection)[1] in (os.geteuid(), 0):
            connection.settimeout(_ANSWER_SECS)
            # A question is short enough to arrive in one piece.
            question, _, argument = connection.recv(64).strip().partition(b" ")
            if question == STACKS:
                answer = json.dumps(describe_threads()).encode()
            elif question == COLLECTIVES:
                answer = describe_collectives()
            else:
                answer = b"%d" % supervisor.wait_status(int(argument)) if question == EXIT else b""
            # If the process that asked is gone, SIGPIPE must not end a user's program that does not ignore it.
            connection.sendall(answer, socket.MSG_NOSIGNAL)
    except Exception:  # noqa: BLE001, S110 - the next question must be answered, and the log is the server's
        pass
