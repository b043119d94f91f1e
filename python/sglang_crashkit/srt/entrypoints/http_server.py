"""Hook of ``sglang/srt/entrypoints/http_server.py`` and ``grpc_server.py``: this process is a server program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import never_raises

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def on_server_program(launch: Launcher) -> Launcher:
    """Wrap a launcher of a server, plain or ``async``: who calls it is a server program, not a library's user.

    It is noted before the launch begins. It stays noted when the call has ended: the program ends next, and with
    the status that tells why.
    """
    if inspect.iscoroutinefunction(launch):

        @functools.wraps(launch)
        async def serve(*args: Any, **kwargs: Any) -> Any:
            _note()
            return await launch(*args, **kwargs)

        return serve  # type: ignore[return-value]

    @functools.wraps(launch)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _note()
        return launch(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


@never_raises
def _note() -> None:
    crash_exit.note_server_program()
