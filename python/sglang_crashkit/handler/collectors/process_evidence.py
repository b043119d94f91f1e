"""What each process did: the state and the stacks of the living, how the dead ended, what the failing left."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sglang_crashkit.capture.ladder import capture_all, parse_faulthandler
from sglang_crashkit.capture.pyspy import capture_native
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.retention import status_of
from sglang_crashkit.kernel import clock, procfs, titles
from sglang_crashkit.kernel.private_files import read_json, read_regular
from sglang_crashkit.kernel.stack_hooks import HookFiles, read_stack_hooks
from sglang_crashkit.model.incident import Evidence, EvidenceKind, Exit, ExitCause, ProcessReport, iso_time
from sglang_crashkit.model.sample import Frame, Sample, Thread, format_threads, main_thread
from sglang_crashkit.policy import Capture

if TYPE_CHECKING:
    from sglang_crashkit.handler.incident_run import IncidentRun

Content = TypeVar("Content")

#: What a process was doing is told by so many frames.
MAX_DOING, _MAX_FRAMES = 4, 1000
_STATUS_FIELDS = ("State", "Threads", "VmRSS", "VmHWM", "SigCgt", "voluntary_ctxt_switches")
#: Where a compiler runs, or weights are read; and functions that load, or write a profile.
_LONG_FILE = re.compile(
    r"(^|/)(torch/_dynamo/(convert_frame|symbolic_convert|output_graph|guards|bytecode_transformation)\.py"
    r"|torch/_inductor/(?!runtime/|output_code|utils)|torch/_functorch/(aot_autograd\.py|_aot_autograd/autograd_cache)"
    r"|torch/utils/cpp_extension\.py|triton/(compiler/|runtime/build\.py|backends/)|flashinfer/jit/|tilelang/jit/"
    r"|deep_gemm/jit|tvm_ffi/cpp/|jit_kernel/utils\.py|cutlass/\S*compiler"
    r"|model_loader/|safetensors/|huggingface_hub/)"
)
_LONG = re.compile(
    r"^(load_model|load_weights|_?load_weights_\w+|_?(start|stop)_profile|export_chrome_trace|export_stacks)$"
)
_KIT, _SGLANG = "sglang_crashkit", re.compile(r"(^|/)sglang/")
#: Function and file in which the thread sleeps that answers for its process; of no interest.
_RESPONDER = ("_answer_all", "sglang_crashkit/srt/stack_hooks.py")
#: On these faulthandler writes the stacks of the process that they end.
_FAULTS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
_MAX_FAULT_BYTES = 4 << 20
#: Of what a rank wrote of itself, and of the stacks of one process.
_MAX_RECORD = 16 << 20
_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


def write_piece(
    kind: EvidenceKind,
    write: Callable[[str, Content], str],
    name: str,
    content: Content,
    *,
    reason: str | None = None,
    seconds: float | None = None,
    source: str | None = None,
) -> Evidence:
    """Write a file of evidence by a method of the incident's folder; return the piece, also where that fails."""
    try:
        return Evidence(kind, "captured", write(name, content), reason, seconds, source)
    except (OSError, CrashkitError) as error:
        return Evidence(kind, status_of(error), reason=f"{name}: {error}", seconds=seconds)


