"""Gather the evidence of one moment: states and stacks of the living, exits of the dead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_crashkit.core import procfs, titles
from sglang_crashkit.core.incident import Evidence, Exit, ProcessReport, iso_time
from sglang_crashkit.core.incident_store import IncidentFolder
from sglang_crashkit.core.pyspy import Photograph, photograph_all
from sglang_crashkit.core.stacks import Thread, format_threads, main_thread
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.tree import TrackedProcess

logger = logging.getLogger(__name__)

_KIT = "sglang_crashkit"
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
    if not status.known:
        return Exit(
            None,
            None,
            "unknown",
            "its parent reaped it, and this kernel does not tell others",
            noticed,
        )
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


def capture_stacks(
    processes: Sequence[TrackedProcess],
    reports: dict[int, ProcessReport],
    folder: IncidentFolder,
    deadline_secs: float,
) -> None:
    """Photograph the living processes side by side and write their stacks.

    Args:
        processes: the living ones.
        reports: their reports by pid; evidence is added to them.
        folder: where the stacks go.
        deadline_secs: the longest that it may take, in seconds.
    """
    for process in processes:
        if not process.is_python:
            reports[process.pid].evidence.append(Evidence("stack", "skipped", reason="not a Python process"))
    wanted = {process.pid: process for process in processes if process.is_python}
    for photograph in photograph_all(wanted, deadline_secs):
        _keep(photograph, wanted[photograph.pid], reports[photograph.pid], folder)


def innermost(threads: Sequence[Thread], pid: int, most: int = 4) -> list[str]:
    """Return the innermost frames of the main thread that are not the kit's own, innermost first."""
    thread = main_thread(threads, pid)
    frames = list(thread.frames) if thread else []
    own = [position for position, frame in enumerate(frames) if _KIT in frame.file]
    if own:
        # The process is in a hook of the kit: what it did is below the hook.
        frames = frames[own[-1] + 1 :]
    return [str(frame) for frame in frames[:most]]


def exception_frames(record: dict[str, Any], most: int = 4) -> list[str]:
    """Return the innermost frames of the traceback in a failing rank's own record, innermost first."""
    traceback = record.get("traceback")
    frames = traceback if isinstance(traceback, list) else []
    return [str(frame) for frame in reversed(frames[-most:])]


def adopt_record(source: Path, report: ProcessReport, folder: IncidentFolder) -> None:
    """Move the record that a failing rank wrote of itself into the incident."""
    name = f"ranks/{titles.label_of(report.title, report.pid)}.exception.json"
    try:
        report.evidence.append(Evidence("exception", "captured", path=folder.adopt(source, name)))
    except (OSError, CrashkitError) as error:
        report.evidence.append(Evidence("exception", "failed", reason=f"{source}: {error}"))


def _keep(photograph: Photograph, process: TrackedProcess, report: ProcessReport, folder: IncidentFolder) -> None:
    seconds = photograph.seconds
    if photograph.threads is None:
        reason = photograph.reason
        if process.handle.has_exited():
            reason = f"it ended while it was photographed ({reason})"
        report.evidence.append(Evidence("stack", "failed", reason=reason, seconds=seconds))
        return
    name = f"stacks/{titles.label_of(report.title, report.pid)}"
    text = "\n".join(format_threads(report.title, report.pid, photograph.threads)) + "\n"
    try:
        threads = [asdict(thread) for thread in photograph.threads]
        folder.write_json(f"{name}.json", {"pid": report.pid, "title": report.title, "threads": threads})
        path = folder.write_text(f"{name}.txt", text)
    except (OSError, CrashkitError) as error:
        report.evidence.append(Evidence("stack", "failed", reason=f"{name}: {error}", seconds=seconds))
    else:
        report.evidence.append(Evidence("stack", "captured", path=path, seconds=seconds))
    if not any(piece.kind == "exception" and piece.status == "captured" for piece in report.evidence):
        # One that raised has left what it was doing; its own record says what that was.
        report.doing = innermost(photograph.threads, report.pid)


def _read_state(pid: int) -> dict[str, Any] | None:
    status = procfs.read_status(pid)
    if not status:
        return None
    state: dict[str, Any] = {name: status[name] for name in _STATUS_FIELDS if name in status}
    wchan = procfs.read_wchan(pid)
    return state | ({"wchan": wchan} if wchan else {})
