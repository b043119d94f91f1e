"""Signs of a stall in the text of logs: watchdogs, health checks, time limits, and whether work continues."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from sglang_crashkit.judge import topology
from sglang_crashkit.judge.components import component_of, is_switched_on, is_telling, way_out
from sglang_crashkit.judge.finding import Finding, Place, finding_of, steps_of
from sglang_crashkit.judge.knowledge import load, pattern, rows
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.event import Arguments, Collective, Event, Exit, Kernel, Line, Raised, Stack, Stage

_MAX_TEXT = 4000
#: Activity within this many seconds of the end of the evidence counts as lasting to the end.
_AT_THE_END = 60.0
#: Seconds without a batch or an answer after which requests in flight count as stuck; a long prompt takes less.
_STANDS_S = 60.0
#: A health check that fails this many seconds after its own time limit shows that the event loop was blocked.
_LATE = 40.0
#: Up to this many KV transfers in flight are normal.
_FEW_TRANSFERS = 8
_HALF_HOUR, _DAY_S = 1800.0, 86400.0
#: The longest that a side waits for a transfer, in seconds; the limits are minutes.
_WAITED_S = 1800.0
OTHER_SIDE = {"prefill": "decode", "decode": "prefill"}
_rows, _pattern = functools.partial(rows, "signs"), functools.partial(pattern, "signs")


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """A log line, or the text of an exception, that matches a row of ``signs`` in ``signs.yaml``."""

    name: str
    text: str
    who: str
    event: Line | Raised
    groups: tuple[str, ...]
    process: Process
    is_of_hang: bool
    is_ending: bool


class Signs(msgspec.Struct, kw_only=True):
    """All signs of a case, in order."""

    found: list[Sign]
    where: Place | None = None  # of the first sign of a hang; None without one
    last_batch: float = 0.0  # when the last batch ran; 0.0 if no batch was seen or its time is not known
    last_answer: float = 0.0  # when the server last answered a request or a health check
    is_hang: bool = False  # a process waited too long, and no batch ran after that
    is_alive: bool = False  # batches, answers or health checks last to the end, and nothing hangs or failed
    stands_for: float = 0.0  # seconds for which requests in flight made no progress; 0.0 if they make progress
    is_unwell: bool = False  # the health check fails to the end, for longer than it may fail during a start
    was_ended: bool = False  # a watchdog or a time limit ended a process
    batch: str = ""  # the last batch and its rank, in words; empty if there was no batch
    side: str = ""  # the side of a pair (prefill or decode) that ran that batch
    last_word: str = ""  # the last log line or control request after the last batch; empty without one
    part: str | None = None  # the component that `last_word` names; else ``gpu`` if all GPUs are at full use
    complaint: list[str] = []  # a report by a person, outside the server's log, that the server makes no progress
    told: list[str] = []  # the first sign of a hang of each name, with its source

    def all(self, *names: str) -> list[Sign]:
        """Return the signs with these names."""
        return [one for one in self.found if one.name in names]


def read(case: Case) -> Signs:
    """Return the signs of a case."""
    found: list[Sign] = []
    for process in case.processes.values():
        events: list[Line | Raised] = [*process.lines, *(one for one in process.raised if not one.follows)]
        found += [sign for event in events for sign in _of_event(process, event)]
    found.sort(key=lambda one: one.event.place)
    signs = Signs(found=found)
    signs.batch, signs.side = _last_batch(case.processes.values())
    places = [(one, (one.last_at or one.at, one.last_order)) for one in case.progress]
    lines = (one for process in case.processes.values() for one in process.lines)
    batches = [(0.0, 0), *(one.place for one in lines if _pattern("batch").match(one.text))]
    batches += [place for one, place in places if one.kind in ("prefill", "decode")]
    answers = [(0.0, 0), *(place for one, place in places if one.kind in ("answer", "refused")
                           or (one.kind == "health" and one.status < 400))]  # fmt: skip
    good = max(*batches, *answers, (case.ready_at or 0.0, 0))
    signs.last_batch, signs.last_answer = max(batches)[0], max(answers)[0]
    hang = [one for one in found if one.is_of_hang]
    signs.where = next((one.event.place for one in hang), None)
    ended = [one for one in hang if one.is_ending and not _is_soft(one)]
    goes_on = signs.last_batch > 1.0 + max((_last_at(one.event) for one in hang), default=0.0)
    signs.was_ended = bool(ended) or (case.watched is not None and case.watched.is_ended)
    is_unanswered = bool(_probe(case)) and (case.is_started or 0 < signs.last_batch <= case.last_at)
    # An incident's stacks are judged only after a process waited too long, so an incident counts as a hang.
    signs.is_hang = bool(ended) or (bool(hang) and not goes_on) or is_unanswered or case.watched is not None
    # Stacks that were taken after the last sign of life do not show that the server still works.
    looked = max((event.place for event in case.events if isinstance(event, Stack) and not event.fatal), default=good)
    is_seen = len(batches) + len(answers) > 2 or case.is_started
    is_recent = goes_on or good[0] >= case.last_at - _AT_THE_END
    signs.last_word, is_begun = _last_word(case, max(batches), signs.where or (float("inf"), 0))
    # If all GPUs are at full use in a hang, they run a kernel that waits or does not end.
    is_spinning = bool(case.gpus) and all(one.use >= 95.0 for one in case.gpus)
    signs.part = component_of(words=signs.last_word) or ("gpu" if is_spinning else None)
    prose = (one for one in case.events if isinstance(one, Line) and one.file not in case.logs and not case.watched)
    told = [f"{one.source}: {one.text[:160]}" for one in prose if _pattern("complaint").search(one.text)]
    told += [f"{one.source}: a person stopped a waiting program with Ctrl-C" for one in case.gave_up]
    signs.complaint = told[:1]
    is_told = signs.complaint or (case.gpus and all(one.is_waiting for one in case.gpus))
    signs.stands_for = _stands_for(case, is_begun=is_begun, least=0.0 if is_told else _STANDS_S)
    failing = [one for one in case.progress if one.kind == "health" and one.status >= 500]
    signs.is_unwell = any(one.last_at - one.at >= _STANDS_S and one.last_at > good[0] for one in failing)
    is_wrong = signs.is_hang or bool(signs.stands_for) or _failed_after(case, good, max(batches))
    signs.is_alive = is_seen and is_recent and looked <= good and not is_wrong
    signs.told = [f"{one.text.strip()[:160]} ({one.event.source or 'log'})" for one in _once(hang)]
    return signs


def _last_batch(processes: Iterable[Process]) -> tuple[str, str]:
    """Return the last batch of these processes in words, and its side of a pair; empty strings without a batch."""
    every = [(one, its) for its in processes for one in its.progress if one.kind in ("prefill", "decode")]
    if not every:
        return "", ""
    one, process = max(every, key=lambda it: (it[0].last_at or it[0].at, it[0].last_order))
    who = f" of {topology.short_name(process)}" if process.ranks else ""
    return f"a {one.kind} batch{who} ({one.running} running, {one.queued} queued)", one.side


def _stands_for(case: Case, *, is_begun: bool, least: float) -> float:
    """Return the seconds for which requests are in flight without a batch or an answer; 0.0 if fewer than `least`.

    Answered health checks do not count: the main process may answer them by itself.
    """
    progress = case.progress
    work = [one for one in progress if one.kind in ("prefill", "decode")]
    last = max(work, key=lambda one: (one.last_at, one.last_order), default=None)
    if last is None or not last.last_at:
        # With a complaint (`least` is 0), a started server that has answered no request counts as stuck.
        return 0.0 if least or not case.is_started or any(one.kind == "answer" for one in progress) else 0.1
    waiting = any(one.kind == "load" and one.queued for one in progress)
    asked = max((one for one in progress if one.kind == "control"), key=lambda one: one.last_at, default=None)
    if asked and asked.last_at >= last.last_at and re.match(r"/(?:pause|release)", asked.text) and not waiting:
        return 0.0  # a request paused it, such as a trainer's during training
    answered, order = max(((one.last_at, one.last_order) for one in progress if one.kind == "answer"), default=(0.0, 0))
    # The log line of a prefill batch does not count that batch's new requests as running.
    is_busy = last.running > 0 or last.queued > 0 or last.kind == "prefill"
    is_idle = bool(least and case.gpus) and not any(one.use for one in case.gpus)
    # A streamed answer is logged before it ends; the order within one second counts only with a complaint.
    is_open = answered < last.last_at or (not least and (answered, order) < (last.last_at, last.last_order))
    if not (waiting or is_begun or (is_busy and not is_idle and is_open)):
        return 0.0
    # Only times of the same log are compared: the clocks of stacks or of another host may differ.
    own = [event for event in case.events if event.file == last.file]
    if any(isinstance(event, Arguments) and event.values and event.order > last.last_order for event in own):
        return 0.0  # the server was restarted
    silent = max(map(_last_at, own)) - max(last.last_at, answered)
    return max(silent, 0.1) if silent >= least else 0.0


def _last_word(case: Case, batch: Place, end: Place) -> tuple[str, bool]:
    """Return the last own log line or control request from `batch` to `end`, and whether it begins an operation."""
    progress = case.progress
    found = [((one.last_at, one.last_order), one.text) for one in progress if one.kind == "control"]
    logs = {one.file for one in progress or case.events}
    found += [(one.place, one.text) for process in case.processes.values() for one in process.lines
              if one.level in ("info", "warning") and one.file in logs
              and one.place < end and _pattern("own_word").match(one.text)]  # fmt: skip
    place, text = max(found, default=((0.0, 0), ""))
    return (text[:120], bool(_pattern("begins").match(text))) if batch < place else ("", False)


def _failed_after(case: Case, good: Place, batch: Place) -> bool:
    """Return whether a failure follows the last sign of life; after a process's end only a batch is such a sign."""
    for event in reversed(case.events):
        if event.at and event.place < batch:
            return False
        if (isinstance(event, Exit) and (event.signal or event.code)) or (isinstance(event, Stack) and event.fatal):
            return True
        is_bad = isinstance(event, Raised) or (isinstance(event, Line) and event.level in ("error", "critical"))
        if is_bad and event.place > good and not _pattern("complaint").search(getattr(event, "text", "")):
            return True
    return False


