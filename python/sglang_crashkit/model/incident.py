"""The data of one incident, which is also the form of ``incident.json``.

`model.SCHEMA_VERSION` grows when a reader of the older form would misread it. Times are UTC in ISO 8601 with
microseconds, durations are seconds. `Incident.of` reads a document that any version of the kit, or anyone, wrote.
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

#: At most this many requests of a step are named in ``incident.json``.
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
    """One expected piece of evidence of a process, captured or not."""

    kind: EvidenceKind
    status: EvidenceStatus  # whether it was captured, could not be, or was not tried
    path: str | None = None  # the file, relative to the incident's folder; None where ``incident.json`` has the data
    reason: str | None = None  # why it is missing, or why a better method failed; None otherwise
    seconds: float | None = None  # from the handling of the trigger until it was captured or failed; None if not tried
    source: str | None = None  # the tool that took a stack; see `sample.Source`. None without a stack


class Exit(msgspec.Struct):
    """How a process ended."""

    code: int | None  # exit status, None when a signal ended it or it is not known
    signal: str | None  # name of the signal, such as ``SIGKILL``
    cause: ExitCause  # why, as far as the evidence goes
    detail: str  # the evidence for the cause, one sentence
    time: str  # when the kit noticed


class LastSign(msgspec.Struct):
    """The last sign of life that a scheduler's heartbeat holds."""

    doing: str  # what the scheduler did then, in words
    batches: int  # how many batches it had begun
    requests: int  # how many requests the last batch holds
    mode: str  # forward mode of the last batch, such as ``decode``; empty where it is not known
    tokens: int  # how many tokens the last batch takes in; 0 where it is not an extend
    seconds_before: float  # seconds between this sign of life and the process's end, or the look at it
    collecting_secs: float = 0.0  # how long Python's garbage collection had run then, in seconds; 0 where it did not


class InStep(msgspec.Struct):
    """The step that a scheduler was in when it died or was examined."""

    number: int  # the step's number; `number`, `mode` and `phase` are as in `step.Step`
    mode: str  # forward mode of the batch; empty where it was not scheduled yet
    phase: str  # how far the step had come
    seconds: float  # how long it had run, in seconds
    size: int  # how many requests are in the step
    rids: list[str]  # their ids, the first `MAX_RIDS` of them
    began: str | None = None  # when it began; `seconds` later is when it was examined, which no other field holds


class LastSteps(msgspec.Struct):
    """What a scheduler did last, in short; ``ranks/<rank>.steps.jsonl`` has all of it."""

    last: list[Step]  # the last few of its steps, with the first few of their requests
    in_step: InStep | None  # the step that it was in; None between steps
    rids: dict[int, list[str]] = {}  # all requests of these steps, by number; not in the JSON
    checks: frozenset[str] = frozenset()  # ids of SGLang's own health checks among them; not in the JSON


class Look(msgspec.Struct):
    """One of several samples of a process, in short."""

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
    rank: dict[str, int]  # ranks by lower-case name (``tp``, ``pp``, ``dp``, ``ep``...); empty for a single rank
    exit: Exit | None = None  # None if the process was alive when the incident was written
    state: dict[str, Any] | None = None  # its state in ``/proc``; None where it was gone
    #: The innermost Python frames that show what it was doing, innermost first.
    doing: list[str] = []
    gpu: list[str] = []  # what its GPU was doing, in lines: kernels, and errors; empty where no GPU core shows it
    samples: list[Sample] = []  # each sample where several were taken; not in the JSON, which has `looks`
    evidence: list[Evidence] = []  # every expected piece
    last_sign: LastSign | None = None  # the last heartbeat of a scheduler that failed; None if unknown
    #: The control request that a scheduler handled as it failed or hung, such as ``update_weights_from_disk``. Empty,
    #: and left out of the JSON, where it handled none or this is not known.
    control: str = ""
    steps: LastSteps | None = None  # from a scheduler's record of its steps; None without a record
    raised_through: list[str] = []  # all frames of the exception that it raised, innermost first; not in the JSON
    hit_in_main: bool | None = None  # whether the fatal signal hit its main thread; None if not known; not in the JSON
    looks: list[Look] = []  # its samples in short; filled when the incident is shown or written

    @property
    def is_rank(self) -> bool:
        """Whether it is a scheduler."""
        return self.role == "scheduler"

    @property
    def in_step(self) -> InStep | None:
        """The step that the process was in; None between steps, or where that is not known."""
        return self.steps.in_step if self.steps is not None else None

    @property
    def state_letter(self) -> str:
        """The letter of the state in ``/proc`` when the process was last examined; empty where that is not known."""
        looked = [look.state for look in self.looks if look.state]
        return looked[-1] if looked else str((self.state or {}).get("State") or "")[:1]

    @property
    def stopped(self) -> str:
        """``stopped (T)`` where the process was stopped when it was last examined; empty otherwise."""
        return f"stopped ({self.state_letter})" if self.state_letter in ("T", "t") else ""

    def has(self, kind: EvidenceKind) -> bool:
        """Say whether a piece of evidence of this kind was captured."""
        return any(piece.kind == kind and piece.status == "captured" for piece in self.evidence)


