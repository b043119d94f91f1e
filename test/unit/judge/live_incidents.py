"""Incident documents for the tests of causes, in the form of ``incident.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.model import incident as incidents
from sglang_crashkit.model.case import case_of
from sglang_crashkit.model.incident import Exit, Failure, Incident, ProcessReport, ServerInfo, Trigger
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.sources.incident import events_of

TP0, TP1 = "sglang::scheduler_TP0", "sglang::scheduler_TP1"
#: By title: pid and role.
PEOPLE = {
    "server": (1, "server"),
    TP0: (10, "scheduler"),
    TP1: (11, "scheduler"),
    "sglang::detokenizer": (12, "detokenizer"),
    "sglang::tokenizer_worker:0": (13, "tokenizer_worker"),
    "ninja": (14, "helper"),
}


def incident(
    kind: str = "unknown",
    first: str | None = None,
    *,
    level: str = "established",
    text: str = "It failed.",
    opened: str = "exception",
    trigger: str = "process_exited",
    end: Exit | None = None,
    error: str = "",
    frames: Sequence[str] = (),
    doing: dict[str, Sequence[str]] | None = None,
    state: dict[str, str] | None = None,
    events: Sequence[str | dict[str, Any]] = (),
    release: str = "0.5.12",
    **more: Any,
) -> dict[str, Any]:
    """Return the document of an incident: first what the verdict says, then what opened it, and its evidence."""
    reports = []
    for title, (pid, role) in PEOPLE.items():
        report = ProcessReport(pid, title, role, {"tp": int(title[-1])} if role == "scheduler" else {})
        report.doing = list((doing or {}).get(title, ()))
        report.state = {"State": state[title]} if state and title in state else None
        report.exit = end if title == first else None
        reports.append(report)
    who = first or TP0
    if error:
        next(one for one in reports if one.title == who).doing = list(frames)
    found = Incident(
        "0", opened, Trigger(trigger, "t", PEOPLE[who][0], who), ServerInfo(1, release, "0", "host"), reports
    )
    failure = Failure(PEOPLE[first][0], first) if first else None
    found.verdict = incidents.Verdict(kind, failure, level, text, [text])  # type: ignore[arg-type]
    if error:
        found.note(1.0, "exception", pid=PEOPLE[who][0], title=who, message=error)
    for event in events:
        fields = dict(event) if isinstance(event, dict) else {"event": event}
        found.note(2.0, fields.pop("event"), **fields)
    return found.to_json() | more


def killed(
    signal: str = "SIGKILL", detail: str = "its memory cgroup counts no OOM kill", cause: Any = "signal"
) -> Exit:
    return Exit(None, signal, cause, detail, "t")


def raised(error: str, *frames: str, first: str = TP0, **fields: Any) -> dict[str, Any]:
    """Return an incident of a process that raised an exception."""
    return incident("exception", first, error=error, frames=frames, **fields)


def hung(first: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return an incident of a server that makes no progress."""
    return incident("hang", first, **({"opened": "hang", "trigger": "no_progress", "level": "supported"} | fields))


def died(signal: str = "SIGKILL", detail: str = "x", first: str = TP1, **fields: Any) -> dict[str, Any]:
    return incident("signal", first, end=killed(signal, detail), **fields)


def verdict_of(document: Mapping[str, Any], records: Mapping[int, Mapping[str, Any]] | None = None) -> Verdict:
    """Return what the judge says of an incident."""
    environment = document.get("environment")
    about = environment if isinstance(environment, dict) else {}
    return judge(case_of(events_of(Incident.of(document), about, records or {})))
