"""What failed: exceptions, ends, words and kernel lines, each by what it means (``knowledge/families.yaml``).

Each fact is asked three things: what kind of failure it is, which process had it, and in which part of SGLang. What
follows from another failure, what the server outlived, and what came after it was asked to end, is no cause.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from sglang_crashkit.judge.components import component_of, is_switched_on, is_telling, way_out
from sglang_crashkit.judge.finding import Finding
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.model.case import Case
from sglang_crashkit.model.event import (
    AnyEvent,
    Arguments,
    Container,
    Error,
    Exit,
    Gpu,
    GpuKernel,
    Kernel,
    Line,
    Progress,
    Raised,
    Stack,
    Stage,
    Stop,
)
from sglang_crashkit.model.sample import Frame

_Place = tuple[float, int]
#: A text that is matched: a message may quote a whole configuration.
_MAX_TEXT, _MAX_QUOTE = 3000, 220
#: So many of the innermost frames tell whose code it was: the others are a library that SGLang called, or its callers.
_NEAR = 5
#: Seconds of work after a failure by which a server is taken to have outlived it.
_OUTLIVED_S = 3.0
#: The kernel's log may be in another time zone: what is further apart than this in seconds is so by the clock.
_ANY_ZONE_S = 15 * 3600.0
#: Seconds after a library's line within which the exception of the process that called it comes.
_NEXT_S = 2.0
#: Below these the web server catches what a request raises.
_OF_REQUEST = re.compile(r"starlette/|fastapi/|uvicorn/protocols|entrypoints/(?:openai|anthropic|ollama)")
_CLIENT = re.compile(r"(?:^|/)bench_\w+\.py$|(?:^|/)benchmark/")
_OF_A_PAIR = frozenset({"pd_transfer", "mooncake", "nixl"})
#: Classes of what a rank, and no front end, says without a name.
_OF_A_RANK = frozenset(
    {"cuda_fault", "gpu_hardware", "gpu_oom_at_start", "gpu_oom_serving", "kv_pool_leak", "kv_pool_exhausted",
     "collective_mismatch", "symmetric_stall", "compile_failed", "startup_memory", "aborted", "segfault"}
)  # fmt: skip
#: What is tried again so often is no passing trouble.
_MANY = 20
_ROUTER = re.compile(r".{0,12}\[Router|\S{0,40}sglang_router")
_LOOP = re.compile(
    r"event_loop|run_batch|process_batch_result|get_next_batch_to_run|recv_requests|process_input_requests"
)
_START = re.compile(
    r"__init__|load_model|_launch|launch_|\binit_(?!forward|load_back|ne[wx])|capture|<module>|prepare_server_args|import_module"
)
_SERVES = re.compile(r"srt/(?:managers/schedul|layers/|mem_cache/)")
#: The function in which a process of each role is, whatever raised below it.
_ROLES = (
    ("detokenizer", re.compile(r"detokenizer_manager|run_detokenizer")),
    ("scheduler", re.compile(r"managers/scheduler|run_scheduler_process|tp_worker|model_runner")),
    ("router", re.compile(r"sglang_router|launch_router")),
    (
        "tokenizer",
        re.compile(
            r"_wait_and_warmup|tokenizer_manager|tokenizer_communicator|http_server|multi_tokenizer|entrypoints/|uvicorn/|starlette/|grpc"
        ),
    ),
    ("scheduler", re.compile(r"srt/(?:constrained|mem_cache|model_executor|layers|models|speculative|lora)/")),
)
#: Names of processes that are SGLang's, as the kernel cuts them.
_OURS = re.compile(r"(?i)^(?:sglang|python|pt_main|ray::|ray_|uvicorn|launch_server|cicc|ninja|nvcc|cudafe|ptxas)")
#: Xid errors of a program, by which a kernel of it failed; all others are the hardware's, or follow.
#: https://docs.nvidia.com/deploy/xid-errors/
_XID_OF_PROGRAM, _XID_FOLLOWS = frozenset({8, 13, 31, 32, 68, 69, 80}), frozenset({43, 45})
_XIDS = {
    48: "double-bit ECC error", 63: "row remapping", 64: "row remapping failed", 74: "NVLink error",
    79: "GPU has fallen off the bus", 92: "high single-bit ECC rate", 94: "contained ECC error",
    95: "uncontained ECC error", 119: "GSP does not answer", 120: "GSP error", 140: "unrecovered ECC error",
    145: "NVLink RLW error", 149: "NVLink error", 154: "GPU recovery action",
}  # fmt: skip
_NOT_RUNNING = frozenset({"CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError"})
_SIGNALS = {"SIGSEGV": "segfault", "SIGABRT": "aborted", "SIGBUS": "bus_error", "SIGKILL": "killed"}
_ORDERLY = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
#: Parts that are off by default and hand memory to the GPU's kernels asynchronously: the likelier, the earlier.
_SUSPECTS = ("hicache", "expert_parallel", "speculative", "lora", "mamba", "weight_update", "custom_all_reduce")
#: What a stack or a message shows of an asynchronous failure is where it was noticed.
_NOTICED = frozenset({None, "scheduler", "gpu", "kv_pool", "driver"})
_OPTION = re.compile(r"--[a-z][a-z0-9-]{2,60}|\bSGLANG_[A-Z_]{3,60}\b|\bNCCL_[A-Z_]{3,40}\b")
_QUOTES = re.compile(r"(?<!\d )(?<![\w'])'[^'\n]{20,2000}'(?!\w)|\"[^\"\n]{20,2000}\"")
_OF_VALUES = frozenset({"ValueError", "KeyError", "TypeError", "IndexError", "UnicodeDecodeError", "JSONDecodeError"})
_HARMLESS = re.compile(
    r"(?i)^(?:WARNING|INFO|DEBUG)\b|(?:will|fall(?:ing)?) ?back|deprecat|ignored?\b|\bretrying\b|will retry|skipp"
    r"|not (?:found|available|installed)[,;.] (?:using|use|fall)|task exception was never retrieved"
    r"|You are using a model of type"
    r"|client (?:disconnect|closed)|abort(?:ed|ing) request|bad request|invalid request|validation error"
    r"|\b4\d\d\b.{0,20}(?:Bad|Not|Unprocess)|longer than the model|is disabled|if you|(?:User|Future)Warning|"
    r"please consider|may (?:cause|lead)|gen throughput|#running-req"
)


class _Family(msgspec.Struct, kw_only=True):
    """A row of ``families.yaml``."""

    kind: str
    type: str = ""
    words: str = ""
    frames: str = ""
    when: str = ""
    who: str = ""
    who_is: str = ""
    start_kind: str = ""
    part: str = ""
    usual: str = ""
    restart: str = ""
    sure: bool = False
    follows: bool = False
    own: bool = False
    line: bool = False
    weight: int = 0
    steps: list[str] = []

    def match(
        self, error: Error | None, text: str, places: str, *, is_started: bool, role: str
    ) -> dict[str, str] | None:
        """Return what the row's pattern names in a text; None where the row does not fit."""
        if (self.when == "start" and is_started) or (self.when == "serving" and not is_started):
            return None
        if self.type and (error is None or not re.match(self.type, error.type.rpartition(".")[2])):
            return None
        if self.line and error is not None:
            return None
        if (self.who and role != self.who) or (self.frames and not re.search(self.frames, places)):
            return None
        if not self.words:
            return {}
        found = re.search(self.words, text)
        return None if found is None else {name: value for name, value in found.groupdict().items() if value}


