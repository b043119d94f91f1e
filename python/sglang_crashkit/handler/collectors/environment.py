"""What surrounded the server, as ``environment.json`` in an incident, and of it what the summary says first."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang_crashkit import __version__
from sglang_crashkit.handler.collectors.process_evidence import set_piece, write_piece
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.kernel import procfs
from sglang_crashkit.memory.ring import RingError, read_blob
from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.redact import redact_text, secrets_of_arguments, secrets_of_mapping

logger = logging.getLogger(__name__)

PATH = "environment.json"
#: SGLang's names of how the model is spread, as far as they are numbers.
_SIZES = ("tp", "pp", "dp", "attn_dp", "ep", "attn_cp", "moe_dp", "nnodes", "node_rank")


class ServerEnvironment:
    """What the launching process told, in memory that is held here, and what is to be read when an incident asks."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._ready_at: float | None = None

    def take(self, descriptor: int | None, seconds: float, *, ready: bool) -> None:
        """Hold what the main process told as `descriptor`, which stays open.

        Args:
            descriptor: see above.
            seconds: when, since the epoch.
            ready: the ranks are ready by now.
        """
        self.close()
        self._descriptor = os.dup(descriptor) if descriptor is not None else None
        self._ready_at = seconds if ready else None

    def arguments(self) -> dict[str, Any]:
        """Return the server's arguments, as far as it told them by now."""
        arguments = self._told().get("arguments")
        return arguments if isinstance(arguments, dict) else {}

    def add_to(self, run: IncidentRun, tree: ProcessTree, deadline: float) -> None:
        """Put ``environment.json`` into an incident that is about to be finished.

        Args:
            run: the incident.
            tree: the server's processes.
            deadline: what is not read by then, by the monotonic clock, is left out; ten processes take about 0.05 s.
        """
        document = self._gather(tree, deadline)
        run.incident.environment = in_short(document)
        set_piece(run.report(tree.root), write_piece("environment", run.folder.write_json, PATH, document))

    def close(self) -> None:
        """Give back what is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._ready_at = None

    def _gather(self, tree: ProcessTree, deadline: float) -> dict[str, Any]:
        # Here alone: it is needed for an incident only.
        from sglang_crashkit.capture import environment

        root, now, told = tree.root, time.time(), self._told()
        arguments = self.arguments()
        # This process is in the same cgroups and the same container, and has the same environment.
        pid = root.pid if root.exited_at is None else os.getpid()
        started = procfs.started_at(root.handle.start_ticks)
        living = [process for process in tree.alive() if process.matters]
        pieces: dict[str, Callable[[], Any]] = {
            "command_line": lambda: told.get("command_line") or _command_line(root),
            "model": lambda: arguments.get("model_path"),
            "parallel": lambda: _sizes_in(arguments),
            "versions": lambda: _versions(told, environment.read_driver()),
            "place": lambda: environment.read_place(pid, os.environ),
            "cgroup": lambda: environment.read_cgroups(pid),
            "host": environment.read_host,
            "arguments": lambda: arguments,
            "processes": lambda: [
                {"pid": one.pid, "title": one.title} | environment.read_process(one.pid)
                for one in living
                if time.monotonic() < deadline
            ],
            # Last, as it may take longest.
            "shared_memory": lambda: environment.read_shared_memory(
                [one.pid for one in living], max(0.0, deadline - time.monotonic())
            ),
        }
        document: dict[str, Any] = {"schema_version": 1, "time": iso_time(now), "started": iso_time(started)}
        document["uptime_secs"] = round(max(0.0, (root.exited_at or now) - started), 1)
        if self._ready_at is not None:
            document["ready_since"] = iso_time(self._ready_at)
        for name, read in pieces.items():
            try:
                value = read()
            except Exception as error:
                # The others may be there.
                logger.error("%s: %s cannot be read", PATH, name, exc_info=error)
                continue
            if value:
                document[name] = value
        return document

    def _told(self) -> dict[str, Any]:
        try:
            told = json.loads(read_blob(self._descriptor)) if self._descriptor is not None else {}
        except (RingError, ValueError, RecursionError) as error:
            logger.warning("what the server reported of its launch cannot be read: %s", error)
            return {}
        return told if isinstance(told, dict) else {}


def _command_line(root: TrackedProcess) -> str:
    words = procfs.read_cmdline(root.pid)
    return redact_text(shlex.join(words), secrets_of_arguments(words) | secrets_of_mapping(os.environ))


def _versions(told: Mapping[str, Any], driver: str | None) -> dict[str, str]:
    versions = told.get("versions")
    known = {"sglang-crashkit": __version__} | (versions if isinstance(versions, dict) else {})
    return known | ({"driver": driver} if driver else {})


def _sizes_in(arguments: Mapping[str, Any]) -> dict[str, int]:
    sizes = {name: arguments.get(f"{name}_size", arguments.get(name)) for name in _SIZES}
    return {name: value for name, value in sizes.items() if type(value) is int}


def in_short(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``environment.json`` that ``incident.json`` repeats, for the summary and for a quick look."""
    names = ("model", "parallel", "versions", "started", "uptime_secs", "ready_since", "place")
    short = {"path": PATH} | {name: document[name] for name in names if name in document}
    memory = document.get("cgroup", {}).get("memory", {})
    if memory:
        kept = ("limit_bytes", "used_bytes", "peak_bytes", "events")
        short["memory"] = {name: memory[name] for name in kept if name in memory}
    shared = document.get("shared_memory", {})
    if "total_bytes" in shared:
        short["shared_memory"] = {name: shared[name] for name in ("total_bytes", "used_bytes")}
    return short
