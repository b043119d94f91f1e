"""The last steps of the process that failed first, and the requests in the one that it was in, in lines of Markdown.

As in `incident.summary`, what is missing or has another form is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_crashkit.model.checked_json import mapping_of, mappings_of

#: Of so many requests the ids are told.
_MAX_RIDS = 8


def lines_of(process: Mapping[str, Any], divergence: Mapping[str, Any]) -> Iterator[str]:
    """Yield a section with the last steps of one process; nothing where neither is known.

    Args:
        process: a process in an ``incident.json``; an empty object where nobody is known to have failed.
        divergence: where the ranks went different ways, in an ``incident.json``.
    """
    steps = mapping_of(process.get("steps"))
    last = mappings_of(steps.get("last"))
    if not last and not divergence:
        return
    yield "## Steps"
    yield ""
    if divergence:
        yield f"- {divergence.get('statement')} ({divergence.get('level')})"
    if last:
        in_step, name = mapping_of(steps.get("in_step")), f"{process.get('title')} (pid {process.get('pid')})"
        if in_step:
            yield f"- {name} {'died' if process.get('exit') else 'was'} in {current_in_words(in_step)}"
            if isinstance(rids := in_step.get("rids"), list) and rids:
                yield f"- its requests: {_rids(rids, in_step.get('size'))}"
        else:
            yield f"- {name} was in no step"
        yield f"- the last {len(last)} of its steps:"
        yield from (f"    - {_step(step)}" for step in last)
    yield ""


def current_in_words(step: Mapping[str, Any]) -> str:
    """Say of the ``in_step`` of a process which step it was, how far it had come, and how long it had run."""
    secs, phase = step.get("seconds"), str(step.get("phase")).replace("_", " ")
    ran = f", for {secs:.3f} s" if isinstance(secs, (int, float)) else ""
    return f"step {_number(step.get('number'))}: {_batch(step)}, {phase}{ran}"


def _step(step: Mapping[str, Any]) -> str:
    began, ended = step.get("began"), step.get("ended")
    if isinstance(began, (int, float)) and isinstance(ended, (int, float)):
        how_far = f"{(ended - began) * 1000:.1f} ms"
    else:
        how_far = str(step.get("phase")).replace("_", " ")
    rids = [request.get("rid") for request in mappings_of(step.get("requests"))]
    of = f" ({_rids(rids, step.get('size'))})" if rids else ""
    return f"step {_number(step.get('number'))}: {_batch(step)}{of}, {how_far}"


def _batch(step: Mapping[str, Any]) -> str:
    size, tokens = step.get("size"), step.get("tokens")
    of = f"{_number(size)} request{'' if size == 1 else 's'}"
    return f"{step.get('mode') or 'not yet scheduled'}, {of}" + (
        f", {_number(tokens)} token{'' if tokens == 1 else 's'}" if tokens else ""
    )


def _rids(rids: Sequence[object], size: object) -> str:
    shown = list(rids)[:_MAX_RIDS]
    more = size - len(shown) if isinstance(size, int) else 0
    return ", ".join(map(str, shown)) + (f" and {more:,} more" if more > 0 else "")


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
