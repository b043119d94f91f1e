"""Report and record the exception that ends this process or one of its threads.

``threading.excepthook`` is chained: the previous hook is called next and prints the traceback as usual. An exception
that upstream handles within the thread, such as in a worker that fails one request and takes the next, is not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from multiprocessing import util
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import OwnFolder, write_json
from sglang_crashkit.model.step import short_rid
from sglang_crashkit.redact import REDACTED
from sglang_crashkit.settings import SPOOL_VARIABLE, published
from sglang_crashkit.srt.hooks import CAPTURE_WAIT_SECS, Lately, never_raises, notify, request, shorten
from sglang_crashkit.srt.redaction import fields_of, redact

#: Folders of this user in the spool's path: the spool, the folder of incidents that it is in, and the host's folder.
_OWN_FOLDERS = 3
_MAX_REQUESTS = 64
MAX_MESSAGE = 4000
#: The maximum length of an exception and its chain as Python prints them, in characters; the end is kept.
MAX_PRINTED = 16_000
#: The number of prompts that `redact.redact_prompts` compares with a message.
_MAX_PROMPTS = 64
#: Attributes of a request that hold its text.
_TEXTS = ("text", "input_text", "origin_input_text")
#: The attribute of a ``Scheduler`` with the batch that it works on, up to 0.5.15.post1 and from 0.5.16 on; the name of
#: the batch in its functions; the attribute with the batch that it decodes.
_AT_WORK, _LOCAL, _DECODED = ("cur_batch", "cur_batch_for_debug"), "batch", "running_batch"

#: The interval between two reports of the same exception, which ends threads or is caught by SGLang, in seconds; the
#: maximum number of different exceptions of threads that are reported within it.
_AGAIN_SECS, _MAX_WAYS = 60.0, 32
_MAX_NAME = 120

_lately, _numbers = Lately(_AGAIN_SECS, _MAX_WAYS), count(1)
#: Allows fewer caught exceptions: each holds up an event loop while its text is searched for prompts.
_caught_lately = Lately(_AGAIN_SECS, 4)
#: The exception that this process reported last.
_told: BaseException | None = None
#: The priority that runs a finalizer before multiprocessing's own, which end this process's children.
_FIRST = 1 << 30


@never_raises
def tell_uncaught(find_gpu: Callable[[], str | None]) -> None:
    """Report an exception that SGLang does not catch and that ends this process, if multiprocessing started it.

    SGLang's ``except Exception`` misses a panic of a Rust library (PyO3's ``PanicException``) and ``sys.exit``.
    multiprocessing runs the finalizer that is registered here while such an exception is being handled.
    """
    util.Finalize(None, _tell_uncaught, args=(find_gpu,), exitpriority=_FIRST)


@never_raises
def _tell_uncaught(find_gpu: Callable[[], str | None]) -> None:
    error = sys.exc_info()[1]
    # Ctrl-C or status 0 means that the process was asked to end.
    is_asked = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code)
    if error is not None and not is_asked and error is not _told:
        tell_exception(find_gpu())


@never_raises
def tell_exception(gpu: str | None = None) -> None:
    """Record and report the exception being handled, and wait until the server's other processes are captured.

    Call it before the parent learns of the failure, because the parent then ends the other processes. Returns after at
    most `CAPTURE_WAIT_SECS`. `gpu` is the UUID of the GPU that this process computes on.
    """
    global _told
    error = _told = sys.exc_info()[1]
    is_exit = isinstance(error, SystemExit)
    if isinstance(error, SystemExit) and error.__context__ is not None:
        # SystemExit only ends the process. The exception that was being handled is the cause.
        error = error.__context__
    if error is None:
        return
    request("exception", CAPTURE_WAIT_SECS, gpu=gpu, soft=is_exit, **write_record(error, "exception"))


@never_raises
def tell_caught(gpu: str | None = None) -> None:
    """Record and report the exception being handled, after which SGLang serves on; don't wait for the crash handler.

    A repeated exception is reported once a minute. `gpu` is as of `tell_exception`.
    """
    error = sys.exc_info()[1]
    if error is not None and _caught_lately.is_news((type(error), *_places(error.__traceback__))):
        _notify_of(error, "exception", "caught_exception", gpu=gpu, caught=True)


@never_raises
def watch_threads(*, of_all: bool) -> None:
    """Report each thread that an exception ends; unless `of_all`, only if SGLang's code is in the traceback."""
    previous = threading.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        _tell_of_thread(args, of_all)
        previous(args)

    threading.excepthook = hook


