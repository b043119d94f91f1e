"""The data of one incident, and its form as JSON.

The JSON is what ``incident.json`` holds; `SCHEMA_VERSION` grows when a reader of the older form would misread it.
Times are UTC in ISO 8601 with microseconds, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal

from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.model.sample import Sample

SCHEMA_VERSION = 1
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
    "gpu_stack",
    "flight_recorder",
    "steps",
    "log",
    "environment",
    "gpu_facts",
    "gloo_flight_recorder",
]
EvidenceStatus = Literal["captured", "failed", "skipped"]
Level = Literal["established", "supported", "unknown"]
Cause = Literal["oom_kill", "signal", "exception", "exit_status", "parent_ended", "unknown"]


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as UTC in ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Evidence:
    """One expected piece of evidence of a process, there or not.

    Attributes:
        kind: what it is.
        status: whether it was captured, could not be, or was not tried.
        path: the file, relative to the incident's folder; None where the piece stands in ``incident.json`` itself.
        reason: why it is not there; of one that is there, why a better way to it failed, None where none did.
        seconds: what it took, from the trigger's handling; None when not tried.
        source: what took a stack; see `sample.Source`. None for other kinds, and where there is none.
    """

    kind: EvidenceKind
    status: EvidenceStatus
    path: str | None = None
    reason: str | None = None
    seconds: float | None = None
    source: str | None = None


@dataclass
class Exit:
    """How a process ended.

    Attributes:
        code: exit status, None when a signal ended it or it is not known.
        signal: name of the signal, such as ``SIGKILL``.
        cause: why, as far as the evidence goes.
        detail: the evidence for the cause, one sentence.
        time: when the kit noticed.
    """

    code: int | None
    signal: str | None
    cause: Cause
    detail: str
    time: str


@dataclass
class LastSign:
    """The last sign of life that a scheduler's heartbeat holds.

    Attributes:
        doing: what it was about then, in words.
        batches: how many batches it had begun.
        requests: how many requests the last one holds.
        mode: forward mode of the last batch, such as ``decode``; empty where it is not known.
        tokens: how many tokens the last batch takes in, 0 where it is no extend.
        seconds_before: how long before its end, or before it was looked at, that was, in seconds.
    """

    doing: str
    batches: int
    requests: int
    mode: str
    tokens: int
    seconds_before: float


@dataclass
class InStep:
    """The step that a scheduler was in when it died, or was looked at.

    Attributes:
        number: the step's, of `step.Step`, as are `mode` and `phase`.
        mode: forward mode of the batch; empty where it was not scheduled yet.
        phase: how far it had come.
        seconds: how long it had run, in seconds.
        size: how many requests are in it.
        rids: their ids, the first `MAX_RIDS` of them.
    """

    number: int
    mode: str
    phase: str
    seconds: float
    size: int
    rids: list[str]


@dataclass
class LastSteps:
    """What a scheduler did last, in short; all of it stands in ``ranks/<rank>.steps.jsonl``.

    Attributes:
        last: the last few of its steps, as `step.Step.to_json` has them, with the first few of their requests.
        in_step: the step that it was in; None where it was in none.
    """

    last: list[dict[str, Any]]
    in_step: InStep | None


@dataclass
class ProcessReport:
    """One process of the server.

    Attributes:
        pid: process id.
        title: process title, without arguments that may be secret.
        role: ``server``, ``scheduler``, ``detokenizer``, ``helper``...
        rank: ranks by lower-case name (``tp``, ``pp``, ``dp``, ``ep``...), empty where there is one rank only.
        exit: None while it lived when the incident was written.
        state: what ``/proc`` said of it, None where it was gone.
        doing: the innermost Python frames that tell what it was doing, innermost first.
        gpu: what its GPU was doing, in lines: which kernels, and what failed; empty where no core tells of it.
        samples: where several were taken, each, the first one too; ``looks`` in the JSON.
        evidence: every expected piece.
        last_sign: what the heartbeat of a scheduler that died or hangs said last; None where nobody followed it.
        steps: what a scheduler's record of its steps says; None where there is none.
    """

    pid: int
    title: str
    role: str
    rank: dict[str, int]
    exit: Exit | None = None
    state: dict[str, Any] | None = None
    doing: list[str] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    last_sign: LastSign | None = None
    steps: LastSteps | None = None


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
    """What the request journals of the server's processes told.

    Attributes:
        path: the file with the requests, one JSON object a line, relative to the incident's folder; None without one.
        finished: how many requests in it had finished within the last five minutes.
        unfinished: how many were in flight.
        lost: how many in flight had found no room in the journal any more.
        torn: how many records were cut off in the middle, as the last one of a killed process may be.
        left_out: how many are in the journal and not in the file.
        reason: why the file is missing or not whole; None otherwise.
    """

    path: str | None = None
    finished: int = 0
    unfinished: int = 0
    lost: int = 0
    torn: int = 0
    left_out: int = 0
    reason: str | None = None


@dataclass
class HandlerInfo:
    """The crash handler that gathered an incident; pid and start time (clock ticks since boot) identify it."""

    pid: int
    start_ticks: int


@dataclass
class Requests:
    """The requests that were saved.

    Attributes:
        finished: how many requests had finished within the last five minutes.
        unfinished: how many were in flight.
        path: the file with all of them that the server saved (a pickle), absolute; None when there is none.
        reason: why there is none.
        source: who counted: the server when it saved them (``pickle``), or the ``journal``; None where nobody did.
        journal: what the journals told; None where the server kept none.
    """

    finished: int | None = None
    unfinished: int | None = None
    path: str | None = None
    reason: str | None = "the server did not report its requests"
    source: Literal["pickle", "journal"] | None = None
    journal: JournaledRequests | None = None


@dataclass
class Failure:
    """The process that failed first."""

    pid: int
    title: str


@dataclass
class Verdict:
    """What the evidence says.

    Attributes:
        kind: the cause of the first failure, or ``unknown``.
        first_failure: the process that failed first.
        level: how well it is supported.
        text: the verdict in words.
        basis: the statements that it rests on.
    """

    kind: str
    first_failure: Failure | None
    level: Level
    text: str
    basis: list[str] = field(default_factory=list)


@dataclass
class Suspect:
    """A request that may have brought the failure about.

    Attributes:
        rid: its id.
        level: how well the suspicion is supported.
        reasons: what speaks for it, a sentence each.
    """

    rid: str
    level: Level
    reasons: list[str]


@dataclass
class Collectives:
    """What PyTorch's flight recorders of the ranks told of their collectives.

    Attributes:
        findings: what is seen of each process group, what tells most first; see `analysis.collectives`. With ``pids``,
            those of the processes to be looked at, and ``waiting_pids``, those of the ones that wait for them.
        missing: of whom there is no dump, and why, a sentence each.
    """

    findings: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass
class Occurrence:
    """One more time that a fault was seen on this host; see `incident.fingerprint`.

    Attributes:
        key: names the fault.
        count: the how-manieth time it is, from 1.
        first: when it was seen for the first time.
        repeats: the id of an earlier incident of the same fault, which is kept in full while this one is kept in short;
            None where this one is kept in full, too.
        seen: in how many earlier incidents of it a request like a suspect of this one was suspected, by the suspect's
            id.
    """

    key: str
    count: int
    first: str
    repeats: str | None = None
    seen: dict[str, int] = field(default_factory=dict)


@dataclass
class Incident:
    """Everything the kit knows of one crash, hang or loss of the other server of a pair.

    Attributes:
        divergence: where the ranks that must agree went different ways, or that they did not; see
            `analysis.divergence.Divergence`. None where no rank has another one to agree with, or none noted its steps.
        suspects: the requests that may have brought the failure about, most suspicious first.
        environment: what of ``environment.json`` a summary says first, see `handler.collectors.environment`; None
            before it was gathered.
        gpus: what `analysis.gpus.account` returns; None where the driver was not asked.
        cause: what `analysis.causes.explain` returns; None before it is finished.
    """

    id: str
    kind: str
    trigger: Trigger
    server: ServerInfo
    processes: list[ProcessReport] = field(default_factory=list)
    requests: Requests = field(default_factory=Requests)
    peers: list[LostPeer] = field(default_factory=list)
    collectives: Collectives | None = None
    divergence: dict[str, Any] | None = None
    suspects: list[Suspect] = field(default_factory=list)
    environment: dict[str, Any] | None = None
    gpus: dict[str, Any] | None = None
    timeline: list[dict[str, Any]] = field(default_factory=list)
    verdict: Verdict | None = None
    handler: HandlerInfo | None = None
    fault: Occurrence | None = None
    cause: dict[str, Any] | None = None
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    def process(self, pid: int) -> ProcessReport | None:
        """Return the report of process `pid`, None when it is not part of the server."""
        return next((process for process in self.processes if process.pid == pid), None)

    def note(self, seconds: float, event: str, /, **fields: Any) -> None:
        """Add an event to the timeline.

        Args:
            seconds: when it happened, since the epoch.
            event: what happened.
            fields: what belongs to it, JSON values.
        """
        self.timeline.append({"time": iso_time(seconds), "event": event, **fields})

    def to_json(self) -> dict[str, Any]:
        """Return the incident as JSON values, ``schema_version`` first and the timeline in order of time."""
        # The stacks of the samples are in files of their own.
        document = asdict(replace(self, processes=[replace(process, samples=[]) for process in self.processes]))
        for entry, process in zip(document["processes"], self.processes, strict=True):
            del entry["samples"]
            entry["looks"] = [_look(sample) for sample in process.samples]
        document["timeline"].sort(key=lambda entry: entry["time"])
        return {"schema_version": document.pop("schema_version"), **document}


def _look(sample: Sample) -> dict[str, Any]:
    return {
        "time": iso_time(sample.time),
        "state": sample.state,
        "cpu_secs": sample.cpu_secs,
        "doing": list(sample.doing),
        "lock": sample.gil,
    }


def missing(processes: Iterable[ProcessReport]) -> list[tuple[ProcessReport, Evidence]]:
    """Return the pieces of evidence that failed."""
    return [(p, piece) for p in processes for piece in p.evidence if piece.status == "failed"]
