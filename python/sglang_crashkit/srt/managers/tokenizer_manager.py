"""Hooks of ``sglang/srt/managers/tokenizer_manager.py``: the dump of the requests before a crash, and SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import OwnFolder, create_private, make_private_folder
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.settings import Settings, fallback_folder
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.exception_record import MAX_MESSAGE, MAX_PRINTED, prompts_of, tell_exception
from sglang_crashkit.srt.hooks import Function, before, in_place_of, never_raises, notify
from sglang_crashkit.srt.managers.loop_heartbeat import start_loop_heartbeat
from sglang_crashkit.srt.redaction import redact, redact_dump
from sglang_crashkit.srt.request_journal import open_journal
from sglang_crashkit.srt.utils.common import end_after_crash
from sglang_crashkit.srt.utils.cudacore_pyspy_dump_utils import diagnose_schedulers

logger = logging.getLogger(__name__)

#: Variables of upstream's own diagnostics, which the kit replaces.
_UPSTREAM_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
_SAVED = "_crashkit_saved_requests"
#: Attribute with the thread that makes a dump, and the event that is set at the dump's end.
_ONGOING = "_crashkit_ongoing_dump"
_ORDERLY = "_crashkit_orderly_exit"
#: Reentrant: a signal whose handler also dumps may interrupt the thread that holds the lock.
_claims = threading.RLock()
#: The least free disk space with which a file of requests is begun, in bytes.
_LEAST_FREE_BYTES = 1 << 20


def on_crash_dump(dump: Function) -> Function:
    """Wrap ``TokenizerManager.dump_requests_before_crash``.

    Upstream's method still writes the requests. From 0.5.13 on it also runs diagnostics: here the crash handler does,
    and the call returns when the incident is complete; without a handler this process does. An error of the dump is in
    the log and in the incident. A second thread that calls waits until the first is done.
    """

    def instead(dump: Function, manager: Any, *args: Any, **kwargs: Any) -> Any:
        save = functools.partial(dump, manager, *args, **kwargs)
        settings, done = Settings.from_environ(), threading.Event()
        wanted = settings.diagnostics or getattr(manager, "crash_dump_folder", None)
        is_crash = settings.enabled and not getattr(manager, _ORDERLY, False)
        with _claims:
            earlier: tuple[int, threading.Event] | None = vars(manager).get(_ONGOING)
            if earlier is None and is_crash and wanted:
                setattr(manager, _ONGOING, (threading.get_ident(), done))
        # `wanted` counts only for the first call: during it, the variables of upstream's diagnostics are overridden.
        if earlier is not None and earlier[0] == threading.get_ident():
            return save() if getattr(manager, "crash_dump_performed", False) else None
        if earlier is not None:
            # The caller kills this process next.
            earlier[1].wait(settings.exit_secs)
            return None
        if is_crash:
            # Without a crash handler this process itself waits for GPU cores.
            seconds = _evidence_secs(settings) + settings.core_wait_secs
            crash_exit.begin(ServerExit.HUNG if _is_unhealthy(manager) else ServerExit.CRASHED, seconds)
        if not (is_crash and wanted):
            return save()
        try:
            return _dump_once(manager, save)
        finally:
            done.set()
            crash_exit.allow(settings.end_secs)

    return in_place_of(dump, instead)


@never_raises
def on_request_states(manager: Any) -> None:
    """Record the requests of a ``TokenizerManager`` in a journal from now on, and start its loop's heartbeat.

    Also for a ``GrpcRequestManager``. There is no journal without ``--crash-dump-folder`` or without a crash handler.
    """
    if crash_exit.state.is_program:
        start_loop_heartbeat(manager)
    # The gRPC server's request manager has the folder only in its arguments.
    arguments = getattr(manager, "server_args", None)
    folder = getattr(manager, "crash_dump_folder", None) or getattr(arguments, "crash_dump_folder", None)
    states = open_journal(manager.rid_to_state) if folder else None
    if states is not None:
        manager.rid_to_state = states
        if abort := getattr(manager, "abort_request", None):
            # SGLang also calls it when a client has disconnected.
            manager.abort_request = before(abort, states.abort)


@never_raises
def on_orderly_exit(manager: Any) -> None:
    """Note that the server ends on request: the dump that follows is upstream's own, and there is no crash."""
    setattr(manager, _ORDERLY, True)


@never_raises
def on_forced_exit() -> None:
    """After a crash, end this process at once when SIGTERM ends a hanging server; its ranks are not asked to end."""
    if crash_exit.has_begun():
        end_after_crash()


def _is_unhealthy(manager: Any) -> bool:
    return getattr(getattr(manager, "server_status", None), "name", None) == "UnHealthy"


def _evidence_secs(settings: Settings) -> float:
    # The dump of the requests and the incident may take one budget each, before the process ends.
    return 2 * settings.budget_secs + settings.end_secs


def _dump_once(manager: Any, save: Callable[[], Any]) -> Any:
    if getattr(manager, "crash_dump_performed", False):
        return save()
    _settle_folder(manager)
    if sys.exc_info()[0] is not None:
        # The tokenizer manager is handling its own exception, which nothing else reports.
        tell_exception()
    has_handler = notify("crash_dump_begun")
    if has_handler:
        crash_exit.allow(_evidence_secs(Settings.from_environ()))
        _ignore_further_sigquit()
    outcome, result = _count_requests(manager) or {}, None
    try:
        with _without_upstream_diagnostics():
            result = save()
    except Exception as error:
        # Go on: the code after the dump ends the server.
        logger.exception("crash kit: the requests could not be saved")
        outcome["error"] = f"{type(error).__name__}: {error}"
    if has_handler:
        _await_incident(manager, outcome)
    else:
        never_raises(diagnose_schedulers)()
    return result


