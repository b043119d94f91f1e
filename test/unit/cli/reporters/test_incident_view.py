from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.cli.reporters import incident_view
from sglang_crashkit.cli.reporters.incident_files import IncidentFiles
from unit.cli.reporters.html_incidents import time


def event(seconds: float, pid: int, name: str = "exception") -> dict[str, Any]:
    return {"time": time(seconds), "pid": pid, "title": f"sglang::scheduler_TP{pid}", "event": name, "message": "x"}


def test_events_have_their_place_between_first_and_last() -> None:
    found = incident_view.timeline(
        {"trigger": {"time": time(12)}, "timeline": [event(10, 0), event(11, 1, "process_exited"), event(14, 0)]}
    )
    assert [(one["after"], one["place"]) for one in found["events"]] == [(-2, 0), (-1, 250), (2, 1000)]
    assert (found["seconds"], found["begin"], len(found["lanes"])) == (4, -2, 2)


@pytest.mark.parametrize("events", [[], 5, [{"event": "exception"}, {"time": "never"}]])
def test_without_a_time_there_is_no_timeline(events: object) -> None:
    assert incident_view.timeline({"timeline": events})["events"] == []


def test_findings_of_all_kinds_are_listed() -> None:
    document = {
        "collectives": {
            "findings": [
                {"group": "tp", "kind": "behind", "level": "supported", "statement": "TP1 is behind."},
            ],
            "missing": ["TP0 wrote none"],
        },
        "gpus": {"lines": ["GPU 0: Xid 79"]},
        "peers": [
            {"role": "prefill", "address": "p:1", "sign": "heartbeat", "since": "t", "requests": [{"rid": "r1"}]}
        ],
    }
    found = incident_view.findings_of(document)
    assert [one["title"] for one in found] == [
        *("tp: behind", "GPUs", "no flight recorder", "lost servers of the pair")
    ]
    assert [one["open"] for one in found] == [True, True, False, True]
    assert found[-1]["lines"] == ["prefill server p:1: heartbeat, since t; requests that wait for it: r1"]


def test_the_environment_is_told_by_dotted_names(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"model": "m", "host": {"cpu": {"count": 2}, "names": ["a", "b"]}}')
    found = incident_view.environment_of(IncidentFiles(tmp_path), {"environment": {"model": "other"}})
    assert [(one["name"], one["values"]) for one in found] == [
        ("in short", [("model", "m")]),
        ("host", [("cpu.count", "2"), ("names", "a, b")]),
    ]
    (tmp_path / "environment.json").unlink()
    found = incident_view.environment_of(IncidentFiles(tmp_path), {"environment": {"model": "other"}})
    assert found[0]["values"] == [("model", "other")]
