"""The data of one incident, which is the form of ``incident.json``, too.

`model.SCHEMA_VERSION` grows when a reader of the older form would misread it. Times are UTC in ISO 8601 with
microseconds, durations are seconds. `read` takes the document of any kit, and of anybody.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from sglang_crashkit.model import SCHEMA_VERSION, lenient
from sglang_crashkit.model import verdict as answers
from sglang_crashkit.model.lenient import iso_time as iso_time
from sglang_crashkit.model.lenient import seconds_of
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.step import DIVERGED, DivergenceKind, Step
from sglang_crashkit.model.verdict import Helps, KnownIssue, Level

#: So many requests of a step are named in ``incident.json``.
MAX_RIDS = 64

EvidenceKind = Literal[
    "exit",
    "proc_state",
    "stack",
    "native_stack",
    "fault_stack",
    "exception",
    "thread_exception",
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
#: The most certain one first.
LEVELS: tuple[Level, ...] = get_args(Level)
ExitCause = Literal["oom_kill", "signal", "exception", "exit_status", "parent_ended", "unknown"]


class Evidence(msgspec.Struct):
    """One expected piece of evidence of a process, there or not."""

    kind: EvidenceKind
    status: EvidenceStatus  # whether it was captured, could not be, or was not tried
    path: str | None = None  # the file, relative to the incident's folder; None where it stands in ``incident.json``
    reason: str | None = None  # why it is not there, or why a better way to it failed; None otherwise
    seconds: float | None = None  # what it took, from the trigger's handling; None when not tried
    source: str | None = None  # what took a stack; see `sample.Source`. None for other kinds, and without a stack


class Exit(msgspec.Struct):
    """How a process ended."""

    code: int | None  # exit status, None when a signal ended it or it is not known
    signal: str | None  # name of the signal, such as ``SIGKILL``
    cause: ExitCause  # why, as far as the evidence goes
    detail: str  # the evidence for the cause, one sentence
    time: str  # when the kit noticed


class LastSign(msgspec.Struct):
    """The last sign of life that a scheduler's heartbeat holds."""

    doing: str  # what it was about then, in words
    batches: int  # how many batches it had begun
    requests: int  # how many requests the last one holds
    mode: str  # forward mode of the last batch, such as ``decode``; empty where it is not known
    tokens: int  # how many tokens the last batch takes in, 0 where it is no extend
    seconds_before: float  # how long before its end, or before it was looked at, that was, in seconds
    collecting_secs: float = 0.0  # for how long Python had collected garbage then, in seconds; 0 where it did not


class InStep(msgspec.Struct):
    """The step that a scheduler was in when it died, or was looked at."""

    number: int  # the step's, of `step.Step`, as are `mode` and `phase`
    mode: str  # forward mode of the batch; empty where it was not scheduled yet
    phase: str  # how far it had come
    seconds: float  # how long it had run, in seconds
    size: int  # how many requests are in it
    rids: list[str]  # their ids, the first `MAX_RIDS` of them
    began: str | None = None  # when it began; `seconds` are up to when it was looked at, which no other time says


class LastSteps(msgspec.Struct):
    """What a scheduler did last, in short; all of it stands in ``ranks/<rank>.steps.jsonl``."""

    last: list[Step]  # the last few of its steps, with the first few of their requests
    in_step: InStep | None  # the step that it was in; None where it was in none
    rids: dict[int, list[str]] = {}  # all requests of these steps, by number; not in the JSON
    checks: frozenset[str] = frozenset()  # ids of SGLang's own health checks among them; not in the JSON


class Look(msgspec.Struct):
    """What a process did at one of several moments, in short."""

    time: str
    state: str = ""  # as `Sample.state`
    cpu_secs: float = 0.0  # as `Sample.cpu_secs`
    doing: list[str] = []  # as `ProcessReport.doing`
    lock: str = ""  # as `Sample.gil`


