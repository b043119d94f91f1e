"""What is said of recorded stacks does not change unnoticed: kind, level, who is named, and a sum of the words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.verdict import FailureEvent, judge
from sglang_crashkit.model.incident import Incident, ProcessReport, ServerInfo, Trigger
from unit.analysis.real_stacks import rounds
from unit.analysis.scenarios import Row, scenarios

GOLDEN = Path(__file__).parent / "golden"
#: What an incident does not see: two samples of all processes of one server, with titles.
_NO_INCIDENT = ("untitled", "prefill", "decode", "one is gone")


def incident_answers() -> Iterator[tuple[str, list[Any]]]:
    for name, rows in scenarios():
        if name.startswith(_NO_INCIDENT) or name.endswith(" once"):
            continue
        for trigger in ("no_progress", "unhealthy_at_sigterm"):
            reports = reports_of(rows)
            incident = Incident("id", "hang", Trigger(trigger, "t", 10, "T"), ServerInfo(1, "0", "0", "h"), reports)
            silent = [FailureEvent(one.pid, 1.0, "hang", "made no progress for 5.0 s") for one in reports]
            verdict = judge(incident, silent if trigger == "no_progress" else [])
            first = verdict.first_failure.pid if verdict.first_failure else None
            yield f"{name}: {trigger}", [verdict.kind, verdict.level, first, verdict.text]


def reports_of(rows: list[Row]) -> list[ProcessReport]:
    """Return the processes as the handler reports them."""
    reports: dict[int, ProcessReport] = {}
    for seen in (one for node in rounds(*rows) for one in node.processes):
        report = reports.setdefault(seen.pid, ProcessReport(seen.pid, seen.title, seen.role, dict(seen.ranks)))
        main = seen.main_thread
        doing = tuple(str(frame) for frame in main.frames[:4]) if main else ()
        gil = "main" if main is not None and main.owns_gil else ""
        report.samples.append(seen.__class__(**{**vars(seen), "doing": doing, "gil": gil}))
    for report in reports.values():
        report.doing = list(report.samples[0].doing)
    return list(reports.values())


def expected(name: str) -> dict[str, list[Any]]:
    document: dict[str, list[Any]] = json.loads((GOLDEN / f"{name}.json").read_text())
    return document


def summed(answers: Iterator[tuple[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [*said[:3], f"{zlib.crc32(said[3].encode()):08x}"] for name, said in answers}


def test_an_incident_says_what_it_said() -> None:
    assert summed(incident_answers()) == expected("incident")
