from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.model.incident import Incident, ServerInfo, Trigger, iso_time


def make_incident() -> Incident:
    return Incident("id", "killed", Trigger("e", "t", 1, "x"), ServerInfo(1, "0", "0", "h"))


@given(st.lists(st.floats(0, 2e9), max_size=10))
def test_the_timeline_is_ordered_by_time(times: list[float]) -> None:
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
