"""Hook of ``sglang/srt/disaggregation/common/conn.py``: the heartbeat of a decode server gave a prefill server up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.hooks import never_raises

Function = TypeVar("Function", bound=Callable[..., Any])


def on_node_failure(handle: Function) -> Function:
    """Note which prefill server is given up, and who waits for it, before ``_handle_node_failure`` ends their wait."""

    @functools.wraps(handle)
    def wrapper(manager: Any, failed_bootstrap_addr: str) -> Any:
        _note(failed_bootstrap_addr)
        return handle(manager, failed_bootstrap_addr)

    return wrapper  # type: ignore[return-value]


@never_raises
def _note(address: str) -> None:
    answers = peer_answers.current()
    if answers is not None:
        answers.note_heartbeat(address)
