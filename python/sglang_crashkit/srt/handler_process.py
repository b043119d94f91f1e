"""Start the crash handler of this server, and let it end when the server ends."""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sglang_crashkit import protocol, settings
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import make_private_folder
from sglang_crashkit.srt.hooks import handler_pid, never_raises, request
from sglang_crashkit.srt.server_args import note_changed

logger = logging.getLogger(__name__)

#: Time limit for the start of the interpreter, in seconds.
START_SECS = 20.0
#: Time limit for the handler to report that it is ready after that, in seconds: longer than it waits for disks.
READY_SECS = 20.0
#: Time limit for the handler to remove its files at the server's end, in seconds.
_EXIT_SECS = 3.0
_MAX_BYTES = 1 << 16
#: The lowest descriptor that is not a standard stream.
_FIRST_FREE = 3
_CORE_FILE = "CUDA_COREDUMP_FILE"
#: The crash folder that this process gave its crash handler, and the paths that the handler answered with.
_kept: dict[str, Any] = {}
#: Held by the thread that starts a handler. A forked child gets a new lock.
_claim = threading.Lock()


def _begin_anew() -> None:
    """Forget the crash handler in a forked child: it is the parent's."""
    global _claim
    _claim = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_begin_anew)


def start(crash_folder: str | None) -> None:
    """Start the handler, unless it runs, and publish it to this process and its children by environment variables.

    The handler inherits none of the server's descriptors but the socket. If it does not get ready, the reason is logged
    in one line, and the server goes on without it. Only the handler accesses the crash folder, whose disk may not
    answer. Without a crash folder it uses a private folder in the temporary folder.
    """
    # Two starts at once would delete each other's socket.
    is_claimed = _claim.acquire(timeout=START_SECS + READY_SECS)
    try:
        socket_path = settings.socket_of(os.getpid())
        assert socket_path is not None
        known = settings.published(settings.SOCKET_VARIABLE)
        if (_kept or known == str(socket_path)) and protocol.is_reachable(known):
            _keep(crash_folder)
            return
        if unknown := settings.unknown_variables(os.environ):
            told = "crash kit: unknown variables have no effect: %s"
            logger.warning(told, ", ".join(unknown))
        # Values that are set already belong to the server that started this one.
        for name in (settings.SOCKET_VARIABLE, settings.SPOOL_VARIABLE):
            settings.withdraw(name)
        _kept.clear()
        folder = str(Path(crash_folder).absolute()) if crash_folder else None
        try:
            answer = _start(folder, socket_path)
        except (OSError, CrashkitError, subprocess.SubprocessError) as error:
            logger.warning("crash kit: no crash handler, so a crash of this server leaves no incident: %s", error)
            return
        for warning in answer["warnings"]:
            logger.warning("crash kit: %s", warning)
        settings.publish(settings.SOCKET_VARIABLE, str(socket_path))
        settings.publish(settings.SPOOL_VARIABLE, answer["spool"])
        _kept.update({name: answer[name] for name in ("core_file", "flight_folder")}, crash_folder=folder)
        _keep(crash_folder)
        atexit.unregister(announce_exit)
        atexit.register(announce_exit)
        logger.info("crash kit: incidents of this server go to %s", Path(answer["host_folder"]) / "incidents")
    finally:
        if is_claimed:
            _claim.release()


def _keep(crash_folder: str | None) -> None:
    """Direct GPU cores and flight recorders to where the handler looks for them, also those of a second server."""
    if crash_folder and _kept.get("crash_folder") not in (None, str(Path(crash_folder).absolute())):
        told = "crash kit: incidents of this program go to %s, the folder of its first server, not to %s"
        logger.warning(told, _kept["crash_folder"], crash_folder)
    for name in (settings.SOCKET_VARIABLE, settings.SPOOL_VARIABLE):
        # For the children: the program may have reset its environment since.
        settings.publish(name, settings.published(name))
    if _kept.get("core_file"):
        note_changed(_CORE_FILE, _kept["core_file"])
    if _kept.get("flight_folder"):
        note_changed(settings.FLIGHT_VARIABLE, _kept["flight_folder"])
    else:
        os.environ.pop(settings.FLIGHT_VARIABLE, None)


@never_raises
def announce_exit() -> None:
    """Announce to the handler that this process is about to end; wait 3 s at most while it removes its files."""
    path = Path(settings.published(settings.SOCKET_VARIABLE))
    if not _kept or not path.exists():
        return
    if request("exiting", _EXIT_SECS) is None:
        # The handler's marker stays. This file shows that the server ended in good order.
        (path.parent / settings.ENDED).touch(0o600)


@never_raises
def pid_below() -> int | None:
    """Return the pid of the crash handler if it is a child of this process, as it is of process 1 of a container."""
    pid = handler_pid()
    stat = procfs.read_stat(pid) if pid is not None else None
    return pid if stat is not None and stat.ppid == os.getpid() else None


def _start(crash_folder: str | None, socket_path: Path) -> dict[str, Any]:
    runtime = socket_path.parent
    for folder in (runtime.parent.parent, runtime.parent):
        make_private_folder(folder)
    shutil.rmtree(runtime, ignore_errors=True)
    make_private_folder(runtime)
    try:
        environ = dict(os.environ)
        if "PYTHONPATH" in environ:
            entries = environ["PYTHONPATH"].split(os.pathsep)
            environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)
        with (
            protocol.Mailbox.bind(socket_path) as bound,
            # A program may have closed its standard streams. The child needs their descriptors for its own streams.
            os.fdopen(fcntl.fcntl(bound, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE), "rb", buffering=0) as receiver,
        ):
            options = {
                "server-pid": os.getpid(),
                "socket-fd": receiver.fileno(),
                "runtime": runtime,
                "core-file": os.environ.get(_CORE_FILE, "") if crash_folder else "",
                "flight-folder": os.environ.get(settings.FLIGHT_VARIABLE, ""),
            } | ({"crash-folder": crash_folder} if crash_folder else {})
            with subprocess.Popen(
                [sys.executable, "-m", "sglang_crashkit.handler", *(f"--{k}={v}" for k, v in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[receiver.fileno()],
                start_new_session=True,
                # With -m, Python looks for modules in the working directory first, which is the user's.
                cwd="/",
                env=environ,
            ) as process:
                return _await_ready(process)
    except BaseException:
        # A handler that gets ready later finds that nothing reads its answer, and ends.
        shutil.rmtree(runtime, ignore_errors=True)
        raise


def _await_ready(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    try:
        # The child forks the handler and ends at once: this waits for the interpreter's start, not for the handler.
        process.wait(START_SECS)
    except BaseException:
        process.kill()
        raise
    assert process.stdout is not None
    text, deadline = b"", time.monotonic() + READY_SECS
    # Not select(2), which accepts no descriptor above 1023.
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    while len(text) < _MAX_BYTES:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise CrashkitError(f"it was not ready within {READY_SECS:g} s")
        chunk = os.read(process.stdout.fileno(), _MAX_BYTES)
        text += chunk
        for line in text[: text.rfind(b"\n") + 1].splitlines():
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise CrashkitError(answer["error"])
                return answer
        if not chunk:
            break
    last = text.decode(errors="replace").strip().splitlines()[-1:]
    raise CrashkitError(last[0] if last else f"it ended with status {process.returncode} before it was ready")
