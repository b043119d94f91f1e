from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.collectors import divergence
from sglang_crashkit.handler.collectors.divergence import divergence_of, without_requests
from sglang_crashkit.model.incident import Incident, ProcessReport, ServerInfo, Trigger
from sglang_crashkit.model.step import Step, StepRequest


def incident(kind: str = "hang", ranks: int = 2) -> Incident:
    reports = [ProcessReport(10 + n, f"sglang::scheduler_TP{n}", "scheduler", {"tp": n}) for n in range(ranks)]
    reports.append(ProcessReport(9, "sglang::detokenizer", "detokenizer", {}))
    return Incident("id", kind, Trigger("no_progress", "t", 10, ""), ServerInfo(1, "0", "0", "h"), reports)


def step(number: int, rid: str) -> Step:
    requests = (StepRequest(rid, hash(rid), 1, 5),)
    return Step(number, float(number), number + 0.5, "processed", "decode", requests, 1, 1, agreed_hash=hash(rid))


def light(steps: dict[int, list[Step]]) -> dict[int, list[Step]]:
    return {pid: without_requests(its) for pid, its in steps.items()}


ALIKE = [step(1, "a"), step(2, "a")]


@pytest.mark.parametrize(
    ("kind", "steps", "expected"),
    [
        ("hang", {10: ALIKE, 11: ALIKE}, "No divergence in the last 2 steps of TP0-1."),
        ("hang", {10: ALIKE, 11: [step(1, "a"), step(2, "b")]}, "; 3.0 s before the hang was noticed."),
        ("killed", {10: ALIKE, 11: [step(1, "a"), step(2, "b")]}, "; 3.0 s before the incident."),
        # Who was read first has not ended for that.
        ("hang", {10: ALIKE, 11: [*ALIKE, step(3, "a")]}, "No divergence in the last 2 steps of TP0-1."),
        ("hang", {10: ALIKE}, "Whether the ranks diverged is unknown: of TP1 there are no steps."),
    ],
)
def test_an_incident_tells_where_the_ranks_diverged(
    tmp_path: Path, kind: str, steps: dict[int, list[Step]], expected: str
) -> None:
    (tmp_path / "ranks").mkdir()
    for pid, its in steps.items():
        text = "".join(json.dumps(one.to_json()) + "\n" for one in its)
        (tmp_path / f"ranks/scheduler_TP{pid - 10}-{pid}.steps.jsonl").write_text(text)
    found = divergence_of(incident(kind), light(steps), tmp_path, 5.0, 4.5)
    assert found is not None
    assert found["statement"].endswith(expected)
    assert (found["request"] == "b") == ("before" in expected)
    assert found["pids"] == ([10, 11] if "before" in expected else [])


@pytest.mark.parametrize(("ranks", "steps"), [(2, {}), (2, {10: [], 11: []}), (1, {10: ALIKE})])
def test_it_tells_nothing_where_there_is_nothing_to_compare(ranks: int, steps: dict[int, list[Step]]) -> None:
    assert divergence_of(incident(ranks=ranks), steps, Path(), 5.0, 5.0) is None


def test_what_breaks_in_it_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(divergence, "find_divergence", fail)
    assert divergence_of(incident(), {10: ALIKE}, Path(), 5.0, 5.0) is None
    assert "cannot be compared" in caplog.text
