"""Tell of threads that an exception ends while their process goes on.

``threading.excepthook`` is chained: whatever was there before is called next, and prints the traceback as ever. What
upstream handles in the thread itself, such as a worker that fails one request and takes the next, does not come here.
"""

from __future__ import annotations

import sys
import threading
import traceback
from itertools import count
from pathlib import Path

from sglang_crashkit.srt.exception_record import write_record
from sglang_crashkit.srt.hooks import Lately, never_raises, notify

#: Threads that end in the same way are told of once in this time, in seconds; and so many ways in a process.
_AGAIN_SECS, _MAX_WAYS = 60.0, 32
_MAX_NAME = 120

_lately = Lately(_AGAIN_SECS, _MAX_WAYS)
_numbers = count(1)


@never_raises
def watch_threads(*, of_all: bool) -> None:
    """Tell the crash handler of each thread of this process that an exception ends.

    Args:
        of_all: also of threads in which no code of SGLang's runs; a user's program has threads of its own.
    """
    previous = threading.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        _tell(args, of_all)
        previous(args)

    threading.excepthook = hook


@never_raises
def _tell(args: threading.ExceptHookArgs, of_all: bool) -> None:
    error = args.exc_value
    # A thread ends itself by SystemExit; as the interpreter ends, what a thread uses is taken from it.
    if error is None or isinstance(error, SystemExit) or sys.is_finalizing():
        return
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(args.exc_traceback)]
    is_sglangs = any("/sglang/" in place for place in places)
    if (of_all or is_sglangs) and threading.main_thread().is_alive() and _lately.is_news((type(error), *places)):
        name = args.thread.name if args.thread is not None else ""
        told = write_record(error, f"thread_exception-{next(_numbers)}")
        if not notify("thread_died", thread=name[:_MAX_NAME], **told) and told["record"] is not None:
            Path(told["record"]).unlink(missing_ok=True)
