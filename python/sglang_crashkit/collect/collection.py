"""Collect and judge what the servers on this host do: a few rounds of stacks, and a debugger on request.

A round neither stops nor signals a process. The debugger, which stops its target for seconds, runs last, and only where
the rounds leave a question. Files are written as soon as their content is known, and each is replaced in one step.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from sglang_crashkit.analysis.divergence import Moment, RankSteps, find_divergence
from sglang_crashkit.analysis.ranks import rank_of
from sglang_crashkit.capture.debugger import (
    CUDA_GDB,
    MAY_TRACE,
    NO_CUDA_GDB,
    SUBSTITUTE,
    Debugged,
    debug_all,
    find_cuda_gdb,
)
from sglang_crashkit.capture.ladder import capture_all
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.kernel import clock, procfs
from sglang_crashkit.kernel.discovery import Discovery, FoundProcess
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private
from sglang_crashkit.kernel.titles import NEEDED
from sglang_crashkit.memory.ring import RingError
from sglang_crashkit.memory.steps import NAME, StepReader
from sglang_crashkit.model.case import Case, case_of
from sglang_crashkit.model.event import Arguments, Compared, Event, Stack
from sglang_crashkit.model.incident import Divergence, iso_time
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from sglang_crashkit.model.step import Step
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.redact import redact_text
from sglang_crashkit.settings import socket_of
from sglang_crashkit.sources.text.facts import arguments_of
from sglang_crashkit.sources.text.snapshots import stacks_in
from sglang_crashkit.view.collected import native_stacks, python_stacks, summary
from sglang_crashkit.view.markdown import section_lines

SUMMARY, VERDICT = "summary.md", "verdict.json"
SCHEMA_VERSION = 2
#: Most seconds for the stacks of all rounds together, and for the debugger on each process.
TOOL_SECS = 60.0
#: Seconds that a round gets in any case, also when earlier rounds used up `TOOL_SECS`; py-spy takes 0.02.
_LEAST_SECS = 1.0
_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Plan:
    """What is to be collected."""

    output: Path  # the folder for the files
    snapshots: int = 3  # number of rounds, 1 or more
    interval_secs: float = 5.0  # from the start of a round to the start of the next, in seconds
    native: bool = False  # whether a debugger runs at the end, on each process for which the rounds leave a question


@dataclass
class Collected:
    """What was collected of one process."""

    process: FoundProcess
    moments: list[Sample] = field(default_factory=list)  # the sample of each round
    debugged: Debugged | None = None  # the debugger's result, None where it has not run
    files: list[str] = field(default_factory=list)  # names of its files in the output folder

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without its stacks."""
        process, debugged = self.process, self.debugged
        return {
            **{name: getattr(process, name) for name in ("pid", "title", "role", "server", "user")},
            "ranks": dict(process.ranks),
            "found_by": process.way,
            "states": [moment.state for moment in self.moments],
            "problems": [moment.problem for moment in self.moments if moment.problem],
            "debugger": debugged and {"tool": debugged.tool, "problem": debugged.problem, "secs": debugged.seconds},
            "files": self.files,
        }


