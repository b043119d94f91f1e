"""What an incident tells, as the rules ask for it.

Any kit version may have written the incident, and each piece of it may be missing: then the answer is that nothing is
known. The words of a request never stand where an answer comes from: an exception is known by its type, by how its own
text begins and by the frames that it came through. Of the logs, only what the HTTP server says as it ends is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import inf
from typing import Any

from sglang_crashkit.judge.matching import are_in
from sglang_crashkit.model.checked_json import mapping_of, mappings_of, seconds_of, texts_of
from sglang_crashkit.model.incident import Level
from sglang_crashkit.model.step import DIVERGED

_ERROR = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?::\s?(?P<text>.*))?", re.DOTALL)
_LINE = re.compile(r":\d{1,9}$")
#: What an exception is, and says, and a frame of it, are longer in none but a hostile one.
_MAX_TYPE, _MAX_TEXT, _MAX_FRAME = 200, 8000, 400
#: A server that has not served yet says one of these of its ranks.
_FAILED_STARTS = ("launch_failed", "startup_timeout")
#: Through these a scheduler passes while it starts, and never later.
_STARTING_PLACES = (
    "__init__ (scheduler.py)",
    "__init__ (tp_worker.py)",
    "__init__ (model_runner.py)",
    "__init__ (detokenizer_manager.py)",
    "*_launch_subprocesses (engine.py)",
)
#: An Xid error of longer ago, in seconds, has nothing to do with it.
_XID_SECS = 600.0
_MAX_RIDS = 4
_LEVELS = ("established", "supported")
#: What SGLang resolves an argument to that was not given.
_UNSET = (None, False, "", 0, "none", "null", "None")
_HANGS = ("no_progress", "silent_at_sigterm", "unhealthy_at_sigterm", "watchdog_timeout", "busy_too_long")


@dataclass(frozen=True)
class KnownIssue:
    """An issue of upstream's, and how it shows; an entry of ``known_issues.yaml``."""

    issue: int  # its number in sgl-project/sglang; an issue or a pull request
    title: str  # what it is, in words of our own
    error: str = ""  # pattern of the exception; empty where any, or none, will do
    frames: tuple[str, ...] = ()  # patterns of places, each of which is among the exception's
    arguments: tuple[str, ...] = ()  # patterns of arguments, each of which the server was given
    hang: bool = False  # it shows as a hang, and the frames are those of a process that does not go on
    all_ranks: bool = False  # of a hang: no rank is anywhere else
    by_request: bool = False  # one request of a client's brings it about
    since: str | None = None  # the first release that has it; None where that is not known
    fixed_in: str | None = None  # the first release without it; None where none is known
    workaround: str | None = None  # what helps until then; None where nothing is known to

    def to_json(self) -> dict[str, Any]:
        """Return what an incident holds of it."""
        return {name: getattr(self, name) for name in ("issue", "title", "fixed_in", "workaround")}


@dataclass(frozen=True)
class Raised:
    """An exception that a process of the server reported."""

    pid: int
    type: str  # the exception's class with its module, as Python writes it; builtin ones have none
    text: str  # what it says of itself
    places: tuple[str, ...] = ()  # the frames that it came through, innermost first, as `place_of` writes them
    paths: tuple[str, ...] = ()  # the files of these frames

    @property
    def line(self) -> str:
        """The last part of its type, and its text: what known issues are told by."""
        return f"{self.type.rpartition('.')[2]}: {self.text}"


def place_of(frame: str) -> str:
    """Return a frame without its line, folder and class, such as ``writing_check (hiradix_cache.py)``."""
    function, path = _parts_of(frame)
    # Stacks name the class where the Python is new enough; what an exception came through does not.
    return f"{function.rpartition('.')[2]} ({path.rpartition('/')[2]})" if path else function


def _parts_of(frame: str) -> tuple[str, str]:
    """Return the function and the path of a frame; the whole of it and none where it is written in another way."""
    frame = frame[:_MAX_FRAME]
    function, paren, place = frame.rpartition(" (")
    return (function, _LINE.sub("", place[:-1])) if paren and place.endswith(")") else (frame, "")


