"""Hook of ``sglang/srt/disaggregation/common/conn.py``: the heartbeat of a decode server gave a prefill server up."""

from __future__ import annotations

from typing import Any

from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.hooks import Function, before


def on_node_failure(handle: Function) -> Function:
    """Note which prefill server is given up, and who waits for it, before ``_handle_node_failure`` ends their wait."""
    return before(handle, _note)


def _note(_manager: Any, failed_bootstrap_addr: str) -> None:
    answers = peer_answers.current()
    if answers is not None:
        answers.note_heartbeat(failed_bootstrap_addr)
