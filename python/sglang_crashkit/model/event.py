"""One fact of an incident, as a source states it. Facts don't judge: what a log calls fatal is a `Line`, not a verdict.

Every source (the text parsers, the crash handler) makes events; `case.case_of` makes one `Case` of them. `Event` has
the common fields; each kind of event has its own Struct.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang_crashkit.model.sample import Frame, Sample

#: Levels of a log line; ``""`` where the line has no level, such as a line that C++ code writes to stderr.
LineLevel = Literal["", "debug", "info", "warning", "error", "critical"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that all events have."""

    order: int = 0  # position in the evidence; it orders events of one source that have no time
    at: float = 0.0  # when, in seconds since the epoch, UTC where the source gives a zone; 0.0 where it is not known
    who: str = ""  # the process by its short name: ``TP3``, ``DP1 TP3``, ``router``, ``pid 4711``; empty if not known
    node: str = ""  # the host, pod, container or file that the event is from, where that distinguishes several
    side: str = ""  # ``prefill`` or ``decode`` where the source says which
    source: str = ""  # file and line: ``server.log:120``
    follows: bool = False  # the crash handler knows that it is a consequence of another failure

    @property
    def place(self) -> tuple[float, int]:
        """The key that sorts events, by time and then by order; events without a time come first."""
        return self.at, self.order

    @property
    def file(self) -> str:
        """The file that the event is from."""
        return self.source.partition(":")[0]


class Arguments(Event, frozen=True, kw_only=True):
    """The arguments that a server was started with, by their Python names (``tp_size``), and SGLang's release."""

    values: dict[str, Any] = {}
    release: str = ""


class Line(Event, frozen=True, kw_only=True):
    """A line of a log, or of stderr, without its carrier and prefix.

    Lines that differ only in numbers are one event: `count` of them, first at `at`, last at `last_at`.
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
    """A traceback: the exception that was printed last, and the exceptions that led to it."""

    chain: tuple[Error, ...]  # the final exception, then its cause, the cause of that, and so on
    said: str = ""  # the log line that introduces it: ``Scheduler hit an exception:``; empty without such a line
    thread: str = ""  # the thread that raised it: ``Thread-5 (transfer_worker)``; empty for the main thread
    is_cut: bool = False  # the head of the traceback is missing, so the process and the outer frames are not known

    @property
    def error(self) -> Error:
        """The final exception of the chain."""
        return self.chain[0]


class Stack(Event, frozen=True, kw_only=True):
    """The stacks of a process at one time."""

    sample: Sample
    fatal: str = ""  # faulthandler's reason, such as ``Segmentation fault``, if the process died with this stack
    is_cut: bool = False  # the head of faulthandler's output is missing, so the signal's name is not known


class Kernel(Event, frozen=True, kw_only=True):
    """A line of the kernel's log about memory, a GPU, a device or a process."""

    #: ``oom_kill``, ``xid``, ``gpu_memory``, ``amdgpu``, ``nvlink``, ``mce``, ``segfault``, ``trap``, ``hung_task``,
    #: ``disk``, ``net``
    kind: str
    text: str
    pid: int = 0
    name: str = ""  # the name of the process in the line
    number: int = 0  # Xid, signal or errno
    facts: dict[str, Any] = {}  # ``gpu``, ``anon_kb``, ``memcg``, ``limit_kb``, ``constraint`` …


class Exit(Event, frozen=True, kw_only=True):
    """A process ended, by observation or by a report in the evidence."""

    code: int | None = None
    signal: str = ""  # ``SIGKILL``
    text: str = ""
    is_seen: bool = False  # the crash handler got the status from the kernel, and nothing else explains the exit


class Stop(Event, frozen=True, kw_only=True):
    """The server was asked to end: SIGTERM or Ctrl-C, by systemd, Kubernetes, Docker or a person."""

    by: str = ""  # ``systemd``, ``kubernetes``, ``docker``, ``signal``
    text: str = ""
    is_end: bool = False  # the server then shut down in good order


class Stage(Event, frozen=True, kw_only=True):
    """A process reached a stage of its start, or the server was ready."""

    #: ``distributed``, ``weights``, ``kv_cache``, ``graphs``, ``compile``, ``warmup``, ``ready``
    name: str
    is_done: bool = False
    text: str = ""


