"""Grafana's own schema knows and allows the dashboard: no registry has a Grafana that could be asked."""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="Grafana's foundation SDK is for Python 3.11 and newer")

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

plugins.register_default_plugins()
_SDK = "grafana_foundation_sdk"

SHIPPED = Path(__file__).parents[3] / "docs" / "prometheus" / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(SHIPPED.read_text())


def unknown_in(dashboard: dict[str, Any]) -> list[str]:
    """Return the places that Grafana does not read, or reads otherwise."""
    return [*_lost(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard))), "")]


def misfits_in(dashboard: dict[str, Any]) -> list[str]:
    """Return the places whose value is of another type than the schema says, or none of the words that it allows."""
    return [*_misfits(Dashboard.from_json(dashboard), Dashboard, "")]


def _lost(given: Any, read: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from _lost(value, read.get(name), f"{where}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from _lost(one, other, f"{where}[{number}]")
    elif given != read:
        yield where


def _misfits(value: Any, hint: Any, where: str) -> Iterator[str]:
    origin, within = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        tried = [[*_misfits(value, one, where)] for one in within]
        yield from [] if [] in tried else tried[0]
    elif origin is typing.Literal or isinstance(hint, enum.EnumMeta):
        allowed = within or [member.value for member in hint]
        yield from [] if value in allowed else [where]
    elif not isinstance(value, bool) and hint is float and isinstance(value, int):
        return
    elif not isinstance(value, origin or hint) or (hint is int and isinstance(value, bool)):
        yield where
    elif origin is list:
        for number, one in enumerate(value):
            yield from _misfits(one, within[0], f"{where}[{number}]")
    elif origin is dict:
        for name, one in value.items():
            yield from _misfits(one, within[1], f"{where}.{name}")
    elif type(value).__module__.startswith(_SDK):
        for name, its in typing.get_type_hints(type(value)).items():
            yield from _misfits(getattr(value, name), its, f"{where}.{name}")


def test_grafanas_schema_knows_and_allows_all_of_it() -> None:
    # Of an annotation the schema has what all data sources share; this is Prometheus's own.
    assert unknown_in(DASHBOARD) == [".annotations.list[0].titleFormat"]
    assert misfits_in(DASHBOARD) == []