class Collection:
    """One run over the given processes; `tell` is called with a line for a person when something begins.

    Raises:
        CrashkitError: the output folder is no folder of this user.
        OSError: it cannot be created or written to.
    """

    def __init__(self, processes: Sequence[FoundProcess], plan: Plan, tell: Callable[[str], None]) -> None:
        self.host = socket.gethostname()
        self.collected = [Collected(process) for process in processes]
        self.rounds: list[NodeSnapshot] = []
        self.snapshot_files: list[str] = []  # of each round, in the output folder
        self._plan, self._tell = plan, tell
        self._stacks_secs = 0.0
        # The debugger on this host; else `missing` says which tool is missing and how to install it.
        self._cuda_gdb = find_cuda_gdb() if plan.native else None
        self.missing = NO_CUDA_GDB if plan.native and self._cuda_gdb is None else ""
        #: Where the ranks of patched servers diverged; None where no server here is patched.
        self.divergence: Divergence | None = None
        self.skipped = ""  # why the debugger ran on no process; empty where it ran on some, or was not asked for
        self._tool = CUDA_GDB if self._cuda_gdb else SUBSTITUTE
        self._started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        make_private_folder(plan.output.absolute())

    def take_snapshots(self) -> None:
        """Collect without stopping a process; when this is interrupted, the files have what was collected so far.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        due = time.monotonic()
        for number in range(1, self._plan.snapshots + 1):
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + self._plan.interval_secs
            self._tell(f"snapshot {number} of {self._plan.snapshots}")
            self._take_snapshot()
        # Read the steps of all ranks at once, because the ranks go on, and only then write and compare them.
        ranks, read_at = [one for one in self.collected if one.process.role == "scheduler"], time.monotonic()
        steps = {one.process.pid: _steps_of(one.process.pid, one.process.start_ticks) for one in ranks}
        for one in ranks:
            if its := steps[one.process.pid]:
                self._write(one, "steps", "".join(json.dumps(step.to_json()) + "\n" for step in its), "jsonl")
        seen = [one for one in self.rounds[-1].processes if one.role == "scheduler"]
        noted = [RankSteps(rank_of(one), steps.get(one.pid, ()), one.pid) for one in seen]
        # The ranks of servers that are not patched have no steps to compare.
        patched = {dict(one.rank.scope).get("server") for one in noted if one.steps}
        noted = [one for one in noted if dict(one.rank.scope).get("server") in patched]
        self.divergence = find_divergence(noted, Moment(read_at, "it was looked at", read_at))
        self._write_verdict()

    def _write_verdict(self) -> None:
        """Write the verdict and the summary so far, for a reader who opens the folder early."""
        verdict, _case = self.judged()
        told = msgspec.to_builtins({"verdict": verdict, "divergence": self.divergence})
        times = [iso_time(one.time) for one in self.rounds]
        document = {"schema_version": SCHEMA_VERSION, "host": self.host, "times": times, **told}
        write_json(self._plan.output / VERDICT, document)
        report = summary(self.rounds, verdict, self.divergence, VERDICT)
        text = "".join(f"{line}\n" for line in section_lines(report))
        write_private(self._plan.output / SUMMARY, redact_text(text).encode(errors="backslashreplace"))

    def judged(self, pids: Container[int] | None = None) -> tuple[Verdict, Case]:
        """Return the verdict on the snapshots of all processes, or of those with these pids; and the case."""
        some = [one.process for one in self.collected if pids is None or one.process.pid in pids]
        lines = {" ".join(("sglang.launch_server", *process.server_arguments)) for process in some}
        known: list[Event] = [Arguments(values=values) for line in sorted(lines) if (values := arguments_of(line))]
        if (found := self.divergence) and found.is_one:
            known.append(Compared(kind="divergence", level=found.level, text=found.statement))
        rounds = self.rounds
        if pids is not None:
            rounds = [
                replace(one, processes=tuple(seen for seen in one.processes if seen.pid in pids)) for one in rounds
            ]
        return judged(rounds, known)

    def to_json(self, status: ExitCode, found: Discovery, *, whole: bool) -> dict[str, Any]:
        """Return the collection as JSON values; with `whole`, include the files' content (see `gather`)."""
        texts = dict[str, str]()
        for name in [SUMMARY, VERDICT, *(name for one in self.collected for name in one.files)] if whole else ():
            # An interrupted collection does not have all of the files.
            with contextlib.suppress(OSError):
                texts[name] = (self._plan.output / name).read_text(errors="replace")
        return {
            "exit_code": int(status),
            "host": self.host,
            "output_dir": str(self._plan.output.absolute()),
            "snapshots": self.snapshot_files,
            "missing": self.missing,
            "processes": [one.to_json() for one in self.collected],
            "verdict": msgspec.to_builtins(self.judged()[0]),
            "divergence": msgspec.to_builtins(self.divergence),
            "other_users": {name_of(user): list(pids) for user, pids in found.others.items()},
            "other_jobs": [
                {"job_id": place and place.job_id, "node": place and place.node, "pids": list(pids)}
                for place, pids in found.elsewhere.items()
            ],
            **({"rounds": [one.to_json() for one in self.rounds], "texts": texts} if whole else {}),
        }

    def debug(self, within_secs: float | None = None) -> None:
        """Run the debugger, if planned, on all processes within `within_secs` seconds; see `take_snapshots`.

        It skips the processes of a server whose snapshots establish what is wrong, or show no hang.
        """
        if not self._plan.native:
            return
        systems: dict[object, set[int]] = {}
        for one in self.collected:
            # The servers of a prefill and decode pair depend on each other, so they are judged together.
            system = "pair" if one.process.side is not None else one.process.server
            systems.setdefault(system, set()).add(one.process.pid)
        reasons: dict[int, str] = {}
        for pids in systems.values():
            verdict, _case = self.judged(pids)
            # Where no question is left, a debugger would stop the process and add nothing.
            reason = "the verdict is established without it" if verdict.level == "established" else ""
            if verdict.kind in ("no_incident", "busy") and verdict.level != "unknown":
                reason = "no hang is seen"
            reasons |= dict.fromkeys(pids, reason)
        for one in self.collected:
            if reason := reasons[one.process.pid]:
                one.debugged = Debugged(self._tool, problem=f"not run: {reason}")
                self._write_debugged(one)
        by_pid = {one.process.pid: one for one in self.collected if not reasons[one.process.pid]}
        if not by_pid:
            self.skipped = "; ".join(dict.fromkeys(reasons.values()))
            return
        self._tell(f"{self._tool} of {len(by_pid)} processes")
        limit = threading.TIMEOUT_MAX if within_secs is None else within_secs
        processes = {pid: one.process.start_ticks for pid, one in by_pid.items()}
        debug_all(self._cuda_gdb, processes, TOOL_SECS, lambda pid, it: self._take_in(by_pid[pid], it), limit)
        self._write_verdict()

    def _take_snapshot(self) -> None:
        began, started = clock.now(), time.monotonic()
        # The limit is for all rounds together: a py-spy that hangs does so in each round.
        secs = max(_LEAST_SECS, TOOL_SECS - self._stacks_secs)
        processes = [one.process for one in self.collected]
        # The processes that still exist and run Python.
        python = [one for one in processes if procfs.read_stat(one.pid, one.start_ticks) and procfs.is_python(one.pid)]
        sockets = {one.pid: socket_of(one.server if one.server is not None else one.pid) for one in python}
        folders = {pid: path.parent for pid, path in sockets.items() if path is not None}
        taken = {one.pid: one for one in capture_all({one.pid: one.start_ticks for one in python}, folders, secs)}
        self._stacks_secs += time.monotonic() - started
        seen = [_sample_of(one.process, self.host, taken.get(one.process.pid)) for one in self.collected]
        problems = [
            Problem(
                f"Python stacks of {moment.title} (pid {moment.pid})",
                moment.problem,
                MAY_TRACE if "ermission" in moment.problem else "",
            )
            for moment in seen
            if moment.problem
        ]
        self.rounds.append(NodeSnapshot(self.host, began, tuple(seen), tuple(problems)))
        self.snapshot_files.append(f"snapshot_{self.host}_{self._started}_{len(self.rounds)}.json")
        self._write_round()
        for one, moment in zip(self.collected, seen, strict=True):
            one.moments.append(moment)
            self._write(one, "pyspy", python_stacks(one.process, self.host, one.moments))

    def _take_in(self, one: Collected, debugged: Debugged) -> None:
        """Put the debugger's result into the process's file and into the last round."""
        one.debugged = debugged
        one.moments[-1] = moment = replace(one.moments[-1], native=debugged.threads, kernels=debugged.kernels)
        last = self.rounds[-1]
        processes = tuple(moment if each.pid == moment.pid else each for each in last.processes)
        what = f"{debugged.tool} of {moment.title} (pid {moment.pid})"
        problems = (*last.problems, Problem(what, debugged.problem)) if debugged.problem else last.problems
        self.rounds[-1] = replace(last, processes=processes, problems=problems)
        self._write_round()
        self._write_debugged(one)

    def _write_debugged(self, one: Collected) -> None:
        assert one.debugged is not None
        self._write(one, "cudagdb", native_stacks(one.process, self.host, one.debugged, self.missing))

    def _write_round(self) -> None:
        write_json(self._plan.output / self.snapshot_files[-1], self.rounds[-1].to_json())

    def _write(self, one: Collected, tool: str, text: str, ending: str = "txt") -> None:
        name = f"{tool}_{self.host}_{one.process.pid}.{ending}"
        write_private(self._plan.output / name, redact_text(text).encode(errors="backslashreplace"))
        if name not in one.files:
            one.files.append(name)


