"""Hook of ``sglang/srt/managers/multi_tokenizer_mixin.py``: a crash of a server with several tokenizer workers.

The server's main process is then an HTTP server's supervisor, in which SGLang runs a router. The supervisor catches
SIGQUIT, which a failed child sends, and does nothing. It replaces a worker that ends; the workers have the requests.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.exception_record import tell_exception
from sglang_crashkit.srt.hooks import after_construction, never_raises, notify
from sglang_crashkit.srt.managers.loop_heartbeat import start_router_heartbeat

logger = logging.getLogger(__name__)

_claim, _done = threading.Lock(), threading.Event()


def on_tokenizer_router(router: type) -> type:
    """Extend ``MultiTokenizerRouter`` in place: its loop beats, and SIGQUIT ends the server whichever handler it has.

    The class gets ``dump_requests_before_crash``, which upstream calls after an exception but does not define there.
    """
    after_construction(router, _watch_sigquit)
    after_construction(router, start_router_heartbeat)
    if not hasattr(router, "dump_requests_before_crash"):
        router.dump_requests_before_crash = dump_requests_of_workers  # type: ignore[attr-defined]
    return router


@never_raises
def dump_requests_of_workers(_router: Any = None) -> None:
    """Have each tokenizer worker save its requests and end, and wait for that and for the incident; only once.

    Takes at most twice ``SGLANG_CRASHKIT_BUDGET_SECS``.
    """
    settings = Settings.from_environ()
    if not settings.enabled:
        return
    if not _claim.acquire(blocking=False):
        # The caller kills this process next.
        _done.wait(settings.exit_secs)
        return
    try:
        crash_exit.begin(ServerExit.CRASHED, 2 * settings.budget_secs + settings.end_secs)
        if sys.exc_info()[0] is not None:
            tell_exception()
        is_told = notify("crash_dump_begun")
        workers = supervisor.end_tokenizer_workers(settings.budget_secs) or 0
        if is_told:
            crash_exit.report("crash_dump_ended", workers=workers)
    finally:
        _done.set()


def _watch_sigquit(router: Any) -> None:
    """Start a thread that notices SIGQUIT, whichever handler it has, by the interpreter's wake-up descriptor."""
    if threading.current_thread() is not threading.main_thread() or not Settings.from_environ().enabled:
        return
    if not crash_exit.ends_with_the_server():
        return
    # The workers, which are about to start, announce themselves to it.
    never_raises(supervisor.listen)()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if earlier != -1:
        # An event loop in this thread uses the wake-up descriptor and handles the signals.
        signal.set_wakeup_fd(earlier)
        os.close(reader)
        os.close(writer)
        return
    kill = vars(sys.modules[type(router).__module__]).get("kill_process_tree")
    arguments = (reader, signal.getsignal(signal.SIGQUIT), kill)
    threading.Thread(target=_end_on_sigquit, args=arguments, name="crashkit-sigquit", daemon=True).start()


def _end_on_sigquit(reader: int, own_handler: Any, kill: Callable[..., None] | None) -> None:
    while True:
        signals = os.read(reader, 64)
        # As long as SGLang's handler of the launch phase is in place, it ends the server.
        if signal.SIGQUIT in signals and signal.getsignal(signal.SIGQUIT) is not own_handler:
            break
    logger.error("crash kit: SIGQUIT received; it usually means that a child failed; the server ends")
    dump_requests_of_workers()
    try:
        if kill is not None:
            kill(os.getpid(), include_parent=True)
    finally:
        os._exit(ServerExit.CRASHED)