@never_raises
def _tell_of_thread(args: threading.ExceptHookArgs, of_all: bool) -> None:
    error = args.exc_value
    # SystemExit is an orderly end of a thread. During its shutdown the interpreter removes objects that threads use.
    if error is None or isinstance(error, SystemExit) or sys.is_finalizing():
        return
    places = _places(args.exc_traceback)
    is_sglangs = any("/sglang/" in place for place in places)
    if (of_all or is_sglangs) and threading.main_thread().is_alive() and _lately.is_news((type(error), *places)):
        name = args.thread.name if args.thread is not None else ""
        _notify_of(error, "thread_died", "thread_exception", thread=name[:_MAX_NAME])


def _places(trace: TracebackType | None) -> list[str]:
    return [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(trace)]


def _notify_of(error: BaseException, event: str, name: str, **fields: Any) -> None:
    """Report an exception that ends no process; remove its record if the handler cannot be reached."""
    told = write_record(error, f"{name}-{next(_numbers)}")
    if not notify(event, **fields, **told) and told["record"] is not None:
        Path(told["record"]).unlink(missing_ok=True)


def write_record(error: BaseException, name: str) -> dict[str, Any]:
    """Write an exception to ``<name>-<pid>.json``; return its one-line ``message`` and its ``record``, path or None."""
    trace, withheld = error.__traceback__, f"{type(error).__name__}: {REDACTED}"
    # A text that is cut before the search for secrets may end in half a secret.
    message = _redacted("".join(traceback.format_exception_only(error)).strip()[:MAX_PRINTED], trace) or withheld
    return {"message": message.splitlines()[0][:300], "record": _write(error, name, message[:MAX_MESSAGE])}


@never_raises
def _write(error: BaseException, name: str, message: str) -> str | None:
    spool, trace = published(SPOOL_VARIABLE), error.__traceback__
    if not spool or not Path(spool).parent.is_dir():
        return None
    frames: dict[int, FrameType] = sys._current_frames()
    record = {
        "pid": os.getpid(),
        # Not by setproctitle: asking it for the title rewrites the command line of this process.
        "title": procfs.read_title(os.getpid()),
        "time": time.time(),
        "message": message,
        "traceback": _format_frames(traceback.extract_tb(trace)),
        "printed": _printed(error, trace) or message,
        "batch": _describe_batch(trace),
        # Innermost frame first, as in all stacks of the kit; only the traceback is in Python's order.
        "threads": {str(ident): _format_frames(traceback.extract_stack(one))[::-1] for ident, one in frames.items()},
    }
    with contextlib.suppress(OSError, CrashkitError):
        # Creates the spool if this server's handler was killed and another server's handler removed the spool.
        folder = OwnFolder(Path(spool), _OWN_FOLDERS)
        path = f"{name}-{os.getpid()}.json"
        write_json(folder.path / path, record)
        return str(Path(spool) / path)
    return None


@never_raises
def _printed(error: BaseException, trace: TracebackType | None) -> str:
    printed = "".join(traceback.format_exception(type(error), error, trace))
    if len(printed) > MAX_PRINTED:
        # In a line that is cut, a secret may have lost the name that marks it.
        printed = printed[-MAX_PRINTED:].partition("\n")[2] or printed[-MAX_PRINTED:]
    return _redacted(printed, trace) or ""


@never_raises
def _redacted(message: str, trace: TracebackType | None) -> str:
    """Return a message without secrets and prompts; None if the search for them failed."""
    return redact(message, never_raises(find_configuration)(trace), prompts=find_prompts(trace))


