"""What the GPUs' driver knows, in each incident, and the watch for what it tells only once."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from sglang_crashkit.analysis.gpus import Holder, XidSources, account
from sglang_crashkit.capture.gpu_facts import GpuFacts, GpuFactsReader, XidWatch, find_library
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.deadline import secs_before
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.identity_key import is_host_namespace
from sglang_crashkit.model.incident import Evidence
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Eight GPUs take less than a second; a driver that takes longer than this hangs. Seconds.
_DEADLINE_SECS = 5.0
#: How often an answer is looked for, in seconds.
_LOOK_SECS = 0.1
#: Incidents of a server whose own GPUs are none of the matter.
_WITHOUT = frozenset({"peer_lost", "snapshot"})
_NAME = "gpu/facts.json"


class DriverFacts:
    """The driver's part of one incident after another.

    Args:
        tree: the server's processes.
        settings: whether it is asked, and how long an incident may take.
    """

    def __init__(self, tree: ProcessTree, settings: Settings) -> None:
        self._tree = tree
        self._settings = settings
        # Folders of libraries may lie on a disk that does not answer later.
        self._library = find_library()
        self._watch: XidWatch | None = None
        self._watch_problem = "not watched"
        self._run: IncidentRun | None = None
        self._reader: GpuFactsReader | None = None

    def watch(self) -> None:
        """Begin to watch for Xid events, where there is an NVIDIA GPU."""
        if self._settings.gpu_facts and self._library == "pynvml":
            try:
                self._watch = XidWatch()
            except OSError as error:
                self._watch_problem = f"its watcher could not be started: {error.strerror}"
                logger.warning("Xid events are not watched for: %s", self._watch_problem)

    def close(self) -> None:
        """End both children."""
        self.forget()
        if self._watch is not None:
            self._watch.close()

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for."""
        return self._reader is None

    def next_due(self) -> float:
        """Return when `look` has something to do, by the monotonic clock."""
        return float("inf") if self.is_done else time.monotonic() + _LOOK_SECS

    def ask(self, run: IncidentRun) -> None:
        """Ask the driver for an incident, where it is one in which the GPUs matter."""
        # The devices may be made when the first process uses them.
        self._run, library = run, self._library or find_library({})
        left_secs = run.opened + secs_before(self._settings.budget_secs) - time.monotonic()
        if run.incident.kind in _WITHOUT:
            return
        if not self._settings.gpu_facts:
            self._add("skipped", "switched off by SGLANG_CRASHKIT_GPU_FACTS")
        elif library is None:
            self._add("skipped", "no GPU: neither the devices of NVIDIA's driver nor of AMD's are there")
        elif left_secs <= 0:
            self._add("skipped", "SGLANG_CRASHKIT_BUDGET_SECS leaves no time for it")
        else:
            since = procfs.started_at(self._tree.root.handle.start_ticks)
            try:
                self._reader = GpuFactsReader(library, min(_DEADLINE_SECS, left_secs), since)
            except RuntimeError as error:
                self._add("failed", str(error))

    def look(self) -> None:
        """Take in what the driver said, where it has."""
        facts = self._reader.look() if self._reader is not None else None
        if facts is not None and self._run is not None:
            self._reader = None
            self._take(facts, self._run)

    def give_up(self, reason: str) -> None:
        """Wait no longer, for a reason that is noted."""
        if self._reader is not None:
            self.forget()
            self._add("failed", reason)

    def forget(self) -> None:
        """Be ready for the next incident."""
        if self._reader is not None:
            self._reader.call_off()
            self._reader = None

    def _take(self, facts: GpuFacts, run: IncidentRun) -> None:
        watch, start = self._watch, {}
        if watch is not None:
            watch.look()
            start = watch.start
        problems = [f"no NVML events: {watch.problem if watch is not None else self._watch_problem}"]
        if watch is not None and not watch.problem:
            problems = [f"{', '.join(names)}: {error}" for error, names in start["errors"].items()]
        if facts.kernel_problem:
            problems.append(facts.kernel_problem)
        told = account(
            facts.gpus,
            [Holder(one.pid, one.title, procfs.started_at(one.handle.start_ticks), one.gpu) for one in self._tree],
            XidSources(watch.xids if watch is not None else (), facts.kernel_xids, start.get("time"), problems),
            start.get("gpus", ()),
            sees_all_pids=is_host_namespace(),
        )
        if facts.reason:
            told["lines"].insert(0, facts.reason)
        run.incident.gpus = told
        for event in told["xids"]:
            pids = [one["pid"] for one in event["processes"]]
            run.note(event["time"], "xid", number=event["xid"], gpu=event["bus_id"], pids=pids, source=event["source"])
        self._write({**asdict(facts), "start": start, **told}, facts, run)

    def _write(self, document: dict[str, Any], facts: GpuFacts, run: IncidentRun) -> None:
        if not facts.driver:
            self._add("failed", facts.reason or "the driver said nothing", facts.seconds)
            return
        try:
            path = run.folder.write_json(_NAME, document)
        except (OSError, CrashkitError) as error:
            # What it says in short is in the incident nonetheless.
            piece = Evidence("gpu_facts", status_of(error), reason=f"{_NAME}: {error}")
        else:
            piece = Evidence("gpu_facts", "captured", path, facts.reason or None, facts.seconds)
        run.report(self._tree.root).evidence.append(piece)

    def _add(self, status: Any, reason: str, seconds: float | None = None) -> None:
        if self._run is not None:
            self._run.report(self._tree.root).evidence.append(
                Evidence("gpu_facts", status, reason=reason, seconds=seconds)
            )
