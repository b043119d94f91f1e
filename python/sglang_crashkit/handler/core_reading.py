"""What whole GPU cores say, taken into the incident: each is read by a process of its own while the handler goes on."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from sglang_crashkit.capture.cuda_core.child import CoreReader, Reading
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import titles
from sglang_crashkit.model.incident import Evidence, ProcessReport

logger = logging.getLogger(__name__)

#: The longest that reading a core may take, in seconds; one of a whole GPU takes about 5.
READ_SECS = 15.0


class CoreReadings:
    """The readings of one incident.

    Args:
        run: the incident; evidence goes into its reports.
        end_at: when the last one is to be done, by the monotonic clock.
    """

    def __init__(self, run: IncidentRun, end_at: float = float("inf")) -> None:
        self._run = run
        self._end_at = end_at
        self._under_way: list[tuple[CoreReader, ProcessReport, float]] = []

    @property
    def are_done(self) -> bool:
        """Whether no core is being read."""
        return not self._under_way

    def start(self, path: Path, report: ProcessReport) -> None:
        """Begin to read the core of a process."""
        now = time.monotonic()
        if now >= self._end_at:
            report.evidence.append(Evidence("gpu_kernels", "skipped", reason="no time was left for it"))
            return
        try:
            self._under_way.append((CoreReader(path, min(READ_SECS, self._end_at - now)), report, now))
        except OSError as error:
            report.evidence.append(Evidence("gpu_kernels", "failed", reason=f"no reader could be started: {error}"))

    def look(self) -> None:
        """Take in what was read by now."""
        for entry in list(self._under_way):
            reader, report, began = entry
            reading = reader.look()
            if reading is not None:
                self._under_way.remove(entry)
                self._take(reading, report, round(time.monotonic() - began, 3))

    def _take(self, reading: Reading, report: ProcessReport, seconds: float) -> None:
        report.gpu = reading.brief
        if reading.core is None:
            report.evidence.append(Evidence("gpu_kernels", "failed", reason=reading.reason, seconds=seconds))
            return
        name = f"gpu/{titles.label_of(report.title, report.pid)}.kernels.json"
        try:
            path = self._run.write_json(name, reading.core)
        except (OSError, CrashkitError) as error:
            # What it says in short is in the incident nonetheless.
            report.evidence.append(Evidence("gpu_kernels", status_of(error), reason=f"{name}: {error}"))
        else:
            report.evidence.append(Evidence("gpu_kernels", "captured", path=path, seconds=seconds))
