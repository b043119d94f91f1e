"""Hook of ``sglang/srt/managers/detokenizer_manager.py``: the detokenizer raises an exception."""

from __future__ import annotations

from sglang_crashkit.srt.exception_record import tell_exception


def on_detokenizer_exception() -> None:
    """Report the exception being handled to the crash handler; call it before the parent learns of it."""
    tell_exception()
