"""Check what a kit wrote against the JSON Schema of ``incident.json`` that its package has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema

from sglang_crashkit.model.schema import incident_schema


@cache
def validator() -> jsonschema.Draft202012Validator:
    """Return what checks a document."""
    return jsonschema.Draft202012Validator(incident_schema())


def assert_fits(document: Mapping[str, Any] | None) -> None:
    """Check that a document is as the schema says."""
    assert document is not None, "there is no document"
    found = [f"{error.json_path}: {error.message[:200]}" for error in validator().iter_errors(document)]
    assert not found, found
