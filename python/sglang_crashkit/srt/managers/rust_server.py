"""The requests of a scheduler that takes them from its own Rust server, in place of a tokenizer manager.

No patch calls this: what SGLang's own ``RustServer`` has is wrapped as the scheduler's process begins. Where a release
has it under another name, an incident has no requests.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from sglang_crashkit.srt.hooks import after, before, never_raises
from sglang_crashkit.srt.request_journal import JournaledStates, open_journal

_SCHEDULER = "sglang.srt.managers.scheduler"
#: A busy scheduler answers a health check by the requests that it has, and this one never.
_HEALTH_CHECK = "HEALTH_CHECK"
#: More are not under way: the oldest of so many ended without a word.
MAX_UNDER_WAY = 1 << 16


@never_raises
def journal_rust_server(server_args: Any) -> None:
    """Note the requests of a ``RustServer`` of this process in a journal, where there is a ``--crash-dump-folder``."""
    kind = getattr(sys.modules.get(_SCHEDULER), "RustServer", None)
    if not isinstance(kind, type) or not getattr(server_args, "crash_dump_folder", None):
        return
    intake = _Intake()
    kind.drain = after(kind.drain, intake.receive)  # type: ignore[attr-defined]
    for name, note in (("push_generation", intake.answer), ("push_abort", intake.drop)):
        if push := getattr(kind, name, None):
            setattr(kind, name, before(push, note))


class _Intake:
    """The requests between what the Rust server hands over and what it is given back."""

    def __init__(self) -> None:
        self._states: JournaledStates | None = None
        self._is_open = False

    def receive(self, requests: list[Any], *_args: Any, **_kwargs: Any) -> None:
        if not requests:
            return
        if not self._is_open:
            self._is_open = True
            self._states = open_journal({})
        states = self._states
        if states is None:
            return
        for request in requests:
            rid, name = str(request.rid), type(request).__name__
            if name.startswith("Tokenized") and not rid.startswith(_HEALTH_CHECK):
                states[rid] = state = SimpleNamespace(obj=request, finished=False)
                # An image is not kept for longer than the scheduler keeps it.
                state.obj = None
                if len(states) > MAX_UNDER_WAY:
                    states.pop(next(iter(states)))
            elif name == "AbortReq":
                states.abort(rid, request.abort_all)

    def answer(self, _server: Any, payload: Any, *_args: Any, **_kwargs: Any) -> None:
        states = self._states
        if states is not None:
            for rid, reason in zip(payload.rids, payload.finished_reasons, strict=False):
                if reason is not None and rid in states:
                    states[rid].finished = True
                    del states[rid]

    def drop(self, _server: Any, abort: Any, *_args: Any, **_kwargs: Any) -> None:
        if self._states is not None:
            self._states.pop(abort.rid, None)
