"""The last steps of a server's schedulers: held in memory since they passed them on, and read for an incident."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import titles
from sglang_crashkit.memory.steps import NotStepsError, StepReader
from sglang_crashkit.model import incident
from sglang_crashkit.model.incident import MAX_RIDS, Evidence, InStep
from sglang_crashkit.model.step import Step

if TYPE_CHECKING:
    from sglang_crashkit.handler.incident import IncidentRun

logger = logging.getLogger(__name__)

#: So many steps, of so many requests each, stand in ``incident.json``; of one that was not finished `MAX_RIDS`.
_LAST, _REQUESTS_OF_LAST = 5, 8
_MAX_MODES = 64
#: So many records of dead schedulers are held, of 1.5 MB each.
_MAX_OF_DEAD = 32


@dataclass
class _Held:
    descriptor: int
    modes: Mapping[int, str]


class StepRecords:
    """The records of the server at hand, which outlive every process of it."""

    def __init__(self) -> None:
        self._held: dict[TrackedProcess, _Held] = {}

    def follow(self, process: TrackedProcess, descriptor: int | None, modes: object = None) -> None:
        """Hold the record of a scheduler.

        Args:
            process: the scheduler.
            descriptor: its record, passed on to this process; it stays open.
            modes: names of the forward modes by their number, as they came; may be anything.
        """
        if descriptor is None:
            return
        try:
            StepReader(descriptor)
        except (OSError, NotStepsError) as error:
            logger.warning("%s (pid %d) passed on no record of its steps: %s", process.title, process.pid, error)
            return
        if process in self._held:
            os.close(self._held.pop(process).descriptor)
        self._held[process] = _Held(os.dup(descriptor), modes_of(modes))
        # An elastic server may start ranks anew for ever.
        dead = [one for one in self._held if one.exited_at is not None]
        for oldest in dead[: max(0, len(dead) - _MAX_OF_DEAD)]:
            os.close(self._held.pop(oldest).descriptor)

    def add_to(self, run: IncidentRun, processes: Iterable[TrackedProcess], deadline: float) -> None:
        """Put what the schedulers noted of their steps into an incident that is about to be finished.

        Args:
            run: the incident.
            processes: those of the server.
            deadline: when no other rank is begun with, by the monotonic clock; one takes about 0.1 s.
        """
        for process in processes:
            if process in self._held or process.role == "scheduler":
                self._add(run, process, deadline)

    def close(self) -> None:
        """Give all of them back."""
        for held in self._held.values():
            os.close(held.descriptor)
        self._held.clear()

    def _add(self, run: IncidentRun, process: TrackedProcess, deadline: float) -> None:
        report, held = run.report(process), self._held.get(process)
        report.evidence = [piece for piece in report.evidence if piece.kind != "steps"]
        if held is None:
            reason = "it noted none: it had not begun its event loop, or SGLANG_CRASHKIT_STEPS is off"
            report.evidence.append(Evidence("steps", "skipped", reason=reason))
            return
        if time.monotonic() > deadline:
            reason = "those of other ranks took all the time that there was"
            report.evidence.append(Evidence("steps", "failed", reason=reason))
            return
        began, name = time.monotonic(), f"ranks/{titles.label_of(process.title, process.pid)}.steps.jsonl"
        try:
            found = StepReader(held.descriptor, held.modes).read()
            run.add_steps(process, found.steps)
            report.steps = incident.LastSteps(
                last=[in_short(step, found.current) for step in found.steps[-_LAST:]],
                in_step=None if found.current is None else _in_step(found.current, _seen_at(process)),
            )
            lines = "".join(json.dumps(step.to_json()) + "\n" for step in found.steps)
            path = run.folder.write_bytes(name, lines.encode(errors="backslashreplace"))
        except (OSError, NotStepsError, CrashkitError) as error:
            report.evidence.append(Evidence("steps", status_of(error), reason=f"{name}: {error}"))
        else:
            seconds = round(time.monotonic() - began, 3)
            report.evidence.append(Evidence("steps", "captured", path, seconds=seconds))


def _seen_at(process: TrackedProcess) -> float:
    """Return when a process died, or now where it lives, by the monotonic clock."""
    now = time.monotonic()
    return now if process.exited_at is None else now - (time.time() - process.exited_at)


def in_short(step: Step, current: Step | None) -> dict[str, object]:
    """Return a step as ``incident.json`` has it, where the scheduler was in step `current`."""
    told = step.to_json()
    # The one that it was in is told apart; one that it had launched, or not processed, may be at fault as well.
    is_open = step.ended is None and step is not current
    told["requests"] = told["requests"][: MAX_RIDS if is_open else _REQUESTS_OF_LAST]
    return told


def _in_step(step: Step, seconds: float) -> InStep:
    return InStep(
        number=step.number,
        mode=step.mode,
        phase=step.phase,
        seconds=round(max(0.0, seconds - step.began), 3),
        size=step.size,
        rids=[request.rid for request in step.requests[:MAX_RIDS]],
    )


def modes_of(value: object) -> dict[int, str]:
    """Return the forward modes that a scheduler reported, without what is none."""
    modes = value if isinstance(value, dict) else {}
    short = {key: str(name)[:40] for key, name in list(modes.items())[:_MAX_MODES]}
    return {int(key): name for key, name in short.items() if isinstance(key, str) and key.isascii() and key.isdecimal()}