class Trigger(msgspec.Struct):
    """The event that opened the incident, of process `pid`."""

    event: str
    time: str
    pid: int
    title: str


class ServerInfo(msgspec.Struct):
    """The server that the incident happened to.

    Pid, start time (clock ticks since boot) and PID namespace (inode number) identify it on its host.
    """

    pid: int
    sglang_version: str
    kit_version: str
    hostname: str
    start_ticks: int | None = None
    pid_namespace: int | None = None


class JournaledRequests(msgspec.Struct):
    """The content of the request journals of the server's processes."""

    path: str | None = None  # the file with the requests, one JSON object a line, as in `Evidence`; None without one
    finished: int = 0  # how many requests in it had finished within the last five minutes
    unfinished: int = 0  # how many were in flight
    lost: int = 0  # how many requests in flight did not fit into the journal
    torn: int = 0  # how many records were cut off in the middle, as the last record of a killed process may be
    left_out: int = 0  # how many requests are in the journal but not in the file
    reason: str | None = None  # why the file is missing or incomplete; None otherwise


class HandlerInfo(msgspec.Struct):
    """The crash handler that gathered an incident; pid and start time (clock ticks since boot) identify it."""

    pid: int
    start_ticks: int


#: Why an incident has no requests: the server never served, or the kit only observed and the server went on.
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
    source: Literal["pickle", "journal"] | None = None  # where the counts are from: the server's pickle, or the journal
    journal: JournaledRequests | None = None  # from the journals; None where the server kept no journal

    @property
    def counts(self) -> Counts | None:
        """How many requests there were, by the journal if complete, as it omits health checks; None if not known."""
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
    """A failure as the crash handler observed it."""

    pid: int
    seconds: float  # when, since the epoch, in the order of the monotonic clock
    kind: Literal["exit", "exception", "thread", "hang"]  # ``thread``: one of its threads ended by an exception
    message: str = ""  # the exception, or what the watchdog reported, in one line; empty for an exit
    fatal_signal: bool = False  # a signal of `exit_status.FATAL_SIGNALS` ended it
    caught: bool = False  # SGLang caught the exception, and the process serves on
    before_capture: bool = True  # it was observed before the server's own clean-up could begin
    with_parent: bool = False  # it ended because the process that had started it ended
    is_answer: bool = False  # the main process ended with a status that reports the crash of another process


class Verdict(msgspec.Struct):
    """The crash handler's conclusion from the evidence."""

    kind: str  # the cause of the first failure, or ``unknown``
    first_failure: Failure | None  # the process that failed first
    level: Level  # how well it is supported
    text: str
    basis: list[str] = []  # the statements that support it


class Suspect(msgspec.Struct):
    """A request that may have caused the failure."""

    rid: str
    level: Level  # how well the suspicion is supported
    reasons: list[str]  # why it is suspected, a sentence each


class CollectiveFinding(msgspec.Struct):
    """What the flight recorders show about one process group; see `analysis.collectives`."""

    group: str = ""
    kind: str = ""
    named: list[int] = []  # the ranks to examine
    processes: list[str] = []  # the processes of those ranks, in words
    statement: str = ""
    level: Level = "unknown"
    waiting: list[str] = []  # the processes that wait for the named ranks, in words
    pids: list[int] = []  # the pids of the processes to examine
    waiting_pids: list[int] = []  # the pids of the processes that wait for them