def _of_event(process: Process, event: Line | Raised) -> Iterable[Sign]:
    if isinstance(event, Line):
        text = event.text[:_MAX_TEXT]
    else:
        said = _pattern("quotes").sub("", event.error.text[:_MAX_TEXT])
        text = f"{event.said}\n{event.error.type}: {said}"[:_MAX_TEXT]
    for row in _rows("signs"):
        if match := row["pattern"].search(text):
            yield Sign(
                name=row["name"], text=text, who=topology.short_name(process) if process.ranks else process.who,
                event=event, groups=tuple(one or "" for one in match.groups()), process=process,
                is_of_hang=bool(row.get("hang")), is_ending=bool(row.get("ends")),
            )  # fmt: skip


def _last_at(event: Event) -> float:
    return max(event.at, getattr(event, "last_at", 0.0))


def _once(found: Iterable[Sign]) -> list[Sign]:
    return list({one.name: one for one in reversed(list(found))}.values())[::-1]


def _is_soft(sign: Sign) -> bool:
    return sign.name == "watchdog" and sign.groups[2] == "True"


def _probe(case: Case) -> str:
    """Return the event of a failed probe; empty without one, or if a manual request was answered."""
    if any(_pattern("answered").search(one.text) for one in case.events if isinstance(one, Line)):
        return ""
    failed = _pattern("probe_when_ready" if case.is_started else "probe")
    return next((note for one in case.containers for note in one.notes if failed.search(note)), "")


