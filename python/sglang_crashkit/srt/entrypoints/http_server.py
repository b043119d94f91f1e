"""Hook of ``sglang/srt/entrypoints/http_server.py``: this process is a server program."""

from __future__ import annotations

from typing import Any

from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import Function, before


def on_server_program(launch: Function) -> Function:
    """Wrap a launcher of a server: a process that calls it is a server program, not a user's program, from then on."""
    return before(launch, _note)


def _note(*_args: Any, **_kwargs: Any) -> None:
    crash_exit.state.is_program = True
