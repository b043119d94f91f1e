"""Evidence from the memory whose descriptors the server's processes passed to the handler: it outlives them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sglang_crashkit import __version__
from sglang_crashkit.analysis.divergence import Moment, RankSteps, find_divergence
from sglang_crashkit.analysis.ranks import rank_at
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.process_evidence import write_piece
from sglang_crashkit.handler.collectors.requests import export_requests
from sglang_crashkit.handler.heartbeats import Heartbeats, Pauses, modes_of
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.store import read_steps
from sglang_crashkit.kernel import clock, procfs, titles
from sglang_crashkit.kernel.private_files import open_regular
from sglang_crashkit.memory.ring import LogRecord, RingError, is_ring, read_blob, read_log
from sglang_crashkit.memory.steps import StepReader
from sglang_crashkit.model import incident, lenient
from sglang_crashkit.model.incident import MAX_RIDS, Divergence, Evidence, EvidenceKind, Incident, InStep, iso_time
from sglang_crashkit.model.step import PHASES, Step
from sglang_crashkit.protocol import Message
from sglang_crashkit.redact import redact_command, redact_prompts, redact_text, secrets_of_arguments
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

OFF = "switched off by SGLANG_CRASHKIT_LOG_RECORDS"
_WITHHELD = "<withheld: it could not be searched for secrets in time>"
#: Limits of the search for prompts: requests; bytes of each request's line; prompts of a request; characters of each.
_MAX_PROMPTS, _MAX_LINE, _MAX_TEXTS, _MAX_COMPARED = 256, 4 << 20, 16, 4096
#: Characters of log text that are compared with the prompts at a time.
_AT_A_TIME = 16_384
_BETWEEN = "\0"
#: The last steps in ``incident.json``, and the requests of each; a step that did not end has up to `MAX_RIDS`.
_LAST, _REQUESTS_OF_LAST = 5, 8
ENVIRONMENT = "environment.json"
#: SGLang's names for how the model is spread over ranks and nodes; only values that are integers are kept.
_SIZES = ("tp", "pp", "dp", "attn_dp", "ep", "attn_cp", "moe_dp", "nnodes", "node_rank")
#: The fields of ``environment.json`` that ``incident.json`` repeats, for the summary and for a quick look.
_IN_SHORT = ("model", "parallel", "versions", "started", "uptime_secs", "ready_since", "place")
_MEMORY, _SHARED = ("limit_bytes", "used_bytes", "peak_bytes", "events"), ("total_bytes", "used_bytes")


class Received:
    """The memory that the processes of one server passed on, by kind."""

    def __init__(self, tree: ProcessTree, settings: Settings) -> None:
        self.heartbeats = Heartbeats(tree, is_on=settings.hang_secs > 0)
        self.environment = ServerEnvironment()
        self.journals = RequestJournals()
        self.steps = StepRecords()
        self.logs = ProcessLogs(settings.log_records)
        self.pauses = Pauses(self.heartbeats, self.steps.of)
        self._of_event: dict[str, Heartbeats | HeldMemory] = {"heartbeat": self.heartbeats, "journal": self.journals}
        self._of_event |= {"steps": self.steps, "log": self.logs}

    def take(self, message: Message, sender: TrackedProcess, seconds: float) -> None:
        """Keep the memory that came with a message, sent at `seconds` since the epoch; ignore other messages."""
        if (held := self._of_event.get(message.event)) is not None:
            held.follow(sender, message.descriptor, message.fields.get("modes"))
        elif message.event == "environment" and sender.is_root:
            self.environment.hold(message.descriptor, seconds, ready=message.fields.get("ready") is True)

    def take_last_signs(self, run: IncidentRun, _deadline: float) -> None:
        """Add the last heartbeats of the schedulers that died to an incident; this needs no stack."""
        now, at, signs = clock.now(), time.monotonic(), self.heartbeats.last_signs()
        for process in run.tree:
            if process.exited_at is not None and (sign := signs.get(process.pid)) is not None:
                # The exit's time is converted to the monotonic clock, which the heartbeat uses.
                run.set_last_sign(process, sign, process.exited_at - now + at - sign.at)

    def release(self, *, is_written: bool) -> None:
        """Release the memory of dead processes that an incident on disk includes; see `HeldMemory.release`."""
        self.journals.release(is_written=is_written)
        self.logs.release(is_written=is_written)

    def forget_requests(self) -> None:
        """Release the requests and steps of an earlier server of the same program."""
        self.journals.close()
        self.steps.close()

    def close(self) -> None:
        """Release all memory."""
        for part in (self.journals, self.steps, self.logs, self.environment):
            part.close()


def _guarded(kind: EvidenceKind, gather: Callable[..., Evidence], *arguments: Any) -> Evidence:
    """Return a piece of evidence; an error with one process must not cost the evidence of the others."""
    try:
        return gather(*arguments)
    except Exception as error:
        logger.exception("the %s of a process cannot be read", kind)
        return Evidence(kind, "failed", reason=f"it cannot be read: {type(error).__name__}")


class Held(NamedTuple):
    """A piece of memory that a process writes, or wrote."""

    descriptor: int
    modes: Mapping[int, str]  # for a record of steps, the names of the forward modes by number


class HeldMemory:
    """The memory of one kind that processes of the server passed on."""

    #: What the memory holds, for messages; how many dead processes keep theirs, because tokenizer workers that end may
    #: be restarted for ever; and how many pieces each process keeps, the latest ones.
    what: ClassVar[str]
    max_of_dead: ClassVar[int] = 4
    max_of_one: ClassVar[int] = 1

    def __init__(self) -> None:
        self.held: dict[TrackedProcess, list[Held]] = {}
        self.taken: list[TrackedProcess] = []  # the dead processes whose memory the current incident includes
        self.dropped = 0  # the number of processes whose memory was released before any incident included it

    def follow(self, process: TrackedProcess, descriptor: int | None, modes: object = None) -> None:
        """Hold a duplicate of `descriptor`, which a process passed on; `descriptor` itself stays open.

        `modes` are the names of forward modes by number, as received: unchecked, they may be anything.
        """
        problem = self._problem_of(descriptor) if descriptor is not None else "no descriptor came"
        if descriptor is None or problem:
            logger.warning("%s (pid %d) passed on no %s: %s", process.title, process.pid, self.what, problem)
            return
        held = Held(os.dup(descriptor), modes_of(modes))
        self.held[process] = pieces = [*self.held.pop(process, ()), held]
        while len(pieces) > self.max_of_one:
            os.close(pieces.pop(0).descriptor)
        dead = self.dead()
        for oldest in dead[: max(0, len(dead) - self.max_of_dead)]:
            self._give_back(oldest)
            self.dropped += 1
            logger.warning("the %s of %s (pid %d) is dropped", self.what, oldest.title, oldest.pid)

    def last_of(self, process: TrackedProcess) -> Held | None:
        """Return the last piece that a process passed on."""
        return self.held[process][-1] if process in self.held else None

    def dead(self) -> list[TrackedProcess]:
        """Return the processes that have exited, so that their memory no longer changes."""
        return [process for process in self.held if process.exited_at is not None]

    def release(self, *, is_written: bool) -> None:
        """Release the memory of dead processes that the current incident includes, if the incident `is_written`.

        If it were kept, each killed tokenizer worker that a server restarts would hold memory and be in each incident.
        """
        if is_written:
            for process in self.taken:
                self._give_back(process)
            self.dropped = 0
        self.taken = []

    def close(self) -> None:
        """Release all memory."""
        for process in list(self.held):
            self._give_back(process)

    def _problem_of(self, descriptor: int) -> str:
        return "" if is_ring(descriptor) else "it is not a ring"

    def _give_back(self, process: TrackedProcess) -> None:
        for held in self.held.pop(process, ()):
            os.close(held.descriptor)


class RequestJournals(HeldMemory):
    """The request journals of the server's processes."""

    what = "request journal"
    #: A program may create several engines one after another, each with its own journal.
    max_of_one = 4

    def take(self, run: IncidentRun, deadline: float) -> None:
        """Add the contents of the journals to an incident; a full journal of 32 MiB takes about a second."""
        if not self.held or run.folder.problem:
            return
        # List the dead before reading: a process that ends in between may have written more since.
        dead, began = self.dead(), time.time() - (time.monotonic() - run.opened)
        journals = [(process.pid, held.descriptor) for process, pieces in self.held.items() for held in pieces]
        secs = max(0.0, deadline - time.monotonic())
        checks: dict[str, bool] = {}
        told = export_requests(journals, run.folder.opened, secs, run.folder.charge, began, checks)
        if self.dropped:
            words = f"the journals of {self.dropped} processes that had ended before were dropped"
            told.reason = f"{told.reason}; {words}" if told.reason else words
        requests = run.incident.requests
        requests.journal = told
        if requests.source is None and told.path:
            # The counts of the journals stand in if the server did not report which requests it saved.
            requests.finished, requests.unfinished, requests.source = told.finished, told.unfinished, "journal"
        own = frozenset(rid for rid, are_all in checks.items() if are_all)
        for report in run.incident.processes:
            if report.steps is not None:
                report.steps.checks = own
        run.incident.note(
            clock.now(), "journal_read", unfinished=told.unfinished, finished=told.finished, reason=told.reason
        )
        run.checkpoint()
        self.taken = dead


