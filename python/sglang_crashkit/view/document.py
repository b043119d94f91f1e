"""Turns the verdict of `explain`, on files that no crash handler wrote, into an incident for `show` and `bundle`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_crashkit.model import incident
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.checked_json import iso_time
from sglang_crashkit.model.event import AnyEvent, Exit, Kernel, Line, Raised, Stage, Stop
from sglang_crashkit.model.incident import (
    Cause,
    Entry,
    Failure,
    Incident,
    ProcessReport,
    Requests,
    ServerInfo,
    Surroundings,
    Trigger,
)
from sglang_crashkit.model.verdict import Verdict

KIND = "explained"
_MAX_EVENTS, _MAX_PROCESSES, _MAX_TEXT = 400, 1024, 500


def incident_of(verdict: Verdict, case: Case, *, now: float, kit: str) -> Incident:
    """Return the incident of a case that was judged from plain evidence.

    Args:
        verdict: what the judge says of it.
        case: the evidence.
        now: seconds since the epoch, for what has no time of its own.
        kit: the kit's version.
    """
    known = [one for one in case.processes.values() if one.who][:_MAX_PROCESSES]
    # A pid may stand in no evidence: then a number that no process has, by which the parts refer to it.
    pids = {id(one): one.pid or -place for place, one in enumerate(known, start=1)}
    first = next((one for one in known if verdict.first and one.who == verdict.first), None)
    failure = None if first is None else Failure(pids[id(first)], _title(first))
    at = iso_time(case.last_at or now)
    sizes = {name: case.arguments.get(f"{name}_size") for name in ("tp", "pp", "dp", "ep")}
    key = repr((msgspec.to_builtins(verdict), case.first_at, case.last_at))
    return Incident(
        id=hashlib.sha256(key.encode()).hexdigest()[:8],
        kind=KIND,
        trigger=Trigger(KIND, at, failure.pid if failure else 0, failure.title if failure else ""),
        server=ServerInfo(0, case.release, kit, ""),
        processes=[
            ProcessReport(
                pids[id(one)], _title(one), one.role, one.ranks, exit=_exit(one, at), doing=list(map(str, _frames(one)))
            )
            for one in known
        ],
        requests=Requests(reason="there is no journal in plain evidence"),
        environment=Surroundings(
            model=str(case.arguments.get("model_path") or ""),
            parallel={name: size for name, size in sizes.items() if isinstance(size, int)},
        ),
        timeline=list(_timeline(case, now))[-_MAX_EVENTS:],
        verdict=incident.Verdict(
            verdict.kind, failure, verdict.level, verdict.headline, [verdict.headline, *verdict.because]
        ),
        cause=Cause.of(verdict),
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


def _frames(process: Process) -> tuple[Any, ...]:
    if process.raised:
        return process.raised[0].error.frames[:4]
    if process.stacks:
        thread = process.stacks[-1].sample.main_thread
        return thread.frames[:4] if thread else ()
    return ()


def _timeline(case: Case, now: float) -> Iterator[Entry]:
    for event in case.events:
        text, name = _words(event), type(event).__name__.lower()
        if text:
            yield Entry(time=iso_time(event.at or now), event=name, who=event.who, message=text[:_MAX_TEXT])


def _words(event: AnyEvent) -> str:
    match event:
        case Raised():
            return f"{event.error.type}: {event.error.text.partition(chr(10))[0]}"
        case Line():
            return event.text if event.level in ("warning", "error", "critical") else ""
        case Exit():
            return event.text or event.signal or f"status {event.code}"
        case Kernel() | Stop():
            return event.text
        case Stage():
            return event.name
        case _:
            return ""