@functools.cache
def _families() -> list[_Family]:
    return msgspec.convert(load("families"), list[_Family])


def find_failures(case: Case) -> list[Finding]:
    """Return what explains a failure in the case."""
    return [*_Failures(case).find()]


class _Failures:
    def __init__(self, case: Case) -> None:
        self._case = case
        work = [one for one in case.events if isinstance(one, Progress) and one.kind in ("prefill", "decode", "answer")]
        ready = [one for one in case.events if isinstance(one, Stage) and one.name == "ready"]
        self._work, self._began = work, [one.place for one in (*work, *ready)]
        self._starts = [one.place for one in case.events if isinstance(one, Arguments) and one.values]
        self._exits = [one for one in case.events if isinstance(one, Exit)]
        self._raises = [one for one in case.events if isinstance(one, Raised)]  # in the order of their places
        self._stops = [one for one in case.events if isinstance(one, Stop)]
        self._asked = min(
            (one.place for one in self._stops if one.by != "signal" or not self._by_kit(one)), default=None
        )

    def _by_kit(self, stop: Stop) -> bool:
        # The server ends itself by a signal once a rank has failed.
        return "sigquit" in stop.text.lower() or "child" in stop.text.lower()

    def find(self) -> Iterator[Finding]:
        """Yield a finding for each fact that tells one."""
        found = [*self._found()]
        if not any(one.weight >= 37 for one in found):
            found += self._vanished()
        # What names a rank is its own word; a role may be any of several.
        raised = [
            one for one in found if re.search(r"\d", one.who or "") and one.weight >= 50 and not one.is_consequence
        ]
        first = min(raised, key=lambda one: one.where, default=None)
        named = {one.who for one in found if one.weight >= 41}
        for one in found:
            if one.kind in ("killed", "exited", "aborted") and one.weight < 40:
                # What itself only follows from another failure explains an exit status, and no signal.
                is_told = any(
                    other.weight >= 41 and other.where < one.where
                    for other in found
                    if one.kind == "exited" or not other.is_consequence
                )
                # SGLang ends its own processes once one has failed; what is named by itself did fail by itself.
                one.is_consequence = is_told and (one.kind == "exited" or not one.who or one.who in named)
            if one.kind in ("cuda_fault", "gpu_hardware", "aborted", "kv_pool_leak") and one.who is None and first:
                # The fact is the GPU's or the library's; who noticed it is another one's word.
                one.who, one.level = first.who, "supported" if one.level == "established" else one.level
            if one.kind == "cuda_fault" and one.component in _NOTICED:
                one.component = self._suspect
                if way := way_out(one.component, self._case.arguments, is_seen=False):
                    others = [step for step in one.next if not step.startswith("the scheduler part")]
                    one.next = [f"{one.component} is on and hands memory to the GPU's kernels: {way}", *others]
            if one.kind in ("kv_pool_leak", "kv_pool_exhausted") and one.component in _NOTICED:
                one.component = "kv_pool"
            if one.kind in ("gpu_oom_at_start", "gpu_oom_serving"):
                one.component = one.component or "gpu"
            if one.kind in ("transfer_failed", "transfer_stuck", "peer_lost"):
                one.component = one.component or "pd_transfer"
            if (
                one.kind in ("gpu_hardware", "host_oom", "cuda_fault")
                and one.who is None
                and one.level == "established"
            ):
                one.level = "supported"
            if one.kind == "connection_lost":
                self._name_the_other_node(one)
            yield one

    @functools.cached_property
    def _suspect(self) -> str:
        on = [name for name in _SUSPECTS if is_switched_on(name, self._case.arguments)]
        if not on and any("aiter" in one.text for one in self._case.events if isinstance(one, Line)):
            return "aiter"
        return on[0] if on else "gpu"

    def _name_the_other_node(self, finding: Finding) -> None:
        nodes = self._case.arguments.get("nnodes")
        if not isinstance(nodes, int) or nodes < 2:
            return
        seen = {one.values.get("node_rank") for one in self._case.servers if one.values}
        unseen = sorted({*range(nodes)} - seen)
        names = ", ".join(f"node {number}" for number in unseen)
        finding.who = names if len(unseen) == 1 else None
        finding.headline = f"the connection to a rank of another node broke ({names or 'all seen'}): {finding.headline}"
        finding.next.insert(0, f"read the log of {names or 'each node'} at that time: what ended first is there")

    def _found(self) -> Iterator[Finding]:
        for event in self._case.events:
            for finding in self._of(event):
                if not finding.where[1]:
                    finding.where = event.place
                if self._asked is not None and finding.where > self._asked and not finding.is_calm:
                    continue
                if event.follows:
                    finding.is_consequence = True
                    finding.level = "supported" if finding.level == "established" else finding.level
                yield finding
        yield from self._calm()

    def _of(self, event: AnyEvent) -> Iterator[Finding]:
        match event:
            case Raised():
                yield from self._raised(event)
            case Line() if event.level in ("error", "critical"):
                yield from self._line(event)
            case Line() if event.level == "warning" and not self._case.is_started:
                # What a start warned of may be why it failed, where nothing else tells.
                yield from self._line(event, most=37)
            case Kernel():
                yield from self._kernel(event)
            case Exit():
                yield from self._exit(event)
            case Container():
                yield from self._container(event)
            case Gpu() if event.faults:
                yield Finding(
                    kind="gpu_hardware", component="gpu", weight=60,
                    headline=f"GPU {event.index} ({event.name}) shows {event.faults}",
                    because=[f"{event.source}: GPU {event.index}: {event.faults}"],
                    next=[f"`nvidia-smi -q -i {event.index} -d ECC,ROW_REMAPPER`; take that GPU out of service"],
                )  # fmt: skip
            case GpuKernel() if event.exception:
                yield Finding(
                    kind="cuda_fault", level="established", who=event.who or None, weight=80,
                    component=component_of(words=f"{event.name} {event.text}", arguments=self._case.arguments) or "gpu",
                    headline=f"the GPU reports {event.exception}" + (f" in {event.name[:80]}" if event.name else ""),
                    because=[_quoted(event, event.text or event.exception)],
                )  # fmt: skip
            case Stack() if event.fatal:
                yield from self._fatal(event)
            case _:
                return

    # -- exceptions

    def _raised(self, event: Raised) -> Iterator[Finding]:
        chain = [
            error for error in event.chain if error.type not in ("SystemExit", "CancelledError", "KeyboardInterrupt")
        ]
        if any(error.type == "KeyboardInterrupt" for error in event.chain):
            yield self._stopped("Ctrl-C", _quoted(event, "KeyboardInterrupt"), event.place)
            return
        chain = chain or [one for one in event.chain if one.type == "SystemExit" and one.text != "0"]
        if not chain or self._is_outlived(event):
            return
        frames = [frame for error in chain for frame in error.frames]
        own = any("sglang/" in frame.file or "srt/" in frame.file for frame in frames[:_NEAR])
        is_client = any(_CLIENT.search(frame.file) for frame in frames) or (
            not own and _is_script(event.chain[0].frames)
        )
        if (self._work or self._case.is_started) and not event.who and is_client:
            return  # a client of the server, which prints into the same evidence
        role = _role(event.who, frames)
        is_started = self._is_started(event, frames)
        if (
            role == "tokenizer"
            and is_started
            and self._case.watched is None
            and any(_OF_REQUEST.search(frame.file) for frame in frames)
        ):
            yield Finding(
                kind="no_incident", weight=45, component="http",
                headline=f"one request failed in the front end ({chain[0].type}: {chain[0].text.strip()[:120]}); the"
                " web server answers it with an error and goes on",
                because=[_quoted(event, f"{chain[0].type}: {chain[0].text.strip()[:_MAX_QUOTE]}")],
            )  # fmt: skip
            return
        # The one that came first tells most; a row may know the one that arrived.
        for error in reversed(chain):
            text = f"{error.type}: {error.text}"
            found = self._family(error, f"{event.said} {text}", frames, is_started=is_started, role=role)
            if found is not None and not (found[0].follows and len(chain) > 1 and error is not chain[0]):
                yield self._finding(event, *found, error, frames, is_started=is_started, role=role)
                return
        error = chain[-1] if chain[-1].frames or len(chain) == 1 else chain[0]
        kind = "startup_failed" if not is_started else "exception_in_sglang" if own else "exception"
        if event.thread and not event.who and "Main" not in event.thread and is_started:
            kind = "thread_died"
        kind = "exited" if error.type == "SystemExit" else kind
        is_telling_itself = error.text.strip() or (error.type == "AssertionError" and own)
        row = _Family(kind=kind, weight=50 if is_telling_itself else 38)
        yield self._finding(event, row, {}, error, frames, is_started=is_started, role=role)

    def _family(
        self, error: Error | None, text: str, frames: Sequence[Frame], *, is_started: bool, role: str
    ) -> tuple[_Family, dict[str, str]] | None:
        name = error.type.rpartition(".")[2] if error else ""
        # What stands in quotes may be anybody's words, as a prompt's; so may all of an error about a value.
        text = _QUOTES.sub("''", text[:_MAX_TEXT]) if error and is_started else text[:_MAX_TEXT]
        places = "\n".join(f"{frame.function} ({frame.file})" for frame in frames[:60])
        for row in _families():
            if is_started and name in _OF_VALUES and not (row.type or row.frames or row.own):
                continue
            found = row.match(error, text, places, is_started=is_started, role=role)
            if found is not None:
                return row, found
        return None

    def _finding(
        self, event: Raised, row: _Family, named: dict[str, str], error: Error, frames: Sequence[Frame], *,
        is_started: bool, role: str,
    ) -> Finding:  # fmt: skip
        kind = row.start_kind if row.start_kind and not is_started else row.kind
        said = "" if "hit an exception" in event.said else event.said
        words = f"{error.type}: {error.text} {said} {' '.join(one.text for one in event.chain if one is not error)}"
        arguments = self._case.arguments
        part = component_of(error.frames or frames, words, thread=event.thread, arguments=arguments)
        part = row.part or (part if is_telling(part) or not row.usual else row.usual)
        if kind == "startup_version" and part == "http":
            part = None  # the launcher imports everything
        if role == "tokenizer" and not is_started:
            # The program itself, before it has a tokenizer manager.
            who = event.who
        else:
            known = role if role != "scheduler" or not self._case.schedulers else ""
            who = event.who or known or (event.side if part in _OF_A_PAIR else "") or _only(self._case) or role
        inner = next((one for one in error.frames if "sglang/" in one.file), error.frames[0] if error.frames else None)
        first_line = error.text.strip().partition("\n")[0][:_MAX_QUOTE]
        name, steps = error.type.rpartition(".")[2], _steps(row, named, error.text)
        if not name:
            name, first_line = "an exception", "the traceback is cut off before its last line, which names it"
            steps.insert(
                0, "get the rest of the log, or another rank's: the last line of the traceback is missing here"
            )
        where = f" in {inner.function} ({inner.file}:{inner.line})" if inner else ""
        phase = "while it served" if is_started else "before it was ready"
        side = f" of the {event.side} server" if event.side else ""
        through = f" in thread {event.thread}" if event.thread else ""
        subject = f"the {who} server" if who and who == event.side else f"{who or 'a process'}{side}"
        if way := way_out(part, arguments, is_seen=bool(frames)):
            steps.append(f"the {part} part is in the stack: {way}")
        return Finding(
            kind=kind,
            level="established" if row.sure and frames else "supported",
            who=who or None,
            component=part,
            restart=_restart(row.restart, kind, is_started=is_started),
            headline=f"{subject} raised {name}{through}{where} {phase}: {first_line}",
            because=[
                _quoted(event, f"{error.type or name}: {first_line}"),
                *(str(frame) for frame in error.frames[:4]),
            ],
            next=steps,
            is_consequence=row.follows,
            weight=min(row.weight or 70, 100 if error.text.strip() or error.type == "AssertionError" else 38),
        )

    def _is_outlived(self, event: AnyEvent) -> bool:
        """Return whether the server went on as if nothing had been, as it does after a request that it refused."""
        place = event.place
        end = min((one for one in self._starts if one > place), default=(float("inf"), 0))
        for one in self._work:
            if one.side != event.side or one.node != event.node or (one.last_at, one.last_order) > end:
                continue
            if one.who and event.who and one.who != event.who and one.kind != "answer":
                continue
            later = one.last_at - max(event.at, getattr(event, "last_at", 0.0)) if one.last_at and event.at else 0.0
            if one.last_order > event.order and (later >= _OUTLIVED_S or (not later and not one.last_at)):
                return True
        return False

    def _is_started(self, event: AnyEvent, frames: Sequence[Frame] = ()) -> bool:
        if self._case.watched is not None:
            return not self._case.watched.is_starting
        place = event.place
        last_start = max((one for one in self._starts if one <= place), default=(0.0, 0))
        if any(last_start <= one <= place for one in self._began):
            return True
        names = " ".join(frame.function for frame in frames)
        if _LOOP.search(names):
            return True
        if last_start != (0.0, 0) or _START.search(names):
            return False
        return self._case.is_started or not frames or any(_SERVES.search(frame.file) for frame in frames)

    # -- lines

    def _line(self, event: Line, most: int = 100) -> Iterator[Finding]:
        is_harmless = most == 100 and event.count < _MANY and _HARMLESS.search(event.text)
        if "leak detected" in event.text and self._is_outlived(event):
            yield Finding(
                kind="no_incident", component="kv_pool", where=(0.0, 1), weight=30,
                headline=f"the server goes on; its own check only warned: {event.text.strip()[:_MAX_QUOTE]}",
                because=[_quoted(event, event.text)],
                next=["watch token usage, which grows while idle, and start it anew before the pool is full;"
                      " --disable-radix-cache takes the usual suspect out; report it with the log"],
            )  # fmt: skip
        if is_harmless or self._is_outlived(event):
            return
        is_started = self._is_started(event)
        found = self._family(None, event.text, (), is_started=is_started, role=_role(event.who, ()))
        if found is None:
            return
        row, named = found
        kind = row.start_kind if row.start_kind and not is_started else row.kind
        part = component_of(words=event.text, arguments=self._case.arguments)
        who = row.who_is or event.who or ("router" if _ROUTER.match(event.text) else "")
        if not who and (raised := self._raised_next(event)):
            # What a library prints without a name is told by what the process that called it raises.
            who = raised.who
            frames = [frame for error in raised.chain for frame in error.frames]
            part = part or component_of(frames, arguments=self._case.arguments)
        part = row.part or (part if is_telling(part) or not row.usual else row.usual)
        if kind == "peer_lost":
            who = next(
                (side for side in ("prefill", "decode") if side in event.text.lower() and side != event.side), who
            )
        who = who or (event.side if part in _OF_A_PAIR else "") or (_only(self._case) if kind in _OF_A_RANK else "")
        steps = _steps(row, named, event.text)
        if is_telling(part) and (way := way_out(part, self._case.arguments, is_seen=True)):
            steps.append(f"the message speaks of {part}: {way}")
        side = f" of the {event.side} server" if event.side else ""
        yield Finding(
            kind=kind,
            who=who or None,
            component=part,
            restart=_restart(row.restart, kind, is_started=is_started),
            headline=f"{who or 'the server'}{side} says: {event.text.strip()[:_MAX_QUOTE]}",
            because=[_quoted(event, event.text)],
            next=steps,
            is_consequence=row.follows,
            weight=min(most, row.weight or (45 if event.level == "critical" else 41)),
        )

    def _raised_next(self, event: Line) -> Raised | None:
        """Return the exception that a process had right after a line."""
        place = bisect.bisect_left(self._raises, event.place, key=lambda one: one.place)
        first = self._raises[place] if place < len(self._raises) else None
        return first if first and first.at - event.at <= _NEXT_S else None

    # -- the kernel, ends, containers

    def _kernel(self, event: Kernel) -> Iterator[Finding]:
        is_ours = not event.name or bool(_OURS.match(event.name)) or any(
            event.pid and event.pid == one.pid for one in self._case.processes.values()
        )  # fmt: skip
        because = [_quoted(event, event.text)]
        if event.kind in ("oom_kill", "segfault", "trap") and not self._is_known(event) and self._is_well(event):
            return
        if (
            event.kind == "oom_kill"
            and not event.pid
            and any(one.pid for one in self._case.kernel if one.kind == "oom_kill")
        ):
            # The kernel says in a later line of the same kill which process it chose.
            return
        if event.kind == "oom_kill" and is_ours:
            limit = (
                "its memory cgroup's limit"
                if "emory cgroup" in event.text or "MEMCG" in event.text
                else "the host's memory"
            )
            size = f", {int(event.facts['anon_kb']) >> 20} GiB of its own" if "anon_kb" in event.facts else ""
            who = event.who or self._named(event.pid) or (f"pid {event.pid}" if event.pid else None)
            stages = [one.name for one in self._case.events if isinstance(one, Stage) and not self._case.is_started]
            loading = "model_loader" if stages and "weights" in stages[-2:] else None
            yield Finding(
                kind="host_oom", level="established" if event.facts.get("is_first", True) else "supported",
                who=who, weight=90,
                component=loading or ("cgroup" if "cgroup" in limit else None),
                headline=f"the kernel killed {who or event.name or 'a process'}"
                f"{f' (pid {event.pid}{size})' if event.pid else ''} as {limit} ran out",
                because=because,
                next=self._memory_steps(),
            )  # fmt: skip
        elif event.kind == "xid" and event.number not in _XID_FOLLOWS and is_ours:
            is_program = event.number in _XID_OF_PROGRAM
            last = max((one.last_at for one in self._work), default=0.0)
            if is_program and not self._is_known(event) and event.at and last - event.at > _ANY_ZONE_S:
                return  # another program's, or that of an earlier server
            gpu = str(event.facts.get("gpu", ""))
            words = _XIDS.get(event.number, "a fault of a program's kernel" if is_program else "a fault of the GPU")
            yield Finding(
                kind="cuda_fault" if is_program else "gpu_hardware", level="supported" if is_program else "established",
                who=event.who or self._named(event.pid) or self._rank_of(gpu), component="gpu",
                weight=60 if is_program else 95,
                headline=f"the driver reports Xid {event.number} on GPU {gpu}: {words}",
                because=because,
                next=[f"take GPU {gpu} out of service: `nvidia-smi -q -i {gpu}`, then reset or exchange it"]
                if not is_program
                else [],
            )  # fmt: skip
        elif event.kind in ("amdgpu", "nvlink", "gpu_lost", "mce", "pcie"):
            is_fault = event.kind == "amdgpu" and ("page fault" in event.text or "PROTECTION_FAULT" in event.text)
            if event.pid and not is_fault:
                return  # which process the line before speaks of
            pids = {one.pid for one in self._case.kernel if one.kind == event.kind and one.pid}
            pid = event.pid or (pids.pop() if len(pids) == 1 else 0)
            yield Finding(
                kind="cuda_fault" if is_fault else "gpu_hardware", level="established", component="gpu",
                who=self._named(pid) or (f"pid {pid}" if pid else None), weight=75,
                headline=f"the kernel's log says: {event.text[:_MAX_QUOTE]}", because=because,
            )  # fmt: skip
        elif event.kind in ("segfault", "trap") and is_ours:
            library = str(event.facts.get("library") or "")
            yield Finding(
                kind="segfault" if event.kind == "segfault" else "fatal_signal", level="established",
                who=self._named(event.pid), component=component_of(words=library), weight=80,
                headline=f"{self._named(event.pid) or event.name} (pid {event.pid}) died of a segmentation fault"
                + (f" in {library}" if library else ""),
                because=because,
            )  # fmt: skip

        elif event.kind in ("disk", "hung_task", "net") and (is_ours or event.kind != "hung_task"):
            if self._is_well(event):
                return
            is_slow = event.kind == "hung_task" and not any(one.kind == "disk" for one in self._case.kernel)
            kind = "connection_lost" if event.kind == "net" else "stuck_in_kernel" if is_slow else "slow_storage"
            yield Finding(
                kind=kind, who=self._named(event.pid), weight=58,
                component=None if event.kind == "net" or is_slow else "storage",
                headline=f"the kernel's log says: {event.text[:_MAX_QUOTE]}", because=because,
                next=["the link or the card that the kernel names is at fault: `ibstat`, `ethtool`, its cable and port"]
                if event.kind == "net"
                else ["see whether the file system, its server or the disk that the kernel names answers"],
            )  # fmt: skip

    def _is_known(self, event: Kernel) -> bool:
        told = any(f"pid={event.pid}" in one.text or f"pid {event.pid}" in one.text for one in self._exits)
        return bool(event.pid) and (told or self._named(event.pid) is not None)

    def _is_well(self, event: AnyEvent) -> bool:
        """Return whether the server shows no harm from an event of unknown time that names none of its processes."""
        harm = any(isinstance(one, Raised | Exit) or (isinstance(one, Line) and one.level == "critical")
                   for one in self._case.events)  # fmt: skip
        return self._is_outlived(event) or (bool(self._work) and not harm and not event.at)

    def _named(self, pid: int) -> str | None:
        if not pid:
            return None
        known = next((one.who for one in self._case.processes.values() if one.pid == pid and one.who), None)
        told = (one.who for one in self._exits if one.who and re.search(rf"\bpid[= ]{pid}\b", one.text))
        return known or next(told, None)

    def _rank_of(self, bus: str) -> str | None:
        """Return the rank on a GPU, where the order of the GPUs tells it."""
        if self._case.arguments.get("base_gpu_id") or self._case.arguments.get("nnodes", 1) not in (1, None):
            return None
        index = next((one.index for one in self._case.gpus if one.bus and bus.lower().startswith(one.bus)), None)
        size = self._case.arguments.get("tp_size")
        used = [one.used_mb > one.total_mb / 2 for one in self._case.gpus]
        fits = index < size if isinstance(size, int) and index is not None else all(used)
        return f"TP{index}" if index is not None and fits else None

    def _memory_steps(self) -> list[str]:
        arguments = self._case.arguments
        return [
            f"lower --{name.replace('_', '-')} (now {arguments[name]}), or raise the memory limit"
            for name in ("hicache_size", "hicache_ratio", "cpu_offload_gb")
            if arguments.get(name)
        ]

    def _exit(self, event: Exit) -> Iterator[Finding]:
        seen = self._case.watched
        if event.signal in _ORDERLY or (seen is None and event.code in (0, 130, 143)):
            return
        who = event.who or self._closed() or _only(self._case)
        kind = _SIGNALS.get(event.signal, "fatal_signal" if event.signal else "exited")
        how = event.signal or f"exit status {event.code}"
        if seen is None and ("Out Of Memory" in event.text or "oom" in event.text.lower()):
            kind = "host_oom"
        if kind == "exited" and seen is not None and seen.is_starting:
            kind = "startup_failed"
        of_role = {"detokenizer": "detokenizer_lost", "tokenizer_worker": "tokenizer_lost"}.get(event.who, kind)
        lost = of_role if kind == "exited" or seen is not None else kind
        yield Finding(
            kind=lost,
            level="established" if event.is_seen else "supported",
            who=who or None,
            headline=f"{who or 'a process'} ended by {how}" + (f": {event.text}" if seen and event.text else ""),
            because=[_quoted(event, event.text or how)],
            weight=39 if event.signal else 20,
        )

    def _closed(self) -> str:
        """Return the rank that NCCL's threads of the others say closed its connection; empty without one such rank."""
        texts = (one.text for one in self._case.events if isinstance(one, Line) and "closed by localRank" in one.text)
        ranks = {int(found[1]) for text in texts if (found := re.search(r"closed by localRank (\d{1,4})", text))}
        return f"TP{ranks.pop()}" if len(ranks) == 1 else ""

    def _container(self, event: Container) -> Iterator[Finding]:
        because = [f"{event.source}: {event.name}: {event.reason or event.state} (exit code {event.code})"]
        if event.reason == "OOMKilled" or event.state == "OOMKilled":
            yield Finding(
                kind="host_oom", level="established", component="cgroup", weight=85, because=because,
                headline=f"the container {event.name} was killed at its memory limit (OOMKilled, "
                f"{event.restarts} restarts)",
                next=self._memory_steps(),
            )  # fmt: skip
        elif event.reason == "Evicted":
            why = next((note for note in event.notes if "low on resource" in note or "exceed" in note), "")
            kind = "host_oom" if "memory" in why else "disk_full" if re.search("storage|disk|inode", why) else ""
            yield Finding(
                kind=kind or "asked_to_stop", weight=80, because=[*because, *([why] if why else [])],
                headline=f"Kubernetes evicted the pod {event.name}: {why or 'why is not in this evidence'}"[:290],
                next=["request as much as it uses (requests equal limits), so that its node does not evict it first"],
            )  # fmt: skip
        elif event.code == 137:
            probe = next((note for note in event.notes if "probe failed" in note or "Killing" in note), "")
            yield Finding(
                kind="killed", weight=38, because=[*because, *([probe] if probe else [])],
                headline=f"the container {event.name} was killed (exit code 137)"
                + (f" after {probe[:100]}" if probe else ""),
                next=["raise the liveness probe's failureThreshold until the cause is known"] if probe else [],
            )  # fmt: skip
        elif failed := [note for note in event.notes if note.startswith("Failed")]:
            row = self._family(None, failed[-1], (), is_started=False, role="")
            yield Finding(
                kind=row[0].kind if row else "startup_failed", component=row[0].part or None if row else None,
                weight=45, because=[*because, failed[-1]],
                headline=f"Kubernetes says of {event.name}: {failed[-1]}"[:290],
                next=row[0].steps if row else ["`kubectl describe pod` says what the cluster lacks for it"],
            )  # fmt: skip
        elif event.state in _NOT_RUNNING:
            times = f", started {event.restarts} times anew" if event.restarts else ""
            yield Finding(
                kind="startup_failed" if "Image" in event.state else "exited", weight=20, because=because,
                headline=f"Kubernetes says of {event.name}: {event.state}{times}",
                next=["`kubectl describe pod` and `kubectl logs --previous` of it say why"],
            )  # fmt: skip
        elif event.code is None and (probe := next((one for one in event.notes if "iveness probe failed" in one), "")):
            yield Finding(
                kind="no_progress", weight=38, because=[*because, probe],
                headline=f"{event.name} did not answer its liveness probe, and Kubernetes restarts it: {probe[:140]}",
                next=["`kubectl logs --previous POD` has what the server said until then",
                      "give the probe more time (timeoutSeconds, failureThreshold) until the cause is known"],
            )  # fmt: skip

    def _fatal(self, event: Stack) -> Iterator[Finding]:
        kind = next(
            (
                kind
                for word, kind in (("Segmentation", "segfault"), ("Abort", "aborted"), ("Bus", "bus_error"))
                if word in event.fatal
            ),
            "fatal_signal",
        )  # fmt: skip
        thread = next((one for one in event.sample.threads if one.active), next(iter(event.sample.threads), None))
        frames = thread.frames if thread else ()
        part = component_of(frames, arguments=self._case.arguments)
        who = event.who or _only(self._case) or _role("", frames)
        way = way_out(part, self._case.arguments, is_seen=True)
        is_started = self._is_started(event, frames)
        row = self._family(None, "", frames, is_started=is_started, role="scheduler")
        if row is not None and kind == "aborted":
            steps = _steps(*row, "")
            yield Finding(
                kind=row[0].kind,
                who=who or None,
                component=row[0].part or part,
                weight=76,
                headline=f"{who or 'a process'} aborted in {frames[0]}",
                because=[_quoted(event, f"Fatal Python error: {event.fatal}"), *(str(frame) for frame in frames[:4])],
                next=[*steps, f"{part} is in the stack: {way or 'report it'}"],
            )
        # A thread that aborted for another's fault, as a watchdog's, tells nothing.
        yield Finding(
            kind=kind, level="established", who=who or None, component=part, weight=75 if kind != "aborted" else 39,
            headline=f"{who or 'a process'} died of {event.fatal}" + (f" in {frames[0]}" if frames else ""),
            because=[_quoted(event, f"Fatal Python error: {event.fatal}"), *(str(frame) for frame in frames[:4])],
            next=[f"the {part} part is in the stack: {way}"] if way else [],
        )  # fmt: skip

    def _vanished(self) -> Iterator[Finding]:
        """Yield that a server which worked starts again in the same log, and nothing says how it ended."""
        for start in (one for one in self._case.events if isinstance(one, Arguments) and one.values):
            log = start.source.partition(":")[0]
            own = [one for one in self._case.events if one.source.partition(":")[0] == log]
            is_again = any(isinstance(one, Progress) and one.order < start.order for one in own)
            if is_again and any(isinstance(one, Stage) and one.order > start.order for one in own):
                yield Finding(
                    kind="vanished", where=start.place, weight=45,
                    headline="the server's log ends in its work, and then it starts anew: nothing tells how it ended",
                    because=[f"{start.source}: it starts again"],
                    next=["`kubectl describe pod` (Last State), `docker inspect --format '{{.State}}'` or `journalctl`"
                          " say how it ended; without an exit status, whether the host was restarted (`last -x`)"],
                )  # fmt: skip
                return

    # -- nothing has failed

    def _calm(self) -> Iterator[Finding]:
        asked = [one for one in self._stops if not self._by_kit(one)]
        if self._case.is_started and self._case.watched is None:
            yield Finding(
                kind="no_incident", weight=1, where=(self._case.last_at, 0),
                headline="nothing is wrong in this evidence: no process failed",
            )  # fmt: skip
        if asked:
            stop = asked[0]
            by = {"signal": "a signal", "kubernetes": "Kubernetes", "slurm": "Slurm", "docker": "Docker"}.get(
                stop.by, stop.by
            )
            found = self._stopped(f"{by}: {stop.text.strip()[:160]}", _quoted(stop, stop.text), stop.place)
            if self._case.watched is not None and stop.who:
                found.who, found.level = stop.who, "established"
            yield found

    @staticmethod
    def _stopped(by: str, because: str, where: _Place) -> Finding:
        return Finding(
            kind="asked_to_stop", where=where, weight=60, because=[because],
            headline=f"the server was asked to stop by {by}",
            next=["nothing failed: it was asked to stop (SIGTERM, Ctrl-C); look at who asked, such as a person, "
                  "systemd, a rollout, a scale-down, a preemption or a time limit"],
        )  # fmt: skip