class ProcessReport(msgspec.Struct):
    """One process of the server."""

    pid: int
    title: str  # process title, without arguments that may be secret
    role: str  # ``server``, ``scheduler``, ``detokenizer``, ``helper``...
    rank: dict[str, int]  # ranks by lower-case name (``tp``, ``pp``, ``dp``, ``ep``...), empty where there is one only
    exit: Exit | None = None  # None while it lived when the incident was written
    state: dict[str, Any] | None = None  # what ``/proc`` said of it, None where it was gone
    #: The innermost Python frames that tell what it was doing, innermost first.
    doing: list[str] = []
    gpu: list[str] = []  # what its GPU was doing, in lines: kernels, and what failed; empty where no core tells of it
    samples: list[Sample] = []  # each sample where several were taken; not in the JSON, which has `looks`
    evidence: list[Evidence] = []  # every expected piece
    last_sign: LastSign | None = None  # what the heartbeat of a scheduler that failed said last; None if unknown
    #: The control request that a scheduler worked on as it failed or hung, such as ``update_weights_from_disk``; empty,
    #: and not in the JSON, where it worked on none, or that is not known.
    control: str = ""
    steps: LastSteps | None = None  # what a scheduler's record of its steps says; None if absent
    raised_through: list[str] = []  # all frames of the exception that it raised, innermost first; not in the JSON
    hit_in_main: bool | None = None  # whether the fatal signal hit its main thread; None if not known; not in the JSON
    looks: list[Look] = []  # its samples in short, of an incident that is shown

    @property
    def is_rank(self) -> bool:
        """Whether it is a scheduler."""
        return self.role == "scheduler"

    @property
    def in_step(self) -> InStep | None:
        """The step that it was in; None where it was in none, or none is known."""
        return self.steps.in_step if self.steps is not None else None

    @property
    def state_letter(self) -> str:
        """The letter of its state in ``/proc`` when it was last looked at; empty where that is not known."""
        looked = [look.state for look in self.looks if look.state]
        return looked[-1] if looked else str((self.state or {}).get("State") or "")[:1]

    @property
    def stopped(self) -> str:
        """``stopped (T)`` where it was stopped when it was last looked at; empty otherwise."""
        return f"stopped ({self.state_letter})" if self.state_letter in ("T", "t") else ""

    def has(self, kind: EvidenceKind) -> bool:
        """Say whether a piece of evidence of this kind was captured."""
        return any(piece.kind == kind and piece.status == "captured" for piece in self.evidence)


class Trigger(msgspec.Struct):
    """What opened the incident: an event of process `pid`."""

    event: str
    time: str
    pid: int
    title: str


class ServerInfo(msgspec.Struct):
    """The server that the incident happened to.

    On its host it is told by pid, start time (clock ticks since boot) and PID namespace (its inode's number).
    """

    pid: int
    sglang_version: str
    kit_version: str
    hostname: str
    start_ticks: int | None = None
    pid_namespace: int | None = None


class JournaledRequests(msgspec.Struct):
    """What the request journals of the server's processes told."""

    path: str | None = None  # the file with the requests, one JSON object a line, as in `Evidence`; None without one
    finished: int = 0  # how many requests in it had finished within the last five minutes
    unfinished: int = 0  # how many were in flight
    lost: int = 0  # how many in flight had found no room in the journal any more
    torn: int = 0  # how many records were cut off in the middle, as the last one of a killed process may be
    left_out: int = 0  # how many are in the journal and not in the file
    reason: str | None = None  # why the file is missing or not whole; None otherwise


class HandlerInfo(msgspec.Struct):
    """The crash handler that gathered an incident; pid and start time (clock ticks since boot) identify it."""

    pid: int
    start_ticks: int


#: Why there are no requests of a server that never had one, and of an incident that was only observed.
NOT_SERVING, SERVER_WENT_ON = "the server had not started to serve", "the server went on"


class Counts(msgspec.Struct, frozen=True):
    """How many requests an incident has."""

    finished: int  # those that were answered within the last five minutes
    unfinished: int  # those in flight


