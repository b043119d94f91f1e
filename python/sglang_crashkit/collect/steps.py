"""The last steps of the schedulers of a patched server: read from their memory, without a word to the server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_crashkit.analysis.divergence import Divergence, Moment, RankSteps, find_divergence
from sglang_crashkit.analysis.ranks import rank_of
from sglang_crashkit.kernel import procfs
from sglang_crashkit.memory.steps import NAME, NotStepsError, StepReader
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.step import Step


@dataclass(frozen=True)
class LiveSteps:
    """The last steps of the schedulers."""

    by_pid: Mapping[int, Sequence[Step]]  # of each whose memory has any, in order of their numbers
    read_at: float  # when the first of them was read, in seconds of the monotonic clock

    def divergence(self, seen: Sequence[Sample]) -> Divergence | None:
        """Return where the ranks went different ways; None where none noted its steps, or none has another one."""
        ranks = [
            RankSteps(rank_of(one), self.by_pid.get(one.pid, ()), one.pid) for one in seen if one.role == "scheduler"
        ]
        # Of another server that is not patched nothing is to be said.
        patched = {dict(one.rank.scope).get("server") for one in ranks if one.steps}
        moment = Moment(self.read_at, "it was looked at", self.read_at)
        return find_divergence([one for one in ranks if dict(one.rank.scope).get("server") in patched], moment)


def read_steps(processes: Mapping[int, int]) -> LiveSteps:
    """Read the steps of processes, given with their start times."""
    read_at = time.monotonic()
    found = {pid: steps for pid, start_ticks in processes.items() if (steps := _steps_of(pid, start_ticks))}
    return LiveSteps(found, read_at)


def _steps_of(pid: int, start_ticks: int) -> Sequence[Step]:
    """Return the steps that one process noted; none where it has no such memory, or may not be looked into."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - a name is all that is wanted
            path = f"/proc/{pid}/fd/{name}"
            # What else there is must not be opened: a terminal, a pipe, a device.
            if os.readlink(path).startswith(f"/memfd:{NAME}"):  # noqa: PTH115 - the link leads to no path
                return _read(path) if procfs.read_stat(pid, start_ticks) is not None else ()
    except (OSError, NotStepsError):
        # It ended, or is another user's.
        return ()
    return ()


def _read(path: str) -> Sequence[Step]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return StepReader(descriptor).read().steps
    finally:
        os.close(descriptor)
