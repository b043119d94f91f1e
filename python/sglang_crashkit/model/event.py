"""One fact of an incident, as a source states it. Facts don't judge: what a log calls fatal is a `Line`, no verdict.

Every source (the parsers of text, the live side) makes these; `case.case_of` makes one `Case` of them. Fields that all
have are in `Event`; each kind has its own Struct.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang_crashkit.model.sample import Frame, Sample

#: Levels of a log line; ``""`` where the line has none, as what C++ code writes to stderr.
LineLevel = Literal["", "debug", "info", "warning", "error", "critical"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all facts have."""

    order: int = 0  # place in the evidence; of two facts of one source without a time, the smaller one was first
    at: float = 0.0  # when, in seconds since the epoch, UTC where the source says so; 0.0 where it is not known
    who: str = ""  # the process by its short name: ``TP3``, ``DP1 TP3``, ``router``, ``pid 4711``; empty if not known
    node: str = ""  # the host, pod, container or file that the fact comes from, as far as it tells several apart
    side: str = ""  # ``prefill`` or ``decode`` where the source says so
    source: str = ""  # where it stands: ``server.log:120``
    follows: bool = False  # the crash handler knows that it follows from another failure

    @property
    def place(self) -> tuple[float, int]:
        """Where it stands among others, by time and then by order; what has no time at all comes first."""
        return self.at, self.order

    @property
    def file(self) -> str:
        """The file that it stands in."""
        return self.source.partition(":")[0]


class Arguments(Event, frozen=True, kw_only=True):
    """The arguments that a server was started with, by their Python names (``tp_size``), and SGLang's release."""

    values: dict[str, Any] = {}
    release: str = ""


class Line(Event, frozen=True, kw_only=True):
    """A line of a log, or of stderr, without its carrier and prefix.

    Lines that differ only in numbers are one fact: `count` of them, first at `at`, last at `last_at`.
    """

    text: str
    level: LineLevel = ""
    count: int = 1
    last_at: float = 0.0


