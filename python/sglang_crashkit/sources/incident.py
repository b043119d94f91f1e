"""Converts an incident into events, so that the judge treats it as other evidence, alone or together with a log.

The crash handler calls `events_of` for the incident that it holds; `read_incident` reads an incident from a folder.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, dropwhile, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import read_json, read_regular
from sglang_crashkit.model import ABORTED, ALONE, ALONE_AT, ONLY
from sglang_crashkit.model.event import (
    Arguments,
    Compared,
    Error,
    Event,
    Exit,
    GpuKernel,
    Kernel,
    Raised,
    Stack,
    Stage,
    Stop,
    Suspect,
    Watched,
)
from sglang_crashkit.model.incident import Gpus, Incident, Look, ProcessReport, Verdict
from sglang_crashkit.model.incident_log import LOG, MAX_BYTES, reduce
from sglang_crashkit.model.lenient import mapping_of, mappings_of, seconds_of, texts_of
from sglang_crashkit.model.sample import Frame, Sample, Thread

DOCUMENT = "incident.json"
#: Most bytes of a file that is read here; an incident of 512 ranks has 2 MB.
_MAX_BYTES = 64 << 20
#: The axes of a rank's name in front of SGLang's log lines, in order.
_RANKS = ("dp", "pp", "attn_cp", "moe_dp", "tp", "ep")
_ORDERLY = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
_HANGS = ("no_progress", "silent_at_sigterm", "unhealthy_at_sigterm", "watchdog_timeout", "busy_too_long")
#: Frames that a process has only during its start.
_STARTING = re.compile(
    r"__init__ \(\S*/(scheduler|tp_worker|model_runner|detokenizer_manager)\.py:"
    r"|(\w+\.)?_launch_subprocesses \(\S*/engine\.py:"
)
#: Xid errors older than this, in seconds, are unrelated; with these exceptions all Xid errors are.
_XID_SECS = 600.0
_OF_NO_GPU = re.compile(
    r"(?:\w+\.)*(?:Attribute|Assertion|FileNotFound|Import|Index|Key|Memory|ModuleNotFound|Name|NotImplemented|OS"
    r"|OutOfMemory|Overflow|Type|UnboundLocal|Value|ZeroDivision|ZMQ)Error"
)
_TELLS_OF_GPU = re.compile(r"[^'\"\n]{0,100}\b(?:CUDA|HIP|NCCL|CUBLAS)")
_WITHOUT_GPU = frozenset({"detokenizer", "tokenizer_worker", "tokenizer"})
#: Reasons that apply to any request that is the only one; so does `ONLY` unless the server failed at taking it in.
_BY_PLACE = frozenset({ABORTED, ALONE, ALONE_AT})
_BEGINNING = re.compile(
    r"\S*(?:handle_generate_request|handle_embedding_request|handle_tokenized_\w*|get_new_batch_prefill\w*"
    r"|prepare_for_extend) \("
)
#: A file system counts as full if this share of it, from 0 to 1, is used.
_FULL = 0.95
_MAX_RIDS = 4


def is_incident(path: Path) -> bool:
    """Return whether a path is the folder of an incident."""
    return any((path / name).is_file() for name in (DOCUMENT, LOG))


def incident_in_log(folder: Path) -> Incident:
    """Return the incident that the log in its folder records; it is not judged.

    Raises:
        OSError: there is no log, or it cannot be read.
    """
    return reduce(io.BytesIO(read_regular(folder / LOG, MAX_BYTES)))


def read_incident(folder: Path) -> Iterator[Event]:
    """Yield the events of an incident on disk; see `events_of`.

    Raises:
        CrashkitError: ``incident.json`` cannot be read.
    """
    if (folder / DOCUMENT).exists():
        incident = Incident.of(_read_json(folder / DOCUMENT, is_needed=True))
    else:
        incident = incident_in_log(folder)
    records: dict[int, Mapping[str, Any]] = {}
    samples: dict[int, list[Sample]] = {}
    for process in incident.processes:
        # Use only the file name of a path, so that it stays in the folder. The last of several exceptions ended it.
        if names := _names_of(process, "exception"):
            records[process.pid] = _read_json(folder / "ranks" / names[-1])
        files = ((folder / "stacks" / name).with_suffix(".json") for name in _names_of(process, "stack"))
        stacks = [_main_frames(_read_json(file), process.pid) for file in files]
        samples[process.pid] = [
            replace(look, threads=_thread(process.pid, frames)) if frames else look
            for look, frames in zip_longest(_samples(process), stacks)
            if look is not None
        ]
    yield from events_of(incident, _read_json(folder / "environment.json"), records, samples, source=folder.name)


def events_of(
    incident: Incident,
    environment: Mapping[str, Any],
    records: Mapping[int, Mapping[str, Any]],
    samples: Mapping[int, Sequence[Sample]] | None = None,
    source: str = "",
) -> Iterator[Event]:
    """Yield events about the processes of an incident, their exits, exceptions and stacks, and about its host.

    `environment` is the content of ``environment.json``, `records` that of ``ranks/*.exception.json`` by pid, `samples`
    the stacks by pid if more is known than the incident contains, and `source` the source of the events.
    """
    orders = count(1)
    for event in _Incident(incident, environment, records, samples or {}).events():
        yield msgspec.structs.replace(event, order=next(orders), source=source)


class _Incident:
    def __init__(
        self,
        incident: Incident,
        environment: Mapping[str, Any],
        records: Mapping[int, Mapping[str, Any]],
        samples: Mapping[int, Sequence[Sample]],
    ) -> None:
        self._incident, self._environment, self._records, self._samples = incident, environment, records, samples
        self._verdict = incident.verdict or Verdict("unknown", None, "unknown", "")
        self._opened = seconds_of(incident.trigger.time) or 0.0
        self._first = incident.first_failure
        is_open = not self._first and self._verdict.kind in ("", "unknown")
        self._is_hang = self._verdict.kind == "hang" or (is_open and incident.trigger.event in _HANGS)
        raised = [one for one in reversed(incident.timeline) if one.event == "exception"]
        self._errors = {one.pid: self._exception(one.pid, one.message) for one in raised if one.pid is not None}

    @property
    def _error(self) -> Error | None:
        """The exception of the first failure; exceptions of other processes are consequences."""
        if self._first is not None:
            return self._errors.get(self._first.pid)
        return next(reversed(self._errors.values()), None)

    def events(self) -> Iterator[Event]:
        """Yield all events, in their order."""
        about = self._incident.surroundings
        parallel = {
            name if name in ("nnodes", "node_rank") else f"{name}_size": size for name, size in about.parallel.items()
        }
        values: dict[str, Any] = {**parallel, "model_path": about.model or None}
        if not (told := mapping_of(self._environment.get("arguments"))):
            values |= _options(str(self._environment.get("command_line") or ""))
        values |= told
        yield Arguments(
            at=seconds_of(about.started) or 0.0,
            values={name.replace("-", "_"): value for name, value in values.items() if value is not None},
            release=self._incident.server.sglang_version,
        )
        if ready := seconds_of(about.ready_since or self._environment.get("ready_since")):
            yield Stage(at=ready, name="ready", is_done=True)
        if self._incident.verdict is not None:
            yield self._watched()
        yield from self._host()
        yield from self._ends()
        yield from self._comparisons()
        yield from self._suspects()
        for one in self._incident.processes:
            for line in (line for line in one.gpu if line.startswith("exception: ")):
                text = line.removeprefix("exception: ")
                yield GpuKernel(who=name_of(one), exception=text.partition(" in ")[0], text=text)
            for sample in self._samples.get(one.pid) or _samples(one):
                if "helper" not in (one.role, sample.role):
                    # A process that its cgroup freezes looks asleep; only its kernel function shows the difference.
                    sample = replace(sample, wchan=sample.wchan or str((one.state or {}).get("wchan") or ""))
                    yield Stack(at=sample.time or self._opened, who=name_of(one), sample=sample)

    # -- the first failure

    def _watched(self) -> Watched:
        verdict = self._verdict
        kind, text = verdict.kind or "unknown", next(iter(verdict.basis), verdict.text)
        late = next((one for one in self._incident.timeline if one.event == "startup_timeout"), None)
        if kind == "peer_lost" and {one.sign for one in self._incident.peers} == {"failed_transfer"}:
            kind = "failed_transfer"
        elif late is not None and not self._errors and not self._first:
            kind, text = "startup_timeout", late.message or "the ranks did not get ready in time"
        return Watched(
            at=self._opened,
            kind=kind,
            level=verdict.level,
            text=text,
            who=name_of(self._first) if self._first else "",
            pid=self._first.pid if self._first else 0,
            role=self._first.role if self._first else "",
            is_hang=self._is_hang,
            is_ended=self._incident.trigger.event in ("watchdog_timeout", "busy_too_long")
            and not any(one.get("soft") is True for one in self._incident.timeline),
            is_starting=self._incident.failed_at_start
            or any(_STARTING.match(str(frame)) for one in self._errors.values() for frame in one.frames),
            notes=(*(self._incident.remarks if kind == "vanished" else ()), *self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        """Yield the control request and the step of the failure, and the ranks that were in a garbage collection."""
        ranks = [one for one in self._incident.processes if one.is_rank]
        some = [self._first] if self._first else ranks if self._is_hang else []
        for name, rank in {rank.control: rank for rank in reversed(some) if rank.control}.items():
            yield f"{rank.title} (pid {rank.pid}) worked on {name}, a control request."
        if self._first is not None and (step := self._first.in_step) is not None:
            who = f", with {', '.join(step.rids[:_MAX_RIDS])}" if step.rids else ""
            batch = f"{step.mode}, {step.size} requests" if step.mode else "not yet scheduled"
            yield f"It was in step {step.number} ({batch}{who})."
        for rank in self._incident.processes:
            if rank.last_sign is not None and rank.last_sign.collecting_secs > 0:
                secs = rank.last_sign.collecting_secs
                yield f"{rank.title} (pid {rank.pid}) was in a garbage collection for {secs:.0f} s."

    def _ends(self) -> Iterator[Event]:
        """Yield exits and exceptions; those of processes other than the first failure follow from it."""
        first = self._first
        for entry in self._incident.timeline:
            kind, pid, at = entry.event, entry.pid, entry.seconds or 0.0
            process = self._incident.process(pid) if pid is not None else None
            who = name_of(process) if process is not None else ""
            follows = self._is_hang or (first is not None and process is not first)
            if kind == "teardown":
                # SGLang ends its own processes: those that die from here on were killed by it.
                break
            if process is not first and process is not None and process.role == "helper":
                # The exit of a helper process that a rank started is no failure.
                continue
            if kind == "process_exited" and who and not (process is first and first is not None and first.exit):
                code, signal = entry.get("code"), entry.get("signal")
                yield Exit(at=at, who=who, code=code, signal=signal or "", follows=follows)
            elif kind == "exception" and pid is not None:
                yield Raised(at=at, who="" if who == "server" else who, chain=(self._errors[pid],), follows=follows)
            elif kind == "thread_died" and who and self._verdict.kind == kind:
                name, _, text = entry.message.partition(": ")
                chain = (Error(type=name.strip(), text=text, frames=frames_in(texts_of(entry.get("frames")))),)
                yield Raised(at=at, who=who, chain=chain, thread=str(entry.get("thread") or "?"), follows=follows)
            elif kind in ("asked_to_end", "draining") and first is None and not self._is_hang:
                yield Stop(at=at, by="signal", text="the server was asked to end")
        for process in self._incident.processes:
            end = process.exit
            if end is None:
                continue
            signal = end.signal or ""
            if end.cause == "oom_kill":
                text = f"the kernel killed {process.title} (pid {process.pid}) for lack of memory: {end.detail}"
                facts = {"is_first": first is None or process is first}
                yield Kernel(kind="oom_kill", who=name_of(process), pid=process.pid, text=text, facts=facts)
            elif process is first and end.cause in ("signal", "exit_status") and not self._is_hang:
                if signal in _ORDERLY:
                    text = f"{process.title} was ended by {signal}, which asks for an orderly end"
                    yield Stop(at=self._opened, who=name_of(process), by="signal", text=text)
                    continue
                # Without the count of OOM kills, the kernel may have sent SIGKILL for lack of memory.
                is_seen = "counts no OOM kill" in end.detail if signal == "SIGKILL" else bool(signal)
                # A shell exits with a status above 128 if its child died of a signal.
                is_seen |= not signal and end.code is not None and end.code <= 128
                yield Exit(
                    at=seconds_of(end.time) or self._opened,
                    who=name_of(process),
                    code=end.code,
                    signal=signal,
                    text=end.detail,
                    is_seen=is_seen and self._verdict.level == "established",
                )

    def _exception(self, pid: int, message: str) -> Error:
        record = self._records.get(pid) or {}
        kind, _, text = str(record.get("message") or message).partition(": ")
        process = self._incident.process(pid)
        frames = frames_in(texts_of(record.get("traceback")) or (process.doing if process is not None else ()))
        return Error(type=kind.strip(), text=text, frames=frames[::-1] if record.get("traceback") else frames)

    # -- the host

    def _host(self) -> Iterator[Kernel]:
        first, error, gpus = self._first, self._error, self._incident.gpus or Gpus()
        signal = first.exit.signal if first is not None and first.exit is not None else None
        # With these signals and exceptions, no GPU failed.
        is_of_no_gpu = signal == "SIGKILL" or signal in _ORDERLY or (error and _OF_NO_GPU.fullmatch(error.type))
        placed = {one.pid for device in gpus.devices for one in device.processes}
        are_placed = placed.issuperset(one.pid for one in self._incident.processes if one.is_rank)
        for event in gpus.xids:
            its = next((device for device in gpus.devices if device.bus_id == event.bus_id), None)
            # Only other programs use that GPU, and all ranks use others. A GPU that fell off the bus lists no programs.
            is_of_others = its is not None and bool(its.others) and not its.processes and are_placed
            holders = [one for one in event.processes if first is not None and one.pid == first.pid]
            may_fail = first is None or first.role not in _WITHOUT_GPU or bool(holders)
            is_old = self._opened and event.time < self._opened - _XID_SECS
            if is_old or is_of_no_gpu or not may_fail or is_of_others:
                continue
            is_sure = any(one.level == "established" for one in holders)
            is_own = first is not None and is_sure and (error is None or _TELLS_OF_GPU.match(error.text))
            text = event.text or f"the driver reported Xid {event.xid} of GPU {event.bus_id}"
            who, pid = (name_of(first), first.pid) if first is not None and is_own else ("", 0)
            yield Kernel(kind="xid", number=event.xid, pid=pid, who=who, text=text, facts={"gpu": event.bus_id})
        memory = self._incident.surroundings.shared_memory
        used, total = memory.used_bytes, memory.total_bytes
        if used is not None and total and used / total >= _FULL:
            yield Kernel(kind="shm_full", text=f"the shared memory is {used / total:.0%} full")

    # -- steps, flight recorders and requests

    def _comparisons(self) -> Iterator[Compared]:
        found = self._incident.divergence
        if found is not None and found.is_one:
            yield Compared(kind="divergence", level=found.level, text=found.statement, late=tuple(found.pids))
        collectives = self._incident.collectives
        for one in collectives.findings if collectives is not None else ():
            if one.kind in ("mismatch", "behind"):
                late, waiting = tuple(one.pids), tuple(one.waiting_pids)
                yield Compared(kind=one.kind, level=one.level, text=one.statement, late=late, waiting=waiting)

    def _suspects(self) -> Iterator[Suspect]:
        seen = self._incident.fault.seen if self._incident.fault is not None else {}
        error = self._error
        # If the failure was elsewhere, the request may not have been received yet.
        is_begun = error is None or any(_BEGINNING.match(str(frame)) for frame in error.frames)
        by_place = _BY_PLACE if is_begun else _BY_PLACE | {ONLY}
        for place, one in enumerate(self._incident.suspects):
            is_repeated = bool(seen.get(one.rid))
            if is_repeated or not place:
                is_alone = by_place.issuperset(one.reasons) and not self._is_beside_others()
                yield Suspect(rid=one.rid, level=one.level, reasons=tuple(one.reasons), is_repeated=is_repeated,
                              is_alone=is_alone)  # fmt: skip

    def _is_beside_others(self) -> bool:
        """Return whether more than one request was in flight on a server in which each rank has all requests.

        Data-parallel replicas divide the requests, so a request may be alone in the step of a replica by chance.
        """
        if any(one.is_rank and "dp" in one.rank for one in self._incident.processes):
            return False
        requests = self._incident.requests
        counts = (requests.unfinished, requests.journal.unfinished if requests.journal is not None else 0)
        return any(one is not None and one > 1 for one in counts)


def logs_of(folder: Path) -> list[Path]:
    """Return the log files in an incident, for the reader of text."""
    return sorted((folder / "logs").glob("*.log"))


def _read_json(path: Path, *, is_needed: bool = False) -> Mapping[str, Any]:
    try:
        return mapping_of(read_json(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if is_needed:
            raise CrashkitError(f"{path} cannot be read: {error}", next_step="sglang-crashkit show INCIDENT") from error
        return {}


def _names_of(process: ProcessReport, kind: str) -> list[str]:
    return [Path(one.path).name for one in process.evidence if one.kind == kind and one.path]


def _main_frames(stacks: Mapping[str, Any], pid: int) -> tuple[Frame, ...]:
    """Return the main thread's frames in a file of stacks, below the kit's own; empty without a main thread."""
    threads = mappings_of(stacks.get("threads"))
    main = next((one for one in threads if one.get("native_id") == pid or one.get("name") == "MainThread"), {})
    found = [
        Frame(str(one.get("function")), str(one.get("file")), line if isinstance(line := one.get("line"), int) else 0)
        for one in mappings_of(main.get("frames"))
    ]
    return tuple(dropwhile(lambda frame: "sglang_crashkit/" in frame.file, found))


def _thread(pid: int, frames: tuple[Frame, ...]) -> tuple[Thread, ...]:
    return (Thread("MainThread", pid, active=False, owns_gil=False, frames=frames),) if frames else ()


def _options(command_line: str) -> dict[str, Any]:
    """Return the options of a command line by their Python names; options without a value are True."""
    words = command_line.split()
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else following.startswith("--") or following
    return found


def name_of(process: ProcessReport) -> str:
    """Return the short name of a process, as in front of SGLang's log lines."""
    named = [f"{name.upper()}{process.rank[name]}" for name in _RANKS if name in process.rank]
    return " ".join(named) or process.role


def _samples(process: ProcessReport) -> Iterator[Sample]:
    state = process.state or {}
    sample = Sample(
        pid=process.pid, title=process.title, role=process.role, ranks=process.rank,
        state=str(state.get("State") or "")[:1], wchan=str(state.get("wchan") or ""),
    )  # fmt: skip
    for look in process.looks or ([Look("", sample.state)] if sample.state or process.doing else []):
        threads = _thread(process.pid, frames_in(look.doing or process.doing))
        at = seconds_of(look.time) or 0.0
        yield replace(sample, time=at, state=look.state, cpu_secs=look.cpu_secs, threads=threads)


def frames_in(lines: Iterable[str]) -> tuple[Frame, ...]:
    """Return the frames in lines of text; lines in another form are left out."""
    return tuple(filter(None, map(Frame.read, lines)))
