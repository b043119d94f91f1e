"""Check what a kit wrote against the JSON Schema of ``incident.json`` that its package has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import jsonschema


@cache
def validator() -> jsonschema.Draft202012Validator:
    """Return what checks a document."""
    text = resources.files("sglang_crashkit.incident").joinpath("incident.schema.json").read_text()
    return jsonschema.Draft202012Validator(json.loads(text))


def assert_fits(document: Mapping[str, Any] | None) -> None:
    """Check that a document is as the schema says."""
    assert document is not None, "there is no document"
    found = [f"{error.json_path}: {error.message[:200]}" for error in validator().iter_errors(document)]
    assert not found, found
