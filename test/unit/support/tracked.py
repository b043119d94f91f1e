"""Processes of a server as the crash handler tracks them, of which none runs; and an incident of a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.incident.folder import IncidentFolder, new_id
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle
from sglang_crashkit.model.incident import Trigger, iso_time
from sglang_crashkit.settings import Settings


def tracked(pid: int, title: str, *, is_root: bool = False, exited_at: float | None = None) -> TrackedProcess:
    """Return one of the server's own processes; nobody knows how it ended, where it has."""
    handle = ProcessHandle.of_reaped(pid, ExitStatus())
    return TrackedProcess(handle, title, is_root, is_python=True, oom_counter=None, is_own=True, exited_at=exited_at)


def begin_incident(tree: ProcessTree, incidents: Path, kind: str = "exception", **more: Any) -> IncidentRun:
    """Begin an incident of a server in the folder of all of them; `more` is for `IncidentRun`."""
    folder = IncidentFolder(incidents, kind, new_id(), time.time())
    trigger = Trigger(kind, iso_time(time.time()), tree.root.pid, tree.root.title)
    return IncidentRun(kind, trigger, tree, folder, incidents, Settings.from_environ({}), **more)