class Case:
    """An incident, and what stands beside it.

    Args:
        document: see `Incident.to_json`.
        records: by pid what failing processes wrote of themselves; see ``srt/exception_record.py``.
        stacks: by pid the frames of the main thread, innermost first; of the others what they were doing is known.
        logs: by pid the lines that a process logged last, as ``logs/`` of an incident holds them.

    Attributes:
        known: what is known upstream of the like; see `known_issues`.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        records: Mapping[int, Mapping[str, Any]] | None = None,
        stacks: Mapping[int, Sequence[str]] | None = None,
        logs: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.document = document
        self.kind = str(document.get("kind"))
        self.verdict = mapping_of(document.get("verdict"))
        self.processes = mappings_of(document.get("processes"))
        self.events = mappings_of(document.get("timeline"))
        pid = mapping_of(self.verdict.get("first_failure")).get("pid")
        self.first: Mapping[str, Any] = next((one for one in self.processes if one.get("pid") == pid), {})
        self._records, self._stacks, self._logs = records or {}, stacks or {}, logs or {}
        self.known: Sequence[KnownIssue] = ()

    @cached_property
    def raised(self) -> tuple[Raised, ...]:
        """The exceptions, in the order in which they were reported."""
        told = sorted(
            (one for one in self.events if one.get("event") == "exception"), key=lambda one: str(one.get("time"))
        )
        return tuple(self._read(one) for one in told)

    def _read(self, event: Mapping[str, Any]) -> Raised:
        pid = event.get("pid")
        record = mapping_of(self._records.get(pid)) if isinstance(pid, int) else {}
        frames = record.get("traceback")
        process = next((one for one in self.processes if one.get("pid") == pid), {})
        innermost = [*map(str, reversed(frames))] if isinstance(frames, list) else texts_of(process.get("doing"))
        message = str(record.get("message") or event.get("message") or "")[:_MAX_TEXT]
        found = _ERROR.fullmatch(message.strip())
        kind, text = (found["type"][:_MAX_TYPE], found["text"] or "") if found else ("", message)
        paths = tuple(filter(None, (_parts_of(frame)[1] for frame in innermost)))
        return Raised(pid if isinstance(pid, int) else 0, kind, text, tuple(map(place_of, innermost)), paths)

    @cached_property
    def error(self) -> Raised | None:
        """The exception of the first failure; of the others, those are consequences."""
        pid = self.first.get("pid")
        return next((one for one in self.raised if not self.first or one.pid == pid), None)

    @property
    def statement(self) -> str:
        """What the verdict says first."""
        return str((self.verdict.get("basis") or [self.verdict.get("text")])[0])

    @property
    def end(self) -> Mapping[str, Any]:
        """How the first failure ended; empty where it did not."""
        return mapping_of(self.first.get("exit"))

    @property
    def signal(self) -> str:
        """The signal that the first failure died of, before it reported anything else; empty without one."""
        is_own = self.verdict.get("kind") in ("signal", "oom_kill")
        return str(self.end.get("signal") or "") if is_own else ""

    @property
    def last_log_lines(self) -> Sequence[str]:
        """What the first failure logged last, where it ended by itself, and no exception says why; empty otherwise."""
        is_silent = self.error.type == "SystemExit" if self.error else self.end.get("cause") == "exit_status"
        return self._logs.get(self.first.get("pid", 0), ()) if is_silent else ()

    @cached_property
    def is_starting(self) -> bool:
        """Whether the server had not got ready."""
        if self.kind == "failed_start" or self.has_event(*_FAILED_STARTS):
            return True
        return any(are_in([place], one.places) for one in self.raised for place in _STARTING_PLACES)

    @property
    def is_hang(self) -> bool:
        """Whether somebody made no progress, and nobody failed in another way before."""
        return self.verdict.get("kind") == "hang" or (
            not self.first and mapping_of(self.document.get("trigger")).get("event") in _HANGS
        )

    @property
    def schedulers(self) -> list[Mapping[str, Any]]:
        """The ranks."""
        return [one for one in self.processes if one.get("role") == "scheduler"]

    @property
    def findings(self) -> list[Mapping[str, Any]]:
        """What the flight recorders show; see `analysis.collectives`."""
        return mappings_of(mapping_of(self.document.get("collectives")).get("findings"))

    @property
    def divergence(self) -> Mapping[str, Any]:
        """The first step at which ranks differ; empty where they do not, or none is known."""
        found = mapping_of(self.document.get("divergence"))
        return found if found.get("kind") in DIVERGED else {}

    @property
    def xids(self) -> list[Mapping[str, Any]]:
        """The Xid errors that the driver reported not long before; see `analysis.gpus`."""
        told = mappings_of(mapping_of(self.document.get("gpus")).get("xids"))
        events = [one for one in told if type(one.get("xid")) is int]
        opened = seconds_of(mapping_of(self.document.get("trigger")).get("time"))
        since = -inf if opened is None else opened - _XID_SECS
        return [one for one in events if not (isinstance(at := one.get("time"), int | float) and at < since)]

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The server's arguments as ``--name`` and ``--name=value``; empty where they are not known."""
        environment = mapping_of(self.document.get("environment"))
        words = set()
        for key, value in mapping_of(environment.get("arguments")).items():
            if value not in _UNSET:
                option = f"--{str(key).replace('_', '-')}"
                words |= {option, f"{option}={value}"}
        given = str(environment.get("command_line") or "").split()
        for word, following in zip_longest(given, given[1:], fillvalue="--"):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                value = value if equals else "" if following.startswith("--") else following
                words |= {name, f"{name}={value}"} if value else {name}
        return frozenset(words)

    @property
    def has_other_nodes(self) -> bool:
        """Whether ranks of the server are on other hosts."""
        return any(option.startswith("--nnodes=") and option != "--nnodes=1" for option in self.arguments)

    @property
    def release(self) -> str:
        """SGLang's version."""
        return str(mapping_of(self.document.get("server")).get("sglang_version") or "")

    @cached_property
    def suspects(self) -> list[Mapping[str, Any]]:
        """The requests that may have done it, most suspicious first; see `analysis.suspects`."""
        return mappings_of(self.document.get("suspects"))

    @property
    def repeated(self) -> str:
        """The id of a request like which one was suspected in an earlier incident of the same fault; empty without."""
        seen = mapping_of(mapping_of(self.document.get("fault")).get("seen"))
        return next((rid for one in self.suspects if seen.get(rid := str(one.get("rid")))), "")

    @property
    def suspected(self) -> str:
        """The id of the first of the suspects, where more speaks for it than that it was in the step; empty without."""
        return next((str(one.get("rid")) for one in self.suspects[:1] if one.get("level") in _LEVELS), "")

    @property
    def suspicions(self) -> list[str]:
        """What speaks for the first of the suspects."""
        return [reason for one in self.suspects[:1] for reason in texts_of(one.get("reasons"))]

    @property
    def is_beside_others(self) -> bool:
        """Whether more than one request was under way where each rank has all of them.

        Replicas of data parallelism share them out: to be alone in the step of one is nothing of a request's own.
        """
        if any(mapping_of(rank.get("rank")).get("dp") is not None for rank in self.schedulers):
            return False
        requests = mapping_of(self.document.get("requests"))
        counts = (requests.get("unfinished"), mapping_of(requests.get("journal")).get("unfinished"))
        return any(isinstance(count, int) and count > 1 for count in counts)

    @property
    def control(self) -> list[str]:
        """At what control request the first failure, or a rank that hangs, was, in a sentence; empty where at none."""
        ranks = [self.first] if self.first else self.schedulers if self.is_hang else []
        names = {name: rank for rank in reversed(ranks) if (name := str(rank.get("control") or ""))}
        return [f"{name_of(rank)} worked on {name}, a control request." for name, rank in names.items()]

    @property
    def last_step(self) -> list[str]:
        """In which step the first failure was, with which requests, in a sentence; empty where that is not known."""
        step = mapping_of(mapping_of(self.first.get("steps")).get("in_step"))
        if not step:
            return []
        rids = texts_of(step.get("rids"))[:_MAX_RIDS]
        who = f", with {', '.join(rids)}" if rids else ""
        batch = f"{step['mode']}, {step.get('size')} requests" if step.get("mode") else "not yet scheduled"
        return [f"It was in step {step.get('number')} ({batch}{who})."]

    def doing(self, process: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the places in which a process was, innermost first."""
        frames = self._stacks.get(process.get("pid", 0)) or texts_of(process.get("doing"))
        return tuple(place_of(frame) for frame in frames)

    def has_event(self, *names: str) -> bool:
        """Say whether one of these events is in the timeline."""
        return any(one.get("event") in names for one in self.events)


@dataclass(frozen=True)
class Finding:
    """What a rule found."""

    level: Level  # how well it is supported
    reasons: tuple[str, ...]  # what speaks for it, a sentence each
    steps: tuple[str, ...] = ()  # what to do next that follows from this incident, before what is always good to do


def name_of(process: Mapping[str, Any]) -> str:
    """Return what a process is called in a sentence."""
    return f"{process.get('title')} (pid {process.get('pid')})"
