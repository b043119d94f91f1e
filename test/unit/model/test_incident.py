from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model.incident import Incident, ProcessReport, ServerInfo, Trigger, iso_time


def make_incident() -> Incident:
    return Incident("id", "killed", Trigger("e", "t", 1, "x"), ServerInfo(1, "0", "0", "h"))


def test_times_are_utc_with_microseconds() -> None:
    assert iso_time(0.000001) == "1970-01-01T00:00:00.000001Z"


@given(st.lists(st.floats(0, 2e9), max_size=10))
def test_the_timeline_is_in_the_order_of_time_however_it_was_noted(times: list[float]) -> None:
    incident = make_incident()
    for seconds in times:
        incident.note(seconds, "event", pid=1)
    timeline = incident.to_json()["timeline"]
    assert [entry["time"] for entry in timeline] == sorted(iso_time(seconds) for seconds in times)
    assert json.loads(json.dumps(timeline)) == timeline


def test_the_json_form_holds_everything_and_changes_nothing() -> None:
    incident = make_incident()
    incident.note(2.0, "second")
    incident.note(1.0, "first")
    document = incident.to_json()
    assert list(document)[:2] == ["schema_version", "id"]
    assert document.keys() == {
        *("schema_version", "id", "kind", "trigger", "server", "processes", "requests", "timeline", "verdict"),
        *("peers", "collectives", "divergence", "suspects", "suspects_left_out", "environment", "gpus", "cause"),
        *("handler", "fault", "complete"),
    }
    assert [entry["event"] for entry in incident.timeline] == ["second", "first"]


def test_a_process_is_found_by_its_pid() -> None:
    incident = make_incident()
    incident.processes.append(ProcessReport(7, "x", "scheduler", {}))
    assert incident.process(7) is incident.processes[0]
    assert incident.process(8) is None
