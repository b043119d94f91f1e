"""The events of an incident, so that it is judged as plain evidence is, alone or beside a log.

The crash handler asks for those of the incident that it holds; `read_incident` reads them from a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, dropwhile, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import read_json
from sglang_crashkit.model import ABORTED, ALONE, ALONE_AT, ONLY
from sglang_crashkit.model.checked_json import mapping_of, mappings_of, seconds_of, texts_of
from sglang_crashkit.model.event import (
    AnyEvent,
    Arguments,
    Compared,
    Error,
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
from sglang_crashkit.model.sample import Frame, Sample, Thread
from sglang_crashkit.model.step import DIVERGED

DOCUMENT = "incident.json"
#: Of each file that is read here; an incident of 512 ranks has 2 MB.
_MAX_BYTES = 64 << 20
_FRAME = re.compile(r"(?P<function>[^()]{1,300}) \((?P<file>[^()]{1,600}?):(?P<line>\d{1,9})\)")
#: How SGLang names the ranks in front of its log lines, in that order.
_RANKS = ("dp", "pp", "attn_cp", "moe_dp", "tp", "ep")
_ORDERLY = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
#: By these SGLang, or the kit, says that it did not get ready, or that it does not go on.
_FAILED_STARTS = ("launch_failed", "startup_timeout")
_HANGS = ("no_progress", "silent_at_sigterm", "unhealthy_at_sigterm", "watchdog_timeout", "busy_too_long")
#: Through these a process passes while it starts, and never later.
_STARTING = re.compile(
    r"__init__ \(\S*/(scheduler|tp_worker|model_runner|detokenizer_manager)\.py:"
    r"|(\w+\.)?_launch_subprocesses \(\S*/engine\.py:"
)
#: An Xid error of longer ago, in seconds, has nothing to do with it; nor has any with these exceptions.
_XID_SECS = 600.0
_OF_NO_GPU = re.compile(
    r"(?:\w+\.)*(?:Attribute|Assertion|FileNotFound|Import|Index|Key|Memory|ModuleNotFound|Name|NotImplemented|OS"
    r"|OutOfMemory|Overflow|Type|UnboundLocal|Value|ZeroDivision|ZMQ)Error"
)
_TELLS_OF_GPU = re.compile(r"[^'\"\n]{0,100}\b(?:CUDA|HIP|NCCL|CUBLAS)")
_WITHOUT_GPU = frozenset({"detokenizer", "tokenizer_worker", "tokenizer"})
#: What is said of any request that a server fails with whose only one it is; of one in no step yet, another one.
_BY_PLACE = frozenset({ABORTED, ALONE, ALONE_AT})
_BEGINNING = re.compile(
    r"\S*(?:handle_generate_request|handle_embedding_request|handle_tokenized_\w*|get_new_batch_prefill\w*"
    r"|prepare_for_extend) \("
)
#: A file system this full, from 0 to 1, has no room for what is needed.
_FULL = 0.95
_MAX_RIDS = 4


def is_incident(path: Path) -> bool:
    """Return whether a path is the folder of an incident."""
    return (path / DOCUMENT).is_file()


def read_incident(folder: Path) -> Iterator[AnyEvent]:
    """Yield what an incident on disk holds; see `events_of`.

    Raises:
        CrashkitError: ``incident.json`` cannot be read.
    """
    document = _read_json(folder / DOCUMENT, is_needed=True)
    records, samples = {}, {}
    for process in mappings_of(document.get("processes")):
        if isinstance(pid := process.get("pid"), int):
            # A path is the document's word: a name in the folder, or nothing.
            if names := _names_of(process, "exception"):
                records[pid] = _read_json(folder / "ranks" / names[0])
            stacks = [
                _main_frames(_read_json((folder / "stacks" / name).with_suffix(".json")), pid)
                for name in _names_of(process, "stack")
            ]
            samples[pid] = [
                replace(look, threads=_thread(pid, frames)) if frames else look
                for look, frames in zip_longest(_samples(pid, process), stacks)
                if look is not None
            ]
    yield from events_of(document, _read_json(folder / "environment.json"), records, samples, source=folder.name)


def events_of(
    document: Mapping[str, Any],
    environment: Mapping[str, Any],
    records: Mapping[int, Mapping[str, Any]],
    samples: Mapping[int, Sequence[Sample]] | None = None,
    source: str = "",
) -> Iterator[AnyEvent]:
    """Yield what is known of an incident's processes, their ends, exceptions and stacks, and of its host.

    Args:
        document: see `incident.Incident.to_json`; each piece of it may be missing, or of another shape.
        environment: what ``environment.json`` holds.
        records: by pid what failing processes wrote of themselves, as ``ranks/*.exception.json`` holds it.
        samples: by pid what the processes did, where more is known of it than the document tells.
        source: what the events are said to come from; empty where that is the incident itself.
    """
    orders = count(1)
    for event in _Incident(document, environment, records, samples or {}).events():
        yield msgspec.structs.replace(event, order=next(orders), source=source)


class _Incident:
    def __init__(
        self,
        document: Mapping[str, Any],
        environment: Mapping[str, Any],
        records: Mapping[int, Mapping[str, Any]],
        samples: Mapping[int, Sequence[Sample]],
    ) -> None:
        self._document, self._environment = document, environment
        self._records, self._samples = records, samples
        told = mappings_of(document.get("processes"))
        self._processes = {pid: one for one in told if isinstance(pid := one.get("pid"), int)}
        self._verdict = mapping_of(document.get("verdict"))
        self._about = mapping_of(document.get("environment"))
        self._timeline = mappings_of(document.get("timeline"))
        trigger = mapping_of(document.get("trigger"))
        self._opened = seconds_of(trigger.get("time")) or 0.0
        first = mapping_of(self._verdict.get("first_failure")).get("pid")
        self._first: Mapping[str, Any] = self._processes.get(first, {}) if isinstance(first, int) else {}
        self._kind = str(self._verdict.get("kind") or "unknown")
        self._is_hang = self._kind == "hang" or (
            not self._first and self._kind == "unknown" and trigger.get("event") in _HANGS
        )
        self._errors = {
            pid: self._exception(pid, str(one.get("message") or ""))
            for one in reversed(self._timeline)
            if one.get("event") == "exception" and isinstance(pid := one.get("pid"), int)
        }

    @property
    def _error(self) -> Error | None:
        """The exception of the first failure; those of others are consequences."""
        if self._first:
            return self._errors.get(self._first["pid"])
        return next(reversed(self._errors.values()), None)

    def events(self) -> Iterator[AnyEvent]:
        """Yield all events, in their order."""
        yield self._arguments()
        if ready := seconds_of(self._about.get("ready_since") or self._environment.get("ready_since")):
            yield Stage(at=ready, name="ready", is_done=True)
        if self._verdict:
            yield self._watched()
        yield from self._host()
        yield from self._ends()
        yield from self._comparisons()
        yield from self._suspects()
        for pid, one in self._processes.items():
            for line in texts_of(one.get("gpu")):
                if line.startswith("exception: "):
                    text = line.removeprefix("exception: ")
                    yield GpuKernel(who=_name(one), exception=text.partition(" in ")[0], text=text)
            if one.get("role") != "helper":
                for sample in self._samples.get(pid) or _samples(pid, one):
                    if sample.role != "helper":
                        # A process that its cgroup freezes sleeps; the function of the kernel's tells it from others.
                        wchan = sample.wchan or str(mapping_of(one.get("state")).get("wchan") or "")
                        sample = replace(sample, wchan=wchan)
                        yield Stack(at=sample.time or self._opened, who=_name(one), sample=sample, by="crash handler")

    def _arguments(self) -> Arguments:
        parallel = {f"{name}_size": size for name, size in mapping_of(self._about.get("parallel")).items()}
        for name in ("nnodes", "node_rank"):
            if f"{name}_size" in parallel:
                parallel[name] = parallel.pop(f"{name}_size")
        values = {**parallel, "model_path": self._about.get("model")}
        for told in (self._about, self._environment):
            values |= _options(str(told.get("command_line") or "")) if not told.get("arguments") else {}
            values |= mapping_of(told.get("arguments"))
        return Arguments(
            at=seconds_of(self._about.get("started")) or 0.0,
            values={name.replace("-", "_"): value for name, value in values.items() if value is not None},
            release=str(mapping_of(self._document.get("server")).get("sglang_version") or ""),
        )

    # -- who failed, and of what

    def _watched(self) -> Watched:
        kind, text = self._kind, next(iter(texts_of(self._verdict.get("basis"))), str(self._verdict.get("text") or ""))
        signs = [one.get("sign") for one in mappings_of(self._document.get("peers"))]
        late = next((one for one in self._timeline if one.get("event") == "startup_timeout"), None)
        if kind == "peer_lost" and signs and all(sign == "failed_transfer" for sign in signs):
            kind = "failed_transfer"
        elif late is not None and not self._errors and not self._first:
            kind, text = "startup_timeout", str(late.get("message") or "the ranks did not get ready in time")
        return Watched(
            at=self._opened,
            kind=kind,
            level=str(self._verdict.get("level") or "unknown"),
            text=text,
            who=_name(self._first) if self._first else "",
            pid=self._first.get("pid", 0),
            role=str(self._first.get("role") or ""),
            is_hang=self._is_hang,
            is_starting=self._is_starting(),
            notes=(*self._control(), *self._step()),
        )

    def _is_starting(self) -> bool:
        if self._document.get("kind") == "failed_start":
            return True
        if any(one.get("event") in _FAILED_STARTS for one in self._timeline):
            return True
        return any(_STARTING.match(str(frame)) for one in self._errors.values() for frame in one.frames)

    def _control(self) -> Iterator[str]:
        """Yield at what control request the first failure, or a rank that hangs, was."""
        ranks = [one for one in self._processes.values() if one.get("role") == "scheduler"]
        some = [self._first] if self._first else ranks if self._is_hang else []
        names = {name: rank for rank in reversed(some) if (name := str(rank.get("control") or ""))}
        for name, rank in names.items():
            yield f"{rank.get('title')} (pid {rank.get('pid')}) worked on {name}, a control request."

    def _step(self) -> Iterator[str]:
        """Yield in which step the first failure was, with which requests."""
        step = mapping_of(mapping_of(self._first.get("steps")).get("in_step"))
        if step:
            rids = texts_of(step.get("rids"))[:_MAX_RIDS]
            who = f", with {', '.join(rids)}" if rids else ""
            batch = f"{step['mode']}, {step.get('size')} requests" if step.get("mode") else "not yet scheduled"
            yield f"It was in step {step.get('number')} ({batch}{who})."

    def _ends(self) -> Iterator[AnyEvent]:
        """Yield ends and exceptions; those of others than the first failure follow from it."""
        for entry in self._timeline:
            kind, pid, at = entry.get("event"), entry.get("pid"), seconds_of(entry.get("time")) or 0.0
            process = self._processes.get(pid, {}) if isinstance(pid, int) else {}
            who, follows = _name(process), self._is_hang or bool(self._first and process is not self._first)
            if kind == "teardown":
                # SGLang's own end: what dies from here on was killed by it.
                break
            if kind == "process_exited" and who and not (self._first is process and process.get("exit")):
                code, signal = entry.get("code"), entry.get("signal")
                yield Exit(at=at, who=who, code=code, signal=signal or "", follows=follows)
            elif kind == "exception" and isinstance(pid, int):
                yield Raised(at=at, who="" if who == "server" else who, chain=(self._errors[pid],), follows=follows)
            elif kind in ("asked_to_end", "draining") and not self._first and not self._is_hang:
                yield Stop(at=at, by="signal", text="the server was asked to end")
        for pid, process in self._processes.items():
            end = mapping_of(process.get("exit"))
            cause, detail = end.get("cause"), str(end.get("detail") or "")
            if cause == "oom_kill":
                text = f"the kernel killed {process.get('title')} (pid {pid}) for lack of memory: {detail}"
                facts = {"is_first": process is self._first or not self._first}
                yield Kernel(kind="oom_kill", who=_name(process), pid=pid, text=text, facts=facts)
            elif process is self._first and cause in ("signal", "exit_status") and not self._is_hang:
                signal = str(end.get("signal") or "")
                if signal in _ORDERLY:
                    text = f"{process.get('title')} was ended by {signal}, which asks for an orderly end"
                    yield Stop(at=self._opened, who=_name(process), by="signal", text=text)
                    continue
                # Without a count it may as well have been the kernel, for lack of memory.
                is_seen = "counts no OOM kill" in detail if signal == "SIGKILL" else bool(signal)
                # With a status above 128 a shell ends whose child died of a signal.
                is_seen |= not signal and isinstance(end.get("code"), int) and end["code"] <= 128
                yield Exit(
                    at=seconds_of(end.get("time")) or self._opened,
                    who=_name(process),
                    code=end.get("code"),
                    signal=signal,
                    text=detail,
                    is_seen=is_seen and self._verdict.get("level") == "established",
                )

    def _exception(self, pid: int, message: str) -> Error:
        record = self._records.get(pid) or {}
        kind, _, text = str(record.get("message") or message).partition(": ")
        frames = _frames(record.get("traceback") or self._processes.get(pid, {}).get("doing") or [])
        return Error(type=kind.strip(), text=text, frames=frames[::-1] if record.get("traceback") else frames)

    # -- what the host says

    def _host(self) -> Iterator[Kernel]:
        for event in mappings_of(mapping_of(self._document.get("gpus")).get("xids")):
            number, at = event.get("xid"), event.get("time")
            is_old = isinstance(at, int | float) and self._opened and at < self._opened - _XID_SECS
            if isinstance(number, int) and not is_old and not self._is_of_others(event):
                holders = [
                    one for one in mappings_of(event.get("processes")) if one.get("pid") == self._first.get("pid")
                ]
                if not self._may_be_by(holders):
                    continue
                error = self._error
                is_own = (error is None or _TELLS_OF_GPU.match(error.text)) and any(
                    one.get("level") == "established" for one in holders
                )
                bus = str(event.get("bus_id") or "")
                text = str(event.get("text") or f"the driver reported Xid {number} of GPU {bus}")
                pid = self._first.get("pid", 0) if is_own else 0
                yield Kernel(kind="xid", number=number, pid=pid, who=_name(self._first) if pid else "",
                             text=text, facts={"gpu": bus})  # fmt: skip
        memory = mapping_of((self._environment or self._about).get("shared_memory") or self._about.get("shared_memory"))
        used, total = memory.get("used_bytes"), memory.get("total_bytes")
        if isinstance(used, int) and isinstance(total, int) and total > 0 and used / total >= _FULL:
            yield Kernel(kind="shm_full", text=f"the shared memory is {used / total:.0%} full")

    def _may_be_by(self, holders: Sequence[object]) -> bool:
        """Return whether a GPU that failed may be why the first failure failed."""
        signal = mapping_of(self._first.get("exit")).get("signal")
        if signal == "SIGKILL" or signal in _ORDERLY or (self._error and _OF_NO_GPU.fullmatch(self._error.type)):
            return False
        return self._first.get("role") not in _WITHOUT_GPU or bool(holders)

    def _is_of_others(self, event: Mapping[str, Any]) -> bool:
        """Return whether an Xid error is of a GPU that other programs have, while each rank is known on another.

        A GPU that fell off the bus lists no process.
        """
        devices = mappings_of(mapping_of(self._document.get("gpus")).get("devices"))
        placed = {one.get("pid") for device in devices for one in mappings_of(device.get("processes"))}
        its = next((device for device in devices if device.get("bus_id") == event.get("bus_id")), {})
        ranks = [pid for pid, one in self._processes.items() if one.get("role") == "scheduler"]
        return bool(its.get("others")) and not its.get("processes") and placed.issuperset(ranks)

    # -- what steps, flight recorders and requests show

    def _comparisons(self) -> Iterator[Compared]:
        found = mapping_of(self._document.get("divergence"))
        told: list[Mapping[str, Any]] = [{**found, "kind": "divergence"}] if found.get("kind") in DIVERGED else []
        told += mappings_of(mapping_of(self._document.get("collectives")).get("findings"))
        for one in told:
            if one.get("kind") in ("divergence", "mismatch", "behind"):
                yield Compared(
                    kind=one["kind"],
                    level=str(one.get("level") or "unknown"),
                    text=str(one.get("statement") or ""),
                    late=_numbers(one.get("pids")),
                    waiting=_numbers(one.get("waiting_pids")),
                )

    def _suspects(self) -> Iterator[Suspect]:
        suspects = mappings_of(self._document.get("suspects"))
        seen = mapping_of(mapping_of(self._document.get("fault")).get("seen"))
        for place, one in enumerate(suspects):
            rid = str(one.get("rid") or "")
            is_repeated = bool(seen.get(rid))
            if place and not is_repeated:
                continue
            reasons = texts_of(one.get("reasons"))
            error = self._error
            by_place = _BY_PLACE
            if error is not None and not any(_BEGINNING.match(str(frame)) for frame in error.frames):
                # It may not even have been received.
                by_place |= {ONLY}
            yield Suspect(
                rid=rid,
                level=str(one.get("level") or "unknown"),
                reasons=tuple(reasons),
                is_repeated=is_repeated,
                is_alone=by_place.issuperset(reasons) and not self._is_beside_others(),
            )

    def _is_beside_others(self) -> bool:
        """Return whether more than one request was under way where each rank has all of them.

        Replicas of data parallelism share them out: to be alone in the step of one is nothing of a request's own.
        """
        ranks = [one for one in self._processes.values() if one.get("role") == "scheduler"]
        if any(mapping_of(rank.get("rank")).get("dp") is not None for rank in ranks):
            return False
        requests = mapping_of(self._document.get("requests"))
        counts = (requests.get("unfinished"), mapping_of(requests.get("journal")).get("unfinished"))
        return any(isinstance(one, int) and one > 1 for one in counts)


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


def _names_of(process: Mapping[str, Any], kind: str) -> list[str]:
    """Return the names of the files of one kind of evidence."""
    evidence = mappings_of(process.get("evidence"))
    return [Path(str(one["path"])).name for one in evidence if one.get("kind") == kind and one.get("path")]


def _main_frames(stacks: Mapping[str, Any], pid: int) -> tuple[Frame, ...]:
    """Return the frames of the main thread in a file of stacks, below the kit's own; empty without such a thread."""
    threads = mappings_of(stacks.get("threads"))
    main = next((one for one in threads if one.get("native_id") == pid or one.get("name") == "MainThread"), {})
    frames = mappings_of(main.get("frames"))
    found = (
        Frame(str(one.get("function")), str(one.get("file")), line if isinstance(line := one.get("line"), int) else 0)
        for one in frames
    )
    return tuple(dropwhile(lambda frame: "sglang_crashkit/" in frame.file, found))


def _thread(pid: int, frames: tuple[Frame, ...]) -> tuple[Thread, ...]:
    return (Thread("MainThread", pid, active=False, owns_gil=False, frames=frames),) if frames else ()


def _options(command_line: str) -> dict[str, Any]:
    """Return the options of a command line by their Python names; those without a value are True."""
    words = command_line.split()
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else True if following.startswith("--") else following
    return found


def _numbers(values: object) -> tuple[int, ...]:
    return tuple(one for one in values if isinstance(one, int)) if isinstance(values, list) else ()


def _name(process: Mapping[str, Any]) -> str:
    ranks = mapping_of(process.get("rank"))
    named = [f"{name.upper()}{ranks[name]}" for name in _RANKS if name in ranks]
    return " ".join(named) or str(process.get("role") or "")


def _samples(pid: int, process: Mapping[str, Any]) -> Iterator[Sample]:
    ranks = {name: rank for name, rank in mapping_of(process.get("rank")).items() if isinstance(rank, int)}
    state = mapping_of(process.get("state"))
    sample = Sample(
        pid=pid,
        title=str(process.get("title") or ""),
        role=str(process.get("role") or ""),
        ranks=ranks,
        state=str(state.get("State") or "")[:1],
        wchan=str(state.get("wchan") or ""),
    )
    looks = mappings_of(process.get("looks"))
    if not looks and (sample.state or process.get("doing")):
        yield replace(sample, threads=_thread(pid, _frames(texts_of(process.get("doing")))))
    for look in looks:
        cpu = look.get("cpu_secs")
        yield replace(
            sample,
            time=seconds_of(look.get("time")) or 0.0,
            state=str(look.get("state") or ""),
            cpu_secs=float(cpu) if isinstance(cpu, int | float) else 0.0,
            threads=_thread(pid, _frames(texts_of(look.get("doing") or process.get("doing")))),
        )


def _frames(lines: Iterable[object]) -> tuple[Frame, ...]:
    found = (_FRAME.fullmatch(str(line)) for line in lines)
    return tuple(Frame(one["function"], one["file"], int(one["line"])) for one in found if one)