class Collectives(msgspec.Struct):
    """What PyTorch's flight recorders of the ranks show about their collectives."""

    findings: list[CollectiveFinding] = []  # for each process group, the most telling first
    missing: list[str] = []  # which rank's dump is missing, and why, a sentence each


class Occurrence(msgspec.Struct):
    """An occurrence of a fault on this host; see `incident.fingerprint`."""

    key: str  # identifies the fault
    count: int  # how many times the fault has occurred, including this time
    first: str  # when it occurred for the first time
    repeats: str | None = None  # id of an earlier incident of the fault that is kept in full; this one is kept in short
    seen: dict[str, int] = {}  # by a suspect's id, how many earlier incidents of the fault suspected a request like it


class Divergence(msgspec.Struct, frozen=True):
    """How the steps of ranks that must agree compare."""

    kind: DivergenceKind
    level: Level  # how well it is supported
    statement: str
    step: int | None = None  # the first step that differs, or that a rank does not have; None if absent
    ranks: str = ""  # the outliers, in words; all ranks where two equal sides differ and neither is known to be wrong
    pids: tuple[int, ...] = ()  # the pids of `ranks`
    against: str = ""  # the ranks that they differ from, in words; empty where the outliers are not known
    request: str | None = None  # the request in which the ranks differ; None where they do not differ in one request
    decision: str | None = None  # the name of the decision that differs; None if decisions agree
    seconds_before: float | None = None  # how long before the failure or hang that step began, in seconds; or None
    compared: int = 0  # how many steps of at least two ranks were compared

    @property
    def is_one(self) -> bool:
        """Whether the ranks diverged."""
        return self.kind in DIVERGED


class Place(msgspec.Struct, omit_defaults=True):
    """Where a server ran, by names from its environment such as ``pod_name`` and ``job_id``."""

    container: str | None = None
    kubernetes: dict[str, str] = {}
    slurm: dict[str, str] = {}


class Memory(msgspec.Struct, omit_defaults=True):
    """The memory of a cgroup or of an in-memory file system, in bytes; None where it is not known."""

    limit_bytes: int | None = None
    used_bytes: int | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None
    events: dict[str, int] = {}  # the kernel's count of each event, such as ``oom_kill``


class Surroundings(msgspec.Struct, omit_defaults=True):
    """The part of ``environment.json`` that an incident repeats, for a quick look."""

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
    """A process of the server that uses a GPU, and how certain that is."""

    pid: int
    title: str
    used: int | None = None  # memory, in bytes
    level: Level = "unknown"


class GpuDevice(msgspec.Struct):
    """One GPU, as the driver and the processes report it."""

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
    processes: list[GpuUser] = []  # the server's processes that used the GPU then


class Gpus(msgspec.Struct):
    """What the driver reported about the GPUs; see `analysis.gpus`."""

    devices: list[GpuDevice] = []
    xids: list[Xid] = []
    lines: list[str] = []  # devices and Xids in words


class Cause(msgspec.Struct):
    """The judge's verdict, in the form that an incident has."""

    kind: str = msgspec.field(name="class", default="unknown")  # see `verdict.Verdict`
    words: str = ""
    level: Level = "unknown"
    reasons: list[str] = []
    next_steps: list[str] = []
    known_issues: list[KnownIssue] = []
    restart_helps: Helps = "unknown"

    @classmethod
    def of(cls, answer: answers.Verdict) -> Cause:
        """Return a verdict of the judge in this form."""
        known, helps = answer.known_issues, answer.restart_helps
        return cls(answer.kind, answer.cause, answer.level, answer.because, answer.next, known, helps)


