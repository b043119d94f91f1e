"""The crash handler's process: ``python -m sglang_crashkit.handler``, started by the engine and never by hand.

It first leaves the server's process tree, so that a kill of the tree does not cost the evidence. The server reads its
standard output up to one line, which reports that the handler is ready and where it works, or why it is not ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import setproctitle

from sglang_crashkit.handler.folders import left_by_others, make_place
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.handler.unfinished import finish_abandoned, remove_runtime_folders
from sglang_crashkit.incident.marker import VANISHED
from sglang_crashkit.incident.store import parse_name
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.guarded_read import GuardedReader, guard_reads
from sglang_crashkit.kernel.private_files import FolderLock, write_private
from sglang_crashkit.kernel.stack_hooks import HANDLER_PID, read_handler_pid
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.redact import learn, redact_text, secrets_of_arguments, secrets_of_mapping
from sglang_crashkit.settings import Settings, fallback_folder
from sglang_crashkit.visible import visible

logger = logging.getLogger("sglang_crashkit.handler")

#: The longest wait for the first child, which only writes a small file, in seconds.
_FIRST_CHILD_SECS = 5.0
#: The log's size limit: a server may crash at every start and write a few lines each time, or fail once a second.
_MAX_LOG_BYTES = 1 << 20
_MAX_RECORD = 1 << 16


def main() -> int:
    """Run until the server is gone and its incident is complete."""
    parser = argparse.ArgumentParser(prog="sglang_crashkit.handler", description=__doc__)
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--crash-folder")
    parser.add_argument("--core-file", default="")
    parser.add_argument("--flight-folder", default="")
    args = parser.parse_args()
    alive, closed_at_its_end = os.pipe()
    handler_pid = os.fork()
    if handler_pid:
        # The first child exits at once, so that the server is not the handler's parent. The server waits for that exit:
        # from then on, its processes can read here which process they let trace them.
        with contextlib.suppress(OSError):
            write_private(args.runtime / HANDLER_PID, str(handler_pid).encode())
        os._exit(0)
    # An orchestrator that ends the server signals the whole group or container, but evidence is written after that.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    # The handler reaps its own children, even if it inherited another disposition.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    setproctitle.setproctitle("sglang::crash_handler")
    os.close(closed_at_its_end)
    # Wait for the first child to exit: it must not write into the runtime folder while this process removes that.
    select.select([alive], [], [], _FIRST_CHILD_SECS)
    os.close(alive)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_if_own, args.runtime)
        try:
            return _serve(args, undo)
        except Exception as error:
            # Clean up before the server learns that there is no handler. The answer must be one line.
            undo.close()
            _answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
            logger.exception("the crash handler cannot work")
            return 1


def _serve(args: argparse.Namespace, undo: contextlib.ExitStack) -> int:
    # Secrets in the server's options and environment variables must not be written anywhere.
    learn(secrets_of_mapping(os.environ) | secrets_of_arguments(procfs.read_cmdline(args.server_pid)))
    place = make_place(args.crash_folder, args.runtime, args.core_file, args.flight_folder)
    if args.core_file:
        os.environ["CUDA_COREDUMP_FILE"] = place.core_file
    # The lock shows other handlers that the spool is in use.
    lock = FolderLock(place.spool)
    undo.callback(lock.release)
    with contextlib.suppress(OSError):
        lock.acquire()
    undo.push(contextlib.suppress(OSError))
    undo.callback(place.spool.rmdir)
    mailbox = Mailbox(socket.socket(fileno=args.socket_fd))
    guard_reads(GuardedReader())
    settings = Settings.from_environ()
    handler = CrashHandler(args.server_pid, mailbox, place, settings)
    is_heard = _answer(
        host_folder=str(place.host_folder),
        spool=str(place.spool),
        core_file=place.core_file,
        flight_folder=str(place.flight_folder or ""),
        warnings=place.warnings,
    )
    logging.basicConfig(
        handlers=[LogFile(place.host_folder / "crash_handler.log")],
        level=logging.INFO,
        format="[%(asctime)s crash_handler] %(levelname)s %(message)s",
    )
    if not is_heard:
        logger.info("server %d did not wait for its crash handler", args.server_pid)
        return 0
    say = handler.session.log.say
    # An earlier server on this host may have left incidents in each of these.
    for folder in dict.fromkeys([place.host_folder, fallback_folder() / place.host_folder.name, fallback_folder()]):
        try:
            for path in finish_abandoned(folder / "incidents", args.runtime.parent, settings.disk):
                logger.info("incident %s of a killed crash handler is finished", path)
                if (name := parse_name(path.name)) is not None and name.kind == VANISHED:
                    say(f"an earlier server on this host ended without a report: incident {path}")
            handler.session.commands.catch_up(folder / "incidents")
        except Exception:
            # An error with another handler's leftovers must not keep this handler from watching its server.
            logger.exception("the unfinished incidents in %s could not be processed", folder)
    remove_runtime_folders(args.runtime.parent)
    if left := left_by_others():
        say(left)
    # From here on, `CrashHandler.run` removes the folders: while the server lives, its ranks use them.
    undo.pop_all()
    handler.run()
    return 0


def _remove_if_own(runtime: Path) -> None:
    """Remove the runtime folder, unless the server gave up this handler and started another one in the same place."""
    if read_handler_pid(runtime) == os.getpid():
        shutil.rmtree(runtime, ignore_errors=True)


def _answer(**fields: Any) -> bool:
    """Report to the server in one line of JSON whether this handler is ready; return whether the line was written."""
    try:
        os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")
    except OSError:
        return False
    return True


class LogFile(logging.Handler):
    """Redirects this process's output to a file, and begins a new file when it is long: a server may run for months."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._begin()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            # Indent the lines of a record, so that none passes for another record.
            text = visible(redact_text(self.format(record)[:_MAX_RECORD])).replace("\n", "\n    ")
            self._written += sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            if self._written > _MAX_LOG_BYTES:
                self._begin()
        except (OSError, ValueError):
            # There is nowhere to report an error such as a full disk.
            return

    def _begin(self) -> None:
        self._written, descriptor = 0, -1
        with contextlib.suppress(OSError):
            if self._path.lstat().st_size > _MAX_LOG_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
        if descriptor < 0:
            descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
