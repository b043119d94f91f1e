"""The JSON Schema of ``incident.json``: it fits what the kit writes, and what it has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from incident_schema import assert_fits, validator
from sglang_crashkit.cli.main import main
from sglang_crashkit.model import SCHEMA_VERSION
from unit.support.stored import DATA, golden

SCHEMA: Any = validator().schema


def test_the_schema_is_one_and_of_this_version() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert SCHEMA["$id"].endswith(f":{SCHEMA_VERSION}")


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_incidents_of_real_servers_fit(path: Path) -> None:
    assert_fits(json.loads(path.read_text()))


def test_the_schema_says_what_is_written_and_no_more() -> None:
    process = SCHEMA["$defs"]["ProcessReport"]["properties"]
    assert process["doing"] == {
        "description": "The innermost Python frames that show what it was doing, innermost first.",
        "type": "array",
        "items": {"type": "string"},
        "default": [],
    }
    assert not {"samples", "raised_through", "hit_in_main"} & process.keys()
    assert "Sample" not in SCHEMA["$defs"]


@pytest.mark.parametrize(
    ("change", "is_fit"),
    [
        ({"id": 7}, False),
        ({"processes": [{"pid": "x"}]}, False),
        ({"timeline": [{"event": "exception"}]}, False),
        ({"verdict": {"kind": "new", "first_failure": None, "level": "likely", "text": ""}}, True),
        # A newer kit may add fields.
        ({"later": {"x": 1}, "processes": [golden("killed")["processes"][0] | {"later": 2}]}, True),
    ],
)
def test_what_has_another_form_does_not_fit(change: dict[str, Any], is_fit: bool) -> None:
    assert validator().is_valid(golden("killed") | change) is is_fit


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))