class StepRecords(HeldMemory):
    """The records of the last steps of the server's schedulers, 2.1 MB each."""

    what = "record of its steps"
    #: An elastic server may restart ranks for ever.
    max_of_dead = 32

    def take(self, run: IncidentRun, deadline: float) -> None:
        """Add the schedulers' records of their steps to an incident; each rank takes about 0.1 s."""
        read_at, steps = time.monotonic(), dict[int, Sequence[Step]]()
        for process in run.tree:
            held = self.last_of(process)
            if held is not None or process.role == "scheduler":
                piece = _guarded("steps", self._piece_of, process, held, run, deadline, steps)
                run.report(process).evidence.append(piece)
        run.incident.divergence = divergence_of(run.incident, steps, run.folder.path, run.opened, read_at)

    def of(self, process: TrackedProcess) -> tuple[Step, ...]:
        """Return the recorded last steps of a scheduler; empty without a readable record."""
        held = self.last_of(process)
        try:
            return () if held is None else StepReader(held.descriptor, held.modes).read().steps
        except (OSError, RingError):
            return ()

    def _problem_of(self, descriptor: int) -> str:
        try:
            StepReader(descriptor)
        except (OSError, RingError) as error:
            return str(error)
        return ""

    def _piece_of(
        self,
        process: TrackedProcess,
        held: Held | None,
        run: IncidentRun,
        deadline: float,
        steps: dict[int, Sequence[Step]],
    ) -> Evidence:
        if held is None:
            reason = "it recorded no steps: its event loop had not begun, or SGLANG_CRASHKIT_STEPS is off"
            return Evidence("steps", "skipped", reason=reason)
        if time.monotonic() > deadline:
            return Evidence("steps", "failed", reason="reading the steps of other ranks took all the time")
        began, name = time.monotonic(), f"ranks/{titles.label_of(process.title, process.pid)}.steps.jsonl"
        try:
            found = StepReader(held.descriptor, held.modes).read()
        except (OSError, RingError) as error:
            return Evidence("steps", "failed", reason=f"{name}: {error}")
        run.begun.update(one.rid for step in found.steps if step.phase != PHASES[0] for one in step.requests)
        # Without the requests, which take tens of megabytes for a thousand steps; the file has them.
        steps[process.pid] = [replace(step, requests=()) for step in found.steps]
        # When the process died or, if alive, now; by the monotonic clock.
        seen_at = time.monotonic() - (0.0 if process.exited_at is None else clock.now() - process.exited_at)
        current, last = found.current, found.steps[-_LAST:]
        # `in_step` reports the current step. A step that was launched, or not processed, may be at fault as well.
        most = [MAX_RIDS if step.ended is None and step is not current else _REQUESTS_OF_LAST for step in last]
        run.report(process).steps = incident.LastSteps(
            last=[replace(step, requests=step.requests[:number]) for step, number in zip(last, most, strict=True)],
            in_step=None if current is None else _in_step(current, seen_at),
            rids={step.number: [one.rid for one in step.requests] for step in last},
        )
        run.report(process).control = found.control
        if not found.steps:
            return Evidence("steps", "skipped", reason="it has run no step yet")
        lines = "".join(json.dumps(step.to_json()) + "\n" for step in found.steps)
        piece = write_piece("steps", run.folder.write_text, name, lines)
        piece.seconds = round(time.monotonic() - began, 3)
        return piece


