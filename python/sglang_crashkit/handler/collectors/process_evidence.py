"""Collect evidence of each process: its state and stacks while it runs, its exit, and the records of a failure."""

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

#: Maximum number of frames in `ProcessReport.doing`, and of frames read from an exception's record.
MAX_DOING, _MAX_FRAMES = 4, 1000
_STATUS_FIELDS = ("State", "Threads", "VmRSS", "VmHWM", "SigCgt", "voluntary_ctxt_switches")
#: Files in which a compiler runs or weights are read; functions that load weights or write a profile.
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
#: Function and file of the kit's thread that answers requests for its process; that thread is left out of the stacks.
_RESPONDER = ("_answer_all", "sglang_crashkit/srt/stack_hooks.py")
#: Fatal signals on which faulthandler writes the stacks of the process.
_FAULTS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
_MAX_FAULT_BYTES = 4 << 20
#: Maximum size in bytes of the exception record that a rank wrote.
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
    """Write a file of evidence with a method of the incident's folder; if that fails, return evidence of the error."""
    try:
        return Evidence(kind, "captured", write(name, content), reason, seconds, source)
    except (OSError, CrashkitError) as error:
        return Evidence(kind, status_of(error), reason=f"{name}: {error}", seconds=seconds)


def note_exit(report: ProcessReport, process: TrackedProcess, *, raised: bool) -> None:
    """Put a dead process's exit into its report, once; `raised`: the process had reported an exception before."""
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
    """Record the state of each living process from ``/proc``."""
    for process in run.tree:
        if not process.is_ignorable:
            run.report(process)
    for process in run.tree.alive():
        report, status = run.report(process), procfs.read_status(process.pid)
        # The incident may have been opened without stacks: replace the earlier evidence.
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
    """Move into the incident the record of an exception that a rank or thread wrote, and its printed traceback.

    Returns:
        The frames of its traceback, innermost first.
    """
    try:
        record = read_json(source, _MAX_RECORD)
    except (OSError, ValueError, RecursionError):
        record = None
    record = record if isinstance(record, dict) else {}
    # A process can report several exceptions: SGLang may catch one, or one may end only a thread.
    others = sum(piece.kind == kind for piece in report.evidence)
    name = f"ranks/{titles.label_of(report.title, report.pid)}.{kind}{others or ''}"
    try:
        path = folder.adopt(source, f"{name}.json")
    except (OSError, CrashkitError) as error:
        report.evidence.append(Evidence(kind, status_of(error), reason=f"{source}: {error}"))
    else:
        report.evidence.append(Evidence(kind, "captured", path=path))
        if isinstance(record.get("printed"), str):
            # The record holds the same text, so a failure to write this file is ignored.
            with contextlib.suppress(OSError, CrashkitError):
                folder.write_text(f"{name}.txt", record["printed"])
    traceback = record.get("traceback")
    frames = traceback if isinstance(traceback, list) else []
    return [str(frame) for frame in reversed(frames[-_MAX_FRAMES:])]


def take_stacks(run: IncidentRun, deadline: float) -> None:
    """Capture the stacks of the living processes in parallel, and write them; see `capture_all`.

    For a hang, each call adds a snapshot, for comparison with the others.
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
    """Capture the stacks; `snapshot` is the number of this capture, from 1, or None if there are no snapshots."""
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
            # After an exception the stack no longer shows what failed; the frames in the exception's record do. The
            # report shows the frames even if there was no space to write the file. A round without a stack is ignored.
            report.doing = doing


def wants_native(run: IncidentRun) -> bool:
    """Return whether to capture native stacks. This briefly stops a process; by default one about to end."""
    # The setting takes precedence; without it, the kit does not stop a process that will continue.
    wanted, of_itself = run.settings.native, run.is_fatal_hang and run.captures is Capture.FULL
    return run.settings.stacks and (of_itself if wanted is None else wanted)


def take_native_stacks(run: IncidentRun, deadline: float) -> None:
    """Capture the native stacks of the server's own living processes, if time is left before `deadline`."""
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
    """Record, once, the stacks that faulthandler wrote in a dead process on its fatal signal."""
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
        # A thread that Python did not start has no stack in this output.
        report.hit_in_main = faulty is not None and faulty.native_id == report.pid
    doing = _of_interest(faulty.frames) if faulty else innermost(output.threads, report.pid)

    def write(name: str, threads: Sequence[Thread]) -> str:
        _write(name, threads, report, folder, doing)
        # Keep faulthandler's text: beyond the threads, it names the error and the loaded modules.
        return folder.write_text(f"{name}.txt", text)

    name = f"stacks/{titles.label_of(report.title, report.pid)}.fault"
    cut_off = None if output.is_whole else "what it wrote is not whole"
    piece = write_piece("fault_stack", write, name, output.threads, reason=cut_off, source="faulthandler")
    report.evidence.append(piece)
    if piece.status == "captured":
        # An earlier capture is older than the fault: the frames that the fault interrupted are the last ones.
        report.doing = doing


def innermost(threads: Sequence[Thread], pid: int) -> list[str]:
    """Return the innermost frames of the main thread that are not the kit's own, innermost first."""
    thread = main_thread(threads, pid)
    return _of_interest(thread.frames if thread else ())


def _below_hooks(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames below the innermost hook of the kit, if the process is in a hook.

    A hook can wrap a function of SGLang: frames of SGLang inside that hook are kept.
    """
    first = next((position for position, frame in enumerate(frames) if _SGLANG.search(frame.file)), len(frames))
    own = [position for position, frame in enumerate(frames[:first]) if _KIT in frame.file]
    return frames[own[-1] + 1 if own else 0 :]


def _of_interest(frames: tuple[Frame, ...]) -> list[str]:
    """Return the innermost frames, and the innermost frame that compiles, loads or writes a profile, at any depth."""
    frames = _below_hooks(frames)
    shown = list(frames[:MAX_DOING])
    for frame in frames:
        if _LONG_FILE.search(frame.file) or _LONG.match(frame.function.rpartition(".")[2]):
            # A process that compiles waits for a compiler: those frames alone do not show what started it.
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
    """Write the stacks of a process, headed by the frames in `doing`, or record why the stacks are missing."""
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