def _sample_of(process: FoundProcess, host: str, taken: Sample | None) -> Sample:
    """Return a sample of a process, with its stacks if any were taken; `state` is empty where it has ended."""
    stat = procfs.read_stat(process.pid, process.start_ticks)
    sample = Sample(
        host=host,
        **{name: getattr(process, name) for name in ("pid", "start_ticks", "title", "role", "ranks", "server")},
        time=clock.now(),
        rendezvous=process.rendezvous,
        side=process.side,
        threads=taken.threads if taken is not None else (),
        problem="it is no Python process" if stat is not None else "it has ended",
    )
    if taken is not None:
        sample = replace(sample, problem="" if taken.threads else taken.problem)
    if stat is None:
        return sample
    wchan, tracer = procfs.read_wchan(process.pid), procfs.read_tracer(process.pid)
    return replace(sample, state=stat.state, wchan=wchan, tracer=tracer, cpu_secs=stat.cpu_ticks / _TICKS_PER_SEC)


def _steps_of(pid: int, start_ticks: int) -> Sequence[Step]:
    """Return the steps that a process recorded; empty where it has no step memory, or may not be inspected."""
    # The process may have ended, or be another user's.
    with contextlib.suppress(OSError, RingError):
        for link, path in procfs.open_files(pid):
            # Open no other file: it may be a terminal, a pipe or a device.
            if str(path).startswith(f"/memfd:{NAME}") and procfs.read_stat(pid, start_ticks) is not None:
                descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    return StepReader(descriptor).read().steps
                finally:
                    os.close(descriptor)
    return ()