class Error(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One exception of a chain."""

    type: str  # with its module as printed: ``torch.OutOfMemoryError``
    text: str = ""
    frames: tuple[Frame, ...] = ()  # innermost first
    code: str = ""  # the source line of the innermost frame in SGLang, where a traceback has it


class Raised(Event, frozen=True, kw_only=True):
    """A traceback: the exception that arrived, with what it came from behind it."""

    chain: tuple[Error, ...]  # the one that arrived first, then its cause, and so on
    said: str = ""  # the line that introduces it: ``Scheduler hit an exception:``; empty without one
    thread: str = ""  # the thread where it is not the main one: ``Thread-5 (transfer_worker)``
    is_cut: bool = False  # its head is not there, and with it who raised it and where that was called from

    @property
    def error(self) -> Error:
        """The exception that arrived."""
        return self.chain[0]


class Stack(Event, frozen=True, kw_only=True):
    """What a process did at a moment."""

    sample: Sample
    fatal: str = ""  # of faulthandler: ``Segmentation fault``, where the stack is that of a process that died
    is_cut: bool = False  # its head is not there, and with it the signal's name


class Kernel(Event, frozen=True, kw_only=True):
    """A line of the kernel's log about memory, a GPU, a device or a process."""

    #: ``oom_kill``, ``xid``, ``gpu_memory``, ``amdgpu``, ``nvlink``, ``mce``, ``segfault``, ``trap``, ``hung_task``,
    #: ``disk``, ``net``
    kind: str
    text: str
    pid: int = 0
    name: str = ""  # of the process that it names
    number: int = 0  # Xid, signal or errno
    facts: dict[str, Any] = {}  # ``gpu``, ``anon_kb``, ``memcg``, ``limit_kb``, ``constraint`` …


class Exit(Event, frozen=True, kw_only=True):
    """A process ended, or was said to have."""

    code: int | None = None
    signal: str = ""  # ``SIGKILL``
    text: str = ""
    is_seen: bool = False  # the crash handler has it from the kernel, and nothing else explains it


class Stop(Event, frozen=True, kw_only=True):
    """The server was asked to end: SIGTERM or Ctrl-C, by systemd, Kubernetes, Docker or a person."""

    by: str = ""  # ``systemd``, ``kubernetes``, ``docker``, ``signal``
    text: str = ""
    is_end: bool = False  # it also ended in good order


class Stage(Event, frozen=True, kw_only=True):
    """A process came to a stage of its start, or the server was ready."""

    #: ``distributed``, ``weights``, ``kv_cache``, ``graphs``, ``compile``, ``warmup``, ``ready``
    name: str
    is_done: bool = False
    text: str = ""


class Progress(Event, frozen=True, kw_only=True):
    """A batch ran, or a request was answered. One event for each process and kind: so many, from `at` to `last_at`."""

    #: ``prefill``, ``decode``; ``answer``, ``refused`` (HTTP 4xx), ``failed`` (HTTP 5xx), ``health``; ``passed``: an
    #: answer that a router passed on; ``control``: what an operator or a trainer asked for, such as
    #: ``/pause_generation``; ``load``: what the server says of its queue.
    kind: str
    count: int = 1
    last_at: float = 0.0
    last_order: int = 0
    running: int = 0  # requests that ran, by the last one
    queued: int = 0
    transfers: int = 0  # KV transfers under way on the decode side; on the prefill side what waits for them, too
    transfers_since: float = 0.0  # since when that number has not fallen
    status: int = 0  # the last HTTP status
    text: str = ""  # the last line; the path of a control request


class Container(Event, frozen=True, kw_only=True):
    """What Kubernetes or Docker says of a container."""

    name: str = ""
    state: str = ""  # ``Running``, ``CrashLoopBackOff``
    reason: str = ""  # of its last end: ``OOMKilled``, ``Error``
    code: int | None = None
    restarts: int = 0
    notes: tuple[str, ...] = ()  # events such as ``Liveness probe failed: …``


class Gpu(Event, frozen=True, kw_only=True):
    """What ``nvidia-smi`` or ``rocm-smi`` says of one GPU."""

    index: int
    bus: str = ""  # its address: ``0000:9c:00``
    name: str = ""
    used_mb: float = 0.0
    total_mb: float = 0.0
    use: float = -1.0  # percent, -1 where it is not known
    watts: float = -1.0  # what it draws, and its limit; -1 where they are not known
    most_watts: float = -1.0
    faults: str = ""  # uncorrectable errors, ``ERR!``, ``Unknown Error`` …

    @property
    def is_waiting(self) -> bool:
        """Whether a kernel on it seems to wait: at full use it draws hardly more than an idle one."""
        # Of a GPU of a server's kind whose limit is not known, an idle one draws up to 130 W.
        limit = 0.3 * self.most_watts if self.most_watts > 0 else 160.0 if self.used_mb > 40_000 else 0.0
        return self.use >= 95.0 and 0.0 < self.watts <= limit


class Collective(Event, frozen=True, kw_only=True):
    """An operation of a rank in torch's flight recorder, or in NCCL's watchdog: the last one of a group."""

    group: str = ""
    number: int = 0
    operation: str = ""
    state: str = ""  # ``scheduled``, ``started``, ``completed``, ``timeout``
    sizes: str = ""
    rank: int = -1


class GpuKernel(Event, frozen=True, kw_only=True):
    """A kernel that a debugger saw on a GPU, or an exception of the GPU's."""

    name: str = ""
    exception: str = ""  # ``CUDA_EXCEPTION_14, Warp Illegal Address``
    device: int = -1
    text: str = ""


class Watched(Event, frozen=True, kw_only=True):
    """What the crash handler concludes, which saw how the processes lived and ended; see `incident.Verdict`.

    `who` failed first, or is the process that the others wait for; empty where no process is named.
    """

    #: ``exception``, ``exit_status``, ``signal``, ``oom_kill``, ``hang``, ``busy``, ``lost_peer``, ``peer_lost``,
    #: ``failed_transfer``, ``startup_timeout``, ``unknown`` …
    kind: str
    level: str = "unknown"
    text: str = ""
    pid: int = 0  # of `who`
    role: str = ""  # of `who`
    is_hang: bool = False  # a process made no progress, and none failed in another way before
    is_ended: bool = False  # SGLang's own watchdog ends it for that
    is_starting: bool = False  # the server had not got ready
    notes: tuple[str, ...] = ()  # at what step, and at which control request, it was


class Compared(Event, frozen=True, kw_only=True):
    """What the steps, or the flight recorders, of ranks show that must agree."""

    kind: str  # ``divergence``, ``mismatch`` or ``behind``
    level: str
    text: str
    late: tuple[int, ...] = ()  # pids of those that are behind
    waiting: tuple[int, ...] = ()  # pids of those that wait for them


class Suspect(Event, frozen=True, kw_only=True):
    """The request that is suspected most, where the handler knows the requests of the step."""

    rid: str
    level: str
    reasons: tuple[str, ...] = ()
    is_repeated: bool = False  # its like was suspected in an earlier incident of the same fault
    is_alone: bool = False  # nothing speaks for it but that no other request was there


class Dumped(Event, frozen=True, kw_only=True):
    """The requests that SGLang saved before it ended: those in flight, and the last that it had answered."""

    unfinished: int = 0
    finished: int = 0
    text: str = ""  # the longest of those in flight


class Unread(Event, frozen=True, kw_only=True):
    """A file, or a part of one, of which nothing was understood; quoted in short."""

    text: str
