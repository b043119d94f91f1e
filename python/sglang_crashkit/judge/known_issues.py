"""Matches a case with known issues of upstream, which are in ``knowledge/known_issues.yaml``.

An entry matches if all of its conditions hold:

- ``error``: a pattern that matches the beginning of an exception (its class without the module, and its text), or any
  part of a log line if the entry has no ``frames``;
- ``frames``: patterns of places in the exception's traceback; with ``hang: true``, in the stacks of a process, or of
  every rank (``all_ranks: true``);
- ``arguments``: patterns of the server's arguments, such as ``--speculative-algorithm=EAGLE*``.

Releases before ``since``, and ``fixed_in`` and later ones, do not have the issue.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.judge.topology import short_name
from sglang_crashkit.model.case import Case
from sglang_crashkit.model.event import Line, Raised
from sglang_crashkit.model.sample import Frame

#: Most characters of a compared text: an exception may contain a whole configuration.
_MAX_TEXT = 2000
#: Matches a frame in which a rank waits for other ranks.
_WAITS = re.compile(r"all_reduce|all_gather|broadcast")


def known_issues(case: Case, *, is_hang: bool, who: str | None = None) -> list[dict[str, Any]]:
    """Return the entries that match a case, those with the most conditions first.

    Entries about hangs match only if the case is judged to be a hang: by the stacks of the process `who` that hangs, or
    of all processes if `who` has no stacks. The stacks of the others only show that they wait for it.
    """
    raised = [error for event in case.events if isinstance(event, Raised) for error in event.chain]
    named = [f"{error.type.rpartition('.')[2]}: {error.text[:_MAX_TEXT]}" for error in raised]
    errors = [(name, {*map(_place, error.frames)}) for name, error in zip(named, raised, strict=True)]
    told = (event for event in case.events if isinstance(event, Line) and event.level not in ("debug", "info"))
    lines = [line.text[:_MAX_TEXT] for line in told]
    # Most of thousands of ranks are in the same places, so equal stacks are converted once.
    places_of = functools.lru_cache(maxsize=None)(lambda frames: frozenset(map(_place, frames)))
    stood: dict[str | None, set[frozenset[str]]] = {}
    for process in case.processes.values():
        threads = [one for stack in process.stacks for one in (*stack.sample.threads, *stack.sample.native)]
        if places := frozenset[str]().union(*(places_of(thread.frames) for thread in threads)):
            stood.setdefault(short_name(process), set()).add(places)
    stacks = stood.get(who) or {places for some in stood.values() for places in some}
    is_alone = str(case.arguments.get("nnodes") or 1) == "1"
    arguments = list(_options(case.arguments))
    release = _release_parts(case.release)

    def applies(entry: dict[str, Any]) -> bool:
        since, until = _release_parts(entry.get("since") or ""), _release_parts(entry["fixed_in"] or "")
        if release and (release < since or (until and release >= until)):
            return False
        if not _are_in(entry.get("arguments", ()), arguments):
            return False
        frames = entry.get("frames", ())
        if entry.get("hang"):
            found = [_are_in(frames, places) for places in stacks]
            if not is_alone and any(map(_WAITS.search, frames)):
                return False  # the rank that hangs may be on another node
            return is_hang and any(found) and (all(found) or not entry.get("all_ranks"))
        pattern = re.compile(entry["error"])
        is_raised = any(pattern.match(line) and _are_in(frames, places) for line, places in errors)
        return is_raised or (not frames and any(pattern.search(line) for line in lines))

    found = [entry for entry in load("known_issues") if applies(entry)]
    return sorted(found, key=lambda entry: -len(entry.get("frames", ())) - len(entry.get("arguments", ())))


def _are_in(patterns: Iterable[str], texts: Collection[str]) -> bool:
    """Return whether each of the patterns (of `fnmatch`) matches one of the texts."""
    return all(any(fnmatchcase(text, pattern) for text in texts) for pattern in patterns)


def _release_parts(release: str) -> tuple[int, ...]:
    """Return the numbers of a release as a sort key; empty if the release is not known."""
    return tuple(int(number) for number in re.findall(r"\d+", release.partition("+")[0]))


def _place(frame: Frame) -> str:
    # Without the line, folder and class: only stacks of newer Python versions contain the class, tracebacks never do.
    return f"{frame.function.rpartition('.')[2]} ({frame.file.rpartition('/')[2]})"


def _options(arguments: dict[str, Any]) -> Iterable[str]:
    for name, value in arguments.items():
        option = f"--{name.removesuffix('_size') if name in ('tp_size', 'dp_size') else name}".replace("_", "-")
        if value not in (None, False):
            yield option if value is True else f"{option}={value}"
