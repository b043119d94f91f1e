"""Hook of ``sglang/srt/managers/detokenizer_manager.py``: the detokenizer hit an exception."""

from __future__ import annotations

from sglang_crashkit.srt.exception_record import tell_exception


def on_detokenizer_exception() -> None:
    """Tell the crash handler of the exception being handled, before the parent is told; see `tell_exception`."""
    tell_exception()
