"""The cause that an incident says, from what stands in its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_crashkit.analysis import causes
from sglang_crashkit.handler.collectors.causes import explain
from sglang_crashkit.incident.summary import format_summary
from sglang_crashkit.model.incident import (
    Evidence,
    Exit,
    Failure,
    Incident,
    ProcessReport,
    ServerInfo,
    Trigger,
    Verdict,
)
from sglang_crashkit.model.sample import Frame, Sample, Thread

RECORD = {
    "message": "RuntimeError: selected index k out of range\nof many lines",
    "traceback": ["forward (sglang/srt/layers/sampler.py:1)", "get_top_logprobs_raw (sglang/srt/layers/logprob.py:2)"],
}


def make_incident(kind: str = "exception") -> Incident:
    rank = ProcessReport(8, "sglang::scheduler", "scheduler", {})
    rank.evidence = [Evidence("exception", "captured", "ranks/r.exception.json")]
    incident = Incident("0", kind, Trigger(kind, "t", 8, rank.title), ServerInfo(7, "0.5.12", "0", "h"), [rank])
    incident.verdict = Verdict(kind, Failure(8, rank.title), "established", "It failed.", ["It failed."])
    incident.note(1.0, "exception", pid=8, message="RuntimeError: selected index k")
    return incident


@pytest.mark.parametrize(
    ("record", "name"), [(json.dumps(RECORD), "poison_request"), ("{torn", "exception"), (None, "exception")]
)
def test_the_record_of_the_rank_is_read_where_it_is_whole(tmp_path: Path, record: str | None, name: str) -> None:
    if record is not None:
        (tmp_path / "ranks").mkdir()
        (tmp_path / "ranks" / "r.exception.json").write_text(record)
    found = explain(make_incident(), tmp_path)
    assert found is not None
    assert found["class"] == name
    assert [one["issue"] for one in found["known_issues"]] == ([40076] if name == "poison_request" else [])


def test_the_whole_stack_of_one_that_hangs_is_looked_at(tmp_path: Path) -> None:
    incident = make_incident("hang")
    incident.timeline.clear()
    names = ("all_reduce", "_all_reduce", "f", "g", "h", "check_prefetch_progress")
    frames = tuple(Frame(name, "sglang/srt/mem_cache/hiradix_cache.py", 1) for name in names)
    incident.processes[0].samples = [Sample(pid=8, threads=(Thread("MainThread", 8, False, False, frames),))]
    found = explain(incident, tmp_path)
    assert found is not None
    assert [one["issue"] for one in found["known_issues"]] == [30760]


def test_the_arguments_are_those_of_the_environment_in_the_folder(tmp_path: Path) -> None:
    incident = make_incident()
    incident.processes[0].doing = ["retract_decode (sglang/srt/managers/schedule_batch.py:1)"]
    incident.timeline[0]["message"] = "NotImplementedError"
    without = explain(incident, tmp_path)
    (tmp_path / "environment.json").write_text('{"arguments": {"enable_hisparse": true}}')
    found = explain(incident, tmp_path)
    assert without is not None
    assert without["known_issues"] == []
    assert found is not None
    assert [one["issue"] for one in found["known_issues"]] == [40729]


def test_the_log_of_the_first_failure_is_read(tmp_path: Path) -> None:
    incident = make_incident("exit_status")
    incident.timeline.clear()
    incident.processes[0].exit = Exit(1, None, "exit_status", "no exception", "t")
    incident.processes[0].evidence = [Evidence("log", "captured", "x.log")]  # type: ignore[arg-type]
    without = explain(incident, tmp_path)
    (tmp_path / "x.log").write_text("2026-01-01T00:00:00Z ERROR uvicorn.error: [Errno 98] x\n")
    found = explain(incident, tmp_path)
    assert without is not None
    assert found is not None
    assert (without["class"], found["class"]) == ("exited", "startup_port")


def test_a_broken_rule_book_does_not_cost_the_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(causes, "explain", None)
    incident = make_incident()
    incident.cause = explain(incident, tmp_path)
    assert incident.cause is None
    assert "the cause of incident 0 was not looked for" in caplog.text
    assert "## Cause" not in format_summary(incident.to_json())


def test_the_summary_says_the_cause_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "r.exception.json").write_text(json.dumps(RECORD))
    incident = make_incident()
    incident.cause = explain(incident, tmp_path)
    text = format_summary(incident.to_json())
    cause = text[text.index("## Cause") : text.index("## Processes")]
    assert "(poison_request, supported)" in cause
    assert "- next: find it in requests/requests.jsonl" in cause
    assert "- a restart helps: unknown" in cause
    assert "- known upstream: sgl-project/sglang #40076" in cause


def test_an_idle_handler_has_loaded_neither_rules_nor_yaml() -> None:
    code = "import sys, sglang_crashkit.handler.server\n"
    code += (
        "print([name for name in sys.modules if name == 'yaml' or name.startswith('sglang_crashkit.analysis.causes')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
