"""The only form of evidence that the judge reads: all events of a case, in order and grouped by process.

`case_of` is pure: the same events give the same `Case`, whatever source they come from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from sglang_crashkit.model.event import (
    Arguments,
    Collective,
    Compared,
    Container,
    Dumped,
    Event,
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
    Suspect,
    Watched,
)

_RANK = re.compile(r"\b(TP|DP|PP|EP|ATTN_CP|MOE_DP|CP)\s?(\d+)\b")
_LOUD = {"critical": 2, "error": 2, "warning": 1}
#: Python's warnings, and the line before a traceback that is an event of its own: not errors by themselves.
_NO_FAILURE = re.compile(r"Warning: |deprecated|Exception in ASGI application")
_CTRL_C = re.compile(r"\^C|\bKeyboardInterrupt\b")
#: Processes that hold no model.
_ROLES = ("detokenizer", "tokenizer", "router", "controller", "encoder", "trainer")
#: By class of event, the list of the process, or of the case, that holds it.
_OF_PROCESS: dict[type, str] = {Line: "lines", Raised: "raised", Stack: "stacks", Exit: "exits", Stage: "stages"}
_OF_PROCESS |= {Progress: "progress"}
_OF_CASE: dict[type, str] = {
    **{Arguments: "servers", Kernel: "kernel", Container: "containers", Gpu: "gpus", Collective: "collectives"},
    **{GpuKernel: "gpu_kernels", Stop: "stops", Compared: "compared", Suspect: "suspects", Dumped: "dumped"},
}


class Process(msgspec.Struct, kw_only=True):
    """One process of the case, with its events in order."""

    who: str  # its short name; see `event.Event`
    node: str = ""
    side: str = ""
    pid: int = 0
    role: str = ""  # ``scheduler``, or one of `_ROLES`; empty where it is not known
    ranks: dict[str, int] = {}  # ``{"tp": 3}``; empty for a single scheduler
    stacks: list[Stack] = []
    raised: list[Raised] = []
    exits: list[Exit] = []
    lines: list[Line] = []
    stages: list[Stage] = []
    progress: list[Progress] = []


class Case(msgspec.Struct, kw_only=True):
    """The evidence of one case."""

    arguments: dict[str, Any] = {}  # the first server's; empty where they are not known
    servers: list[Arguments] = []  # the arguments of each server, such as both of a pair
    release: str = ""
    processes: dict[str, Process] = {}  # by side, node and name, in the order of their first event
    events: list[Event] = []  # all events but those of `gave_up`, by time as far as it is known
    kernel: list[Kernel] = []
    containers: list[Container] = []
    gpus: list[Gpu] = []
    collectives: list[Collective] = []
    gpu_kernels: list[GpuKernel] = []
    stops: list[Stop] = []
    logs: set[str] = set()  # the files that the server itself writes to
    gave_up: list[Event] = []  # interrupts (Ctrl-C) of a program that is not the server, such as one that queries it
    watched: Watched | None = None  # the crash handler's conclusion; None without a crash handler
    compared: list[Compared] = []
    suspects: list[Suspect] = []
    dumped: list[Dumped] = []
    ready_at: float | None = None  # when the server was ready; 0.0 if at an unknown time, None if no event shows it
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def is_started(self) -> bool:
        """Whether an event shows that the server got ready, or served."""
        return self.ready_at is not None

    @property
    def progress(self) -> list[Progress]:
        """The progress of all processes."""
        return [one for process in self.processes.values() for one in process.progress]

    @property
    def schedulers(self) -> list[Process]:
        """The processes that hold the model, in the order of their ranks."""
        found = [one for one in self.processes.values() if one.role == "scheduler"]
        return sorted(found, key=lambda one: (one.side, *(one.ranks.get(name, -1) for name in ("pp", "dp", "tp"))))

    def batch_before(self, event: Event) -> str:
        """Return the line of the log's last batch if it took in new requests and an event follows it; else empty."""
        batches = [one for one in self.progress if one.kind in ("prefill", "decode") and one.file == event.file]
        last = max(batches, key=lambda one: one.last_order, default=None)
        return last.text if last is not None and last.kind == "prefill" and last.last_order < event.order else ""

    def said_before(self, place: tuple[float, int], who: str | None, besides: str, secs: float) -> list[str]:
        """Return up to three lines, last first, that a process or an unnamed one logged up to `secs` before a place.

        Lines that `besides` already contains are left out.
        """
        lines = (one for one in reversed(self.events) if isinstance(one, Line) and one.place < place)
        near = (one.text for one in lines if one.who in ("", who) and place[0] - one.at <= secs)
        return [*islice((text for text in near if text[:60] not in besides), 3)]

    def controls_before(self, event: Event, secs: float) -> list[str]:
        """Return the control requests, such as ``/pause_generation``, that a server answered up to `secs` before."""
        own = (one for one in self.progress if one.kind == "control" and one.file == event.file)
        before = (one for one in own if (one.last_at, one.last_order) < event.place)
        return [*dict.fromkeys(one.text for one in before if event.at - one.last_at <= secs)]

    @property
    def loudest(self) -> list[tuple[str, int]]:
        """The two most frequent exceptions, errors or warnings, the worse kind first, each with its count."""
        told: Counter[tuple[int, str]] = Counter()
        logs = {one.file for one in self.progress}  # the server's logs; where there are any, only these count
        for one in self.events:
            if logs and one.file not in logs:
                continue
            if isinstance(one, Raised) and one.error.type:
                told[3, f"{one.error.type}: {one.error.text.strip().partition(chr(10))[0]}"] += 1
            elif isinstance(one, Line) and one.level in _LOUD and not _NO_FAILURE.search(one.text):
                told[_LOUD[one.level], one.text] += one.count
        found = sorted(told.items(), key=lambda it: (it[0][0], it[1]), reverse=True)
        return [(text, count) for (_kind, text), count in found[:2]]