def note_exit(report: ProcessReport, process: TrackedProcess, *, raised: bool) -> None:
    """Put a dead process's exit into its report, once; `raised` says that it had reported an exception before."""
    if report.exit is not None and report.exit.cause != "unknown":
        return
    status, code, signal = process.handle.exit_status(), None, None
    cause: ExitCause
    if process.ended_with_parent:
        cause, code, signal = "parent_ended", status.code, status.signal
        detail = "the process, or the thread of it, that had started it ended, and the kernel killed it for that"
    elif not status.known:
        cause, detail = "unknown", "its parent reaped it, and this kernel does not tell others"
        if procfs.read_stat(process.pid) is not None and not procfs.may_inspect(process.pid):
            detail = "the kernel tells it to a tracer of the process, and its parent did not answer"
    elif status.signal is not None:
        cause, signal, detail = "signal", status.signal, "no Python exception was reported"
        if signal == "SIGKILL":
            counter = process.oom_counter
            kills = counter.grown_by() if counter is not None else None
            detail = "its memory cgroup counts no OOM kill" if kills == 0 else "no OOM counter could be read"
            if counter is not None and kills:
                cause, detail = "oom_kill", f"{counter.path} counts {kills} OOM kill(s) more than before"
        detail += ", the kernel wrote a core file" if status.core_dumped else ""
    else:
        cause, code = "exception" if raised else "exit_status", status.code
        detail = "it had reported a Python exception" if raised else "no Python exception was reported"
    report.exit = Exit(code, signal, cause, detail, iso_time(process.exited_at or 0.0))
    reason = None if status.known else detail
    others = [piece for piece in report.evidence if piece.kind != "exit"]
    report.evidence = [Evidence("exit", "captured" if status.known else "failed", reason=reason), *others]


def take_states(run: IncidentRun, _deadline: float) -> None:
    """Note what ``/proc`` says of each living process."""
    for process in run.tree:
        if not process.is_ignorable:
            run.report(process)
    for process in run.tree.alive():
        report, status = run.report(process), procfs.read_status(process.pid)
        # The incident may have been opened without stacks.
        report.evidence = [piece for piece in report.evidence if piece.kind not in ("proc_state", "stack")]
        if not status:
            report.evidence.append(Evidence("proc_state", "failed", reason="the process was gone"))
            continue
        report.state = {name: status[name] for name in _STATUS_FIELDS if name in status}
        if wchan := procfs.read_wchan(process.pid):
            report.state["wchan"] = wchan
        report.evidence.append(Evidence("proc_state", "captured"))


def adopt_record(
    source: Path, report: ProcessReport, folder: IncidentFolder, kind: EvidenceKind = "exception"
) -> list[str]:
    """Move the record that a failing rank, or thread, wrote of itself into the incident, and what Python prints.

    Returns:
        The frames of its traceback, innermost first.
    """
    try:
        record = read_json(source, _MAX_RECORD)
    except (OSError, ValueError, RecursionError):
        record = None
    record = record if isinstance(record, dict) else {}
    # What SGLang catches, or only ends a thread, may come again.
    others = sum(piece.kind == kind for piece in report.evidence)
    name = f"ranks/{titles.label_of(report.title, report.pid)}.{kind}{others or ''}"
    try:
        path = folder.adopt(source, f"{name}.json")
    except (OSError, CrashkitError) as error:
        report.evidence.append(Evidence(kind, status_of(error), reason=f"{source}: {error}"))
    else:
        report.evidence.append(Evidence(kind, "captured", path=path))
        if isinstance(record.get("printed"), str):
            # The record says the same, for whom there is no room for another file.
            with contextlib.suppress(OSError, CrashkitError):
                folder.write_text(f"{name}.txt", record["printed"])
    traceback = record.get("traceback")
    frames = traceback if isinstance(traceback, list) else []
    return [str(frame) for frame in reversed(frames[-_MAX_FRAMES:])]


def take_stacks(run: IncidentRun, deadline: float) -> None:
    """Take the stacks of the living processes side by side, and write them; see `capture_all`.

    Of a hang each time is a snapshot of its own, for comparison.
    """
    began, living = clock.now(), run.tree.alive()
    run.rounds += 1
    if run.captures is Capture.NONE or not run.settings.stacks:
        is_off = run.captures is not Capture.NONE
        reason = "switched off by SGLANG_PYSPY_DUMP_BEFORE_CRASH" if is_off else "nothing of this server failed"
        for process in living if run.rounds == 1 else ():
            run.report(process).evidence.append(Evidence("stack", "skipped", reason=reason))
    else:
        _sample_all(run, living, deadline, run.rounds if run.incident.kind == "hang" else None)
    if run.captures is not Capture.NONE:
        run.incident.note(clock.now(), "stacks_captured", processes=len(living), seconds=round(clock.now() - began, 4))
    run.checkpoint()