class Entry(dict[str, Any]):
    """An event of the timeline: a JSON object with ``time``, ``event``, and the values that belong to it."""

    @property
    def time(self) -> str:
        """The time, in the form of `iso_time`; empty where it is not known."""
        return str(self.get("time") or "")

    @property
    def seconds(self) -> float | None:
        """The time, in seconds since the epoch; None where it is not known."""
        return seconds_of(self.get("time"))

    @property
    def event(self) -> str:
        """What happened, in a word."""
        return str(self.get("event") or "")

    @property
    def pid(self) -> int | None:
        """The pid of the process that the event is about; None where it is about no process."""
        return pid if type(pid := self.get("pid")) is int else None

    @property
    def title(self) -> str:
        """The title of that process."""
        return str(self.get("title") or "")

    @property
    def message(self) -> str:
        """The message of the event."""
        return str(self.get("message") or "")

    @property
    def silent_secs(self) -> float | None:
        """For how long the process had given no sign of life, in seconds; None for events without it."""
        return secs if isinstance(secs := self.get("silent_secs"), int | float) else None


class Incident(msgspec.Struct):
    """Everything the kit knows about one crash, hang or loss of the other server of a pair."""

    id: str
    kind: str
    trigger: Trigger
    server: ServerInfo
    processes: list[ProcessReport] = []
    requests: Requests = msgspec.field(default_factory=Requests)
    peers: list[LostPeer] = []
    collectives: Collectives | None = None
    divergence: Divergence | None = None  # how the ranks that must agree compare; None without steps to compare
    suspects: list[Suspect] = []  # the requests that may have caused it, most suspicious first
    suspects_left_out: int = 0  # how many more requests were considered as suspects and are not listed
    environment: Surroundings | None = None  # None before it was gathered
    gpus: Gpus | None = None  # None where the driver was not asked
    timeline: list[Entry] = []  # in order of time once the incident is shown or written
    failures: list[FailureEvent] = []  # in the order in which they were observed
    remarks: list[str] = []  # sentences that are added to the verdict's text
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
        """The process that failed first; None where that is not known."""
        failure = self.verdict.first_failure if self.verdict is not None else None
        return self.process(failure.pid) if failure is not None else None

    @property
    def failed_at_start(self) -> bool:
        """Whether the server failed before it served."""
        return self.kind == "failed_start" or any(one.event in _FAILED_STARTS for one in self.timeline)

    @property
    def surroundings(self) -> Surroundings:
        """The server's environment, as far as it is known."""
        return self.environment or Surroundings()

    def note(self, seconds: float, event: str, /, **fields: Any) -> None:
        """Add an event to the timeline, at `seconds` since the epoch, with the JSON values that belong to it."""
        self.timeline.append(Entry(time=iso_time(seconds), event=event, **fields))

    def shown(self) -> Incident:
        """Return the incident as it is shown and written: samples in short, the timeline in order of time."""
        processes = []
        for one in self.processes:
            steps = one.steps and msgspec.structs.replace(one.steps, rids={}, checks=frozenset())
            looks = [Look(iso_time(at.time), at.state, at.cpu_secs, list(at.doing), at.gil) for at in one.samples]
            only_here: dict[str, Any] = {"samples": [], "raised_through": [], "hit_in_main": None}
            processes.append(msgspec.structs.replace(one, **only_here, steps=steps, looks=looks or one.looks))
        timeline = sorted(self.timeline, key=lambda entry: entry.time)
        return msgspec.structs.replace(self, processes=processes, timeline=timeline)

    def to_json(self) -> dict[str, Any]:
        """Return the incident as JSON values, ``schema_version`` first."""
        document = msgspec.to_builtins(self.shown())
        for process in document["processes"]:
            for name in NOT_IN_JSON if process["control"] else (*NOT_IN_JSON, "control"):
                del process[name]
            for name in NOT_IN_JSON_OF_STEPS if process["steps"] is not None else ():
                del process["steps"][name]
        return {"schema_version": document.pop("schema_version"), **document}

    @classmethod
    def of(cls, document: object) -> Incident:
        """Return the incident in a document of any version of the kit; see `lenient`."""
        return lenient.read(document, cls)


#: Events that show that a server had not served yet.
_FAILED_STARTS = ("launch_failed", "startup_timeout")
#: Fields of a process, and of its steps, that exist only while the incident is gathered and are not written.
NOT_IN_JSON, NOT_IN_JSON_OF_STEPS = ("samples", "raised_through", "hit_in_main"), ("rids", "checks")