@contextlib.contextmanager
def open_crash_dump(manager: Any, filename: str, data: dict[str, Any]) -> Iterator[BinaryIO]:
    """Open the file for the requests in place of ``open(filename, "wb")``.

    The file has mode 0600 and gets its name only when it is complete; a name that is taken (a second crash within a
    second) gets a number. The final path is stored in the `manager`. If the folder is a link or another user's, the
    file goes to the fallback folder. Secrets are removed from the `data`; see `redact_dump`.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    redact_dump(data)
    folder = safe_folder(Path(filename).parent)
    opened = OwnFolder(folder)
    path = opened.path / Path(filename).name
    stat = procfs.read_stat(os.getpid())
    # The folder may be shared with another server, in a PID namespace where its process has the same pid.
    key = server_key(os.getpid(), stat.start_ticks if stat is not None else 0)
    temporary = path.with_name(f".{path.name}.{key}.partial")
    temporary.unlink(missing_ok=True)
    try:
        with create_private(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        final = folder / give_name(temporary, path).name
    finally:
        temporary.unlink(missing_ok=True)
    setattr(manager, _SAVED, str(final))


def on_sigterm(handler: Function) -> Function:
    """Wrap ``SignalHandler.sigterm_handler``: from then on an exit with status 0 is not a crash.

    If the server's health check failed, the crash handler collects evidence at once: SIGKILL follows after some time.
    """
    return before(handler, _note_sigterm)


def _note_sigterm(signal_handler: Any = None, *_args: Any, **_kwargs: Any) -> None:
    crash_exit.state.draining = True
    notify("draining", unhealthy=_is_unhealthy(getattr(signal_handler, "tokenizer_manager", None)))


@never_raises
def _ignore_further_sigquit() -> None:
    """Ignore further SIGQUITs: during a dump, upstream's handler would kill the process tree and cut the dump short."""
    if not crash_exit.ends_with_the_server():
        # A user's program may have its own handler, and go on.
        return
    with contextlib.suppress(ValueError):  # not the main thread
        # SIG_IGN would make Python report pending signals as lost.
        signal.signal(signal.SIGQUIT, lambda _signum, _frame: None)


@never_raises
def _settle_folder(manager: Any) -> None:
    """Create the folder for the requests with mode 0700, or switch to the fallback folder."""
    if getattr(manager, "crash_dump_folder", None):
        hostname = os.getenv("HOSTNAME", os.uname().nodename)
        manager.crash_dump_folder = str(safe_folder(Path(manager.crash_dump_folder) / hostname).parent)


@never_raises
def _count_requests(manager: Any) -> dict[str, Any]:
    states = list(manager.rid_to_state.values())
    return {
        "finished": len(manager.crash_dump_request_list),
        "unfinished": sum(not state.finished for state in states),
    }


@contextlib.contextmanager
def _without_upstream_diagnostics() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _UPSTREAM_DIAGNOSTICS}
    os.environ.update(dict.fromkeys(_UPSTREAM_DIAGNOSTICS, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@never_raises
def _await_incident(manager: Any, outcome: dict[str, Any]) -> None:
    if "error" in outcome:
        configuration = getattr(manager, "server_args", None)
        # The size of a message to the crash handler is limited.
        error = redact(outcome["error"][:MAX_PRINTED], configuration, prompts=prompts_of(manager))
        outcome["error"] = error[:MAX_MESSAGE]
    outcome["path"] = getattr(manager, _SAVED, None)
    if outcome["path"] is None and not getattr(manager, "crash_dump_folder", None):
        outcome["reason"] = "the server was started without --crash-dump-folder"
    crash_exit.report("crash_dump_ended", **outcome)


def safe_folder(folder: Path) -> Path:
    """Return `folder`, made private; if it cannot be, or takes no more files, one of its name in the fallback folder.

    Raises:
        OSError, CrashkitError: neither folder can be created, or the fallback folder is another user's.
    """
    try:
        make_private_folder(folder)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written to", str(folder))
        if shutil.disk_usage(folder).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, "the disk is full", str(folder))
    except (OSError, CrashkitError) as error:
        safe = make_private_folder(fallback_folder()) / folder.name
        why = error.strerror if isinstance(error, OSError) else error
        logger.error("crash kit: no requests can be saved in %s (%s): the requests go to %s", folder, why, safe)
        return make_private_folder(safe)
    return folder


def give_name(temporary: Path, path: Path) -> Path:
    """Rename a file to `path`, or to a name with a number if that is taken; return the new path.

    Raises:
        OSError: the file cannot be renamed.
    """
    candidate, number = path, 1
    while True:
        try:
            os.link(temporary, candidate)
        except FileExistsError:
            candidate, number = path.with_name(f"{path.stem}.{number}{path.suffix}"), number + 1
        except OSError:
            # The file system has no hard links; the error depends on it (EPERM, ENOTSUP, ENOSYS). There, the file of a
            # second crash within a second replaces that of the first.
            temporary.replace(candidate)
            return candidate
        else:
            return candidate