def _sample_all(run: IncidentRun, living: Sequence[TrackedProcess], deadline: float, snapshot: int | None) -> None:
    """Take the stacks; `snapshot` is the number of this one, from 1, where several are taken."""
    reports = {process.pid: run.report(process) for process in living}
    for process in living:
        if snapshot is not None:
            stat = procfs.read_stat(process.pid)
            state, ticks = (stat.state, stat.cpu_ticks) if stat is not None else ("", 0)
            its = Sample(pid=process.pid, time=clock.now(), state=state, cpu_secs=ticks / _TICKS_PER_SEC)
            reports[process.pid].samples.append(its)
        if not process.is_python:
            reports[process.pid].evidence.append(Evidence("stack", "skipped", reason="not a Python process"))
    wanted = {process.pid: process for process in living if process.is_python}
    start_ticks = {pid: process.handle.start_ticks for pid, process in wanted.items()}
    secs, may_signal = max(0.0, deadline - time.monotonic()), run.captures is Capture.FULL
    for sample in capture_all(start_ticks, run.runtime, secs, may_signal=may_signal):
        process, report = wanted[sample.pid], reports[sample.pid]
        doing = innermost(sample.threads, report.pid)
        raised = any(piece.kind == "exception" and piece.status == "captured" for piece in report.evidence)
        _keep("stack", sample, process, run, snapshot, report.doing if raised else doing)
        if snapshot is not None:
            thread = sample.main_thread
            threads = (replace(thread, frames=_below_hooks(thread.frames)),) if thread is not None else ()
            gil = "main" if thread is not None and thread.owns_gil else sample.gil
            report.samples[-1] = replace(report.samples[-1], threads=threads, gil=gil, doing=tuple(doing))
        if sample.threads and not raised and (snapshot in (None, 1) or not report.doing):
            # After an exception the stack no longer shows what failed; the frames in the exception's record do. What
            # was seen is told even where there was no room to write all of it. A round without a stack does not count.
            report.doing = doing


def wants_native(run: IncidentRun) -> bool:
    """Say whether native stacks are taken: it stops a process for a moment, which is to end for what happened."""
    # What somebody set stands; by itself the kit does not stop a process that goes on.
    wanted, of_itself = run.settings.native, run.is_fatal_hang and run.captures is Capture.FULL
    return run.settings.stacks and (of_itself if wanted is None else wanted)


def take_native_stacks(run: IncidentRun, deadline: float) -> None:
    """Take the native stacks of the server's own living processes, as far as there is time."""
    began, secs = clock.now(), deadline - time.monotonic()
    if secs <= 0:
        return
    living = [process for process in run.tree.alive() if process.matters and not process.handle.has_exited()]
    wanted = {process.pid: process for process in living if process.is_python}
    samples, obstacles = capture_native({pid: one.handle.start_ticks for pid, one in wanted.items()}, secs)
    for sample in samples:
        _keep("native_stack", sample, wanted[sample.pid], run)
    for pid, obstacle in obstacles.items():
        run.report(wanted[pid]).evidence.append(Evidence("native_stack", "skipped", reason=obstacle))
    run.incident.note(clock.now(), "native_stacks", processes=len(living), seconds=round(clock.now() - began, 4))
    run.checkpoint()


