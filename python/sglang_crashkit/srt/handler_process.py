"""Start the crash handler beside this server."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from sglang_crashkit.core import channel, procfs, settings
from sglang_crashkit.core.journal_place import is_safe_to_map, journal_folder
from sglang_crashkit.core.private_files import make_private_folder
from sglang_crashkit.errors import CrashkitError

logger = logging.getLogger(__name__)

_START_SECS = 20.0
#: A server that crashes at every start writes a few lines each time.
_MAX_LOG_BYTES = 1 << 20


def start(crash_folder: str | None) -> None:
    """Start the handler, and let this process and its children find it by environment variables.

    Its standard streams are its own, and it holds none of the server's descriptors but the socket: a program that reads
    the server's output sees its end when the server ends.

    Args:
        crash_folder: what the server was given as ``--crash-dump-folder``; a private folder in the temporary one where
            it was given none or cannot be written to.

    Raises:
        OSError: the socket cannot be made or Python cannot be started.
        CrashkitError: a folder on the way belongs to somebody else.
        subprocess.SubprocessError: the handler did not start.
    """
    pid = os.getpid()
    stat = procfs.read_stat(pid)
    assert stat is not None
    runtime = settings.runtime_folder(pid, stat.start_ticks)
    socket_path = settings.socket_path(pid, stat.start_ticks)
    if os.environ.get(settings.SOCKET_VARIABLE) == str(socket_path) and channel.is_reachable(str(socket_path)):
        return
    host_folder, spool = _make_folders(crash_folder, f".spool-{pid}-{stat.start_ticks}")
    journal = _make_journal_folder(host_folder, pid, stat.start_ticks) if crash_folder else None
    for folder in (runtime.parent.parent, runtime.parent):
        make_private_folder(folder)
    shutil.rmtree(runtime, ignore_errors=True)
    make_private_folder(runtime)
    try:
        with channel.Mailbox.bind(socket_path) as receiver, _open_log(host_folder / "crash_handler.log") as log:
            options = {
                "server-pid": pid,
                "socket-fd": receiver.fileno(),
                "host-folder": host_folder,
                "spool": spool,
                "runtime": runtime,
            } | ({"journal": journal} if journal else {})
            # The child forks the handler and ends at once: this waits for an interpreter's start, not for the handler.
            subprocess.run(
                [sys.executable, "-m", "sglang_crashkit.handler", *(f"--{k}={v}" for k, v in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[receiver.fileno()],
                start_new_session=True,
                # Python looks for modules in its working directory first, which is the user's.
                cwd="/",
                env=_environment(),
                timeout=_START_SECS,
                check=True,
            )
    except BaseException:
        shutil.rmtree(runtime, ignore_errors=True)
        for made in (spool, journal):
            with contextlib.suppress(OSError):
                if made is not None:
                    made.rmdir()
        raise
    os.environ[settings.SOCKET_VARIABLE] = str(socket_path)
    os.environ[settings.SPOOL_VARIABLE] = str(spool)
    # One that is set already is that of the server which started this one.
    os.environ.pop(settings.JOURNAL_VARIABLE, None)
    if journal is not None:
        os.environ[settings.JOURNAL_VARIABLE] = str(journal)
    logger.info("crash kit: incidents of this server go to %s", host_folder / "incidents")


def _make_folders(crash_folder: str | None, spool_name: str) -> tuple[Path, Path]:
    hostname = os.getenv("HOSTNAME", socket.gethostname())
    fallback = settings.fallback_folder() / hostname
    candidates = [Path(crash_folder).absolute() / hostname, fallback] if crash_folder else [fallback]
    for folder in candidates:
        try:
            # One after the other: a link that somebody put in a shared crash folder is not followed.
            make_private_folder(folder)
            make_private_folder(folder / "incidents")
            # SGLang may have created it before, for everybody to read; cores and prompts go there.
            folder.chmod(0o700)
            # A folder that is there may still be full or read-only; the spool shows it.
            return folder, make_private_folder(folder / "incidents" / spool_name)
        except (OSError, CrashkitError) as error:
            logger.warning(
                "crash kit: crash folder %s cannot be used (%s); next: check the --crash-dump-folder",
                folder,
                error,
            )
            failure = error
    raise failure


def _make_journal_folder(host_folder: Path, pid: int, start_ticks: int) -> Path | None:
    """Return the folder of this server's request journals, on a file system where writing them is no risk."""
    if not settings.Settings.from_environ().journal:
        return None
    for place in (host_folder, settings.fallback_folder() / host_folder.name):
        try:
            make_private_folder(place)
            if is_safe_to_map(place):
                folder = journal_folder(place, pid, start_ticks)
                make_private_folder(folder.parent)
                return make_private_folder(folder)
        except (OSError, CrashkitError) as error:
            logger.warning("crash kit: no request journal below %s: %s", place, error)
    logger.warning(
        "crash kit: neither %s nor the temporary folder is on a local disk: no request journal; "
        "next: set TMPDIR to a folder on one",
        host_folder,
    )
    return None


def _environment() -> dict[str, str]:
    environ = dict(os.environ)
    if "PYTHONPATH" in environ:
        entries = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)
    return environ


def _open_log(path: Path) -> BinaryIO:
    with contextlib.suppress(OSError):
        if path.lstat().st_size > _MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "wb")
    return open(os.devnull, "wb")  # noqa: PTH123
