"""Failures: exceptions, exits, error messages and kernel log lines, classified by ``knowledge/messages.yaml``.

Each event yields the class of the failure, the process that had it, and the part of SGLang. An event that follows from
another failure, that the server survived, or that comes after a request to stop the server, is not a cause.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from sglang_crashkit.judge.activity import is_own
from sglang_crashkit.judge.components import component_of, is_switched_on, is_telling, way_out
from sglang_crashkit.judge.finding import TELLING, Finding, Place, fill_steps, finding_of, steps_of
from sglang_crashkit.judge.knowledge import load, pattern, rows
from sglang_crashkit.judge.topology import Topology, name_nodes, topology_of
from sglang_crashkit.model.case import Case
from sglang_crashkit.model.event import (
    Arguments,
    Container,
    Error,
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
)
from sglang_crashkit.model.sample import Frame

#: Most characters of a matched text, a quote and a headline: a message may contain a whole configuration.
_MAX_TEXT, _MAX_QUOTE, _MAX_HEADLINE = 3000, 220, 1000
#: An exception counts as SGLang's if one of this many innermost frames is; frames further out are only callers.
_NEAR = 5
#: Seconds of work after a failure that show that the server survived it; after the end of a process, whose other
#: ranks may go on, or a failure that comes and goes; and seconds without work that show it idle.
_OUTLIVED_S, _LASTING_S, _IDLE_S = 3.0, 120.0, 30.0
#: The kernel's log may be in another time zone; times that differ by more seconds than this differ in any zone.
_ANY_ZONE_S = 15 * 3600.0
#: Seconds, or lines, within which the exception of the calling process follows a library's line.
_NEXT_S, _NEXT = 5.0, 5
#: The seconds for which a control request, such as a weight update, or a line beside it may belong to a failure.
_RECENT_S = 120.0
#: The weight of an exception whose class is cut off.
_CUT_OFF = 36
#: A retry that is logged this often is not a temporary error.
_MANY = 20
#: Components in which an asynchronous failure is noticed; it may have begun in another one.
_NOTICED = frozenset({None, "scheduler", "gpu", "kv_pool", "driver"})
_pattern = functools.partial(pattern, "failures")
_Event = TypeVar("_Event", Raised, Exit)


def _known(name: str) -> Any:
    return load("failures")[name]


class _Row(msgspec.Struct, kw_only=True):
    """A row of ``messages.yaml``."""

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
    blames: bool = False
    own: bool = False
    line: bool = False
    stays: bool = False
    weight: int = 0
    steps: list[str] = []

    def match(
        self, error: Error | None, text: str, places: str, *, is_started: bool, role: str
    ) -> dict[str, str] | None:
        """Return the named groups of the row's pattern in a text; None if the row does not match."""
        if self.when == ("start" if is_started else "serving") or (self.who and role != self.who):
            return None
        if (self.line and error is not None) or (self.type and error is None):
            return None
        if self.type and error is not None and not re.match(self.type, error.type.rpartition(".")[2]):
            return None
        if self.frames and not re.search(self.frames, places):
            return None
        if (found := re.search(self.words, text)) is None:
            return None
        named = {name: value for name, value in found.groupdict().items() if value}
        # The text names the process that failed, which may not be the process that logged it.
        if "holder" in named:
            return {**named, "who": f"{named['holder']} (pid {named['pid']})"}
        return {**named, "who": f"TP{named['rank']}"} if "rank" in named else named

    def kind_at(self, is_started: bool) -> str:
        """Return the class, which may differ before the server is ready."""
        return self.start_kind if self.start_kind and not is_started else self.kind

    def part_of(self, part: str | None) -> str | None:
        """Return the row's component if it has one; `part` is the component that frames and words show."""
        return self.part or (self.usual if part in _NOTICED and self.usual else part)

    def restart_at(self, is_started: bool) -> str:
        """Return whether a restart helps; empty if the class decides it."""
        is_of_phase = self.kind in ("exception_in_sglang", "exception", "cuda_fault")
        # A failure under load depends on timing or on a request; a failure of the start occurs at the next start too.
        return self.restart or (("yes" if is_started else "no") if is_of_phase else "")


@functools.cache
def _rows_of_messages() -> list[_Row]:
    return msgspec.convert(load("messages"), list[_Row])


def guess(case: Case) -> Finding | None:
    """Return a finding from the first error line of a server that was never ready; None without such a line."""
    bad = (one for one in case.events if isinstance(one, Line) and one.level in ("error", "critical"))
    first = next((one for one in bad if not _pattern("harmless").search(one.text)), None)
    if first is None or case.is_started:
        return None
    return finding_of(
        "guess", first.place, [_quoted(first, first.text)], who=first.who, component=component_of(words=first.text),
        text=_first_line(first.text), steps=_steps(_Row(kind=""), {}, first.text, case.arguments),
        kind="startup_failed" if any(isinstance(one, Arguments | Stage) for one in case.events) else None,
    )  # fmt: skip


