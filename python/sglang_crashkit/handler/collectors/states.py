"""Gather the evidence of one moment: states of the living, exits of the dead, records of the failing."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.model.incident import Evidence, Exit, ProcessReport, iso_time

logger = logging.getLogger(__name__)

#: What a process that raised was doing is told by so many frames.
MAX_DOING = 4
_MAX_FRAMES = 1000
_STATUS_FIELDS = ("State", "Threads", "VmRSS", "VmHWM", "SigCgt", "voluntary_ctxt_switches")


def report_of(process: TrackedProcess) -> ProcessReport:
    """Return an empty report of a process."""
    return ProcessReport(pid=process.pid, title=process.title, role=process.role, rank=process.rank)


def describe_exit(process: TrackedProcess, *, raised: bool) -> Exit:
    """Return how a dead process ended and why, as far as the evidence goes.

    Args:
        process: dead, with `exited_at` set.
        raised: it had reported an exception before.
    """
    status = process.exit_status()
    noticed = iso_time(process.exited_at or 0.0)
    if process.ended_with_parent:
        detail = "the process, or the thread of it, that had started it ended, and the kernel killed it for that"
        return Exit(status.code, status.signal, "parent_ended", detail, noticed)
    if not status.known:
        detail = "its parent reaped it, and this kernel does not tell others"
        if procfs.read_stat(process.pid) is not None and not procfs.may_inspect(process.pid):
            detail = "the kernel tells it to whoever may trace the process, and its parent did not answer"
        return Exit(None, None, "unknown", detail, noticed)
    kills = process.oom_counter.grown_by() if process.oom_counter else None
    if status.signal == "SIGKILL" and kills:
        detail = (
            f"{process.oom_counter.path if process.oom_counter else ''} counts {kills} OOM kill(s) more than before"
        )
        return Exit(None, status.signal, "oom_kill", detail, noticed)
    if status.signal is not None:
        memory = "its memory cgroup counts no OOM kill" if kills == 0 else "no OOM counter could be read"
        core = ", the kernel wrote a core file" if status.core_dumped else ""
        detail = f"{memory}{core}" if status.signal == "SIGKILL" else f"no Python exception was reported{core}"
        return Exit(None, status.signal, "signal", detail, noticed)
    if raised:
        return Exit(status.code, None, "exception", "it had reported a Python exception", noticed)
    return Exit(status.code, None, "exit_status", "no Python exception was reported", noticed)


def note_exit(report: ProcessReport, process: TrackedProcess, *, raised: bool) -> None:
    """Put a process's exit into its report, once."""
    if report.exit is not None and report.exit.cause != "unknown":
        return
    report.exit = describe_exit(process, raised=raised)
    report.evidence = [piece for piece in report.evidence if piece.kind != "exit"]
    if process.exit_status().known:
        report.evidence.insert(0, Evidence("exit", "captured"))
    else:
        report.evidence.insert(0, Evidence("exit", "failed", reason=report.exit.detail))


def capture_states(processes: Sequence[TrackedProcess], reports: dict[int, ProcessReport]) -> None:
    """Note what ``/proc`` says of each living process."""
    for process in processes:
        report = reports[process.pid]
        state = _read_state(process.pid)
        if state is None:
            report.evidence.append(Evidence("proc_state", "failed", reason="the process was gone"))
        else:
            report.state = state
            report.evidence.append(Evidence("proc_state", "captured"))


def exception_frames(record: dict[str, Any]) -> list[str]:
    """Return the frames of the traceback in a failing rank's own record, innermost first."""
    traceback = record.get("traceback")
    frames = traceback if isinstance(traceback, list) else []
    return [str(frame) for frame in reversed(frames[-_MAX_FRAMES:])]


def adopt_record(source: Path, report: ProcessReport, folder: IncidentFolder) -> None:
    """Move the record that a failing rank wrote of itself into the incident, and beside it what Python prints."""
    name = f"ranks/{titles.label_of(report.title, report.pid)}.exception"
    try:
        path = folder.adopt(source, f"{name}.json")
        report.evidence.append(Evidence("exception", "captured", path=path))
    except (OSError, CrashkitError) as error:
        report.evidence.append(Evidence("exception", status_of(error), reason=f"{source}: {error}"))
        return
    # The record says the same, for whom there is no room for another file.
    with contextlib.suppress(OSError, CrashkitError, ValueError, AttributeError):
        printed = json.loads((folder.path / path).read_text()).get("printed")
        if isinstance(printed, str):
            folder.write_text(f"{name}.txt", printed)


def _read_state(pid: int) -> dict[str, Any] | None:
    status = procfs.read_status(pid)
    if not status:
        return None
    state: dict[str, Any] = {name: status[name] for name in _STATUS_FIELDS if name in status}
    wchan = procfs.read_wchan(pid)
    return state | ({"wchan": wchan} if wchan else {})
