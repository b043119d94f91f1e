"""Grafana's own schema knows all of the dashboard: no registry has a Grafana that could be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="Grafana's foundation SDK is for Python 3.11 and newer")

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

plugins.register_default_plugins()

SHIPPED = Path(__file__).parents[3] / "docs" / "prometheus" / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(SHIPPED.read_text())


def lost(given: Any, read: Any, where: str) -> Iterator[str]:
    """Yield the places that Grafana does not read, or reads otherwise."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from lost(value, read.get(name), f"{where}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from lost(one, other, f"{where}[{number}]")
    elif given != read:
        yield where


def test_grafanas_schema_knows_all_of_it() -> None:
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    # Of an annotation the schema has what all data sources share; this is Prometheus's own.
    assert [*lost(DASHBOARD, read, "")] == [".annotations.list[0].titleFormat"]
