"""Finds the component, a part of SGLang or of its environment, by ``knowledge/components.yaml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.model.sample import Frame

#: Innermost frames that can show a component; frames further out are the event loop's, which every stack has.
_NEAR = 14
_MAX_WORDS = 1500
_NEUTRAL = re.compile(
    r"general_mm_embed_routine|quantization/unquant|"
    r"torch/(?:nn/modules|utils|_ops|cuda|_C|functional|distributed)|c10d_logger|_call_impl|_wrapped_call|contextlib|"
    r"tvm_ffi|threading\.py|multiprocessing/(?:process|spawn|popen|context)|concurrent/|asyncio/|runpy|<string>"
)


@functools.cache
def _patterns(column: str) -> dict[str, re.Pattern[str]]:
    forms = {
        name: "|".join(f"(?:{one.replace('(?i)', '')})" for one in row[column])
        for name, row in load("components").items()
    }
    return {name: re.compile(form, re.IGNORECASE) for name, form in forms.items() if form}


def component_of(
    frames: Sequence[Frame] = (), words: str = "", *, arguments: Mapping[str, Any] | None = None
) -> str | None:
    """Return the component that frames (innermost first) and words show; None if they show no known component.

    The server's arguments, by their Python names, decide between components that only the words suggest.
    """
    # The import of a module does not show which component failed.
    frames = [frame for frame in frames if frame.function != "<module>"]
    places = [f"{one.function} ({one.file})" for one in frames if not _NEUTRAL.search(f"{one.function} ({one.file})")]
    scores: dict[str, float] = {}
    for near, place in enumerate(places[:_NEAR]):
        for name in _of_frame(place):
            scores[name] = max(scores.get(name, 0.0), (8.0 if is_telling(name) else 4.0) / (1 + near / 4))
    for name in (name for name, pattern in _patterns("words").items() if pattern.search(words[:_MAX_WORDS])):
        is_on = arguments is not None and is_switched_on(name, arguments)
        scores[name] = scores.get(name, 0.0) + (4.5 if is_telling(name) else 2.0) + (1.0 if is_on else 0.0)
    if not scores:
        return "distributed_init" if any("torch/distributed/" in one.file for one in frames[:_NEAR]) else None
    return max(scores, key=lambda name: scores[name])


def is_telling(component: str | None) -> bool:
    """Return whether a component is in few stacks, so that its frames are significant."""
    return component is not None and not (load("components").get(component) or {}).get("common")


@functools.lru_cache(maxsize=4096)
def _of_frame(place: str) -> Sequence[str]:
    return [name for name, pattern in _patterns("frames").items() if pattern.search(place)][:2]


def is_switched_on(component: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments switch on a component that is off by default."""
    row = load("components").get(component) or {"switch": ()}
    switches = [(arguments.get(name), value) for name, _, value in (switch.partition("=") for switch in row["switch"])]
    off = (None, False, "", "none", "None")
    return any(has not in off and (not value or re.fullmatch(value, str(has))) for has, value in switches)


def way_out(component: str | None, arguments: Mapping[str, Any], *, is_seen: bool) -> str:
    """Return how to disable or limit a component; empty if there is no way, or if nothing shows that it is in use."""
    row = load("components").get(component or "") or {"out": ""}
    return str(row["out"]) if is_seen or is_switched_on(component or "", arguments) else ""
