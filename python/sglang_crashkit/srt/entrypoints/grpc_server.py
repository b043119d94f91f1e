"""Hook of ``sglang/srt/entrypoints/grpc_server.py``: a server program that launches its ranks without an ``Engine``.

After 0.5.9 another distribution, ``smg-grpc-servicer``, does the launch. It is not patched. The hooks are on functions
that every release of it calls: ``configure_logger``, functions of the event loop and of ``multiprocessing``, and
``GrpcRequestManager`` by its name. Without that class an incident has no requests, and all else works.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.entrypoints.engine import on_engine_launch, on_launch_phase_sigquit, on_ranks_ready
from sglang_crashkit.srt.hooks import Function, after_construction, before, never_raises
from sglang_crashkit.srt.managers.tokenizer_manager import on_request_states, on_sigterm
from sglang_crashkit.srt.utils.common import end_after_crash

#: Modules with the class that holds the requests in progress: SGLang's own, and the other distribution's.
_MANAGERS = ("sglang.srt.grpc.grpc_request_manager", "smg_grpc_servicer.sglang.request_manager")


def on_grpc_program(serve: Function) -> Function:
    """Wrap ``serve_grpc``: a process that awaits it is a server program, and its launch is hooked from then on."""

    @functools.wraps(serve)
    async def serve_program(*args: Any, **kwargs: Any) -> Any:
        _hook_launch()
        return await serve(*args, **kwargs)

    return serve_program


@never_raises
def _hook_launch() -> None:
    if crash_exit.state.launch is not None:
        return
    crash_exit.state.is_program, crash_exit.state.launch = True, _begin_launch
    loop: Any = asyncio.get_running_loop()
    loop.add_signal_handler = functools.partial(_add_signal_handler, loop.add_signal_handler)
    # The launcher ends these processes on purpose.
    for name in ("terminate", "kill"):
        setattr(BaseProcess, name, before(getattr(BaseProcess, name), _announce_end))
    for module in _MANAGERS:
        with contextlib.suppress(ImportError):
            kind = getattr(importlib.import_module(module), "GrpcRequestManager", None)
            if isinstance(kind, type):
                # Newer releases make it before the ranks, and before they configure the logger.
                kind.__init__ = before(kind.__init__, lambda _manager, *args, **named: _begin_launch(*args, **named))  # type: ignore[misc]
                after_construction(kind, on_request_states)


@never_raises
def _begin_launch(server_args: Any = None, *_args: Any, **_kwargs: Any) -> None:
    if crash_exit.state.mode is not None or server_args is None:
        return
    on_engine_launch(server_args)
    if not crash_exit.ends_with_the_server():
        return
    supervisor.listen().when_ready = on_ranks_ready
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        # By default SIGQUIT would end this process with a core dump before the incident is complete.
        signal.signal(signal.SIGQUIT, on_launch_phase_sigquit(lambda *_args: end_after_crash()))


def _add_signal_handler(add: Function, number: int, callback: Callable[..., object], *args: Any) -> Any:
    """Replace the event loop's function: the launcher's callbacks for signals notify the crash handler first."""
    if number in (signal.SIGTERM, signal.SIGINT):
        callback = on_sigterm(callback)
    elif number == signal.SIGQUIT:
        callback = on_launch_phase_sigquit(callback)
    return add(number, callback, *args)


def _announce_end(process: BaseProcess) -> None:
    if process.pid is not None:
        supervisor.announce_teardown(process.pid, whole=True)