class Progress(Event, frozen=True, kw_only=True):
    """Batches ran or requests were answered: one event per process and kind, `count` of them from `at` to `last_at`."""

    #: ``prefill``, ``decode``; ``answer``, ``refused`` (HTTP 4xx), ``failed`` (HTTP 5xx), ``health``; ``passed``: an
    #: answer that a router passed on; ``control``: a request of an operator or a trainer, such as
    #: ``/pause_generation``; ``load``: the server's report of its queue.
    kind: str
    count: int = 1
    last_at: float = 0.0
    last_order: int = 0
    running: int = 0  # running requests, by the last line
    queued: int = 0
    transfers: int = 0  # KV transfers under way; on the prefill side, including requests that wait for a transfer
    transfers_since: float = 0.0  # since when `transfers` has not fallen
    status: int = 0  # the last HTTP status
    text: str = ""  # the last line; the path of a control request


class Container(Event, frozen=True, kw_only=True):
    """The state of a container by Kubernetes or Docker."""

    name: str = ""
    state: str = ""  # ``Running``, ``CrashLoopBackOff``
    reason: str = ""  # why it last ended: ``OOMKilled``, ``Error``
    code: int | None = None
    restarts: int = 0
    notes: tuple[str, ...] = ()  # events such as ``Liveness probe failed: …``


class Gpu(Event, frozen=True, kw_only=True):
    """The state of one GPU by ``nvidia-smi`` or ``rocm-smi``."""

    index: int
    bus: str = ""  # bus address: ``0000:9c:00``
    name: str = ""
    used_mb: float = 0.0
    total_mb: float = 0.0
    use: float = -1.0  # utilization in percent, -1 where it is not known
    watts: float = -1.0  # power draw, -1 where it is not known
    most_watts: float = -1.0  # power limit, -1 where it is not known
    faults: str = ""  # uncorrectable errors, ``ERR!``, ``Unknown Error`` …

    @property
    def is_waiting(self) -> bool:
        """Whether a kernel on the GPU seems to wait: at full use it draws hardly more power than an idle GPU."""
        # Where the limit is not known: an idle GPU of the kind that servers have draws up to 130 W.
        limit = 0.3 * self.most_watts if self.most_watts > 0 else 160.0 if self.used_mb > 40_000 else 0.0
        return self.use >= 95.0 and 0.0 < self.watts <= limit


class Collective(Event, frozen=True, kw_only=True):
    """The last operation of a rank in a group, by torch's flight recorder or NCCL's watchdog."""

    group: str = ""
    number: int = 0
    operation: str = ""
    state: str = ""  # ``scheduled``, ``started``, ``completed``, ``timeout``
    sizes: str = ""
    rank: int = -1


class GpuKernel(Event, frozen=True, kw_only=True):
    """A kernel that a debugger found on a GPU, or an exception of the GPU."""

    name: str = ""
    exception: str = ""  # ``CUDA_EXCEPTION_14, Warp Illegal Address``
    device: int = -1
    text: str = ""


class Watched(Event, frozen=True, kw_only=True):
    """The conclusion of the crash handler, which watched the processes run and end; see `incident.Verdict`.

    `who` failed first, or is the process that the others wait for; empty where the conclusion names no process.
    """

    #: ``exception``, ``exit_status``, ``signal``, ``oom_kill``, ``hang``, ``busy``, ``lost_peer``, ``peer_lost``,
    #: ``failed_transfer``, ``startup_timeout``, ``unknown`` …
    kind: str
    level: str = "unknown"
    text: str = ""
    pid: int = 0  # of `who`
    role: str = ""  # of `who`
    is_hang: bool = False  # a process made no progress, and none failed in another way before
    is_ended: bool = False  # SGLang's own watchdog ends the process for that
    is_starting: bool = False  # the server was not ready yet
    notes: tuple[str, ...] = ()  # the step and the control request that the process was at


class Compared(Event, frozen=True, kw_only=True):
    """The comparison of the steps, or the flight recorders, of ranks that must agree."""

    kind: str  # ``divergence``, ``mismatch`` or ``behind``
    level: str
    text: str
    late: tuple[int, ...] = ()  # pids of the processes that are behind
    waiting: tuple[int, ...] = ()  # pids of the processes that wait for them


class Suspect(Event, frozen=True, kw_only=True):
    """The most suspicious request, where the handler knows the requests of the step."""

    rid: str
    level: str
    reasons: tuple[str, ...] = ()
    is_repeated: bool = False  # a request like it was suspected in an earlier incident of the same fault
    is_alone: bool = False  # the only reason is that there was no other request


class Dumped(Event, frozen=True, kw_only=True):
    """The requests that SGLang saved before it ended: those in flight, and the last answered ones."""

    unfinished: int = 0
    finished: int = 0
    text: str = ""  # the longest request in flight


class Unread(Event, frozen=True, kw_only=True):
    """A file, or a part of a file, that no parser understood; quoted in short."""

    text: str
