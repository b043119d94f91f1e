"""The data of one incident, and its form as JSON.

The JSON is what ``incident.json`` holds; `model.SCHEMA_VERSION` grows when a reader of the older form would misread it.
Times are UTC in ISO 8601 with microseconds, durations are seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from sglang_crashkit.model import SCHEMA_VERSION
from sglang_crashkit.model.checked_json import iso_time as iso_time
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.model.sample import Sample

#: So many requests of a step are named in ``incident.json``.
MAX_RIDS = 64

EvidenceKind = Literal[
    "exit",
    "proc_state",
    "stack",
    "native_stack",
    "fault_stack",
    "exception",
    "cuda_core",
    "gpu_kernels",
    "flight_recorder",
    "steps",
    "log",
    "environment",
    "gpu_facts",
    "gloo_flight_recorder",
]
EvidenceStatus = Literal["captured", "failed", "skipped"]
Level = Literal["established", "supported", "unknown"]
#: The most certain one first.
LEVELS: tuple[Level, ...] = get_args(Level)
Cause = Literal["oom_kill", "signal", "exception", "exit_status", "parent_ended", "unknown"]


@dataclass
class Evidence:
    """One expected piece of evidence of a process, there or not."""

    kind: EvidenceKind
    status: EvidenceStatus  # whether it was captured, could not be, or was not tried
    #: The file, relative to the incident's folder; None where the piece stands in ``incident.json`` itself.
    path: str | None = None
    #: Why it is not there; of one that is there, why a better way to it failed, None where none did.
    reason: str | None = None
    seconds: float | None = None  # what it took, from the trigger's handling; None when not tried
    source: str | None = None  # what took a stack; see `sample.Source`. None for other kinds, and where there is none


@dataclass
class Exit:
    """How a process ended."""

    code: int | None  # exit status, None when a signal ended it or it is not known
    signal: str | None  # name of the signal, such as ``SIGKILL``
    cause: Cause  # why, as far as the evidence goes
    detail: str  # the evidence for the cause, one sentence
    time: str  # when the kit noticed


@dataclass
class LastSign:
    """The last sign of life that a scheduler's heartbeat holds."""

    doing: str  # what it was about then, in words
    batches: int  # how many batches it had begun
    requests: int  # how many requests the last one holds
    mode: str  # forward mode of the last batch, such as ``decode``; empty where it is not known
    tokens: int  # how many tokens the last batch takes in, 0 where it is no extend
    seconds_before: float  # how long before its end, or before it was looked at, that was, in seconds


@dataclass
class InStep:
    """The step that a scheduler was in when it died, or was looked at."""

    number: int  # the step's, of `step.Step`, as are `mode` and `phase`
    mode: str  # forward mode of the batch; empty where it was not scheduled yet
    phase: str  # how far it had come
    seconds: float  # how long it had run, in seconds
    size: int  # how many requests are in it
    rids: list[str]  # their ids, the first `MAX_RIDS` of them
    began: str | None = None  # when it began; `seconds` are up to when it was looked at, which no other time says


@dataclass
class LastSteps:
    """What a scheduler did last, in short; all of it stands in ``ranks/<rank>.steps.jsonl``."""

    #: The last few of its steps, as `step.Step.to_json` has them, with the first few of their requests.
    last: list[dict[str, Any]]
    in_step: InStep | None  # the step that it was in; None where it was in none
    #: All requests of these steps, by number, of which the above have the first few. Not in the JSON.
    rids: dict[int, list[str]] = field(default_factory=dict)
    #: The ids of SGLang's own health checks among its requests, by the journals. Not in the JSON.
    checks: frozenset[str] = frozenset()


@dataclass
class ProcessReport:
    """One process of the server."""

    pid: int
    title: str  # process title, without arguments that may be secret
    role: str  # ``server``, ``scheduler``, ``detokenizer``, ``helper``...
    #: Ranks by lower-case name (``tp``, ``pp``, ``dp``, ``ep``...), empty where there is one rank only.
    rank: dict[str, int]
    exit: Exit | None = None  # None while it lived when the incident was written
    state: dict[str, Any] | None = None  # what ``/proc`` said of it, None where it was gone
    #: The innermost Python frames that tell what it was doing, innermost first.
    doing: list[str] = field(default_factory=list)
    #: What its GPU was doing, in lines: which kernels, and what failed; empty where no core tells of it.
    gpu: list[str] = field(default_factory=list)
    #: Where several were taken, each, the first one too; ``looks`` in the JSON.
    samples: list[Sample] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)  # every expected piece
    #: What the heartbeat of a scheduler that died or hangs said last; None where nobody followed it.
    last_sign: LastSign | None = None
    #: The control request that a scheduler worked on as it failed or hung, such as ``update_weights_from_disk``; empty,
    #: and not in the JSON, where it worked on none, or that is not known.
    control: str = ""
    steps: LastSteps | None = None  # what a scheduler's record of its steps says; None where there is none
    #: The frames of the exception that it raised, innermost first. Not in the JSON: `doing` has the innermost, and its
    #: own record all.
    raised_through: list[str] = field(default_factory=list)
    #: Whether the fatal signal that ended it hit its main thread; None where that is not known. Not in the JSON.
    hit_in_main: bool | None = None


@dataclass
class Trigger:
    """What opened the incident: an event of process `pid`."""

    event: str
    time: str
    pid: int
    title: str


@dataclass
class ServerInfo:
    """The server that the incident happened to.

    On its host it is told by pid, start time (clock ticks since boot) and PID namespace (its inode's number).
    """

    pid: int
    sglang_version: str
    kit_version: str
    hostname: str
    start_ticks: int | None = None
    pid_namespace: int | None = None


