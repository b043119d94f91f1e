"""A stand-in for a scheduler: what the step recorder uses of SGLang's, shaped like it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from sglang_crashkit.memory.steps import NAME
from sglang_crashkit.srt.managers import step_recorder
from sglang_crashkit.srt.managers.step_recorder import (
    on_forward,
    on_processed,
    on_received,
    on_results,
    on_retraction,
    on_scheduled,
)
from unit.support.waiting import memory_named

#: As in ``forward_batch_info.py``.
ForwardMode = IntEnum("ForwardMode", "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL")
EXTEND, DECODE, MIXED, IDLE = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE


class Req:
    """A request of so many tokens, and those of its answer so far."""

    def __init__(self, rid: str, tokens: int, answer: Sequence[int] = ()) -> None:
        self.rid = rid
        self.origin_input_ids = [1] * tokens
        self.output_ids: Any = [*answer]


class Lengths(list[int]):
    """A tensor on the CPU."""

    def tolist(self) -> list[int]:
        return list(self)


class TokenizedGenerateReqInput:
    def __init__(self, rid: str, tokens: int = 4) -> None:
        self.rid, self.input_ids = rid, [1] * tokens


class BatchTokenizedGenerateReqInput:
    def __init__(self, batch: list[TokenizedGenerateReqInput]) -> None:
        self.batch = batch


class AbortReq:
    def __init__(self, rid: str, message: str | None = None) -> None:
        self.rid, self.abort_message = rid, message


class FlushCacheReqInput:
    pass


def batch_of(mode: ForwardMode, reqs: Sequence[Req], **changed: Any) -> Any:
    """Return a ``ScheduleBatch``."""
    known = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
    fields = {
        **{"reqs": list(reqs), "forward_mode": mode, "seq_lens_cpu": Lengths(known), "spec_algorithm": None},
        **{"prefix_lens": [0] * len(reqs), "extend_lens": known, "inner_idle_batch": None},
    }
    return SimpleNamespace(**fields | changed)


class Scheduler:
    """An event loop in pieces."""

    def __init__(self, **changed: Any) -> None:
        self._engine_paused = False
        self.forward_ct = 0
        self.device = "cpu"
        self.waiting_queue: list[Req] = []
        self.last_batch: Any = None
        self.tree_cache = SimpleNamespace()
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.__dict__ |= changed

    def process_input_requests(self, recv_reqs: Sequence[Any] = ()) -> None:
        on_received(self, recv_reqs)

    def retract(self, requests: Sequence[Req]) -> None:
        on_retraction(requests)

    def run_batch(self, batch: Any, *passes: ForwardMode) -> None:
        self.forward_ct += 1
        on_scheduled(self, batch)
        for mode in passes or (batch.forward_mode,):
            on_forward(SimpleNamespace(forward_mode=mode))

    def process_batch_result(self, batch: Any, result: Any = None) -> None:
        on_results(batch, result)
        on_processed()

    def step(self, batch: Any, recv_reqs: Sequence[Any] = ()) -> None:
        """Go round once, without overlap."""
        self.process_input_requests(recv_reqs)
        self.run_batch(batch)
        self.process_batch_result(batch)
        self.last_batch = batch


def forget_recorder() -> None:
    """Be as in a process that has just begun."""
    importlib.reload(step_recorder)
    while (descriptor := memory_named(NAME)) is not None:
        os.close(descriptor)