def take_fault(process: TrackedProcess, report: ProcessReport, folder: IncidentFolder, runtime: Path) -> None:
    """Take in, once, the stacks that a dead process wrote when the fatal signal that ended it came."""
    status = process.handle.exit_status()
    if (status.known and status.signal not in _FAULTS) or any(piece.kind == "fault_stack" for piece in report.evidence):
        return
    start_ticks = process.handle.start_ticks
    hooks = read_stack_hooks(runtime, process.pid, start_ticks)
    text = ""
    with contextlib.suppress(OSError):
        fault = HookFiles.of(runtime, process.pid, start_ticks).fault
        text = read_regular(fault, _MAX_FAULT_BYTES).decode(errors="replace")
    if hooks is None or not text:
        if status.known:
            reason = "it wrote none" if hooks else "faulthandler was not enabled in it"
            report.evidence.append(Evidence("fault_stack", "failed", reason=reason))
        return
    output = parse_faulthandler(text, process.pid, hooks.main_thread, hooks.roots)
    faulty = next((thread for thread in output.threads if thread.active), None)
    if output.error and output.is_whole:
        # A thread that Python did not start has no stack.
        report.hit_in_main = faulty is not None and faulty.native_id == report.pid
    doing = _of_interest(faulty.frames) if faulty else innermost(output.threads, report.pid)

    def write(name: str, threads: Sequence[Thread]) -> str:
        _write(name, threads, report, folder, doing)
        # Its own words say more than its threads: which error it was, and which modules were loaded.
        return folder.write_text(f"{name}.txt", text)

    name = f"stacks/{titles.label_of(report.title, report.pid)}.fault"
    cut_off = None if output.is_whole else "what it wrote is not whole"
    piece = write_piece("fault_stack", write, name, output.threads, reason=cut_off, source="faulthandler")
    report.evidence.append(piece)
    if piece.status == "captured":
        # It was captured alive, if at all; what the fault interrupted is what it did last.
        report.doing = doing


def innermost(threads: Sequence[Thread], pid: int) -> list[str]:
    """Return the innermost frames of the main thread that are not the kit's own, innermost first."""
    thread = main_thread(threads, pid)
    return _of_interest(thread.frames if thread else ())


def _below_hooks(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames without the kit's own: of a process in a hook, what it did is below that.

    What SGLang does within one, which only wraps a function of its own, is no part of the hook.
    """
    first = next((position for position, frame in enumerate(frames) if _SGLANG.search(frame.file)), len(frames))
    own = [position for position, frame in enumerate(frames[:first]) if _KIT in frame.file]
    return frames[own[-1] + 1 if own else 0 :]


def _of_interest(frames: tuple[Frame, ...]) -> list[str]:
    """Return the innermost frames, and one that compiles, loads or writes a profile, wherever it is."""
    frames = _below_hooks(frames)
    shown = list(frames[:MAX_DOING])
    for frame in frames:
        if _LONG_FILE.search(frame.file) or _LONG.match(frame.function.rpartition(".")[2]):
            # Who compiles waits for a compiler, which says nothing without what started it.
            shown[-1] = shown[-1] if frame in shown else frame
            break
    return [str(frame) for frame in shown]


def _keep(
    kind: EvidenceKind,
    sample: Sample,
    process: TrackedProcess,
    run: IncidentRun,
    snapshot: int | None = None,
    doing: Sequence[str] = (),
) -> None:
    """Write the stacks of a process, or why they are missing; the file begins with what it was doing."""
    report, seconds, source = run.report(process), sample.seconds, sample.source
    if not sample.threads:
        reason = sample.problem
        if process.handle.has_exited():
            reason = f"it ended while its stacks were taken ({reason})"
        report.evidence.append(Evidence(kind, "failed", reason=reason, seconds=seconds))
        return
    suffix = ".native" if kind == "native_stack" else "" if snapshot in (None, 1) else f".{snapshot}"
    name = f"stacks/{titles.label_of(report.title, report.pid)}{suffix}"
    function, file = _RESPONDER
    threads = [
        thread
        for thread in sample.threads
        if not any(frame.function == function and frame.file.endswith(file) for frame in thread.frames)
    ]
    write = functools.partial(_write, report=report, folder=run.folder, doing=doing)
    piece = write_piece(kind, write, name, threads, reason=sample.problem or None, seconds=seconds, source=source)
    report.evidence.append(piece)


def _write(
    name: str, threads: Sequence[Thread], report: ProcessReport, folder: IncidentFolder, doing: Sequence[str]
) -> str:
    document = {"pid": report.pid, "title": report.title, "threads": [asdict(thread) for thread in threads]}
    folder.write_json(f"{name}.json", document)
    lines = format_threads(report.title, report.pid, threads, doing)
    return folder.write_text(f"{name}.txt", "\n".join(lines) + "\n")