@dataclass
class JournaledRequests:
    """What the request journals of the server's processes told."""

    #: The file with the requests, one JSON object a line, relative to the incident's folder; None without one.
    path: str | None = None
    finished: int = 0  # how many requests in it had finished within the last five minutes
    unfinished: int = 0  # how many were in flight
    lost: int = 0  # how many in flight had found no room in the journal any more
    torn: int = 0  # how many records were cut off in the middle, as the last one of a killed process may be
    left_out: int = 0  # how many are in the journal and not in the file
    reason: str | None = None  # why the file is missing or not whole; None otherwise


@dataclass
class HandlerInfo:
    """The crash handler that gathered an incident; pid and start time (clock ticks since boot) identify it."""

    pid: int
    start_ticks: int


#: Why there are no requests of a server that never had one.
NOT_SERVING = "the server had not started to serve"


@dataclass
class Requests:
    """The requests that were saved."""

    finished: int | None = None  # how many requests had finished within the last five minutes
    unfinished: int | None = None  # how many were in flight
    #: The file with all of them that the server saved (a pickle), absolute; None when there is none.
    path: str | None = None
    reason: str | None = "the server did not report its requests"  # why there is none
    #: Who counted: the server when it saved them (``pickle``), or the ``journal``; None where nobody did.
    source: Literal["pickle", "journal"] | None = None
    journal: JournaledRequests | None = None  # what the journals told; None where the server kept none


@dataclass
class Failure:
    """The process that failed first."""

    pid: int
    title: str


@dataclass
class Verdict:
    """What the evidence says."""

    kind: str  # the cause of the first failure, or ``unknown``
    first_failure: Failure | None  # the process that failed first
    level: Level  # how well it is supported
    text: str
    basis: list[str] = field(default_factory=list)  # the statements that it rests on


@dataclass
class Suspect:
    """A request that may have brought the failure about."""

    rid: str
    level: Level  # how well the suspicion is supported
    reasons: list[str]  # what speaks for it, a sentence each


@dataclass
class Collectives:
    """What PyTorch's flight recorders of the ranks reported of their collectives."""

    #: What is seen of each process group, what tells most first; see `analysis.collectives`. With ``pids``, those of
    #: the processes to be looked at, and ``waiting_pids``, those of the ones that wait for them.
    findings: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # of whom there is no dump, and why, a sentence each


@dataclass
class Occurrence:
    """One more time that a fault was seen on this host; see `incident.fingerprint`."""

    key: str  # names the fault
    count: int  # how many times it was seen, this one included
    first: str  # when it was seen for the first time
    #: The id of an earlier incident of the same fault, which is kept in full while this one is kept in short; None
    #: where this one is kept in full, too.
    repeats: str | None = None
    #: In how many earlier incidents of it a request like a suspect of this one was suspected, by the suspect's id.
    seen: dict[str, int] = field(default_factory=dict)


@dataclass
class Incident:
    """Everything the kit knows of one crash, hang or loss of the other server of a pair."""

    id: str
    kind: str
    trigger: Trigger
    server: ServerInfo
    processes: list[ProcessReport] = field(default_factory=list)
    requests: Requests = field(default_factory=Requests)
    peers: list[LostPeer] = field(default_factory=list)
    collectives: Collectives | None = None
    #: Where the ranks that must agree went different ways, or that they did not; see `analysis.divergence.Divergence`.
    #: None where no rank has another one to agree with, or none noted its steps.
    divergence: dict[str, Any] | None = None
    #: The requests that may have brought the failure about, most suspicious first.
    suspects: list[Suspect] = field(default_factory=list)
    suspects_left_out: int = 0  # how many more of the requests among which they were looked for are not listed
    #: What of ``environment.json`` a summary says first, see `handler.collectors.received`; None before it was
    #: gathered.
    environment: dict[str, Any] | None = None
    gpus: dict[str, Any] | None = None  # what `analysis.gpus.account` returns; None where the driver was not asked
    timeline: list[dict[str, Any]] = field(default_factory=list)
    verdict: Verdict | None = None
    handler: HandlerInfo | None = None
    fault: Occurrence | None = None
    cause: dict[str, Any] | None = None  # the judge's, see `view.document.cause_of`; None before it is finished
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    def process(self, pid: int) -> ProcessReport | None:
        """Return the report of process `pid`, None when it is not part of the server."""
        return next((process for process in self.processes if process.pid == pid), None)

    def note(self, seconds: float, event: str, /, **fields: Any) -> None:
        """Add an event to the timeline, at `seconds` since the epoch, with the JSON values that belong to it."""
        self.timeline.append({"time": iso_time(seconds), "event": event, **fields})

    def to_json(self) -> dict[str, Any]:
        """Return the incident as JSON values, ``schema_version`` first and the timeline in order of time."""
        # The stacks of the samples are in files of their own.
        document = asdict(replace(self, processes=[_in_short(process) for process in self.processes]))
        for entry, process in zip(document["processes"], self.processes, strict=True):
            del entry["samples"], entry["raised_through"], entry["hit_in_main"]
            if not process.control:
                del entry["control"]
            if entry["steps"] is not None:
                del entry["steps"]["rids"], entry["steps"]["checks"]
            entry["looks"] = [_look(sample) for sample in process.samples]
        document["timeline"].sort(key=lambda entry: entry["time"])
        return {"schema_version": document.pop("schema_version"), **document}


def _in_short(process: ProcessReport) -> ProcessReport:
    return replace(process, samples=[], steps=process.steps and replace(process.steps, rids={}, checks=frozenset()))


def _look(sample: Sample) -> dict[str, Any]:
    return {
        "time": iso_time(sample.time),
        "state": sample.state,
        "cpu_secs": sample.cpu_secs,
        "doing": list(sample.doing),
        "lock": sample.gil,
    }
