"""A verdict as ``incident.json`` has one, so that what shows and packs incidents takes it too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_crashkit.model import SCHEMA_VERSION
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.checked_json import iso_time
from sglang_crashkit.model.event import AnyEvent, Exit, Kernel, Line, Raised, Stage, Stop
from sglang_crashkit.model.verdict import Verdict

KIND = "explained"
_MAX_EVENTS, _MAX_PROCESSES, _MAX_TEXT = 400, 1024, 500


def document(verdict: Verdict, case: Case, *, now: float, kit: str) -> dict[str, Any]:
    """Return the document of a case that was judged from plain evidence.

    Args:
        verdict: what the judge says of it.
        case: the evidence.
        now: seconds since the epoch, for what has no time of its own.
        kit: the kit's version.
    """
    known = [one for one in case.processes.values() if one.who][:_MAX_PROCESSES]
    # A pid may stand in no evidence: then a number that no process has, by which the document's parts refer to it.
    pids = {id(one): one.pid or -place for place, one in enumerate(known, start=1)}
    first = next((one for one in known if verdict.first and one.who == verdict.first), None)
    failure = None if first is None else {"pid": pids[id(first)], "title": _title(first)}
    at = iso_time(case.last_at or now)
    told = {"pid": 0, "title": ""} if failure is None else failure
    answer = msgspec.to_builtins(verdict)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": hashlib.sha256(repr((answer, case.first_at, case.last_at)).encode()).hexdigest()[:8],
        "kind": KIND,
        "trigger": {"event": KIND, "time": at, **told},
        "server": {"pid": 0, "sglang_version": case.release, "kit_version": kit, "hostname": ""},
        "processes": [
            {
                "pid": pids[id(one)],
                "title": _title(one),
                "role": one.role,
                "rank": one.ranks,
                "exit": _exit(one, at),
                "state": None,
                "doing": [str(frame) for frame in _frames(one)],
            }
            for one in known
        ],
        "requests": {"reason": "there is no journal in plain evidence"},
        "environment": {"model": str(case.arguments.get("model_path") or ""), "parallel": _parallel(case)},
        "timeline": list(_timeline(case, now))[-_MAX_EVENTS:],
        "verdict": {
            "kind": verdict.kind,
            "first_failure": failure,
            "level": verdict.level,
            "text": verdict.headline,
            "basis": [verdict.headline, *verdict.because],
        },
        "cause": cause_of(verdict),
        "complete": True,
    }


def cause_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as ``incident.json`` has it under ``cause``."""
    return {
        "class": verdict.kind,
        "words": verdict.cause,
        "level": verdict.level,
        "reasons": verdict.because,
        "next_steps": verdict.next,
        "known_issues": [msgspec.structs.asdict(one) for one in verdict.known_issues],
        "restart_helps": verdict.restart_helps,
    }


def _title(process: Process) -> str:
    name = process.who.replace(" ", "_")
    return f"sglang::scheduler_{name}" if process.ranks else f"sglang::{name}"


def _exit(process: Process, at: str) -> dict[str, Any] | None:
    if not process.exits:
        return None
    end = process.exits[-1]
    cause = "signal" if end.signal else "exit_status"
    return {
        "code": end.code,
        "signal": end.signal or None,
        "cause": cause,
        "detail": end.text,
        "time": iso_time(end.at) if end.at else at,
    }


def _frames(process: Process) -> tuple[Any, ...]:
    if process.raised:
        return process.raised[0].error.frames[:4]
    if process.stacks:
        thread = process.stacks[-1].sample.main_thread
        return thread.frames[:4] if thread else ()
    return ()


def _parallel(case: Case) -> dict[str, int]:
    sizes = {name: case.arguments.get(f"{name}_size") for name in ("tp", "pp", "dp", "ep")}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _timeline(case: Case, now: float) -> Iterator[dict[str, Any]]:
    for event in case.events:
        text = _words(event)
        if text:
            moment = iso_time(event.at or now)
            yield {"time": moment, "event": type(event).__name__.lower(), "who": event.who, "message": text[:_MAX_TEXT]}


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