class Requests(msgspec.Struct):
    """The requests that were saved."""

    finished: int | None = None  # how many requests had finished within the last five minutes
    unfinished: int | None = None  # how many were in flight
    path: str | None = None  # the file with all of them that the server saved (a pickle), absolute; None if absent
    reason: str | None = "the server did not report its requests"  # why it is missing
    source: Literal["pickle", "journal"] | None = None  # who counted: the server as it saved them, or the journal
    journal: JournaledRequests | None = None  # what the journals told; None where the server kept none

    @property
    def counts(self) -> Counts | None:
        """How many there were, by the journal where it is whole, as it leaves health checks out; None if not known."""
        if self.finished is None or self.unfinished is None:
            return None
        journal, saved = self.journal, Counts(self.finished, self.unfinished)
        if self.source != "pickle" or journal is None or not journal.path or journal.left_out or journal.lost:
            return saved
        return Counts(journal.finished, journal.unfinished) if journal.unfinished <= saved.unfinished else saved


class Failure(msgspec.Struct):
    """The process that failed first."""

    pid: int
    title: str


class FailureEvent(msgspec.Struct, frozen=True):
    """A failure as it was seen."""

    pid: int
    seconds: float  # when, since the epoch, in the order of the monotonic clock
    kind: Literal["exit", "exception", "thread", "hang"]  # ``thread``: one of its threads ended by an exception
    message: str = ""  # the exception, or what the watchdog saw, in one line; empty for an exit
    fatal_signal: bool = False  # the exit was by a signal of `exit_status.FATAL_SIGNALS`
    caught: bool = False  # SGLang caught the exception, and the process serves on
    before_capture: bool = True  # it was seen before the server's own clean-up could begin
    with_parent: bool = False  # the exit came of the end of the process that had started it
    is_answer: bool = False  # the main process ended with a status that reports the crash of another process


class Verdict(msgspec.Struct):
    """What the evidence says."""

    kind: str  # the cause of the first failure, or ``unknown``
    first_failure: Failure | None  # the process that failed first
    level: Level  # how well it is supported
    text: str
    basis: list[str] = []  # the statements that it rests on


class Suspect(msgspec.Struct):
    """A request that may have brought the failure about."""

    rid: str
    level: Level  # how well the suspicion is supported
    reasons: list[str]  # what speaks for it, a sentence each


class CollectiveFinding(msgspec.Struct):
    """What is seen of one process group; see `analysis.collectives.CollectiveFinding`."""

    group: str = ""
    kind: str = ""
    named: list[int] = []  # the ranks to be looked at
    processes: list[str] = []  # the processes of those ranks, in words
    statement: str = ""
    level: Level = "unknown"
    waiting: list[str] = []  # the processes that wait for them, in words
    pids: list[int] = []  # those of the processes to be looked at
    waiting_pids: list[int] = []  # those of the processes that wait for them


class Collectives(msgspec.Struct):
    """What PyTorch's flight recorders of the ranks reported of their collectives."""

    findings: list[CollectiveFinding] = []  # what is seen of each process group, what tells most first
    missing: list[str] = []  # whose dump is missing, and why, a sentence each


class Occurrence(msgspec.Struct):
    """One more time that a fault was seen on this host; see `incident.fingerprint`."""

    key: str  # names the fault
    count: int  # how many times it was seen, this one included
    first: str  # when it was seen for the first time
    repeats: str | None = None  # id of an earlier incident of it that is kept in full, while this one is kept in short
    seen: dict[str, int] = {}  # in how many earlier ones a request like a suspect was suspected, by the suspect's id


class Divergence(msgspec.Struct, frozen=True):
    """What the steps of the ranks that must agree say together."""

    kind: DivergenceKind
    level: Level  # how well it is supported
    statement: str
    step: int | None = None  # the first that differs, or that a rank has not; None if absent
    ranks: str = ""  # the outliers, in words; of as many on each side, all of them where nothing tells who it is
    pids: tuple[int, ...] = ()  # of those
    against: str = ""  # from whom, in words; empty where nothing tells who the outliers are
    request: str | None = None  # the request that one has and another has not, or otherwise; None where it is not one
    decision: str | None = None  # the name of the decision that differs, None where none does
    seconds_before: float | None = None  # how long before the moment that step began, in seconds; None if not known
    compared: int = 0  # how many steps of at least two ranks were compared

    @property
    def is_one(self) -> bool:
        """Whether the ranks did diverge."""
        return self.kind in DIVERGED


