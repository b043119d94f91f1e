"""The dashboard and the alerts ask for what the crash handler tells; Grafana's schema and promtool take them.

No registry has a Grafana that could be asked.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_crashkit.handler.metrics import Measured, gauges_of

SHIPPED = Path(__file__).parents[3] / "docs" / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((SHIPPED / "grafana.json").read_text())
RULES = yaml.safe_load((SHIPPED / "alerts.yaml").read_text())["groups"][0]["rules"]
KNOWN = {name for name, _words, _samples in gauges_of(Measured("1", True, 0.0), {})}
_METRIC = re.compile(r"sglang_crashkit_\w+")


def asked_for(text: str) -> set[str]:
    return set(_METRIC.findall(text))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert asked_for(json.dumps(DASHBOARD)) == KNOWN


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
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's foundation SDK is for Python 3.11 and newer")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    # Of an annotation the schema has what all data sources share; this is Prometheus's own.
    assert [*lost(DASHBOARD, read, "")] == [".annotations.list[0].titleFormat"]


def test_the_alerts_ask_for_known_metrics_alone() -> None:
    assert len(RULES) == 3
    assert all(asked_for(rule["expr"]) and asked_for(rule["expr"]) <= KNOWN for rule in RULES)
    assert all({"summary", "description"} <= rule["annotations"].keys() for rule in RULES)


def test_no_panel_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
def test_promtool_finds_nothing_wrong_with_the_alerts(tmp_path: Path) -> None:
    shutil.copy(SHIPPED / "alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_promtool.yaml"), tmp_path / "tests.yaml")
    for argv in (["check", "rules", "alerts.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(["promtool", *argv], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
