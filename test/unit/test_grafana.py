"""Grafana's own schema knows and allows the dashboard: no registry has a Grafana that could be asked."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="Grafana's foundation SDK is for Python 3.11 and newer")

from unit.grafana_schema import misfits_in, unknown_in

SHIPPED = Path(__file__).parents[2] / "docs" / "prometheus" / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(SHIPPED.read_text())


def test_grafanas_schema_knows_and_allows_all_of_it() -> None:
    # Of an annotation the schema has what all data sources share; this is Prometheus's own.
    assert unknown_in(DASHBOARD) == [".annotations.list[0].titleFormat"]
    assert misfits_in(DASHBOARD) == []


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (("panels", 0), "title", 5),
        (("panels", 0, "gridPos"), "x", "1"),
        (("panels", 0, "options"), "colorMode", "gaudy"),
        (("templating", "list", 0), "hide", "never"),
        ((), "schemaVersion", True),
    ],
)
def test_the_schema_finds_what_is_wrong(place: tuple[str | int, ...], name: str, value: object) -> None:
    spoilt: Any = deepcopy(DASHBOARD)
    inner = spoilt
    for step in place:
        inner = inner[step]
    inner[name] = value
    assert misfits_in(spoilt)
    inner["no such field"] = inner.pop(name)
    assert any(where.endswith(".no such field") for where in unknown_in(spoilt))