def _role(who: str, frames: Sequence[Frame]) -> str:
    if who.startswith(("detokenizer", "tokenizer", "router")):
        return who.split()[0]
    if who:
        return "scheduler"
    # A process of any role may import a module.
    places = [f"{frame.function} ({frame.file})" for frame in reversed(frames) if frame.function != "<module>"]
    return next((role for role, pattern in _ROLES for place in places if pattern.search(place)), "")


def _is_script(frames: Sequence[Frame]) -> bool:
    """Return whether an exception came through a program of somebody's own, and nowhere through SGLang or a thread."""
    is_whole = bool(frames) and frames[-1].function == "<module>" and "-packages/" not in frames[-1].file
    return is_whole and not any("sglang" in frame.file or "ray/" in frame.file for frame in frames)


def _only(case: Case) -> str:
    """Return the one scheduler, where there is no more than one."""
    schedulers = {one.who for one in case.schedulers}
    return next(iter(schedulers)) if len(schedulers) == 1 and case.arguments.get("tp_size", 1) in (1, None) else ""


def _restart(stated: str, kind: str, *, is_started: bool) -> Any:
    if stated:
        return stated
    if kind in ("exception_in_sglang", "exception"):
        # What was reached once under load is a matter of timing or of a request; at the start it comes again.
        return "yes" if is_started else "no"
    return None


def _steps(row: _Family, named: dict[str, str], text: str) -> list[str]:
    """Return a row's steps with what its pattern named, and the options that a message names itself."""
    steps = [re.sub(r"\{(\w+)\}", lambda match: named.get(match[1], match[1]), step) for step in row.steps]
    options = list(dict.fromkeys(_OPTION.findall(text[:_MAX_TEXT])))[:4]
    return [*steps, f"the message names {', '.join(options)}: change that first"] if options else steps


def _quoted(event: AnyEvent, text: str) -> str:
    where = " ".join(filter(None, (event.source, event.who)))
    return f"{where}: {text.strip()[:_MAX_QUOTE]}" if where else text.strip()[:_MAX_QUOTE]
