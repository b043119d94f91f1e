"""A verdict on one screen, and as Markdown for an issue."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.event import Dumped
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.view.model import Section
from sglang_crashkit.visible import visible

CLASSES_PAGE = "docs/classes.md"
#: What the levels mean, for who reads the word for the first time.
_LEVELS = {
    "established": "established: the kernel, the driver or the exception itself says so",
    "supported": "supported: the evidence points there",
    "unknown": "unknown: the evidence is not enough",
}
_RESTART = {"yes": "likely to help", "no": "does not help", "unknown": "may help or not"}
_WIDTH, _LABEL = 118, 9
#: Arguments that an issue needs most; the others are in the log.
_TOLD_ARGUMENTS = 40
_MAX_FRAMES, _MAX_QUOTES, _MAX_PROCESSES = 12, 6, 16


def screen(verdict: Verdict, case: Case) -> Iterator[str]:
    """Yield the lines of a verdict for a terminal, the headline first."""
    yield from textwrap.wrap(_plain(verdict.headline), _WIDTH, break_on_hyphens=False)
    yield ""
    rows: list[tuple[str, Iterable[str]]] = [
        ("class", [f"{verdict.kind}: {verdict.cause}"]),
        ("level", [_LEVELS[verdict.level]]),
        ("first", [verdict.first] if verdict.first else []),
        ("part", [verdict.component] if verdict.component else []),
        ("restart", [_RESTART[verdict.restart_helps]]),
        ("release", [case.release] if case.release else []),
        ("requests", [_in_flight(one) for one in case.dumped]),
        ("because", verdict.because[:_MAX_QUOTES]),
        ("next", [f"{number}. {step}" for number, step in enumerate(verdict.next, start=1)]),
        ("known", [f"#{one.issue}: {one.title}" for one in verdict.known_issues]),
        ("more", [f"{CLASSES_PAGE}#{verdict.kind}"]),
    ]
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * _LABEL, break_on_hyphens=False)
    for label, values in rows:
        head = f"{label:<{_LABEL}}"
        for value in values:
            wrapper.initial_indent = head
            yield from wrapper.wrap(_plain(value))
            head = " " * _LABEL


def report(verdict: Verdict, case: Case) -> Section:
    """Return what goes into an upstream issue: verdict, release, arguments, frames, words."""
    known = (("first", verdict.first), ("component", verdict.component), ("SGLang", case.release))
    told = [f"{name}={value!r}" for name, value in case.arguments.items() if value not in (None, False, "", "auto")]
    arguments = textwrap.wrap(_plain(", ".join(told[:_TOLD_ARGUMENTS])), _WIDTH, break_on_hyphens=False)
    seen = [one for one in case.processes.values() if one.raised or one.stacks][:_MAX_PROCESSES]
    parts = [
        Section("Arguments", code=arguments),
        Section("Evidence", code=[_plain(line) for line in verdict.because]),
        *(Section(one.who or "a process", code=_frames_of(one)) for one in seen),
        Section("Next", verdict.next),
        Section("Looks like", [f"#{one.issue}: {one.title}" for one in verdict.known_issues]),
    ]
    return Section(
        _plain(verdict.headline),
        [
            f"class: `{verdict.kind}` ({verdict.level}): {verdict.cause}",
            *(f"{label}: {value}" for label, value in known if value),
        ],
        parts=[part for part in parts if part.lines or part.code],
    )


def processes(case: Case) -> list[dict[str, Any]]:
    """Return what is known of each process, for JSON: its name, where it was and what it said last."""
    return [
        {
            "who": one.who,
            **({"node": one.node} if one.node else {}),
            **({"side": one.side} if one.side else {}),
            **({"pid": one.pid} if one.pid else {}),
            "doing": _frames_of(one)[:3],
            "last_line": one.lines[-1].text[:300] if one.lines else "",
        }
        for one in case.processes.values()
        if one.who
    ][:256]


def _in_flight(dumped: Dumped) -> str:
    longest = f"; the longest: {dumped.text}" if dumped.text else ""
    return f"{dumped.unfinished} had not finished, {dumped.finished} before them had ({dumped.source}){longest}"


def _frames_of(process: Process) -> list[str]:
    if process.raised:
        error = process.raised[0].error
        text = f"{error.type}: {error.text.splitlines()[0][:200]}" if error.text else error.type
        return [_plain(text), *(f"  {frame}" for frame in error.frames[:_MAX_FRAMES])]
    if process.stacks:
        sample = process.stacks[-1].sample
        thread = sample.main_thread or next(iter((*sample.threads, *sample.native)), None)
        return [_plain(str(frame)) for frame in thread.frames[:_MAX_FRAMES]] if thread else []
    return []


def _plain(text: str) -> str:
    return visible(text, keep="")
