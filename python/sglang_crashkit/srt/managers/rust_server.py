"""Journal the requests of a scheduler that gets them from its own Rust server, not from a tokenizer manager.

No patch calls this: methods of SGLang's class ``RustServer`` are wrapped as the scheduler's process begins. In a
release that names the class differently, an incident has no requests.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from sglang_crashkit.srt.hooks import after, before, never_raises
from sglang_crashkit.srt.request_journal import JournaledStates, open_journal

_SCHEDULER = "sglang.srt.managers.scheduler"
#: The prefix of a health check's id. A busy scheduler lets its other requests answer, and never answers the check.
_HEALTH_CHECK = "HEALTH_CHECK"
#: The maximum number of requests in progress: beyond it the oldest is taken to have ended without a message.
MAX_UNDER_WAY = 1 << 16


@never_raises
def journal_rust_server(server_args: Any) -> None:
    """Record the requests of this process's ``RustServer`` in a journal, if there is a ``--crash-dump-folder``."""
    kind = getattr(sys.modules.get(_SCHEDULER), "RustServer", None)
    if not isinstance(kind, type) or not getattr(server_args, "crash_dump_folder", None):
        return
    intake = _Intake()
    kind.drain = after(kind.drain, intake.receive)  # type: ignore[attr-defined]
    for name, note in (("push_generation", intake.answer), ("push_abort", intake.drop)):
        if push := getattr(kind, name, None):
            setattr(kind, name, before(push, note))


class _Intake:
    """The requests that the Rust server has handed over, and that the scheduler has not answered."""

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
                # Keep no reference to the request, whose images the scheduler may free earlier.
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