def divergence_of(
    incident: Incident, steps: Mapping[int, Sequence[Step]], folder: Path, opened: float, read_at: float
) -> Divergence | None:
    """Return the divergence of the ranks; None if no rank recorded steps, or none has another that it must agree with.

    Args:
        incident: the incident, with its processes.
        steps: the last steps of the schedulers, by pid, without their requests: steps are compared by their hashes.
        folder: the incident's folder, which has the steps with their requests.
        opened: when the incident was opened, in seconds of the monotonic clock.
        read_at: when reading the steps began, by the same clock.
    """
    if not any(steps.values()):
        return None
    moment = Moment(opened, "the hang was noticed" if incident.kind == "hang" else "the incident", read_at)
    reports = sorted((report for report in incident.processes if report.is_rank), key=lambda report: report.pid)
    ranks = [RankSteps(rank_at(report.rank), steps.get(report.pid, ()), report.pid) for report in reports]
    try:
        found = find_divergence(ranks, moment)
        if found is not None and found.step is not None:
            told = {one.pid: one.steps for one in read_steps(folder, found.step)}
            whole = [replace(one, steps=[*one.steps, *told.get(one.pid, ())]) for one in ranks]
            found = find_divergence(whole, moment) or found
    except Exception:
        # The incident's other evidence is worth more than the comparison.
        logger.exception("the steps of the ranks cannot be compared")
        return None
    return found


