"""Make the folders that a crash handler works in, on disks that may not answer.

The crash folder may lie on a network disk whose server is gone; whoever touches it then stands still for as long as
that lasts, and no signal ends it. So each is made in a child process, which is left to itself where it takes too long.
Nothing is changed of what was there before: an operator's folder keeps its permissions.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.recovery import SPOOL
from sglang_crashkit.kernel.folder_lock import FolderLock
from sglang_crashkit.kernel.private_files import make_private_folder
from sglang_crashkit.settings import fallback_folder

#: A disk that answers does it within this time, in seconds.
ANSWER_SECS = 2.0

_MOST_BYTES = 4096
_MOST_DESCRIPTORS = 1 << 16


@dataclass
class WorkFolders:
    """Where the handler works, and what could not be made.

    Attributes:
        host_folder: the host's folder in the crash folder, or in the fallback folder.
        spool: where failing ranks leave their records.
        core_file: the template of the names of GPU cores; empty where there is none.
        flight_folder: where PyTorch's flight recorder writes; None where it cannot.
        warnings: what the server's log is to say.
    """

    host_folder: Path
    spool: Path
    core_file: str = ""
    flight_folder: Path | None = None
    warnings: list[str] = field(default_factory=list)


def make_work_folders(
    crash_folder: str | None, key: str, core_file: str = "", flight_folder: str = "", secs: float = ANSWER_SECS
) -> WorkFolders:
    """Make the folders; each of them that cannot be in the crash folder is below the fallback folder.

    Args:
        crash_folder: what the server was given as ``--crash-dump-folder``, absolute; None where it was given none.
        key: the server's; see `identity_key`.
        core_file: the template of the names of GPU cores, as CUDA expands it; empty for none.
        flight_folder: where PyTorch's flight recorder is to write; empty where it is not used.
        secs: how long a disk may take, in seconds.

    Raises:
        OSError: none of the places can be used.
    """
    hostname = os.getenv("HOSTNAME", socket.gethostname())
    fallback = fallback_folder() / hostname
    candidates = [Path(crash_folder) / hostname, fallback] if crash_folder else [fallback]
    warnings = []
    for host_folder in candidates:
        spool = host_folder / "incidents" / f"{SPOOL}{key}"
        problem = make_within(secs, functools.partial(_make_host_folder, host_folder, spool))
        if not problem:
            break
        advice = "next: check the --crash-dump-folder" if crash_folder else "next: set TMPDIR"
        warnings.append(f"crash folder {host_folder} cannot be used ({problem}); {advice}")
    else:
        raise OSError(errno.EIO, "; ".join(warnings))
    folders = WorkFolders(host_folder, spool, warnings=warnings)
    # A disk that did not answer is not asked again.
    moved = crash_folder is not None and host_folder == fallback
    if core_file:
        _make_core_folder(folders, core_file, crash_folder, secs, moved=moved)
    if flight_folder:
        _make_flight_folder(folders, flight_folder, secs, moved=moved)
    return folders


def make_within(secs: float, make: Callable[[], object]) -> str:
    """Run `make` in a child process and return what went wrong; empty where nothing did.

    Args:
        secs: how long it may take, in seconds. A child that takes longer is left to itself, killed as soon as the
            kernel lets go of it.
        make: raises OSError or CrashkitError.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_alone(theirs, make)
    os.close(theirs)
    answer, deadline = b"", time.monotonic() + secs
    try:
        while True:
            if not select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return f"it did not answer within {secs:g} s"
            chunk = os.read(ours, _MOST_BYTES)
            if not chunk:
                break
            answer += chunk
    finally:
        os.close(ours)
    os.waitpid(pid, 0)
    words, _, end = answer.decode(errors="replace").rpartition("\n")
    return words if end == "done" else "the process that tried died"


def _run_alone(answer: int, make: Callable[[], object]) -> None:
    """Run `make`, tell what came of it, and end this process: a child, which holds nothing of its parent's."""
    words = ""
    try:
        # It may stand still for long, and nobody is to take it for the handler.
        os.closerange(0, answer)
        os.closerange(answer + 1, _MOST_DESCRIPTORS)
        make()
    except (OSError, CrashkitError) as error:
        words = " ".join(str(error).split())
    except BaseException as error:  # noqa: BLE001 - of this process nothing else is left
        words = f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.write(answer, words.encode(errors="backslashreplace")[: _MOST_BYTES // 2] + b"\ndone")
        os._exit(0)


def _make_host_folder(host_folder: Path, spool: Path) -> None:
    # One after the other: a link that somebody put in a shared crash folder is not followed.
    make_private_folder(host_folder)
    make_private_folder(host_folder / "incidents")
    # A folder that is there may still be full or read-only; the spool shows it.
    make_private_folder(spool)


def _make_core_folder(
    folders: WorkFolders, core_file: str, crash_folder: str | None, secs: float, *, moved: bool
) -> None:
    """Make the folder in which the driver will write, for its owner alone: the driver makes none."""
    folders.core_file = core_file
    if core_file.startswith("|"):
        return
    name = "core.cuda.%t.%p"
    is_own = crash_folder is not None and core_file == f"{crash_folder}/%h/{name}"
    problem = "it is in the crash folder" if moved and is_own else ""
    if not problem:
        problem = make_within(secs, functools.partial(_make_folder_of, core_file, is_own=is_own))
    if not problem:
        return
    # Upstream's words, which people search for.
    folders.warnings.append(
        f"Failed to create CUDA coredump directory {os.path.dirname(core_file)}: {problem}; coredumps "  # noqa: PTH120
        + (f"go below {fallback_folder()}" if is_own else "may fail to write. next: check CUDA_COREDUMP_FILE")
    )
    if is_own:
        folders.core_file = f"{fallback_folder()}/%h/{name}"
        make_within(secs, functools.partial(_make_folder_of, folders.core_file, is_own=True))


def _make_folder_of(core_file: str, *, is_own: bool) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.stat(core_file).st_mode):  # noqa: PTH116
            return
    folder = Path(os.path.dirname(core_file).replace("%h", socket.gethostname()))  # noqa: PTH120 - may be empty
    if "%" in str(folder):
        raise OSError(errno.EINVAL, "only %h is supported in the directory part of CUDA_COREDUMP_FILE", str(folder))
    # The driver follows links, and a core holds the memory of a GPU: what somebody else prepared is not taken for ours.
    if is_own or not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        make_private_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "it cannot be written to", str(folder))


def _make_flight_folder(folders: WorkFolders, wanted: str, secs: float, *, moved: bool) -> None:
    other = folders.host_folder / Path(wanted).name
    for folder in [other] if moved else [Path(wanted), other]:
        # What is not there when it is asked for is never written.
        if not make_within(secs, functools.partial(_make_both, folder)):
            folders.flight_folder = folder
            return


def _make_both(folder: Path) -> None:
    make_private_folder(folder.parent)
    make_private_folder(folder)


def lock_spool(spool: Path) -> FolderLock:
    """Lock the spool for as long as this process lives, by which others know that it is in use."""
    lock = FolderLock(spool)
    with contextlib.suppress(OSError):
        lock.acquire()
    return lock
