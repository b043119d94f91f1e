from __future__ import annotations

import json
from dataclasses import asdict

from sglang_crashkit.model.incident import Incident, ProcessReport, ServerInfo, Trigger
from sglang_crashkit.model.look import Look, without_frames
from sglang_crashkit.model.stacks import Frame

LOOK = Look("t", "S", 1.5, ["f (x.py:1)"], "main", (Frame("f", "x.py", 1),))
VALUES = {"time": "t", "state": "S", "cpu_secs": 1.5, "doing": ["f (x.py:1)"], "lock": "main"}


def test_the_frames_are_no_part_of_its_json() -> None:
    assert without_frames(asdict(LOOK)) == VALUES


def test_nor_of_the_json_of_its_incident() -> None:
    report = ProcessReport(1, "t", "scheduler", {}, looks=[LOOK, LOOK])
    incident = Incident("id", "hang", Trigger("e", "t", 1, "t"), ServerInfo(1, "0", "0", "h"), processes=[report])
    document = json.loads(json.dumps(incident.to_json()))
    assert document["processes"][0]["looks"] == [VALUES, VALUES]
    # The incident goes on to compare them.
    assert report.looks[0].frames
