"""Find what SGLang works on in the frames of a traceback: the batch, the configuration, the users' prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from types import ModuleType, TracebackType
from typing import Any

#: As many prompts as are compared with a message; see `core.redact.redact_prompts`.
_MAX_PROMPTS = 64
#: What a request calls its text.
_TEXTS = ("text", "input_text", "origin_input_text")

#: Where a ``Scheduler`` has the batch that it works on: up to 0.5.15.post1, from 0.5.16 on, and between two batches.
_BATCHES = ("cur_batch", "cur_batch_for_debug", "running_batch")


def find_batch(trace: TracebackType | None) -> tuple[Any, Any]:
    """Return the first object that has a batch and that batch, twice None where there is none."""
    for owner in _owners(trace):
        batch = _batch_of(owner)
        if batch is not None:
            return owner, batch
    return None, None


def find_configuration(trace: TracebackType | None) -> Any:
    """Return the ``ServerArgs`` that a function was called with or its object has; None where there are none."""
    for frame in _frames(trace):
        configuration = frame.get("server_args") or getattr(frame.get("self"), "server_args", None)
        if configuration is not None:
            return configuration
    return None


def find_prompts(trace: TracebackType | None) -> list[str]:
    """Return texts that users sent and that were at hand or that the process works on, some of them.

    At hand are the requests in the frames' own variables, in a process that has no list of them.
    """
    of_owners = (prompt for owner in _owners(trace) for prompt in prompts_of(owner))
    return list(islice(chain(_at_hand(trace), of_owners), _MAX_PROMPTS))


def prompts_of(owner: Any) -> Iterator[str]:
    """Yield the texts of the requests that a ``Scheduler`` or a ``TokenizerManager`` works on."""
    batch = _batch_of(owner)
    for request in [*(getattr(batch, "reqs", None) or ()), *(getattr(owner, "waiting_queue", None) or ())]:
        yield from _texts(getattr(request, "origin_input_text", None))
    for state in list((getattr(owner, "rid_to_state", None) or {}).values()):
        yield from _texts(getattr(getattr(state, "obj", None), "text", None))


def _batch_of(owner: Any) -> Any:
    batches = (getattr(owner, name, None) for name in _BATCHES)
    return next((batch for batch in batches if batch is not None), None)


def _at_hand(trace: TracebackType | None) -> Iterator[str]:
    for frame in _frames(trace):
        for value in list(frame.values()):
            # What an object computes when it is asked might raise.
            fields = getattr(value, "__dict__", None)
            if type(fields) is dict and not isinstance(value, (type, ModuleType)):
                for name in _TEXTS:
                    yield from _texts(fields.get(name))


def _texts(value: Any) -> Iterator[str]:
    # A request may hold several prompts.
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and text:
            yield text


def _frames(trace: TracebackType | None) -> Iterator[dict[str, Any]]:
    while trace is not None:
        yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _owners(trace: TracebackType | None) -> Iterator[Any]:
    seen: set[int] = set()
    for frame in _frames(trace):
        owner = frame.get("self")
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            yield owner