# -- findings from log lines alone


def judge(signs: Signs, case: Case) -> list[Finding]:
    """Return the findings that log lines support by themselves."""
    rules = (_sizes, _gpus, _recorders, _late_health, _exchange, _lost_peer, _transfers)
    return [found for rule in rules if (found := rule(signs, case)) is not None]


def _quote(*some: Sign) -> list[str]:
    return [
        f"{one.who + ': ' if one.who else ''}{' '.join(one.text.split())[:180]} ({one.event.source or 'log'})"
        for one in some
    ]


def _part_of_errors(processes: Iterable[Process]) -> str | None:
    frames = (raised.error.frames for process in processes for raised in process.raised)
    return next((part for one in frames if (part := component_of(one))), None)


def _sizes(signs: Signs, case: Case) -> Finding | None:
    if not (found := signs.all("sizes")):
        return None
    first = found[0]
    sizes = re.search(r"nbytes\.? (\d+) vs\.? (\d+)", first.text)
    told = sizes and f"{sizes[1]} bytes against {sizes[2]}"
    is_pair = first.process.side or topology.topology_of(case).side
    part = _part_of_errors([first.process, *case.processes.values()]) or ("pd_transfer" if is_pair else None)
    return finding_of("sizes", first.event.place, _quote(*found[:3]), who=first.who, component=part, sizes=told)


