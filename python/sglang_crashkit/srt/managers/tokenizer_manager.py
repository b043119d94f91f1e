"""Hooks of ``sglang/srt/managers/tokenizer_manager.py``: the requests are saved before a crash, and SIGTERM comes."""

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

#: Upstream's own diagnostics, which the kit takes over.
_UPSTREAM_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
_SAVED = "_crashkit_saved_requests"
#: The thread that makes a dump, and the event of its end.
_ONGOING = "_crashkit_ongoing_dump"
_ORDERLY = "_crashkit_orderly_exit"
#: A signal whose handler dumps, too, may interrupt the process that holds it.
_claims = threading.RLock()
#: On a disk with less than this, in bytes, no file of requests is begun.
_LEAST_FREE_BYTES = 1 << 20


def on_crash_dump(dump: Function) -> Function:
    """Wrap ``TokenizerManager.dump_requests_before_crash``.

    Upstream's method writes the requests, as before. The diagnostics that follow them there, from 0.5.13 on, are the
    crash handler's, and the method returns when the incident is whole; without a handler this process makes them. An
    error of the dump is named in the log and in the incident. A second thread that calls waits until the first is done.
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
        # What is wanted counts for the first one only: while it works, upstream's flags are not the user's.
        if earlier is not None and earlier[0] == threading.get_ident():
            return save() if getattr(manager, "crash_dump_performed", False) else None
        if earlier is not None:
            # Its caller kills the process next.
            earlier[1].wait(settings.exit_secs)
            return None
        if is_crash:
            # Without a crash handler the wait for GPU cores is this process's.
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
    """Note the requests of a ``TokenizerManager`` in the journal from now on, and have its loop beat.

    A ``GrpcRequestManager`` is as good. Without ``--crash-dump-folder`` or a crash handler there is no journal.
    """
    if crash_exit.state.is_program:
        start_loop_heartbeat(manager)
    # A request manager of the gRPC server has no attribute of its own for it.
    arguments = getattr(manager, "server_args", None)
    folder = getattr(manager, "crash_dump_folder", None) or getattr(arguments, "crash_dump_folder", None)
    states = open_journal(manager.rid_to_state) if folder else None
    if states is not None:
        manager.rid_to_state = states
        if abort := getattr(manager, "abort_request", None):
            # SGLang calls it where a client has gone, too.
            manager.abort_request = before(abort, states.abort)


@never_raises
def on_orderly_exit(manager: Any) -> None:
    """Note that the server ends because it was asked to: the dump that follows is upstream's own, of no crash."""
    setattr(manager, _ORDERLY, True)


@never_raises
def on_forced_exit() -> None:
    """End the process after a crash at once, where SIGTERM came to a server that hangs; its ranks are not asked."""
    if crash_exit.has_begun():
        end_after_crash()


def _is_unhealthy(manager: Any) -> bool:
    return getattr(getattr(manager, "server_status", None), "name", None) == "UnHealthy"


def _evidence_secs(settings: Settings) -> float:
    # The requests and the incident may take their budget each, and then the process ends.
    return 2 * settings.budget_secs + settings.end_secs


def _dump_once(manager: Any, save: Callable[[], Any]) -> Any:
    if getattr(manager, "crash_dump_performed", False):
        return save()
    _settle_folder(manager)
    if sys.exc_info()[0] is not None:
        # Called where the tokenizer manager's own exception is handled: nothing else reports it.
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
        # What comes after the dump ends the server, and must be reached.
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

    The file has mode 0600 and gets its name only when it is whole; one that is taken (a second crash within a second)
    gets a number, which the `manager` is told. In a folder that somebody else prepared (a link, another user's) nothing
    is written: the file goes to the fallback folder then. Secrets are taken out of the `data`; see `redact_dump`.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    redact_dump(data)
    folder = safe_folder(Path(filename).parent)
    opened = OwnFolder(folder)
    path = opened.path / Path(filename).name
    stat = procfs.read_stat(os.getpid())
    # The folder may be another server's, too, whose process has the same pid.
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
    """Wrap ``SignalHandler.sigterm_handler``: from now on an exit with status 0 is no crash.

    Of a server whose health check failed the crash handler takes the evidence at once: SIGKILL comes some time after.
    """
    return before(handler, _note_sigterm)


def _note_sigterm(signal_handler: Any = None, *_args: Any, **_kwargs: Any) -> None:
    crash_exit.state.draining = True
    notify("draining", unhealthy=_is_unhealthy(getattr(signal_handler, "tokenizer_manager", None)))


@never_raises
def _ignore_further_sigquit() -> None:
    """Let no second SIGQUIT cut the dump short: upstream's handler kills the tree when it finds a dump under way."""
    if not crash_exit.ends_with_the_server():
        # A user's program may have a handler of its own, and live on.
        return
    with contextlib.suppress(ValueError):  # not the main thread
        # SIG_IGN would make Python report pending signals as lost.
        signal.signal(signal.SIGQUIT, lambda _signum, _frame: None)


@never_raises
def _settle_folder(manager: Any) -> None:
    """Create the folder that the requests go to privately, or take the fallback folder in its place."""
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
        # A message to the crash handler has a bound.
        error = redact(outcome["error"][:MAX_PRINTED], configuration, prompts=prompts_of(manager))
        outcome["error"] = error[:MAX_MESSAGE]
    outcome["path"] = getattr(manager, _SAVED, None)
    if outcome["path"] is None and not getattr(manager, "crash_dump_folder", None):
        outcome["reason"] = "the server was started without --crash-dump-folder"
    crash_exit.report("crash_dump_ended", **outcome)


def safe_folder(folder: Path) -> Path:
    """Return `folder`, private; one of the same name below the fallback folder where that cannot be, or takes no more.

    Raises:
        OSError, CrashkitError: neither can be created, or the fallback folder is somebody else's, too.
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
    """Give a file its name and return it: `path`, or with a number where that is taken.

    Raises:
        OSError: it cannot be renamed.
    """
    candidate, number = path, 1
    while True:
        try:
            os.link(temporary, candidate)
        except FileExistsError:
            candidate, number = path.with_name(f"{path.stem}.{number}{path.suffix}"), number + 1
        except OSError:
            # A file system without hard links, which each says in its own way (EPERM, ENOTSUP, ENOSYS). Without them a
            # second crash within a second replaces the first one's file.
            temporary.replace(candidate)
            return candidate
        else:
            return candidate
