"""The verdict of `explain`, on files that no crash handler wrote: on one screen, as Markdown, and as an incident.

`page_of_classes` makes ``docs/classes.md``, on what each class of verdicts means, from ``classes.yaml``.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from sglang_crashkit.model import incident
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.event import Dumped, Event, Exit, Kernel, Line, Raised, Stage, Stop
from sglang_crashkit.model.lenient import iso_time
from sglang_crashkit.model.sample import Frame, Sample
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.view.markdown import section_lines
from sglang_crashkit.view.model import Section
from sglang_crashkit.visible import visible

CLASSES_PAGE = "docs/classes.md"
#: What each level means, for a reader who sees the word for the first time.
_LEVELS = {
    "established": "established: the kernel, the driver or the exception itself says so",
    "supported": "supported: the evidence points there",
    "unknown": "unknown: the evidence is not enough",
}
_RESTART = {"yes": "likely to help", "no": "does not help", "unknown": "may help or not"}
_WIDTH, _LABEL = 118, 9
#: Most server arguments that a report for an issue shows; the log has the others.
_MAX_ARGUMENTS = 40
_MAX_FRAMES, _MAX_QUOTES, _MAX_PROCESSES = 12, 6, 16
#: The kind of an incident made from plain evidence; its most events and processes, and characters of an event's text.
KIND = "explained"
_MAX_EVENTS, _MAX_KEPT, _MAX_TEXT = 400, 1024, 500
_PAGE_HEAD = """\
# Classes of verdicts

What a verdict of `sglang-crashkit explain`, and the cause of an incident, may say has happened. The names are stable:
alerts route on them.
`sglang-crashkit explain --class CLASS` prints one; this page is what `--class all` prints.
"""


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
        ("requests", map(_in_flight, case.dumped)),
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
    """Return the text of an upstream issue: verdict, release, arguments, lines of evidence, frames, next steps."""
    known = (("first", verdict.first), ("component", verdict.component), ("SGLang", case.release))
    told = [f"{name}={value!r}" for name, value in case.arguments.items() if value not in (None, False, "", "auto")]
    arguments = textwrap.wrap(_plain(", ".join(told[:_MAX_ARGUMENTS])), _WIDTH, break_on_hyphens=False)
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
    """Return what is known of each process, for JSON: its name and place, innermost frames and last log line."""
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
    error = process.raised[0].error if process.raised else None
    head = [f"{error.type}: {error.text.splitlines()[0][:200]}" if error.text else error.type] if error else []
    lead = "  " if error else ""
    return [_plain(line) for line in (*head, *(f"{lead}{frame}" for frame in _innermost(process, _MAX_FRAMES)))]


def _plain(text: str) -> str:
    return visible(text, keep="")


# -- as an incident, for `show` and `bundle`


def incident_of(verdict: Verdict, case: Case, *, now: float, kit: str) -> incident.Incident:
    """Return the incident of a case that was judged from plain evidence; `kit` is the kit's version.

    Events that have no time get `now`, in seconds since the epoch.
    """
    known = [one for one in case.processes.values() if one.who][:_MAX_KEPT]
    # A process without a known pid gets a negative number, by which the parts of the incident refer to it.
    pids = {id(one): one.pid or -place for place, one in enumerate(known, start=1)}
    first = next((one for one in known if verdict.first and one.who == verdict.first), None)
    failure = None if first is None else incident.Failure(pids[id(first)], _title(first))
    at = iso_time(case.last_at or now)
    sizes = {name: case.arguments.get(f"{name}_size") for name in ("tp", "pp", "dp", "ep")}
    key = repr((msgspec.to_builtins(verdict), case.first_at, case.last_at))
    timeline = [
        incident.Entry(
            time=iso_time(one.at or now), event=type(one).__name__.lower(), who=one.who, message=text[:_MAX_TEXT]
        )
        for one in case.events
        if (text := _words(one))
    ]
    return incident.Incident(
        id=hashlib.sha256(key.encode()).hexdigest()[:8],
        kind=KIND,
        trigger=incident.Trigger(KIND, at, failure.pid if failure else 0, failure.title if failure else ""),
        server=incident.ServerInfo(0, case.release, kit, ""),
        processes=[
            incident.ProcessReport(
                pids[id(one)],
                _title(one),
                one.role,
                one.ranks,
                exit=_exit(one, at),
                doing=[*map(str, _innermost(one))],
            )
            for one in known
        ],
        requests=incident.Requests(reason="there is no journal in plain evidence"),
        environment=incident.Surroundings(
            model=str(case.arguments.get("model_path") or ""),
            parallel={name: size for name, size in sizes.items() if isinstance(size, int)},
        ),
        timeline=timeline[-_MAX_EVENTS:],
        verdict=incident.Verdict(
            verdict.kind, failure, verdict.level, verdict.headline, [verdict.headline, *verdict.because]
        ),
        cause=incident.Cause.of(verdict),
        complete=True,
    )


def _title(process: Process) -> str:
    name = process.who.replace(" ", "_")
    return f"sglang::scheduler_{name}" if process.ranks else f"sglang::{name}"


def _exit(process: Process, at: str) -> incident.Exit | None:
    if not process.exits:
        return None
    end = process.exits[-1]
    cause: incident.ExitCause = "signal" if end.signal else "exit_status"
    return incident.Exit(end.code, end.signal or None, cause, end.text, iso_time(end.at) if end.at else at)


def _innermost(process: Process, most: int = 4) -> tuple[Frame, ...]:
    if process.raised:
        return process.raised[0].error.frames[:most]
    sample = process.stacks[-1].sample if process.stacks else Sample()
    thread = sample.main_thread or next(iter((*sample.threads, *sample.native)), None)
    return thread.frames[:most] if thread is not None else ()


def _words(event: Event) -> str:
    match event:
        case Raised():
            return f"{event.error.type}: {event.error.text.partition(chr(10))[0]}"
        case Line(level="warning" | "error" | "critical") | Kernel() | Stop():
            return event.text
        case Exit():
            return event.text or event.signal or f"status {event.code}"
        case Stage():
            return event.name
    return ""


# -- what the classes mean


def page_of_classes(classes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page: all classes by name, as Markdown."""
    yield from _PAGE_HEAD.splitlines()
    for kind in sorted(classes):
        yield from ("", *class_lines(kind, classes[kind]))


def class_lines(kind: str, row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one class: what it is, how it is known, what to do."""
    lines = [f"known by: {row['known_by']}", f"a restart helps: {row['restart']}"]
    lines += [f"next: {step}" for step in row["next"]]
    yield from section_lines(Section(kind, lines, f"{row['words'][0].upper()}{row['words'][1:]}."), "##")