class ProcessLogs(HeldMemory):
    """The last log records of each process, at most `most`, written to ``logs/<process>.log`` in an incident."""

    what = "log"
    max_of_dead = 16

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def take(self, run: IncidentRun, deadline: float) -> None:
        """Add the logs of the server's own processes to an incident that has its requests; each log takes 0.1 s."""
        prompts: list[str] = []
        with contextlib.suppress(OSError), open_regular(run.folder.path / REQUESTS) as file:
            # The first requests are those under way.
            for line in islice(iter(lambda: file.readline(_MAX_LINE), b""), _MAX_PROMPTS):
                # If the disk is full, the last line may be cut off.
                with contextlib.suppress(ValueError, AttributeError, RecursionError):
                    text = json.loads(line).get("text")
                    texts = text if isinstance(text, list) else [text]
                    prompts += [one[:_MAX_COMPARED] for one in texts[:_MAX_TEXTS] if isinstance(one, str)]
        for process in run.tree:
            if process.matters:
                piece = _guarded("log", self._piece_of, process, run, prompts, deadline)
                run.report(process).evidence.append(piece)
        self.taken = self.dead()

    def _piece_of(self, process: TrackedProcess, run: IncidentRun, prompts: Sequence[str], deadline: float) -> Evidence:
        held = self.last_of(process)
        if held is None:
            reason = (
                "it did not use Python's logging, or its log was not passed to the crash handler" if self._most else OFF
            )
            return Evidence("log", "skipped", reason=reason)
        name = f"logs/{titles.label_of(process.title, process.pid)}.log"
        try:
            # Reading gets half of the time, and the search the rest.
            middle = (deadline + time.monotonic()) / 2
            lines = format_log(read_log(held.descriptor, self._most, middle), prompts, deadline)
        except (OSError, CrashkitError) as error:
            return Evidence("log", "failed", reason=f"{name}: {error}")
        if not lines:
            return Evidence("log", "skipped", reason="it logged nothing")
        return write_piece("log", run.folder.write_text, name, "".join(lines))


def format_log(records: Sequence[LogRecord], prompts: Sequence[str], deadline: float) -> list[str]:
    """Return one text for each record, without secrets and without prompts.

    A record that is not searched before `deadline`, by the monotonic clock, is withheld.
    """
    # Search the latest records first: they are the most useful.
    said = [redact_text(one.text) if time.monotonic() < deadline else _WITHHELD for one in reversed(records)]
    if prompts:
        said = _without_prompts(said, prompts, deadline)
    return [
        f"{iso_time(one.seconds)} {logging.getLevelName(one.level)} {one.logger}: {text}\n"
        for one, text in zip(records, reversed(said), strict=True)
    ]


def _without_prompts(texts: Sequence[str], prompts: Sequence[str], deadline: float) -> list[str]:
    """Return the texts without what they share with the prompts; search many at once: each search reads all prompts."""
    found: list[str] = []
    chunks, size = list[list[str]](), _AT_A_TIME
    for text in texts:
        if size >= _AT_A_TIME:
            chunks.append([])
            size = 0
        chunks[-1].append(text.replace(_BETWEEN, " "))
        size += len(text)
    for chunk in chunks:
        searched: list[str] = []
        if time.monotonic() < deadline:
            searched = redact_prompts(_BETWEEN.join(chunk), prompts).split(_BETWEEN)
        found += searched if len(searched) == len(chunk) else [_WITHHELD] * len(chunk)
    return found