class Failures:
    """Finds the events that explain a failure in a case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        work = [one for one in case.events if isinstance(one, Progress) and one.kind in ("prefill", "decode", "answer")]
        self._passed = [one for one in case.events if isinstance(one, Progress) and one.kind == "passed"]
        stages = [one for one in case.events if isinstance(one, Stage)]
        self._work, self._began = work, [one.place for one in (*work, *(it for it in stages if it.name == "ready"))]
        self._starts = [one for one in case.events if isinstance(one, Arguments) and one.values]
        self._stage = stages[-1].name if stages else ""
        self._ready = {(one.who, one.file): one.place for one in stages if one.name == "ready"}
        self._is_loading = not case.is_started and any(one.name == "weights" for one in stages[-2:])
        # Addresses of this node; `dist_init_addr` is the one of node 0.
        own = case.arguments.get("host"), not case.arguments.get("node_rank") and case.arguments.get("dist_init_addr")
        self._own = {"127.0.0.1", "::1", *(re.sub(r":\d+$", "", str(one)).strip("[]") for one in own)}
        self._exits = [one for one in case.events if isinstance(one, Exit)]
        self._raises = [one for one in case.events if isinstance(one, Raised)]  # in the order of their places
        self._errors = [one for one in case.events if isinstance(one, Line) and one.level in ("error", "critical")]
        bad = {one.file: one.place for one in sorted((*self._errors, *self._raises), key=lambda one: one.place)}
        infos = (one for one in case.events if isinstance(one, Line) and one.level == "info" and one.who)
        # What each process did last: its stages, and its lines after the last error of its log.
        self._calm: dict[tuple[str, str], list[Place]] = {}
        for one in (*stages, *(it for it in infos if it.place > bad.get(it.file, (0.0, 0)))):
            self._calm.setdefault((one.who, one.file), []).append(one.place)
        self._whole = {(one.error.type, one.error.frames[:1]) for one in self._raises if not one.is_cut}
        inner = {frame.function for one in self._raises for error in one.chain for frame in error.frames}
        self._raised_at_start = any(_pattern("start").search(name) for name in inner if name != "<module>")
        self._dumps = [one for one in case.events if isinstance(one, Stack) and one.fatal]
        on = [name for name in load("components") if is_switched_on(name, case.arguments)]
        self._on = ", ".join(on[:4])  # components that the arguments switch on
        # The server also sends itself a signal after a rank failed. A stop before this server worked is another's.
        stops = [one for one in case.stops if one.place > min(self._began, default=(0.0, 0))]
        self._asked = [one for one in stops if "sigquit" not in (text := one.text.lower()) and "child" not in text]
        self._end = min((one.place for one in stops if one.by != "signal" or one in self._asked), default=None)

    @functools.cached_property
    def _of_engines(self) -> list[Line]:
        """The errors of transfer engines, in order."""
        return [one for one in self._errors if component_of(words=one.text) in ("mooncake", "nixl")]

    def find(self) -> Iterator[Finding]:
        """Yield a finding for each event that shows one, adjusted by the other findings."""
        found = [*self._found()]
        if not any(one.weight >= 37 for one in found):
            found += self._vanished()
        if any(one.kind == "asked_to_stop" for one in found):
            found = [one for one in found if one.weight != _CUT_OFF]  # part of the output of Ctrl-C
        for one in found:
            one.is_consequence |= self._follows(one, found)
        # Only a name with a number is certain: several processes may have the same role.
        sure = sorted((it for it in found if it.weight >= 50 and not it.is_consequence), key=lambda it: it.where)
        first = next((it.who for it in (*sure, self._case.watched) if it and re.search(r"\d", it.who or "")), None)
        first = first or next(filter(None, (_only(self._case, one) for one in self._dumps)), None)
        stacks = (one.because[1:] for one in found if one.kind in ("aborted", "fatal_signal"))
        noticed = next((frames[0] for frames in stacks if frames), "")
        layout = topology_of(self._case)
        for one in found:
            self._name(one, first, layout)
            self._place(one, noticed)
            if one.kind == "connection_lost" and layout.nodes > 1:
                self._of_another_node(one, layout)
            is_transfer = one.component == "pd_transfer" and one.kind in ("transfer_failed", "transfer_stuck")
            if is_transfer and self._of_engines:
                one.next[:0] = steps_of("engine", line=self._of_engines[0].text[:170])
        yield from found

    def _follows(self, one: Finding, found: Sequence[Finding]) -> bool:
        """Return whether another finding explains this one."""
        if one.weight == _CUT_OFF:
            # An exception without its class explains less than any finding that tells what failed.
            others = (it for it in found if not (it.is_consequence and it.kind == "exited"))
            return any(other.weight > TELLING for other in others)
        if one.kind not in ("killed", "exited", "aborted") or one.weight >= TELLING:
            return False
        # A finding that is itself a consequence can explain an exit status, but not a signal.
        others = (it for it in found if it.weight > TELLING and (one.kind == "exited" or not it.is_consequence))
        is_told = any(it.where < one.where or not (one.where[0] and it.where[0]) for it in others)
        # SGLang ends its processes once one failed; a process that no stronger finding names failed by itself.
        is_named = one.who in {it.who for it in found if it.weight > TELLING}
        return is_told and (one.kind == "exited" or not one.who or is_named)

    def _name(self, one: Finding, first: str | None, layout: Topology) -> None:
        """Set who failed where the event of a finding does not tell it, or names a process that noticed it."""
        if one.kind in ("cuda_fault", "gpu_hardware", "aborted", "kv_pool_leak") and one.who is None and first:
            # The event is the GPU's or a library's; the name of the process comes from another finding.
            one.who, one.level = first, "supported"
        if one.kind in ("gpu_hardware", "host_oom", "cuda_fault") and not one.who:
            one.level = "supported"
        if one.kind == "disk_full" or (one.is_consequence and one.kind in _known("told_by_the_left")):
            # All ranks of one node have its address.
            is_alone = bool(self._starts) and layout.nodes == 1 and not layout.side
            peer = None if is_alone else _pattern("peer").search(one.headline)
            one.who = peer[1] if peer and peer[1] not in self._own else None

    def _place(self, one: Finding, noticed: str) -> None:
        """Set the part where the event of a finding does not tell it, or shows only where it was noticed."""
        arguments = self._case.arguments
        if one.kind == "cuda_fault" and one.component in _NOTICED:
            seen = (part for it in self._raises if (part := component_of(it.error.frames)) not in _NOTICED)
            said = ("aiter" for it in self._case.events if isinstance(it, Line) and "aiter" in it.text)
            on = (name for name in _known("suspects") if is_switched_on(name, arguments))
            one.component = next((name for some in (on, seen, said) for name in some), "gpu")
            if noticed and noticed not in one.headline:
                one.next = [*steps_of("noticed", place=noticed), *one.next]
            if way := way_out(one.component, arguments, is_seen=False):
                others = [step for step in one.next if not step.startswith("the scheduler part")]
                one.next = [*steps_of("suspect", part=one.component, way=way), *others]
        is_loading = one.kind in ("killed", "host_oom") and self._is_loading
        is_loading = is_loading and one.component in (None, "cgroup", "scheduler")
        if is_loading or (one.kind == "gpu_oom_at_start" and any("create_weights" in it for it in one.because)):
            one.component = "model_loader"
        is_of_stage = not self._case.is_started and one.kind in ("startup_failed", "unsupported_configuration")
        part = _known("part_of_stage").get(self._stage) if is_of_stage else None
        one.component = one.component or _known("usual_part").get(one.kind) or part

    def _of_another_node(self, one: Finding, layout: Topology) -> None:
        told = {server.values.get("node_rank") for server in self._case.servers}
        unseen = [node for node in layout.unseen_nodes if node not in told]
        names = name_nodes(unseen)
        one.who = names if len(unseen) == 1 else one.who
        one.headline = f"the connection to a rank of another node broke ({names or 'all seen'}): {one.headline}"
        one.next[:0] = steps_of("other_node", nodes=names)

    def _found(self) -> Iterator[Finding]:
        is_pair = len({event.side for event in self._case.events} - {""}) > 1
        for event in self._case.events:
            for finding in self._of(event):
                if not finding.where[1]:
                    finding.where = event.place
                if self._end is not None and finding.where > self._end and not finding.is_calm:
                    continue
                if event.follows:
                    finding.is_consequence, finding.level = True, "supported"
                if is_pair and finding.who and event.side and event.side not in finding.who:
                    finding.who += f" of {event.side}"
                yield finding
        work = [*self._work, *self._passed]
        served = max(((one.last_at, one.last_order) for one in work), default=None)
        # Answers show that the server works, unless error answers or failed health checks follow them.
        is_served = served is not None and not any(
            (one.kind == "failed" or (one.kind == "health" and one.status >= 400))
            and (one.last_at, one.last_order) > served
            for one in self._case.progress
        )
        if (self._case.is_started or is_served) and self._case.watched is None:
            said = [one.text for one in self._case.events if isinstance(one, Line | Progress | Stage)]
            pool, limit = (next(filter(None, map(_pattern(name).search, said)), None) for name in ("pool", "limit"))
            if pool and limit and int(limit["limit"]) < min(int(pool["context"]), int(pool["chunk"])):
                where = (self._case.last_at, 0)
                yield finding_of("small_pool", where, [limit[0]], pool=pool[1], context=pool[3], limit=limit[1])
            notes = [row["step"] for row in rows("failures", "notes") if any(map(row["pattern"].search, said))]
            # The components whose exceptions failed single requests.
            # Pydantic quotes the client's input after its own words.
            texts = ((one.error.frames, one.error.text.partition("input_value=")[0]) for one in self._raises)
            parts = [one for one in itertools.starmap(component_of, texts) if one]
            parts.sort(key=is_telling, reverse=True)
            answers = sum(one.count for one in work if one.kind in ("answer", "passed")) or None
            idle = self._case.last_at - max((one.last_at or float("inf") for one in work), default=float("inf"))
            yield finding_of(
                "no_failure", (self._case.last_at, 0), notes=notes, answers=answers, on=self._on,
                probe=any("probe failed" in note for one in self._case.containers for note in one.notes),
                idle=f"{idle:.0f}" if answers and idle > _IDLE_S else None, component=next(iter(parts), None),
            )  # fmt: skip
        for stop in self._asked[:1]:
            by = f"{_known('askers').get(stop.by, stop.by)}: {stop.text.strip()[:160]}"
            found = finding_of("asked_to_stop", stop.place, [_quoted(stop, stop.text)], by=by)
            if self._case.watched is not None and stop.who:
                found.who, found.level = stop.who, "established"
            yield found

    def _of(self, event: Event) -> Iterator[Finding]:
        levels = ("error", "critical") if self._case.is_started else ("error", "critical", "warning")
        match event:
            case Raised():
                yield from self._raised(event)
            case Line() if event.level in levels or (event.level and _pattern("serious").search(event.text)):
                yield from self._line(event, is_started=self._is_started(event))
            case Kernel():
                yield from self._kernel(event)
            case Exit():
                yield from self._exit(event)
            case Container():
                yield from self._container(event)
            case Gpu() if event.faults:
                because = [f"{event.source}: GPU {event.index}: {event.faults}"]
                yield finding_of("gpu_faults", because=because, gpu=event.index, name=event.name, faults=event.faults)
            case GpuKernel() if event.exception:
                part = component_of(words=f"{event.name} {event.text}", arguments=self._case.arguments)
                yield finding_of(
                    "gpu_exception", because=[_quoted(event, event.text or event.exception)], who=event.who,
                    component=part, exception=event.exception, kernel=event.name[:80],
                )  # fmt: skip
            case Stack() if event.fatal and not (event.is_cut and any(not one.is_cut for one in self._dumps)):
                yield from self._fatal(event)

    # -- exceptions

    def _raised(self, event: Raised) -> Iterator[Finding]:
        chain = [error for error in event.chain if error.type not in ("SystemExit", "CancelledError")]
        if any(error.type == "KeyboardInterrupt" for error in event.chain):
            yield finding_of("asked_to_stop", event.place, [_quoted(event, "KeyboardInterrupt")], by="Ctrl-C")
            return
        chain = chain or [one for one in event.chain if one.type == "SystemExit" and one.text != "0"]
        # Another process may have raised the same exception, with a complete traceback.
        likeness = event.error.type, event.error.frames[:1]
        has_twin = event.is_cut and event.error.frames and likeness in self._whole
        if not chain or self._is_outlived(event) or has_twin:
            return
        frames = [frame for error in chain for frame in error.frames]
        own = any("sglang/" in one or "srt/" in one for one in (chain[0].text, *(one.file for one in frames[:_NEAR])))
        # A user's script: its outermost frame is a module, and no frame is SGLang's, Ray's or an installed package's.
        called, types = event.chain[0].frames, " ".join(error.type for error in chain)
        is_alone = len(frames) == 1 and re.match("/(?!.*python3)", frames[0].file) and "Ray" not in types
        outer = [frame for frame in called if "runpy" not in frame.file]
        is_script = is_alone or any(frame.function == "<module>" for frame in outer[-1:])
        is_script = is_script and not any(re.search("-packages/|sglang|ray/", frame.file) for frame in called)
        arrived = f"{chain[0].type}: {chain[0].text[:_MAX_QUOTE]}"
        is_client = (is_script and not own) or (not frames and bool(_pattern("client_error").match(arrived)))
        is_client |= any(_pattern("client").search(frame.file) for frame in frames)
        # The log of another program, beside the log of a server that ran batches.
        served = {one.file for one in self._case.progress if one.kind in ("prefill", "decode")}
        is_client |= bool(served and frames) and event.file not in served and not any(map(is_own, frames))
        if (self._work or self._case.is_started) and not event.who and is_client:
            return  # a client of the server, with its output in the same evidence
        role = _role(event.who, frames)
        is_started = self._is_started(event, frames)
        is_of_request = any(_pattern("of_request").search(frame.file) for frame in frames)
        if role == "tokenizer" and is_started and self._case.watched is None and is_of_request:
            text = f"{chain[0].type}: {chain[0].text.strip()}"
            # Some types show an error of the code, and not of the request.
            what = "request_raised" if chain[0].type in _known("of_code") else "request_failed"
            part = component_of(frames, text, arguments=self._case.arguments)
            yield finding_of(what, because=[_quoted(event, text)], error=text[:140], code=chain[0].code, component=part)
            return
        is_thread = bool(event.thread) and not event.who and "Main" not in event.thread and is_started
        # The original exception tells most; if no row matches it, one that was raised because of it may match.
        is_cause_known = False
        for error in reversed(chain):
            said = f"{event.said} {error.type}: {error.text}"
            found = self._row_of(error, said, frames, is_started=is_started, role="" if is_thread else role)
            follows = found is not None and found[0].follows
            is_victim = follows and (error is not chain[0] or is_cause_known)
            if found and (found[0].sure or not is_thread) and not is_victim:
                # An exception that only wraps another, whose text it quotes, says less than that one.
                cause = chain[-1]
                quotes = cause.type == "AssertionError" or _first_line(cause.text) in error.text
                told = cause if 0 < found[0].weight < TELLING and cause.frames and quotes else error
                yield self._finding(event, *found, told, frames, is_started=is_started, role=role)
                return
            is_cause_known = is_cause_known or not follows
        error = chain[-1] if chain[-1].frames or len(chain) == 1 else chain[0]
        # Without arguments or a frame of SGLang, this may be the start of any program.
        is_ours = bool(self._starts) or not frames or any("sglang" in one.file or "srt/" in one.file for one in frames)
        kind = "startup_failed" if is_ours and not is_started else "exception_in_sglang" if own else "exception"
        kind = "thread_died" if is_thread else "exited" if error.type == "SystemExit" else kind
        is_telling_itself = error.text.strip() or (error.type == "AssertionError" and own)
        row = _Row(kind=kind, weight=50 if is_telling_itself else 38)
        yield self._finding(event, row, {}, error, frames, is_started=is_started, role=role)

    def _row_of(
        self, error: Error | None, text: str, frames: Sequence[Frame], *, is_started: bool, role: str
    ) -> tuple[_Row, dict[str, str]] | None:
        name = error.type.rpartition(".")[2] if error else ""
        words = _pattern("quotes").sub("''", text[:_MAX_TEXT]) if error and is_started else text[:_MAX_TEXT]
        places = "\n".join(f"{frame.function} ({frame.file})" for frame in frames[:60])
        for row in _rows_of_messages():
            if is_started and name in _known("of_values") and not (row.type or row.frames or row.own):
                continue
            found = row.match(error, words, places, is_started=is_started, role=role)
            if found is not None:
                return row, found
        if error and is_started and not self._began and not frames and self._case.watched is None:
            # Words alone do not show the phase, so the rows of a start are tried too.
            return self._row_of(error, text, frames, is_started=False, role=role)
        return None

    def _finding(
        self, event: Raised, row: _Row, named: dict[str, str], error: Error, frames: Sequence[Frame], *,
        is_started: bool, role: str,
    ) -> Finding:  # fmt: skip
        kind, arguments = row.kind_at(is_started), self._case.arguments
        part = row.part_of(self._part_of_raised(event, kind, error, frames))
        part = part or component_of(words=error.text, arguments=arguments)
        if kind == "startup_version" and part is None and error.frames and "/" in (file := error.frames[0].file):
            # The package that raised it; in SGLang's code, the component of the module that could not be imported.
            part = component_of(words=file) if is_own(error.frames[0]) else file.partition("/")[0] or None
        # Python imports the package before the module that `python -m` names.
        in_launch = "launch_server|cli/serve|entrypoints/(?:engine|http_server)"
        is_launch = any(re.search(in_launch, it.file) or it.function == "_get_module_details" for it in frames)
        is_launch = is_launch and not is_started
        who = named.get("who") or row.who_is or event.who
        if not who and not is_started and role == "tokenizer":
            # Before the server is ready, the tokenizer's functions run in the main process.
            who = "main process" if is_launch else ""
        elif not who:
            who = self._who_raised(event, kind, part, role) or ("main process" if is_launch else "")
            who = who or ("" if is_started else event.side)
            if who in ("", "scheduler") and (gpu := _pattern("full_gpu").search(error.text)):
                who = " on ".join(filter(None, (who, gpu[0])))
        # The process that a text blames did not raise the exception itself.
        told = (event.who or (is_launch and "main process") or role) if named.get("who") else who
        inner = next((one for one in error.frames if "sglang/" in one.file), error.frames[0] if error.frames else None)
        text, name = _first_line(error.text), error.type.rpartition(".")[2]
        if not name:
            text = "the traceback is cut off before its last line, which names it"
        side = f" of the {event.side} server" if event.side else ""
        is_telling_itself = error.text.strip() or error.type == "AssertionError"
        # One line of an excerpt does not show whether the server was ready.
        is_phase_known = frames or self._began or self._starts or self._case.watched is not None
        return finding_of(
            "raised",
            because=[_quoted(event, f"{error.type or 'an exception'}: {text}"), *map(str, error.frames[:4])],
            most=_MAX_HEADLINE, kind=kind, who=who,
            level="established" if row.sure and frames and not event.is_cut else "supported",
            component=part, restart=row.restart_at(is_started) if is_phase_known else row.restart,
            subject=f"the {told} server" if told and told == event.side else f"{told or 'a process'}{side}", name=name,
            thread=event.thread, place=inner and f"{inner.function} ({inner.file}:{inner.line})",
            phase=is_phase_known and ("while it served" if is_started else "before it was ready"), text=text,
            steps=_steps(row, named, error.text, arguments, error.frames),
            way=way_out(part, arguments, is_seen=bool(frames)),
            code=error.code, batch=is_started and self._case.batch_before(event), on=not name and self._on,
            controls=is_started and ", ".join(self._case.controls_before(event, _RECENT_S)),
            imports=not name and any(one.function == "<module>" for one in frames),
            is_consequence=row.follows,
            weight=min(row.weight or 70, 100 if is_telling_itself else 38 if name else _CUT_OFF),
        )  # fmt: skip

    def _part_of_raised(self, event: Raised, kind: str, error: Error, frames: Sequence[Frame]) -> str | None:
        """Return the part that an exception's frames and words show; `frames` are those of its whole chain."""
        # The line before a traceback belongs to it only if it ends with a colon; else it may be any line.
        said = "" if "hit an exception" in event.said or not event.said.rstrip().endswith(":") else event.said
        others = " ".join(one.text for one in event.chain if one is not error)
        words = f"{error.type}: {_first_line(error.text)} {said} {others}"
        part = component_of(error.frames or frames, words, arguments=self._case.arguments)
        # The original exception may be in a component that every batch passes; other frames then tell more.
        outer = component_of(frames, arguments=self._case.arguments)
        part = outer if is_telling(outer) and part in (None, "scheduler") else part
        if kind == "connection_lost" and any("torch/distributed/" in frame.file for frame in error.frames[:1]):
            return "distributed_init"
        return part

    def _who_raised(self, event: Raised, kind: str, part: str | None, role: str) -> str:
        """Return the process that raised an exception in which nothing names it; empty if nothing shows it."""
        known = role if role != "scheduler" or not self._case.schedulers else ""
        # Ray names the actor in whose process an exception was raised; the innermost actor is last.
        texts = [one.text for one in event.chain if not role and kind in ("startup_failed", "exception")]
        actors = [found[1] for text in texts if (found := re.search(r"\bray::(\w{1,80})[.:]", text))]
        known = known or (event.side if part in _known("of_a_pair") else "") or (actors[-1] if actors else "")
        return known or _only(self._case, event) or ("" if event.is_cut and role == "scheduler" else role)

    def _next_start(self, event: Event) -> Place:
        """Return the place of the next start of the event's server, or of any beside its log; infinity without one."""
        own = [one for one in self._starts if one.file == event.file] or self._starts
        return min((one.place for one in own if one.place > event.place), default=(float("inf"), 0))

    def _is_outlived(self, event: Event, secs: float = _OUTLIVED_S) -> bool:
        """Return whether the server kept working for `secs` after an event, as after a request that it refused."""
        if isinstance(event, Raised):
            is_of_sglang = any("sglang/srt/" in one.file for one in event.error.frames)
            if event.who == "detokenizer" or (event.thread and (is_of_sglang or not event.error.type)):
                return False  # no other process or thread takes over its work
        if event.at and self._ready.get((event.who, event.file), (0.0, 0)) > event.place:
            return True
        end = self._next_start(event)
        for one in (*self._work, *(one for one in self._passed if one.file == event.file)):
            is_other = one.who and event.who and one.who != event.who and one.kind != "answer"
            if is_other or one.side != event.side or one.node != event.node or (one.last_at, one.last_order) > end:
                continue
            later = one.last_at - max(event.at, getattr(event, "last_at", 0.0)) if one.last_at and event.at else 0.0
            is_timed = later or one.last_at or secs > _OUTLIVED_S
            if one.last_order > event.order and (later >= secs or not is_timed):
                return True
        return False

    def _is_started(self, event: Event, frames: Sequence[Frame] = ()) -> bool:
        if self._case.watched is not None:
            return not self._case.watched.is_starting
        place = event.place
        last_start = max((one.place for one in self._starts if one.place <= place), default=(0.0, 0))
        if any(last_start <= one <= place for one in self._began):
            return True
        names = " ".join(frame.function for frame in frames)
        if _pattern("loop").search(names):
            return True
        if last_start != (0.0, 0) or _pattern("start").search(names) or not (frames or self._began or not self._stage):
            return False
        if not frames and not self._case.is_started:
            # A line is from the same phase as the exceptions of the case.
            return not self._raised_at_start
        return self._case.is_started or not frames or any(_pattern("serves").search(frame.file) for frame in frames)

    # -- lines

    def _line(self, event: Line, *, is_started: bool) -> Iterator[Finding]:
        # A warning during the start may be why it failed, if no other finding tells.
        most = 37 if event.level == "warning" else 100
        is_passing = most == 100 and event.count < _MANY and not _pattern("serious").search(event.text)
        is_harmless = (is_passing and _pattern("harmless").search(event.text)) or "deprecated" in event.text
        because = [_quoted(event, event.text)]
        text = _first_line(event.text)
        if "leak detected" in event.text and self._is_outlived(event):
            yield finding_of("leak_warned", (0.0, -1), because, text=text)
        if is_harmless and all(isinstance(one, Line) for one in self._case.events):
            yield finding_of("only_warned", (float("inf"), 1), because, text=text)
        found = self._row_of(None, event.text, (), is_started=is_started, role=_role(event.who, ()))
        if is_harmless or found is None or self._is_survived(event, found[0], is_started=is_started):
            return
        row, named = found
        kind = row.kind_at(is_started)
        # An incident holds only the logs of its server.
        is_foreign = self._case.watched is None and bool(self._case.logs) and event.file not in self._case.logs
        if kind.startswith("startup_") and is_started and is_foreign:
            return  # another program's trouble is no failed start of a server that serves
        part, code = component_of(words=event.text, arguments=self._case.arguments), ""
        by_words = "router" if _pattern("router_line").search(event.text) else ""
        by_pid = f"worker (pid {named['pid']})" if "pid" in named else ""
        who = named.get("who") or row.who_is or event.who or by_words or by_pid
        if not who and (following := self._next(self._raises, event)):
            # A library's line names no process; the exception that its caller raises next does.
            frames = [frame for error in following.chain for frame in error.frames]
            who, code = following.who or _role("", frames), following.error.code
            of_frames = component_of(frames, arguments=self._case.arguments)
            part = of_frames if part in _NOTICED and is_telling(of_frames) else part
        part = row.part_of(part)
        who = who or self._who_ended(event, kind, part)
        if kind == "peer_lost":
            who = next((one for one in ("prefill", "decode") if one in event.text.lower() and one != event.side), who)
        # The server of the other side says itself what failed there, or its transfer engine does.
        raised = (one.side for one in self._raises if one.error.type)
        engines = (one.side for one in self._of_engines if abs(one.at - event.at) < _NEXT_S)
        is_blamed = row.blames and any(side not in ("", event.side) for side in (*raised, *engines))
        # What a person tried, without a time, beside the server's own log; a library's line is of the server.
        is_note = is_foreign and not event.at and not who and not _pattern("library_line").search(event.text)
        yield finding_of(
            "line", because=because, kind=kind, who=who, component=part,
            restart=row.restart_at(is_started or not (self._began or self._starts)), side=event.side, text=text,
            code=code, steps=_steps(row, named, event.text, self._case.arguments),
            way=is_telling(part) and way_out(part, self._case.arguments, is_seen=True),
            is_consequence=row.follows or is_blamed,
            weight=min(most, 38 if is_note else 100, row.weight or (45 if event.level == "critical" else 41)),
        )  # fmt: skip

    def _is_survived(self, event: Line, row: _Row, *, is_started: bool) -> bool:
        """Return whether the process that logged a line, or its server, went on after it."""
        is_end = _pattern("end_of_process").search(event.text)
        if self._is_outlived(event, _LASTING_S if is_end or row.stays else _OUTLIVED_S):
            return True
        calm, end = self._calm.get((event.who, event.file), ()), self._next_start(event)
        return bool(event.at) and not is_started and any(event.place < one < end for one in calm)

    def _who_ended(self, event: Line, kind: str, part: str | None) -> str:
        """Return the process that a line without a name is of, by what ended after it; empty if nothing shows it."""
        ended = self._next(self._exits, event)
        silent = self._fell_silent(event) if _pattern("end_of_process").search(event.text) else ""
        who = (ended.who if ended else "") or silent or (event.side if part in _known("of_a_pair") else "")
        return who or ((_only(self._case, event) or event.side) if kind in _known("of_a_rank") else "")

    def _next(self, events: Sequence[_Event], event: Event) -> _Event | None:
        """Return the first of `events`, sorted by place, after `event` if it follows at once; else None."""
        place = bisect.bisect_left(events, event.place, key=lambda one: one.place)
        later = (it for it in itertools.islice(events, place, None) if it.file == event.file)
        near = next((it for it in later if it.order > event.order), None)
        if near is None or near.at - event.at <= _NEXT_S or near.order == event.order + 1:
            return near
        # A line without a time has the time of the line before it.
        is_beside = near.order <= event.order + _NEXT and (not event.at or near.at - event.at <= _RECENT_S)
        return near if is_beside else None

    # -- the kernel, ends, containers

    def _kernel(self, event: Kernel) -> Iterator[Finding]:
        events, facts = self._case.events, event.facts
        told = f"{event.kind} {event.number} {event.text}"
        row = next((one for one in rows("failures", "kernel") if one["pattern"].search(told)), None)
        if row is None:
            return
        is_known = bool(self._names(event.pid))
        harm = self._raises or self._exits or any(isinstance(one, Line) and one.level == "critical" for one in events)
        is_well = self._is_outlived(event) or (bool(self._work) and not harm and not event.at)
        is_ours = is_known or not event.name or row.get("any_program") or _pattern("ours").match(event.name)
        if not is_ours or (row.get("well") and is_well and (not is_known or event.kind == "hung_task")):
            return
        pids = {one.pid for one in self._case.kernel if one.kind == event.kind and one.pid}
        killed = [one.who for one in self._exits if one.signal == "SIGKILL"]
        if event.kind == "oom_count" and not killed:
            return  # a count since the container's start
        if event.kind == "oom_kill" and not event.pid and pids:
            # A later line of the same kill names the process.
            return
        last = max((one.last_at for one in self._work), default=0.0)
        if row["row"] == "xid_of_program" and not is_known and event.at and last - event.at > _ANY_ZONE_S:
            return  # of another program, or of an earlier server
        by_pid = bool(row.get("by_pid"))
        pid = event.pid or (pids.pop() if by_pid and len(pids) == 1 else 0)
        gpu, library = str(facts.get("gpu", "")), str(facts.get("library") or "")
        who = event.who or self._named(pid) or self._rank_of(gpu) or (f"pid {pid}" if by_pid and pid else None)
        who = killed[0] if event.kind == "oom_count" else who
        if event.kind == "segfault" and not who:
            # The kernel logs the thread's id, other sources the process's; a stack tells more than this line.
            died = {one.who for one in self._exits if one.signal == "SIGSEGV"}
            if self._dumps and not library:
                return
            who = died.pop() if len(died) == 1 else None
        said = [one.text for one in events if isinstance(one, Line) and "host memory" in one.text]
        parts = (component_of(words=one) for one in said if row["row"] == "oom_kill")
        part = component_of(words=library) or next(filter(is_telling, parts), None)
        size = f", {int(facts['anon_kb']) >> 20} GiB of its own" if "anon_kb" in facts else ""
        is_disk = event.kind == "hung_task" and any(one.kind == "disk" for one in self._case.kernel)
        yield finding_of(
            "disk" if is_disk else row["row"], because=[_quoted(event, event.text)], text=event.text[:_MAX_QUOTE],
            who=who, victim=who or event.name, library=library,
            level=None if facts.get("is_first", True) else "supported", pid=f"{pid}{size}" if pid else None,
            component=part, number=event.number, gpu=gpu, fault=_known("xids").get(event.number),
        )  # fmt: skip

    def _names(self, pid: int) -> list[str]:
        """Return the names of the processes with a pid, by their own events and by the texts of exits."""
        known = [one.who for one in self._case.processes.values() if pid and one.pid == pid]
        return known + [one.who for one in self._exits if pid and re.search(rf"\bpid[= ]{pid}\b", one.text)]

    def _named(self, pid: int) -> str | None:
        return next(filter(None, self._names(pid)), None)

    def _rank_of(self, bus: str) -> str | None:
        """Return the rank on the GPU with a bus address, if the order of the GPUs shows it."""
        if self._case.arguments.get("base_gpu_id") or self._case.arguments.get("nnodes", 1) not in (1, None):
            return None
        index = next((one.index for one in self._case.gpus if one.bus and bus.lower().startswith(one.bus)), None)
        size = self._case.arguments.get("tp_size")
        used = [one.used_mb > one.total_mb / 2 for one in self._case.gpus]
        fits = index < size if isinstance(size, int) and index is not None else all(used)
        return f"TP{index}" if index is not None and fits else None

    def _exit(self, event: Exit) -> Iterator[Finding]:
        seen = self._case.watched
        if event.signal in _known("orderly") or (seen is None and event.code in (0, 130, 143)):
            return
        who = event.who or self._closed() or _only(self._case, event)
        kind = _known("signals").get(event.signal, "fatal_signal" if event.signal else "exited")
        how = event.signal or f"exit status {event.code}"
        kind = "startup_failed" if kind == "exited" and seen is not None and seen.is_starting else kind
        kind = _known("lost_role").get(event.who, kind) if kind == "exited" or seen is not None else kind
        yield finding_of(
            "ended", because=[_quoted(event, event.text or how)], kind=kind, who=who, how=how,
            component=part if is_telling(part := component_of(words=event.text)) else None,
            level="established" if event.is_seen else "supported", text=seen and event.text,
            weight=39 if event.signal else 20,
        )  # fmt: skip

    def _fell_silent(self, event: Event) -> str:
        """Return the one scheduler that ran batches until an event while several others went on; empty without one."""
        own = sorted((one for one in self._work if one.who and one.file == event.file), key=lambda one: one.last_order)
        last = {one.who: one for one in own}
        silent = [one for one in last.values() if one.last_order < event.order]
        is_known = len(silent) == 1 and len(last) > 2 and event.at - silent[0].last_at < _IDLE_S
        return silent[0].who if is_known else ""

    def _closed(self) -> str:
        """Return the rank that closed its connection, by NCCL's messages of other ranks; empty if not exactly one."""
        texts = (one.text for one in self._case.events if isinstance(one, Line) and "closed by localRank" in one.text)
        ranks = {int(found[1]) for text in texts if (found := re.search(r"closed by localRank (\d{1,4})", text))}
        return f"TP{ranks.pop()}" if len(ranks) == 1 else ""

    def _container(self, event: Container) -> Iterator[Finding]:
        told = f"{event.reason}/{event.state}/{event.code}"
        for row in rows("failures", "containers"):
            notes = reversed(event.notes) if row.get("by_message") else event.notes
            note = next((one for one in notes if "note" in row and row["note"].search(one)), "")
            is_again = event.restarts > 0 or not row.get("again")
            if not row["pattern"].search(told) or ("note" in row and not note) or not is_again:
                continue
            because = f"{event.source}: {event.name or 'it'}: {event.reason or event.state} (exit code {event.code})"
            found = self._row_of(None, note, (), is_started=False, role="") if row.get("by_message") else None
            known = found[0] if found else _Row(kind=row.get("kind", ""))
            yield finding_of(
                row["row"], because=[because, note] if note else [because], name=event.name, kind=known.kind,
                component=known.part, state=event.state, restarts=event.restarts or None, note=note,
                probe=note[:140], steps=known.steps, is_known=bool(found),
            )  # fmt: skip
            return

    def _fatal(self, event: Stack) -> Iterator[Finding]:
        words = _known("fatal_words")
        kind = next((words[word] for word in words if word in event.fatal), "fatal_signal")
        # If the head of faulthandler's output stands alone, its frames may be in another file.
        rest = [one.sample for one in self._dumps if one.is_cut]
        sample = rest[0] if len(rest) == 1 and not event.sample.threads and not event.sample.native else event.sample
        thread = next((one for one in sample.threads if one.active), next(iter(sample.native or sample.threads), None))
        # The innermost frames belong to the handler of the signal.
        frames = [one for one in (thread.frames if thread else ()) if not _pattern("handlers").match(one.function)]
        part = component_of(frames, arguments=self._case.arguments)
        role = _role("", frames) or _role("", [frame for one in sample.threads for frame in one.frames])
        is_there = thread is None or thread.active or thread.name or sample.native
        if not is_there or not is_telling(part):
            # Ask all threads if the one that faulted is missing; else those that are in a C call from SGLang's code.
            stacks = (one.frames for one in sample.threads if one.frames)
            others = (stack for stack in stacks if not is_there or "sglang/" in stack[0].file)
            parts = [component_of(stack, arguments=self._case.arguments) for stack in others]
            part = next(filter(is_telling, parts), part or next(filter(None, parts), None))
        known = self._closed() or self._named(sample.pid)
        who = known or event.who or self._fell_silent(event) or _only(self._case, event)
        who = who or role or ("scheduler" if self._is_loading else "")
        is_told = known or sample.title or self._case.watched is not None or self._case.arguments.get("tp_size") == 1
        because = [_quoted(event, f"Fatal Python error: {event.fatal}"), *map(str, frames[:4])]
        values: dict[str, Any] = {"who": who, "part": part, "place": next(iter(frames if is_there else ()), None),
                  "fatal": event.fatal, "way": way_out(part, self._case.arguments, is_seen=True)}  # fmt: skip
        is_started = self._is_started(event, frames)
        row = self._row_of(None, "", frames, is_started=is_started, role="scheduler")
        if row is not None and kind == "aborted":
            known_row, steps = row[0], _steps(*row, "", {})
            yield finding_of("aborted_in", because=because, kind=known_row.kind, component=known_row.part or part,
                             steps=steps, **values)  # fmt: skip
        # A thread that aborts because of another one's fault, such as a watchdog's, tells nothing.
        weight = 75 if kind != "aborted" else 39
        level = "established" if is_told else "supported"
        yield finding_of("fatal", because=because, kind=kind, level=level, component=part, weight=weight, **values)

    def _vanished(self) -> Iterator[Finding]:
        """Yield a finding if a server that worked starts again in the same log, which does not show how it ended."""
        if any(one.reason == "Completed" and one.restarts for one in self._case.containers):
            return
        for start in (one for one in self._case.servers if one.values):
            own = [one for one in self._case.events if one.file == start.file]
            is_again = any(isinstance(one, Progress) and one.order < start.order for one in own)
            if is_again and any(isinstance(one, Stage) and one.order > start.order for one in own):
                yield finding_of("starts_anew", start.place, [f"{start.source}: it starts again"])
                return