def _gpus(signs: Signs, case: Case) -> Finding | None:
    """Return which GPUs run another kernel while the rest wait for them, if a debugger listed the kernels."""
    seen = [one for one in reversed(case.gpu_kernels) if one.device >= 0 and one.name and not one.exception]
    devices = {one.device: one.name for one in seen}  # the first of each
    waiting = [device for device, name in devices.items() if kernel_of(name)[0] in load("signs")["exchanges"]]
    others = sorted(set(devices) - set(waiting))
    if not waiting or len(others) > len(waiting) or (len(devices) < 2 and case.schedulers):
        return None
    kernel = devices[others[0]] if others else devices[waiting[0]]
    part, steps = kernel_of(kernel)
    is_plain = case.arguments.get("nnodes", 1) in (1, None) and not case.arguments.get("base_gpu_id")
    return finding_of(
        "gpus", signs.where or (case.last_at, 0),
        [f"GPU {one.device}: {one.name[:120]} ({one.source})" for one in case.gpu_kernels if one.name][:4],
        who=topology.name_ranks([f"TP{number}" for number in others]) if others and is_plain else None,
        component=part, others=", ".join(map(str, others)), kernel=kernel[:100], steps=steps,
        waiting=", ".join(map(str, sorted(waiting))), exchange=devices[waiting[0]][:80],
    )  # fmt: skip


def _recorders(signs: Signs, case: Case) -> Finding | None:
    """Compare the last collectives of the ranks, by flight recorders or by the watchdog of NCCL or gloo."""
    last: dict[str, dict[int, Collective]] = {one.group: {} for one in case.collectives}
    # A rank waits in its first unfinished operation; if all are finished, the last one counts.
    for one in sorted(case.collectives, key=lambda one: 1e18 - one.number if one.state == "completed" else one.number):
        last[one.group].setdefault(one.rank, one)
    for name, by_rank in last.items():
        ranks = dict(sorted(by_rank.items()))
        kinds = {(one.operation, one.sizes) for one in ranks.values() if one.operation}
        numbers = {one.number for one in ranks.values()}
        if len(numbers) == 1 and len(kinds) < 2:
            continue
        told = "; ".join(
            f"rank {rank} {one.state or 'in'} number {one.number} {one.operation} {one.sizes}".rstrip()
            for rank, one in list(ranks.items())[:4]
        )
        behind = [rank for rank, one in ranks.items() if one.number == min(numbers)]
        who = f"TP{behind[0]}" if len(behind) == 1 else None
        row = "other_operation" if len(numbers) == 1 else "not_joined"
        where = signs.where or min(one.place for one in by_rank.values())
        kind = "rank_stuck" if who and len(numbers) > 1 else None
        return finding_of(row, where, [told], kind=kind, who=who, group=name and f"group {name}", told=told)
    if not (found := signs.all("nccl", "gloo")):
        return None
    reports = max(last.values(), key=len, default={})
    layout = topology.topology_of(case)
    missing = sorted(set(range(layout.tp)) - set(reports)) if reports and layout.pp == 1 else []
    nodes = layout.unseen_nodes
    # During a start, a rank that compiles for longer than the others' time limit makes them time out.
    busy = [one for one in signs.all("compile") if one.who and signs.last_batch < one.event.at <= found[0].event.at]
    late = busy[-1].who if busy else f"TP{missing[0]}" if len(missing) == 1 and not nodes else None
    part = component_of(words=busy[-1].text) if busy else _part_of_errors(case.processes.values())
    reported = len(reports) or len({one.who for one in found if one.who})
    return finding_of(
        "time_limit", found[0].event.place, _quote(*found[:3]), kind="rank_stuck" if late else None,
        who=topology.name_nodes(nodes) or late,
        component=part or (busy and "compiler"), is_compiling=bool(busy),
        ranks=f"{reported} of {layout.ranks}" if layout.is_known else reported or "some",
        operation=next((one.operation for one in reports.values() if one.operation), ""), nodes=nodes,
        is_known=layout.is_known,
    )  # fmt: skip