def _in_step(step: Step, seconds: float) -> InStep:
    return InStep(
        number=step.number,
        mode=step.mode,
        phase=step.phase,
        seconds=round(max(0.0, seconds - step.began), 3),
        size=step.size,
        rids=[request.rid for request in step.requests[:MAX_RIDS]],
        began=iso_time(clock.at(step.began)),
    )


class ServerEnvironment:
    """The facts of the launch that the main process passed on, and the environment that an incident reads later."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._ready_at: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the server's main process reported that all ranks are ready."""
        return self._ready_at is not None

    def hold(self, descriptor: int | None, seconds: float, *, ready: bool) -> None:
        """Hold a duplicate of the main process's `descriptor`; `ready`: the ranks were ready at `seconds`."""
        self.close()
        self._descriptor = os.dup(descriptor) if descriptor is not None else None
        self._ready_at = seconds if ready else None

    def arguments(self) -> dict[str, Any]:
        """Return the server's arguments; empty if it has not reported them yet."""
        arguments = self._told().get("arguments")
        return arguments if isinstance(arguments, dict) else {}

    def take(self, run: IncidentRun, deadline: float) -> None:
        """Add ``environment.json`` to an incident that is about to be finished; ten processes take about 0.05 s."""
        document = self._gather(run.tree, deadline)
        memory, shared = document.get("cgroup", {}).get("memory", {}), document.get("shared_memory", {})
        in_short = {name: document[name] for name in _IN_SHORT if name in document} | {"path": ENVIRONMENT}
        in_short["memory"] = {name: memory[name] for name in _MEMORY if name in memory}
        in_short["shared_memory"] = {name: shared[name] for name in _SHARED if name in shared}
        run.incident.environment = lenient.read(in_short, incident.Surroundings)
        piece = write_piece("environment", run.folder.write_json, ENVIRONMENT, document)
        run.report(run.tree.root).evidence.append(piece)

    def close(self) -> None:
        """Release the held memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._ready_at = None

    def _gather(self, tree: ProcessTree, deadline: float) -> dict[str, Any]:
        # Imported here because only an incident needs it.
        from sglang_crashkit.capture import environment

        root, now, told = tree.root, clock.now(), self._told()
        arguments, versions = self.arguments(), told.get("versions")
        known = {"sglang-crashkit": __version__} | (versions if isinstance(versions, dict) else {})
        words = procfs.read_cmdline(root.pid)
        sizes = {name: arguments.get(f"{name}_size", arguments.get(name)) for name in _SIZES}
        # This process is in the same cgroups and the same container, and has the same environment.
        pid = root.pid if root.exited_at is None else os.getpid()
        started = procfs.started_at(root.handle.start_ticks)
        pieces: dict[str, Callable[[], Any]] = {
            "command_line": lambda: told.get("command_line") or redact_command(words, secrets_of_arguments(words)),
            "model": lambda: arguments.get("model_path"),
            "parallel": lambda: {name: value for name, value in sizes.items() if type(value) is int},
            "versions": lambda: known | ({"driver": driver} if (driver := environment.read_driver()) else {}),
            "place": lambda: environment.read_place(pid, os.environ),
            "cgroup": lambda: environment.read_cgroups(pid),
            "host": environment.read_host,
            "arguments": lambda: arguments,
            "shared_memory": environment.read_shared_memory,
            "processes": lambda: [
                {"pid": one.pid, "title": one.title} | environment.read_process(one.pid)
                for one in tree.alive()
                if one.matters and time.monotonic() < deadline
            ],
        }
        document: dict[str, Any] = {"schema_version": 1, "time": iso_time(now), "started": iso_time(started)}
        document["uptime_secs"] = round(max(0.0, time.time() - (now - (root.exited_at or now)) - started), 1)
        if self._ready_at is not None:
            document["ready_since"] = iso_time(self._ready_at)
        for name, read in pieces.items():
            try:
                value = read()
            except Exception as error:
                # The other pieces may still be readable.
                logger.error("%s: %s cannot be read", ENVIRONMENT, name, exc_info=error)
                continue
            if value:
                document[name] = value
        return document

    def _told(self) -> dict[str, Any]:
        try:
            told = json.loads(read_blob(self._descriptor)) if self._descriptor is not None else {}
        except (RingError, ValueError, RecursionError) as error:
            logger.warning("what the server reported of its launch cannot be read: %s", error)
            return {}
        return told if isinstance(told, dict) else {}
