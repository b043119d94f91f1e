"""Hook of ``sglang/srt/entrypoints/http_server.py`` and ``grpc_server.py``: this process is a server program."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import Function, before, never_raises


def on_server_program(launch: Function) -> Function:
    """Wrap a launcher of a server, plain or ``async``: who calls it is a server program, not a library's user.

    It is noted before the launch begins. It stays noted when the call has ended: the program ends next, and with
    the status that tells why.
    """
    if not inspect.iscoroutinefunction(launch):
        return before(launch, _note)

    @functools.wraps(launch)
    async def serve(*args: Any, **kwargs: Any) -> Any:
        never_raises(_note)()
        return await launch(*args, **kwargs)

    return serve


def _note(*_args: Any, **_kwargs: Any) -> None:
    crash_exit.state.is_program = True