def _late_health(signs: Signs, _case: Case) -> Finding | None:
    """Report a blocked event loop of the main process if a health check ended long after its time limit."""
    for sign in signs.all("health"):
        began = _pattern("tic").search(sign.text)
        if began is None or not sign.event.at:
            continue
        hours, minutes, seconds = (int(one) for one in began.groups())
        lag = (sign.event.at - (3600 * hours + 60 * minutes + seconds)) % 86400.0
        # A difference of whole half hours is another time zone; a beginning shortly after the line is another clock.
        if float(sign.groups[0] or 0) + _LATE < lag % _HALF_HOUR < _HALF_HOUR - 3 * _LATE:
            late = f"{(lag % _HALF_HOUR if lag > 43200 else lag) / 60:.0f}"
            return finding_of("late_health", sign.event.place, _quote(sign), late=late, began=":".join(began.groups()))
    return None


def _exchange(signs: Signs, _case: Case) -> Finding | None:
    """Return which rank the others waited for when an exchange between GPUs reached its time limit."""
    if not (found := signs.all("exchange")):
        return None
    compiling = [one for one in signs.all("compile") if one.event.at <= _last_at(found[-1].event)]
    late = [one for one in compiling if one.who][-1:]
    return finding_of(
        "exchange", found[0].event.place, _quote(*found[:2], *late), kind="rank_stuck" if late else None,
        who=late[0].who if late else None, is_compiling=bool(compiling), waiter=found[0].who,
        component=(component_of(words=late[0].text) or "compiler") if late else None,
    )  # fmt: skip


def _lost_peer(signs: Signs, case: Case) -> Finding | None:
    if not (found := signs.all("lost_prefill", "no_bootstrap")):
        return None
    address = next((one.groups[1] for one in found if one.name == "lost_prefill"), "")
    place = found[0].event.place
    again = max(
        (one.at for one in case.servers if one.values and one.side == "prefill" and one.place > place), default=0.0
    )
    served = {one.side: one.last_at for one in sorted(case.progress, key=_last_at) if one.kind == one.side}
    if again and all(served.get(side, 0.0) >= again + _STANDS_S for side in OTHER_SIDE):
        return None  # both sides serve again
    is_forsaken = bool(again) and served.get("decode", 0.0) < again
    return finding_of(
        "lost_prefill", place, _quote(*_once(found)[:3]), address=address, by=found[0].who, is_forsaken=is_forsaken,
        restart="yes" if is_forsaken else None,
    )  # fmt: skip


def _transfers(signs: Signs, case: Case) -> Finding | None:
    """Report KV transfers that timed out, or many more than running requests, none of which ended for a minute."""
    if signs.all("lost_prefill"):
        return None
    if found := signs.all("transfer_timeout"):
        side, place = topology.topology_of(case, found[0].process.side).side, found[0].event.place
        other = OTHER_SIDE.get(side)
        lines = (one for one in reversed(case.events) if isinstance(one, Line) and one.side == other)
        word = next((one for one in lines if one.place < place and place[0] - one.at < _WAITED_S), None)
        return finding_of("transfer_timeout", place, _quote(*found[:3]), who=other, word=word and word.text[:140])
    # A prefill server runs no requests, and its queue also grows for other reasons: it counts only with a complaint.
    least = dict.fromkeys(("decode", "prefill"), _STANDS_S / 3) if signs.complaint else {"decode": _STANDS_S}
    for process in case.processes.values():
        for one in process.progress:
            since = one.transfers_since and one.last_at - one.transfers_since
            if one.transfers > max(_FEW_TRANSFERS, 4 * one.running) and since >= least.get(one.kind, float("inf")):
                return finding_of(
                    "standing_transfers", (one.transfers_since, one.last_order), [f"{one.text[:200]} ({one.source})"],
                    transfers=one.transfers, rank=topology.short_name(process) or one.side, since=f"{since:.0f}",
                    running=one.running,
                )  # fmt: skip
    return None


# -- findings if neither stacks nor the rules above explain the case