class Place(msgspec.Struct, omit_defaults=True):
    """Where a server ran; of each what its environment names, such as ``pod_name`` and ``job_id``."""

    container: str | None = None
    kubernetes: dict[str, str] = {}
    slurm: dict[str, str] = {}


class Memory(msgspec.Struct, omit_defaults=True):
    """The memory of a cgroup, in bytes, or of a file system in memory; None where that is not known."""

    limit_bytes: int | None = None
    used_bytes: int | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None
    events: dict[str, int] = {}  # how often the kernel did what, such as ``oom_kill``


class Surroundings(msgspec.Struct, omit_defaults=True):
    """What of ``environment.json`` an incident repeats, for a quick look."""

    path: str = ""
    model: str = ""
    parallel: dict[str, int] = {}  # SGLang's sizes, such as ``tp``
    versions: dict[str, str] = {}
    started: str = ""
    uptime_secs: float | None = None
    ready_since: str = ""
    place: Place = msgspec.field(default_factory=Place)
    memory: Memory = msgspec.field(default_factory=Memory)
    shared_memory: Memory = msgspec.field(default_factory=Memory)


class GpuUser(msgspec.Struct):
    """A process of the server that has a GPU, and how well that is known."""

    pid: int
    title: str
    used: int | None = None  # memory, in bytes
    level: Level = "unknown"


class GpuDevice(msgspec.Struct):
    """One GPU, as the driver and the processes have it."""

    index: int
    name: str | None = None
    bus_id: str | None = None
    memory: dict[str, int] | None = None  # ``used`` and ``total``, in bytes
    processes: list[GpuUser] = []
    others: list[dict[str, int | None]] = []  # processes of other programs, by ``pid`` and ``used``
    throttle: list[str] = []  # what holds its clocks down
    errors: dict[str, int] = {}
    new_errors: dict[str, int] | None = None  # since the server started; None where that is not known


class Xid(msgspec.Struct, omit_defaults=True):
    """An error that the driver reported."""

    xid: int
    bus_id: str
    time: float  # in seconds since the epoch
    text: str = ""  # the kernel's line
    source: str = ""
    processes: list[GpuUser] = []  # those of the server that had the GPU then


class Gpus(msgspec.Struct):
    """What the driver said of the GPUs; see `analysis.gpus`."""

    devices: list[GpuDevice] = []
    xids: list[Xid] = []
    lines: list[str] = []  # both in words


class Cause(msgspec.Struct):
    """What the judge says, as an incident has it."""

    kind: str = msgspec.field(name="class", default="unknown")  # see `verdict.Verdict`
    words: str = ""
    level: Level = "unknown"
    reasons: list[str] = []
    next_steps: list[str] = []
    known_issues: list[KnownIssue] = []
    restart_helps: Helps = "unknown"

    @classmethod
    def of(cls, answer: answers.Verdict) -> Cause:
        """Return a verdict of the judge's as an incident has it."""
        known, helps = answer.known_issues, answer.restart_helps
        return cls(answer.kind, answer.cause, answer.level, answer.because, answer.next, known, helps)


class Entry(dict[str, Any]):
    """An event of the timeline: a JSON object with ``time``, ``event``, and the values that belong to it."""

    @property
    def time(self) -> str:
        """When, as `iso_time` has it; empty where that is not known."""
        return str(self.get("time") or "")

    @property
    def seconds(self) -> float | None:
        """When, in seconds since the epoch; None where that is not known."""
        return seconds_of(self.get("time"))

    @property
    def event(self) -> str:
        """What happened, in a word."""
        return str(self.get("event") or "")

    @property
    def pid(self) -> int | None:
        """To which process; None where it did to none."""
        return pid if type(pid := self.get("pid")) is int else None

    @property
    def title(self) -> str:
        """What that process is called."""
        return str(self.get("title") or "")

    @property
    def message(self) -> str:
        """What it said."""
        return str(self.get("message") or "")

    @property
    def silent_secs(self) -> float | None:
        """For how long nothing was heard of it, in seconds; None of another event."""
        return secs if isinstance(secs := self.get("silent_secs"), int | float) else None