def _role(who: str, frames: Sequence[Frame]) -> str:
    if who.startswith(("detokenizer", "tokenizer", "router")):
        return who.split()[0]
    if who:
        return "scheduler"
    # A module's frame shows no role: processes of all roles import modules.
    places = [f"{frame.function} ({frame.file})" for frame in reversed(frames) if frame.function != "<module>"]
    found = (row["role"] for row in rows("failures", "roles") for place in places if row["pattern"].search(place))
    return next(found, "")


def _only(case: Case, event: Event) -> str:
    """Return the only scheduler's name; empty if there may be several, or if the event is from a node without it."""
    schedulers = {one.who for one in case.schedulers}
    if len(schedulers) != 1:
        return ""
    # A node may have one rank of a larger group.
    if (layout := topology_of(case)).is_known and layout.ranks != layout.nodes:
        return ""
    who = schedulers.pop()
    is_here = not event.node or any(one.who == who and one.node == event.node for one in case.events)
    return who if is_here else ""


def _steps(
    row: _Row, named: dict[str, str], text: str, arguments: dict[str, Any], frames: Sequence[Frame] = ()
) -> list[str]:
    """Return a row's steps, filled from its pattern's groups, and steps about options and arguments in the text.

    Last come the set arguments that share two adjacent words of their names with a function that failed.
    """
    steps = list(fill_steps(row.steps, named))
    if row.follows or row.kind == "compile_failed":  # its message has the compiler's options
        return steps
    told = [f"--{name.replace('_', '-')} ({str(arguments[name])[:40]} here)"
            for name in _pattern("argument").findall(text[:_MAX_TEXT]) if name in arguments]  # fmt: skip
    options = list(dict.fromkeys([*_pattern("option").findall(text[:_MAX_TEXT]), *told]))[:4]
    functions, failed = " ".join(one.function for one in frames[:4]), []
    for name, value in arguments.items():
        pairs = map("_".join, itertools.pairwise(name.split("_")))
        if value not in (None, False, "") and any(len(pair) > 8 and pair in functions for pair in pairs):
            failed.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"[:40]))
    return [
        *steps,
        *steps_of("named_options", options=", ".join(options)),
        *steps_of("set_options", options=", ".join(failed[:3])),
    ]


def _quoted(event: Event, text: str) -> str:
    where = " ".join(filter(None, (event.source, event.who)))
    return f"{where}: {_first_line(text)}" if where else _first_line(text)


def _first_line(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    # A compiler's message has the place in its first line and the error in its last one.
    return (f"{first} {rest.strip().rpartition(chr(10))[2]}" if first.endswith(":") and rest else first)[:_MAX_QUOTE]