def ranks_in(who: str) -> dict[str, int]:
    """Return the ranks in a short name: ``DP1 TP3`` is ``{"dp": 1, "tp": 3}``."""
    return {name.lower(): int(number) for name, number in _RANK.findall(who)}


def role_in(who: str) -> str:
    """Return the role in a short name; empty where it has none."""
    if ranks_in(who) or who.startswith("scheduler"):
        return "scheduler"
    if who == "server":
        # The main process runs the tokenizer manager.
        return "tokenizer"
    return next((role for role in _ROLES if role in who), "")


def case_of(events: Iterable[Event]) -> Case:
    """Return the case of events, which may come in any order."""
    told = sorted(events, key=lambda event: event.place)
    case = Case(logs={event.file for event in told if isinstance(event, Arguments | Progress | Stage)})
    for event in told:
        if case.logs and event.file not in case.logs and _is_given_up(event):
            case.gave_up.append(event)
            continue
        case.events.append(event)
        if event.at:
            case.first_at = min(case.first_at or event.at, event.at)
        case.last_at = max(case.last_at, event.at, getattr(event, "last_at", 0.0))
        key = "/".join(filter(None, (event.side, event.node, event.who)))
        if (process := case.processes.get(key)) is None:
            ranks, role = ranks_in(event.who), role_in(event.who)
            process = Process(who=event.who, node=event.node, side=event.side, role=role, ranks=ranks)
            case.processes[key] = process
        if (name := _OF_PROCESS.get(type(event))) is not None:
            getattr(process, name).append(event)
        elif (name := _OF_CASE.get(type(event))) is not None:
            getattr(case, name).append(event)
        match event:
            case Arguments():
                case.arguments = case.arguments or event.values
                case.release = case.release or event.release
            case Stack():
                process.pid = process.pid or event.sample.pid
            case Stage(name="ready"):
                case.ready_at = event.at if case.ready_at is None else min(case.ready_at, event.at)
            case Progress(kind="prefill" | "decode") if case.ready_at is None:
                case.ready_at = event.at
            case Watched():
                case.watched = case.watched or event
    return case


def _is_given_up(event: Event) -> bool:
    """Return whether a person interrupted a program that does not run the server's code."""
    if isinstance(event, Raised):
        frames = (frame for error in event.chain for frame in error.frames)
        is_interrupt = any(error.type == "KeyboardInterrupt" for error in event.chain)
        return is_interrupt and not event.who and not any("srt/" in frame.file for frame in frames)
    return isinstance(event, Stop) and event.by == "signal" and bool(_CTRL_C.search(event.text))