class Incident(msgspec.Struct):
    """Everything the kit knows of one crash, hang or loss of the other server of a pair."""

    id: str
    kind: str
    trigger: Trigger
    server: ServerInfo
    processes: list[ProcessReport] = []
    requests: Requests = msgspec.field(default_factory=Requests)
    peers: list[LostPeer] = []
    collectives: Collectives | None = None
    divergence: Divergence | None = None  # how the ranks that must agree compare; None without such steps
    suspects: list[Suspect] = []  # the requests that may have brought it about, most suspicious first
    suspects_left_out: int = 0  # how many more of the requests among which they were looked for are not listed
    environment: Surroundings | None = None  # None before it was gathered
    gpus: Gpus | None = None  # None where the driver was not asked
    timeline: list[Entry] = []  # in order of time, of an incident that is shown
    failures: list[FailureEvent] = []  # as they were seen
    remarks: list[str] = []  # what the verdict says beside them, a sentence each
    verdict: Verdict | None = None
    handler: HandlerInfo | None = None
    fault: Occurrence | None = None
    cause: Cause | None = None  # None before it is finished
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    def process(self, pid: int) -> ProcessReport | None:
        """Return the report of process `pid`, None when it is not part of the server."""
        return next((process for process in self.processes if process.pid == pid), None)

    @property
    def first_failure(self) -> ProcessReport | None:
        """The process that failed first; None where none is known to have."""
        failure = self.verdict.first_failure if self.verdict is not None else None
        return self.process(failure.pid) if failure is not None else None

    @property
    def failed_at_start(self) -> bool:
        """Whether its server had not served yet."""
        return self.kind == "failed_start" or any(one.event in _FAILED_STARTS for one in self.timeline)

    @property
    def surroundings(self) -> Surroundings:
        """What surrounded the server, as far as it is known."""
        return self.environment or Surroundings()

    def note(self, seconds: float, event: str, /, **fields: Any) -> None:
        """Add an event to the timeline, at `seconds` since the epoch, with the JSON values that belong to it."""
        self.timeline.append(Entry(time=iso_time(seconds), event=event, **fields))

    def shown(self) -> Incident:
        """Return it as it is shown and written: the samples in short, the timeline in order of time."""
        processes = []
        for one in self.processes:
            steps = one.steps and msgspec.structs.replace(one.steps, rids={}, checks=frozenset())
            looks = [Look(iso_time(at.time), at.state, at.cpu_secs, list(at.doing), at.gil) for at in one.samples]
            only_here: dict[str, Any] = {"samples": [], "raised_through": [], "hit_in_main": None}
            processes.append(msgspec.structs.replace(one, **only_here, steps=steps, looks=looks or one.looks))
        timeline = sorted(self.timeline, key=lambda entry: entry.time)
        return msgspec.structs.replace(self, processes=processes, timeline=timeline)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, ``schema_version`` first."""
        document = msgspec.to_builtins(self.shown())
        for process in document["processes"]:
            for name in NOT_IN_JSON if process["control"] else (*NOT_IN_JSON, "control"):
                del process[name]
            for name in NOT_IN_JSON_OF_STEPS if process["steps"] is not None else ():
                del process["steps"][name]
        return {"schema_version": document.pop("schema_version"), **document}

    @classmethod
    def of(cls, document: object) -> Incident:
        """Return the incident that a document tells of, whatever kit wrote it; see `lenient`."""
        return lenient.read(document, cls)


#: Events that show that a server had not served yet.
_FAILED_STARTS = ("launch_failed", "startup_timeout")
#: What of a process, and of its steps, is known while the incident is gathered, and not written.
NOT_IN_JSON, NOT_IN_JSON_OF_STEPS = ("samples", "raised_through", "hit_in_main"), ("rids", "checks")