def _format_frames(frames: traceback.StackSummary) -> list[str]:
    return [f"{frame.name} ({shorten(frame.filename)}:{frame.lineno})" for frame in frames]


@never_raises
def _describe_batch(trace: TracebackType | None) -> dict[str, Any]:
    scheduler, batch = next(find_batches(trace), (None, None))
    if batch is None:
        return {}
    requests = list(getattr(batch, "reqs", None) or [])
    return {
        "forward_mode": str(getattr(batch, "forward_mode", None)),
        "size": len(requests),
        "request_ids": [short_rid(getattr(request, "rid", "")) for request in requests[:_MAX_REQUESTS]],
        "forward_count": getattr(scheduler, "forward_ct", None),
    }


def find_batches(trace: TracebackType | None) -> Iterator[tuple[Any, Any]]:
    """Yield each batch with its owner: current batches, then functions' batches, innermost first, then decoded ones."""
    owners, seen = _owners(trace), set[int]()
    at_work = ((owner, getattr(owner, name, None)) for name in _AT_WORK for owner in owners)
    local = ((frame.get("self"), frame.get(_LOCAL)) for frame in reversed(list(_frames(trace))))
    decoded = ((owner, getattr(owner, _DECODED, None)) for owner in owners)
    for owner, batch in chain(at_work, ((owner, its) for owner, its in local if getattr(its, "reqs", None)), decoded):
        if batch is not None and id(batch) not in seen:
            seen.add(id(batch))
            yield owner, batch


def find_configuration(trace: TracebackType | None) -> Any:
    """Return the ``ServerArgs`` in a frame's variables or in its ``self``, outermost frame first; None if absent."""
    for frame in _frames(trace):
        configuration = frame.get("server_args") or getattr(frame.get("self"), "server_args", None)
        if configuration is not None:
            return configuration
    return None


def find_prompts(trace: TracebackType | None) -> list[str]:
    """Return texts of users, at most `_MAX_PROMPTS`: from frames' variables, batches, queues and current requests."""
    requests = (each for _owner, batch in find_batches(trace) for each in getattr(batch, "reqs", None) or ())
    of_batches = (text for each in requests for text in _texts(getattr(each, "origin_input_text", None)))
    of_owners = (text for owner in _owners(trace) for text in prompts_of(owner))
    return list(islice(chain(_at_hand(trace), of_batches, of_owners), _MAX_PROMPTS))


def prompts_of(owner: Any) -> Iterator[str]:
    """Yield the texts of requests in a ``Scheduler``'s queue, or of those that a ``TokenizerManager`` works on."""
    for each in getattr(owner, "waiting_queue", None) or ():
        yield from _texts(getattr(each, "origin_input_text", None))
    for state in list((getattr(owner, "rid_to_state", None) or {}).values()):
        yield from _texts(getattr(getattr(state, "obj", None), "text", None))


def _at_hand(trace: TracebackType | None) -> Iterator[str]:
    """Yield the texts of requests in the frames' local variables."""
    for frame in _frames(trace):
        for value in list(frame.values()):
            found: list[str] = []
            # Reading a value may raise, for example if it is a weak proxy of a deleted object.
            with contextlib.suppress(Exception):
                fields = {} if isinstance(value, (type, ModuleType)) else fields_of(value)
                batch = fields.get("batch")
                for its in (fields, *map(fields_of, batch[:_MAX_PROMPTS] if isinstance(batch, list) else ())):
                    found += (text for name in _TEXTS for text in _texts(its.get(name)))
            yield from found


def _texts(value: Any) -> Iterator[str]:
    # A request may hold several prompts.
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and text:
            yield text


def _frames(trace: TracebackType | None) -> Iterator[dict[str, Any]]:
    while trace is not None:
        yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _owners(trace: TracebackType | None) -> list[Any]:
    found = (frame.get("self") for frame in _frames(trace))
    return list({id(owner): owner for owner in found if owner is not None}.values())
