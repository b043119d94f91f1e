"""Hooks of ``sglang/srt/managers/tokenizer_manager.py``: the requests are saved before a crash, and SIGTERM comes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sglang_crashkit.core.private_files import create_private, make_private_folder
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.srt.hooks import never_raises, notify, request

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

#: Upstream's own diagnostics, which the crash handler takes over.
_UPSTREAM_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
_SAVED = "_crashkit_saved_requests"


def on_crash_dump(dump: Method) -> Method:
    """Wrap ``TokenizerManager.dump_requests_before_crash``.

    Upstream's method writes the requests, as before; the diagnostics that follow it there are the crash handler's, and
    the method returns when the incident is whole. An error of the dump is named in the log and in the incident instead
    of leaving the server half dead. Where there is no crash handler, upstream's method runs as it is.
    """

    @functools.wraps(dump)
    def wrapper(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(manager, "crash_dump_performed", False) or not notify("crash_dump_begun"):
            return dump(manager, *args, **kwargs)
        _ignore_further_sigquit()
        outcome = _count_requests(manager) or {}
        result = None
        try:
            with _without_upstream_diagnostics():
                result = dump(manager, *args, **kwargs)
        except Exception as error:
            logger.exception("crash kit: the requests could not be saved")
            outcome["error"] = f"{type(error).__name__}: {error}"
        path = getattr(manager, _SAVED, None)
        if path is None and not getattr(manager, "crash_dump_folder", None):
            outcome["reason"] = "the server was started without --crash-dump-folder"
        _await_incident(outcome | {"path": path})
        return result

    return wrapper  # type: ignore[return-value]


@contextlib.contextmanager
def open_crash_dump(manager: Any, filename: str) -> Iterator[BinaryIO]:
    """Open the file for the requests in place of ``open(filename, "wb")``.

    The file has mode 0600 and gets its name only when it is whole, so that no reader ever takes a torn one for it. A
    name that is taken (a second crash within a second) gets a number.

    Args:
        manager: the ``TokenizerManager``; it is told the name that the file got.
        filename: what upstream calls it.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = Path(filename)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.unlink(missing_ok=True)
    try:
        with create_private(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        final = _give_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    setattr(manager, _SAVED, str(final))


def on_sigterm(handler: Method) -> Method:
    """Wrap ``SignalHandler.sigterm_handler``: from now on an exit with status 0 is no crash."""

    @functools.wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        notify("draining")
        return handler(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _give_name(temporary: Path, path: Path) -> Path:
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


@never_raises
def _ignore_further_sigquit() -> None:
    """Let no second SIGQUIT cut the dump short: upstream's handler kills the tree when it finds a dump under way."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGQUIT, _do_nothing)


def _do_nothing(_signum: int, _frame: object) -> None:
    """Stand in for a signal handler; SIG_IGN would make Python report pending signals as lost."""


@never_raises
def _count_requests(manager: Any) -> dict[str, Any]:
    states = list(manager.rid_to_state.values())
    folder = manager.crash_dump_folder
    if folder:
        # Upstream would create it for everybody to read.
        make_private_folder(Path(folder) / os.getenv("HOSTNAME", os.uname().nodename))
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
def _await_incident(outcome: dict[str, Any]) -> None:
    answer = request("crash_dump_ended", Settings.from_environ().budget_secs, **outcome)
    if answer and answer.get("path"):
        logger.error("crash kit: incident %s", answer["path"])