def judged(rounds: Sequence[NodeSnapshot], known: Iterable[Event] = ()) -> tuple[Verdict, Case]:
    """Return the verdict on the snapshots of all hosts and on the `known` events, and the case that was judged."""
    events = [*known, *_stacks(rounds)]
    case = case_of(msgspec.structs.replace(one, order=order) for order, one in enumerate(events))
    return judge(case), case


def _stacks(rounds: Sequence[NodeSnapshot]) -> Iterator[Stack]:
    """Yield all stacks; and for a process that a later round on its host lacks, a stack that says it is gone."""
    last: dict[str, float] = {}
    seen: dict[tuple[str, int, int], tuple[float, Sample]] = {}
    for number, one in enumerate(rounds, start=1):
        yield from (msgspec.structs.replace(stack, source=f"snapshot {number}") for stack in stacks_in(one))
        last[one.host] = max(one.time, last.get(one.host, one.time))
        for process in one.processes:
            key = (process.host, process.pid, process.start_ticks)
            seen[key] = max((one.time, process), seen.get(key, (one.time, process)), key=lambda entry: entry[0])
    gone = [
        replace(sample, time=last[sample.host], state="", threads=(), native=())
        for time, sample in seen.values()
        if time < last.get(sample.host, time) and sample.role in {"scheduler", *NEEDED}
    ]
    yield from stacks_in(NodeSnapshot("", 0.0, tuple(gone)))


def name_of(user: int) -> str:
    """Return the name of a user, the id where it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
