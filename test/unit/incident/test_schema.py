"""The JSON Schema of ``incident.json`` that the package has: it fits what the kit writes, and what it has written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from incident_schema import assert_fits, validator
from sglang_crashkit.cli.main import main
from sglang_crashkit.model import SCHEMA_VERSION, incident, peers
from unit.support.stored import make_incident

DATA = Path(__file__).parent / "data"
SCHEMA: Any = validator().schema
#: What the first kit that wrote schema version 1 did not write yet, of the document and of a process.
LATER = ("peers", "collectives", "divergence", "suspects", "suspects_left_out", "environment", "gpus", "fault", "cause")
LATER_OF_PROCESS = ("gpu", "looks", "last_sign", "steps")


@pytest.fixture
def oldest() -> dict[str, Any]:
    """The document of a real incident as the first kit would have written it."""
    document: dict[str, Any] = json.loads((DATA / "killed.json").read_text())
    for name in (*LATER, "handler"):
        document.pop(name, None)
    for process in document["processes"]:
        for name in LATER_OF_PROCESS:
            del process[name]
        for piece in process["evidence"]:
            del piece["source"]
    for name in ("source", "journal"):
        del document["requests"][name]
    return document


def test_the_schema_is_one_and_of_this_version() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert SCHEMA["$id"].endswith(f":{SCHEMA_VERSION}")


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_incidents_of_real_servers_fit(path: Path) -> None:
    assert_fits(json.loads(path.read_text()))


def test_every_field_that_is_written_is_described() -> None:
    written = {
        one.__name__: {field.name for field in dataclasses.fields(one)}
        for module in (incident, peers)
        for one in vars(module).values()
        if dataclasses.is_dataclass(one) and isinstance(one, type) and one.__module__ == module.__name__
    }
    # The stacks of its samples, and of its exception and its fault, are in files of their own.
    unwritten = {"samples", "raised_through", "hit_in_main"}
    written["ProcessReport"] = written["ProcessReport"] - unwritten | {"looks"}
    # Its first few are in those of the steps.
    written["LastSteps"] -= {"rids", "checks"}
    described = {name: set(one["properties"]) for name, one in SCHEMA["$defs"].items() if name != "Moment"}
    assert described == {name: fields for name, fields in written.items() if name in described}
    assert set(SCHEMA["properties"]) == written["Incident"]


def test_an_older_document_fits_and_is_read(
    oldest: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_fits(oldest)
    path = make_incident(tmp_path / "host" / "incidents")
    (path / "incident.json").write_text(json.dumps(oldest))
    for command in (["show"], ["show", "--timeline"], ["show", "--stacks"], ["incidents"], ["bundle", "--report"]):
        assert main([command[0], str(path), *command[1:]]) == 0
    out = capsys.readouterr().out
    assert out.startswith("TP1 was killed by SIGKILL; exit status 82; 3 requests lost\n")
    # Without a class of the cause, the verdict stands in the table.
    assert " TP1 " in out


def test_a_newer_kit_may_add_fields() -> None:
    document = json.loads((DATA / "killed.json").read_text())
    document["later"] = {"x": 1}
    document["processes"][0]["later"] = 2
    assert_fits(document)