def judge_silence(signs: Signs, case: Case) -> list[Finding]:
    """Return the finding about a server that stopped, or still serves, if neither stacks nor log lines explain more."""
    for rule in (_watchdogs, _health, _standing, _starting):
        if (found := rule(signs, case)) is not None:
            return [found]
    return [finding_of("serves", end_of(case), batch=signs.batch)] if signs.is_alive else []


def end_of(case: Case) -> Place:
    """Return the place of the last event of a case."""
    return case.last_at, max((one.order for one in case.events), default=0)


def _standing(signs: Signs, case: Case) -> Finding | None:
    """Report requests that make no progress, if the server neither failed nor was asked to stop."""
    is_asked = any(one.place >= (signs.last_batch, 0) for one in case.stops)
    if not signs.stands_for or is_asked or _failed_after(case, (signs.last_batch, 0), (0.0, 0)):
        return None
    seconds = f"{signs.stands_for:.0f}" if signs.stands_for >= _STANDS_S else None
    because = [f"nothing of a batch in the last {seconds} s"] * bool(seconds) + signs.complaint
    told = silence_of(signs, case)
    return finding_of("standing", (signs.last_batch, 0), because, seconds=seconds, who=signs.side, **told)


def silence_of(signs: Signs, case: Case) -> dict[str, Any]:
    """Return the fields that describe a silent server: class, part, last batch, last line, steps of an update."""
    kind = "weight_update_deadlock" if signs.part == "weight_update" else None
    asked = {one.text for one in case.progress if one.kind == "control"}
    steps = steps_of("update") if "/pause_generation" in asked else []
    suspects = [*load("failures")["suspects"], "nixl", "mooncake"]
    on = (name for name in suspects if is_switched_on(name, case.arguments))
    part = signs.part or next(on, None)
    told = {"kind": kind, "component": part, "way": way_out(part, case.arguments, is_seen=False), "update_steps": steps}
    return told | {"batch": signs.batch, "word": signs.last_word}


def _starting(signs: Signs, case: Case) -> Finding | None:
    """Return the start stage of a server that no event shows ready, and whether the stage takes too long."""
    stages = load("signs")["stages"]
    order = list(stages)
    places: dict[str, list[str]] = {}
    last = 0.0
    known = [one for one in case.processes.values() if one.stages and one.stages[-1].name in stages]
    begun = {one.stages[-1].name for one in known if not one.stages[-1].is_done}
    serves_http = any(isinstance(one, Stage) and one.name == "http" for one in case.events)
    # Stages of unnamed processes belong to one of the ranks, so they count only if no rank has a stage.
    for process in [one for one in known if one.ranks] or known:
        name = process.stages[-1].name
        if process.stages[-1].is_done and order.index(name) + 1 < len(order):
            name = "warmup" if serves_http else order[order.index(name) + 1]
        who = topology.short_name(process) if process.ranks else process.who or "the server"
        places.setdefault(name, []).append(who)
        last = max(last, process.stages[-1].at)
    if case.is_started or signs.last_batch or not places:
        return None
    # Not every rank logs each stage, so the stage of most processes counts, not the earliest.
    stage = max(places, key=lambda name: (len(places[name]), order.index(name)))
    part, patience = stages[stage]["component"], stages[stage]["patience"]
    told = "; ".join(f"{topology.name_ranks(who)}: {stages[name]['words']}" for name, who in places.items())
    probe = _probe(case)
    if probe and any("will be restarted" in note for one in case.containers for note in one.notes):
        return finding_of("probe_at_start", (last, 0), [probe[:200]], component=part, told=told)
    # A start that raised stands no longer; other evidence may be from hours later, as by the kernel's clock.
    raised = (max(one.at, last) for one in case.events if isinstance(one, Raised) and one.place > (last, 0))
    end = max((_last_at(one) for one in case.events if not isinstance(one, Kernel)), default=last)
    stands = min([end, *raised]) - last if last else 0.0
    stands = stands if stands < _DAY_S else 0.0  # longer: two different clocks
    if probe and (over := _pattern("over").search(probe)):
        # Kubernetes counts failed probes beyond the last line of the log.
        hours, minutes = (int(one or 0) for one in over.groups())
        stands = max(stands, 3600.0 * hours + 60.0 * minutes - (last - case.first_at))
    if stands < patience and not signs.complaint:
        at_work = stages[max(begun, key=order.index)]["component"] if begun else None
        part = signs.part if is_telling(signs.part) else at_work
        return finding_of("starting", end_of(case), component=part, told=told, slow=stages[stage].get("slow"))
    behind = [who for name, some in places.items() if order.index(name) < order.index(stage) for who in some]
    nodes = topology.topology_of(case).unseen_nodes
    named = topology.name_ranks(behind) if 0 < len(behind) <= 2 else None
    is_joining = stage == "distributed"
    return finding_of(
        "start_stands", (last, 0), signs.complaint,
        kind={"distributed": "startup_timeout", "weights": "slow_storage"}.get(stage),
        who=topology.name_nodes(nodes) if nodes and is_joining else named, component=part, is_joining=is_joining,
        minutes=f"{stands / 60:.0f}" if stands >= patience else None, told=told,
        way=way_out(part, case.arguments, is_seen=True),
    )  # fmt: skip


