"""Check what a kit wrote against the JSON Schemas that it publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from sglang_crashkit.model.schema import incident_schema

COMMANDS = Path(__file__).parents[1] / "docs" / "commands.schema.json"


@cache
def validator() -> jsonschema.Draft202012Validator:
    """Return what checks an ``incident.json``."""
    return jsonschema.Draft202012Validator(incident_schema())


@cache
def validator_of(answer: str) -> jsonschema.Draft202012Validator:
    """Return what checks the `answer` of a command, a name in the schema; a field that it lacks is an error here."""
    schema = _closed(json.loads(COMMANDS.read_text()))
    return jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{answer}"})


def assert_fits(document: Mapping[str, Any] | None, answer: str | None = None) -> None:
    """Check that a document is as its schema says: an incident, or the `answer` of a command."""
    assert document is not None, "there is no document"
    which = validator() if answer is None else validator_of(answer)
    found = [f"{error.json_path}: {error.message[:200]}" for error in which.iter_errors(document)]
    assert not found, found


def _closed(schema: Any) -> Any:
    """Return a schema that allows the fields that it names and no other."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **closed} if isinstance(schema.get("properties"), dict) else closed
