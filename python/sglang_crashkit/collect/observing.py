"""What processes of this host are doing at a moment, by means that neither stop nor signal them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sglang_crashkit.analysis.divergence import Moment, RankSteps, find_divergence
from sglang_crashkit.analysis.ranks import rank_of
from sglang_crashkit.capture.ladder import capture_all
from sglang_crashkit.kernel import clock, procfs
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.kernel.server_arguments import rendezvous_of, side_of
from sglang_crashkit.memory.steps import NAME, NotStepsError, StepReader
from sglang_crashkit.model.incident import Divergence
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.step import Step
from sglang_crashkit.settings import socket_of

_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


def observe(processes: Sequence[FoundProcess], host: str, stacks_secs: float) -> list[Sample]:
    """Return a sample of each process, in the order given.

    Its `state` is empty where it has ended. The stacks of all may take `stacks_secs` seconds; without time none are
    taken.
    """
    python = [one for one in processes if is_python(one)] if stacks_secs else []
    sockets = {one.pid: socket_of(one.server if one.server is not None else one.pid) for one in python}
    folders = {pid: path.parent for pid, path in sockets.items() if path is not None}
    taken = capture_all({one.pid: one.start_ticks for one in python}, folders, stacks_secs)
    by_pid = {sample.pid: sample for sample in taken}
    return [_sample_of(one, host, by_pid.get(one.pid)) for one in processes]


def is_python(process: FoundProcess) -> bool:
    """Say whether it is there, and runs Python."""
    return procfs.read_stat(process.pid, process.start_ticks) is not None and procfs.is_python(process.pid)


def _sample_of(process: FoundProcess, host: str, taken: Sample | None) -> Sample:
    stat = procfs.read_stat(process.pid, process.start_ticks)
    if taken is not None:
        problem = "" if taken.threads else taken.problem
    else:
        problem = "it is no Python process" if stat is not None else "it has ended"
    return Sample(
        host=host,
        pid=process.pid,
        start_ticks=process.start_ticks,
        title=process.title,
        role=process.role,
        ranks=process.ranks,
        time=clock.now(),
        server=process.server,
        rendezvous=rendezvous_of(process.server_arguments),
        side=side_of(process.server_arguments),
        state=stat.state if stat is not None else "",
        wchan=procfs.read_wchan(process.pid) if stat is not None else "",
        tracer=procfs.read_tracer(process.pid) if stat is not None else 0,
        cpu_secs=stat.cpu_ticks / _TICKS_PER_SEC if stat is not None else 0.0,
        threads=taken.threads if taken is not None else (),
        problem=problem,
    )


def divergence_of(steps: Mapping[int, Sequence[Step]], seen: Sequence[Sample], read_at: float) -> Divergence | None:
    """Return where the ranks went different ways; None where none noted its steps, or none has another one.

    Args:
        steps: of each process by its pid, as `steps_of` returns them.
        seen: the processes.
        read_at: when the first of the steps were read, in seconds of the monotonic clock.
    """
    ranks = [RankSteps(rank_of(one), steps.get(one.pid, ()), one.pid) for one in seen if one.role == "scheduler"]
    # Of another server that is not patched nothing is to be said.
    patched = {dict(one.rank.scope).get("server") for one in ranks if one.steps}
    moment = Moment(read_at, "it was looked at", read_at)
    return find_divergence([one for one in ranks if dict(one.rank.scope).get("server") in patched], moment)


def steps_of(pid: int, start_ticks: int) -> Sequence[Step]:
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