def _watchdogs(signs: Signs, case: Case) -> Finding | None:
    if not (found := signs.all("watchdog")):
        dumped = signs.all("dumped")[:4]
        return finding_of("dumped", dumped[0].event.place, _quote(*dumped), batch=signs.batch) if dumped else None
    first = found[0]
    secs, name = first.groups[1], first.groups[0].lower()
    if role := next(filter(name.startswith, ("detokenizer", "tokenizer")), ""):
        more: dict[str, Any] = {"kind": f"{role}_stuck", "who": role, "component": role, "secs": secs}
        return finding_of("role_watchdog", first.event.place, _quote(first), **more)
    if _is_soft(first) and signs.last_batch > _last_at(first.event) + 1.0:
        return finding_of("slow_batch", first.event.place, _quote(first), secs=secs)
    who = list(dict.fromkeys(one.who for one in found if one.who))
    layout = topology.topology_of(case, first.process.side)
    told = topology.name_ranks(who) if who else "the scheduler"
    replicas = {one.process.ranks.get("dp", -1) for one in found}
    alike = [one for one in case.schedulers if one.ranks.get("dp", -1) in replicas]
    is_one = len(replicas) == 1 and len(alike) < len(case.schedulers) and not layout.is_dp_attention
    return finding_of(
        "watchdog", first.event.place, _quote(*found[:4]), secs=secs, who=f"DP{replicas.pop()}" if is_one else None,
        told=f"all {len(who)} ranks" if len(who) == layout.ranks > 1 else told, component=signs.part,
        word=signs.last_word, batch=_last_batch(alike)[0] or signs.batch,
        nodes=topology.name_nodes(layout.unseen_nodes),
    )  # fmt: skip


def _health(signs: Signs, case: Case) -> Finding | None:
    found = signs.all("health")
    probe = _probe(case)
    if not signs.is_hang or not (found or probe):
        return None
    where = found[0].event.place if found else (case.last_at, len(case.events))
    because = [*_quote(*found[:2]), *([probe[:200]] if probe else [])]
    goes_on = signs.last_batch > max(found[0].event.at + 20.0 if found else 0.0, signs.last_answer + 5.0)
    if goes_on and found:
        return finding_of("no_answers", where, because)
    if goes_on or (not found and re.search(r"(?i)deadline exceeded|timeout", probe)):
        return finding_of("main_process_silent", where, because)
    if not found:
        return None
    nodes = topology.name_nodes(topology.topology_of(case).unseen_nodes)
    side = found[0].process.side
    return finding_of("no_health", where, because, who=side, nodes=nodes, **silence_of(signs, case))


# -- components and kernels


def kernels_of(case: Case) -> list[str]:
    """Return the names of the kernels that a debugger saw on the GPUs, the most frequent first."""
    names = [one.name for one in case.gpu_kernels if one.name and not one.exception]
    names += [name for process in case.processes.values() for stack in process.stacks for name in stack.sample.kernels]
    return sorted(dict.fromkeys(names), key=lambda one: -names.count(one))


def kernel_of(name: str) -> tuple[str | None, list[str]]:
    """Return the component of a GPU kernel, and the next steps if the kernel does not end."""
    part = next((row["component"] for row in _rows("gpu_kernels") if row["pattern"].search(name)), None)
    return part, steps_of("kernel", **{part or "": True})
