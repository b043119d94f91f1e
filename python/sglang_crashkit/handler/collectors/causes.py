"""Why the incident happened; see `analysis.causes`. What that takes is loaded when an incident asks for it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sglang_crashkit.model.incident import Incident

logger = logging.getLogger(__name__)

#: A record holds every thread's stack, and is still short of this.
_MAX_BYTES = 4 << 20


def explain(incident: Incident, folder: Path) -> dict[str, Any] | None:
    """Return the cause of an incident, as ``incident.json`` holds it; None where nothing failed, or nobody can tell.

    Args:
        incident: judged.
        folder: where its evidence lies.
    """
    if incident.kind == "snapshot":
        return None
    try:
        from sglang_crashkit.analysis import causes

        document = incident.to_json()
        # Of which the incident itself has a little.
        document["environment"] = _read(folder / "environment.json") or document.get("environment")
        return causes.explain(document, _records(incident, folder), _stacks(incident), _logs(incident, folder))
    except Exception as error:
        logger.error("the cause of incident %s was not looked for", incident.id, exc_info=error)
        return None


def _stacks(incident: Incident) -> dict[int, list[str]]:
    """Return by pid the main thread of those that hang; of others the incident has what they were doing."""
    return {
        process.pid: [str(frame) for frame in sample.threads[0].frames]
        for process in incident.processes
        for sample in reversed(process.samples)
        if sample.threads
    }


def _records(incident: Incident, folder: Path) -> dict[int, dict[str, Any]]:
    """Return by pid what failing processes wrote of themselves."""
    paths = _paths(incident, "exception")
    return {pid: record for pid, path in paths.items() if (record := _read(folder / path))}


def _logs(incident: Incident, folder: Path) -> dict[int, list[str]]:
    """Return by pid what the first failure logged last; of the others it says nothing about the cause."""
    failure = incident.verdict.first_failure if incident.verdict is not None else None
    path = _paths(incident, "log").get(failure.pid) if failure is not None else None
    if failure is None or path is None:
        return {}
    try:
        with (folder / path).open(errors="replace") as file:
            return {failure.pid: file.read(_MAX_BYTES).splitlines()}
    except OSError:
        return {}


def _paths(incident: Incident, kind: str) -> dict[int, str]:
    return {
        process.pid: piece.path
        for process in incident.processes
        for piece in process.evidence
        if piece.kind == kind and piece.path is not None
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open() as file:
            document = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
