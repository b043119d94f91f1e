"""What the words of a log tell of a stall: watchdogs, health checks, time limits, and what goes on meanwhile."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import msgspec

from sglang_crashkit.judge import topology
from sglang_crashkit.judge.components import component_of, way_out
from sglang_crashkit.judge.finding import Finding
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.model.case import Case, Process
from sglang_crashkit.model.event import Arguments, Collective, Exit, Line, Raised, Stack

_MAX_TEXT = 4000
#: What an exception quotes may be anybody's words.
_QUOTES = re.compile(r"'[^'\n]{20,2000}'")
#: What comes within so many seconds of the end of the evidence goes on to its end.
_AT_THE_END = 60.0
#: Seconds without a batch and an answer after which requests under way stand still: a long prompt takes less.
_STANDS_S = 60.0
#: Beyond the time limit that a health check names, so many seconds late say that the loop itself did not come round.
_LATE = 40.0
#: So many transfers may be under way at any time.
_FEW_TRANSFERS = 8
_HALF_HOUR = 1800.0
_SLOW_SHARD = 30.0
#: How long a stage of the start may take before it counts as one that does not end, in seconds; in their order.
_PATIENCE = {
    "distributed": 300.0,
    "weights": 3600.0,
    "kv_cache": 600.0,
    "compile": 3600.0,
    "graphs": 1200.0,
    "warmup": 1800.0,
}
_STAGE_WORDS = {
    "distributed": "joining the distributed groups",
    "weights": "loading weights",
    "kv_cache": "allocating the KV cache",
    "compile": "compiling kernels",
    "graphs": "capturing CUDA graphs",
    "warmup": "warming up",
}
_STAGE_PARTS = {
    "distributed": "distributed_init",
    "weights": "model_loader",
    "kv_cache": "kv_pool",
    "compile": "compiler",
    "graphs": "cuda_graph",
    "warmup": "scheduler",
}
#: A line of SGLang's own that says what it does; uvicorn's and a health check's do not.
_OWN_WORD = re.compile(r"(?!INFO: |Health check|Application |Waiting for application|The server is fired up)\S")
_BEGINS = re.compile(r"(?i)(?:start|begin|enter|try|attempt|wait)(?:s|ning|ing|ting)?\b")
#: What a kernel is of that waits for other GPUs.
_EXCHANGES = frozenset({"custom_all_reduce", "distributed_init", "expert_parallel"})
_BATCH = re.compile(r"(Prefill|Decode) batch\b")
_OVER = re.compile(r"\(x\d+ over (?:(\d+)h)?(?:(\d+)m)?")
_TIC = re.compile(r"tic start time: (\d\d):(\d\d):(\d\d)")
_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+), NumelOut=(\d+)|"
    r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(\S+?)(?: PG GUID \S+?)? Rank (\d+)\]|\[Rank (\d+)\]|\[rank(\d+)\]")


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """A line, or an exception's words, that says that somebody waited too long."""

    name: str
    text: str
    who: str
    at: float
    last_at: float
    order: int
    source: str
    groups: tuple[str, ...]
    process: Process


class Signs(msgspec.Struct, kw_only=True):
    """All signs of a case, in order.

    Attributes:
        found: the signs.
        last_batch: when the last batch ran, 0.0 where none was seen or it has no time.
        last_answer: when the last request or health check was answered.
        is_hang: somebody waited too long, and it did not go on after that.
        is_alive: batches, answers or health checks go on to the end of the evidence.
        stands_for: seconds for which requests have been under way and none has gone on; 0.0 where they do.
        was_ended: a watchdog or a time limit ended a process.
        is_slow_load: the weights come slowly.
        last_word: what a server that stands still said last, or was asked for, after its last batch; empty where that
            is not known.
        part: the component that this speaks of.
        told: the most telling of the lines, with their sources.
    """

    found: list[Sign]
    last_batch: float = 0.0
    last_answer: float = 0.0
    is_hang: bool = False
    is_alive: bool = False
    stands_for: float = 0.0
    was_ended: bool = False
    is_slow_load: bool = False
    last_word: str = ""
    part: str | None = None
    told: list[str] = []

    @property
    def where(self) -> tuple[float, int] | None:
        """The place of the first sign of a hang, None without one."""
        return next(((one.at, one.order) for one in self.found if one.name in _OF_A_HANG), None)

    def all(self, *names: str) -> list[Sign]:
        """Return the signs with these names."""
        return [one for one in self.found if one.name in names]


_OF_A_HANG = ("watchdog", "health", "later", "silent", "nccl", "gloo", "exchange")
_ENDING = ("watchdog", "nccl", "gloo", "exchange")


@functools.cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    return [(row["name"], re.compile(row["pattern"])) for row in load("activities")["signs"]]


@functools.cache
def _kernels() -> list[tuple[re.Pattern[str], str, str]]:
    return [(re.compile(row["pattern"]), row["component"], row["name"]) for row in load("activities")["gpu_kernels"]]


def read(case: Case) -> Signs:
    """Return the signs of a case."""
    found: list[Sign] = []
    for process in case.processes.values():
        for line in process.lines:
            found += _of_text(process, line, line.text)
        for raised in process.raised:
            if raised.follows:
                continue
            found += _of_text(
                process, raised, f"{raised.said}\n{raised.error.type}: {_QUOTES.sub('', raised.error.text[:_MAX_TEXT])}"
            )
    found.sort(key=lambda one: (one.at, one.order))
    signs = Signs(found=found)
    batches, answers = [(0.0, 0)], [(0.0, 0)]
    for process in case.processes.values():
        batches += [one.place for one in process.lines if _BATCH.match(one.text)]
        for one in process.progress:
            if one.kind in ("prefill", "decode"):
                batches.append((one.last_at or one.at, one.last_order))
            elif one.kind in ("answer", "refused") or (one.kind == "health" and one.status < 400):
                answers.append((one.last_at or one.at, one.last_order))
    good = max(*batches, *answers, (case.ready_at or 0.0, 0))
    signs.last_batch, signs.last_answer = max(batches)[0], max(answers)[0]
    hang = signs.all(*_OF_A_HANG)
    ended = [one for one in hang if one.name in _ENDING and not _is_soft(one)]
    last = max((max(one.at, one.last_at) for one in hang), default=0.0)
    goes_on = signs.last_batch > last + 1.0
    signs.was_ended = bool(ended)
    # The stacks of an incident are looked at only where somebody waited too long.
    signs.is_hang = (
        bool(ended) or (bool(hang) and not goes_on) or _probe_failed(case, signs) or case.watched is not None
    )
    # Stacks that somebody took after the last sign of life are no such sign.
    looked = max((event.place for event in case.events if isinstance(event, Stack) and not event.fatal), default=good)
    is_late = good[0] >= case.last_at - _AT_THE_END
    is_seen = len(batches) + len(answers) > 2 or case.is_started
    signs.last_word, is_begun = _last_word(case, max(batches))
    signs.part = component_of(words=signs.last_word) if signs.last_word else None
    signs.stands_for = _stands_for(case, is_begun=is_begun)
    signs.is_alive = (
        is_seen
        and not signs.stands_for
        and (is_late or goes_on)
        and looked <= good
        and not signs.is_hang
        and not _failed_after(case, good, max(batches))
    )
    signs.is_slow_load = any(float(one.groups[2] or 0) >= _SLOW_SHARD for one in signs.all("shards"))
    signs.told = [f"{one.text.strip()[:160]} ({one.source or 'log'})" for one in _once(hang)]
    return signs


def _stands_for(case: Case, *, is_begun: bool) -> float:
    """Return for how many seconds requests have been in a batch, or waited for one, and no batch ran and none ended.

    0.0 where they go on, or no request is under way. The main process alone may answer health checks all the while.

    Args:
        case: the evidence.
        is_begun: the last that the server said is that it began something.
    """
    progress = case.progress
    work = [one for one in progress if one.kind in ("prefill", "decode")]
    answers = [one for one in progress if one.kind == "answer"]
    last = max(work, key=lambda one: (one.last_at, one.last_order), default=None)
    if last is None or not last.last_at:
        return 0.0
    waiting = any(one.kind == "load" and one.queued for one in progress)
    asked = max((one for one in progress if one.kind == "control"), key=lambda one: one.last_at, default=None)
    if asked and asked.last_at >= last.last_at and re.match(r"/(?:pause|release)", asked.text) and not waiting:
        return 0.0  # it was asked to make no batches, as while a trainer trains
    answered = max((one.last_at for one in answers), default=0.0)
    # The requests of a batch of new ones are not counted in its own line yet.
    is_busy = last.running > 0 or last.queued > 0 or last.kind == "prefill"
    if not (waiting or is_begun or (is_busy and answered < last.last_at)):
        return 0.0
    # By the clock of its own log: that of stacks or of another host need not agree with it.
    log = last.source.partition(":")[0]
    own = [event for event in case.events if event.source.partition(":")[0] == log]
    if any(isinstance(event, Arguments) and event.values and event.order > last.last_order for event in own):
        return 0.0  # it was started anew
    silent = max(max(event.at, getattr(event, "last_at", 0.0)) for event in own) - max(last.last_at, answered)
    return silent if silent >= _STANDS_S else 0.0


def _last_word(case: Case, batch: tuple[float, int]) -> tuple[str, bool]:
    """Return what a server said last, or was asked for, after a batch, and whether that says that something began."""
    progress = case.progress
    found = [((one.last_at, one.last_order), one.text) for one in progress if one.kind == "control"]
    logs = {one.source.partition(":")[0] for one in progress}
    found += [(one.place, one.text) for process in case.processes.values() for one in process.lines
              if one.level in ("info", "warning") and one.source.partition(":")[0] in logs
              and _OWN_WORD.match(one.text)]  # fmt: skip
    place, text = max(found, default=((0.0, 0), ""))
    return (text[:120], bool(_BEGINS.match(text))) if batch < place else ("", False)


def _failed_after(case: Case, good: tuple[float, int], batch: tuple[float, int]) -> bool:
    """Return whether something went wrong after the last sign of life, whatever it was.

    A main process answers health checks for as long as it lives: after the end of another, only a batch is such a sign.
    """
    for event in reversed(case.events):
        if event.at and event.place < batch:
            return False
        if (isinstance(event, Exit) and (event.signal or event.code)) or (isinstance(event, Stack) and event.fatal):
            return True
        is_bad = isinstance(event, Raised) or (isinstance(event, Line) and event.level in ("error", "critical"))
        if is_bad and event.place > good:
            return True
    return False


def _of_text(process: Process, event: Line | Raised, text: str) -> Iterable[Sign]:
    text = text[:_MAX_TEXT]
    for name, pattern in _patterns():
        if match := pattern.search(text):
            yield Sign(
                name=name,
                text=text,
                who=topology.short_name(process) if process.ranks else process.who,
                at=event.at,
                last_at=max(event.at, getattr(event, "last_at", 0.0)),
                order=event.order,
                source=event.source,
                groups=tuple(one or "" for one in match.groups()),
                process=process,
            )


def _once(found: Iterable[Sign]) -> list[Sign]:
    return list({one.name: one for one in reversed(list(found))}.values())[::-1]


def _is_soft(sign: Sign) -> bool:
    return sign.name == "watchdog" and sign.groups[2] == "True"


def _probe_failed(case: Case, signs: Signs) -> bool:
    """Return whether an orchestrator's probe was not answered while nothing else is known to have failed."""
    return (case.is_started or signs.last_batch > 0) and bool(_probe(case)) and not signs.last_batch > case.last_at


def _probe(case: Case) -> str:
    pattern = r"(?i)(liveness|startup) probe failed"
    if case.is_started:
        pattern += r"|readiness probe failed.{0,120}(deadline exceeded|timeout)"
    notes = (note for one in case.containers for note in one.notes)
    return next((note for note in notes if re.search(pattern, note)), "")


# -- what they tell


def judge(signs: Signs, case: Case) -> list[Finding]:
    """Return what words of a log tell by themselves."""
    rules = (_sizes, _gpus, _recorders, _late_health, _exchange, _lost_peer, _transfers)
    return [found for rule in rules if (found := rule(signs, case)) is not None]


def _at(sign: Sign) -> tuple[float, int]:
    return sign.at, sign.order


def _quote(*some: Sign) -> list[str]:
    return [
        f"{one.who + ': ' if one.who else ''}{' '.join(one.text.split())[:180]} ({one.source or 'log'})" for one in some
    ]


def _sizes(signs: Signs, case: Case) -> Finding | None:
    found = signs.all("sizes")
    if not found:
        return None
    first = found[0]
    sizes = re.search(r"nbytes\.? (\d+) vs\.? (\d+)", first.text)
    told = f" ({sizes[1]} bytes against {sizes[2]})" if sizes else ""
    raised = [*first.process.raised, *(one for process in case.processes.values() for one in process.raised)]
    frames = next((one.error.frames for one in raised if component_of(one.error.frames)), ())
    who = first.who or None
    return Finding(
        kind="collective_mismatch",
        who=who,
        component=component_of(frames)
        or ("pd_transfer" if first.process.side or topology.topology_of(case).side else None),
        restart="yes",
        headline=f"ranks of one group ran a collective with different sizes{told}; {who or 'a rank'} noticed it",
        because=_quote(*found[:3]),
        next=[
            "the rank that ended is the victim: ranks of its group took different branches, or had different queues",
            "compare the last lines of each rank's log (aborted requests, queue lengths); upgrade to a newer release",
        ],
        where=_at(first),
        weight=90,
    )


def _gpus(signs: Signs, case: Case) -> Finding | None:
    """Return which GPU runs another kernel than those that wait for it, where a debugger saw several."""
    devices: dict[int, str] = {}
    for one in case.gpu_kernels:
        if one.device >= 0 and one.name and not one.exception:
            devices.setdefault(one.device, one.name)
    waiting = [device for device, name in devices.items() if component_of_kernel(name) in _EXCHANGES]
    others = sorted(set(devices) - set(waiting))
    if len(devices) < 2 or not waiting or len(others) > len(waiting):
        return None
    kernel = devices[others[0]] if others else devices[waiting[0]]
    is_plain = case.arguments.get("nnodes", 1) in (1, None) and not case.arguments.get("base_gpu_id")
    who = topology.name_ranks([f"TP{number}" for number in others]) if others and is_plain else None
    rest = f"GPU {', '.join(map(str, sorted(waiting)))} wait in {devices[waiting[0]][:80]}"
    return Finding(
        kind="gpu_stall",
        who=who,
        component=component_of_kernel(kernel),
        headline=f"GPU {', '.join(map(str, others))} runs {kernel[:100]}, while {rest}"[:290] if others else rest,
        because=[f"GPU {one.device}: {one.name[:120]} ({one.source})" for one in case.gpu_kernels if one.name][:4],
        next=steps_of_kernel(kernel),
        where=signs.where or (case.last_at, 0),
        weight=72,
    )


def _recorders(signs: Signs, case: Case) -> Finding | None:
    """Return what the last operations of the ranks tell, by flight recorders or by NCCL's watchdog."""
    last = _operations(signs, case)
    for group, ranks in last.items():
        if len(ranks) < 2:
            continue
        kinds = {(one.operation, one.sizes) for one in ranks.values() if one.operation}
        numbers = {one.number for one in ranks.values()}
        told = "; ".join(
            f"rank {rank} {one.state or 'in'} number {one.number} {one.operation} {one.sizes}".rstrip()
            for rank, one in sorted(ranks.items())[:4]
        )
        first = min(ranks.values(), key=lambda one: one.place)
        where = signs.where or (first.at, first.order)
        name = f"group {group}" if group else "one group"
        steps = [f"`py-spy dump --native --pid PID` of each rank of {name} shows which branch it took"]
        if len(numbers) == 1 and len(kinds) > 1:
            return Finding(
                kind="collective_mismatch",
                headline=f"ranks of {name} are in different operations at the same number: {told}"[:290],
                because=[told],
                next=steps,
                where=where,
                weight=85,
            )
        if len(numbers) > 1:
            least = min(numbers)
            behind = [rank for rank, one in sorted(ranks.items()) if one.number == least]
            named = f"TP{behind[0]}" if len(behind) == 1 and len(ranks) > 1 else None
            return Finding(
                kind="rank_stuck" if named else "rank_divergence",
                who=named,
                headline=f"{named or 'some ranks'} of {name} did not come to the operation of the others: {told}"[:290],
                because=[told],
                next=steps,
                where=where,
                weight=85,
            )
    return _nccl_timeouts(signs, case, last)


def _operations(signs: Signs, case: Case) -> dict[str, dict[int, Collective]]:
    found: dict[str, dict[int, Collective]] = {}
    seen = list(case.collectives)
    if not seen:
        for sign in signs.all("nccl"):
            group, work = _GROUP.search(sign.text), _WORK.search(sign.text)
            if work is None or work[1] is None:
                continue
            rank = next((int(one) for one in (group.groups()[1:] if group else ()) if one), -1)
            rank = sign.process.ranks.get("tp", rank) if rank < 0 else rank
            seen.append(
                Collective(
                    group=group[1] or "" if group else "",
                    number=int(work[1]),
                    operation=work[2].lower(),
                    sizes=f"{work[3]} to {work[4]} elements",
                    state="timed out in",
                    rank=rank,
                    at=sign.at,
                    order=sign.order,
                )
            )
    for one in seen:
        known = found.setdefault(one.group, {}).get(one.rank)
        # A dump has all that is unfinished: the first of these is what the rank waits in.
        place, before = _unfinished(one), _unfinished(known) if known else None
        if before is None or place < before:
            found[one.group][one.rank] = one
    return found


def _unfinished(one: Collective) -> tuple[bool, int]:
    # The first that is not finished comes first, then the last that is.
    is_finished = one.state == "completed"
    return is_finished, -one.number if is_finished else one.number


def _nccl_timeouts(signs: Signs, case: Case, last: dict[str, dict[int, Collective]]) -> Finding | None:
    found = signs.all("nccl", "gloo")
    if not found:
        return None
    first = found[0]
    ranks = next(iter(sorted(last.values(), key=len, reverse=True)), {})
    layout = topology.topology_of(case, "", (one.ranks for one in case.schedulers))
    operation = next((one.operation for one in ranks.values() if one.operation), "") or "a collective"
    missing = sorted(set(range(layout.tp)) - set(ranks)) if ranks and layout.pp == 1 else []
    seen = [one.ranks for one in case.schedulers]
    nodes = topology.unseen_nodes(layout, seen)
    who = topology.name_nodes(nodes) if nodes else f"TP{missing[0]}" if len(missing) == 1 else None
    reported = len(ranks) or len({one.who for one in found if one.who})
    steps = [
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 at the next start leaves a flight recorder dump at the time limit",
        "`py-spy dump --native --pid PID` of every rank before the time limit shows who is not in it",
    ]
    if nodes:
        steps.insert(0, f"read the log of {who}, the other node, at the same time: nothing of its ranks is seen here")
    if not layout.is_known:
        steps.append(topology.OTHER_NODES)
    words = f"{reported} of {layout.ranks} ranks" if layout.is_known else f"{reported or 'some'} ranks"
    return Finding(
        kind="rank_stuck" if who and not nodes else "symmetric_stall",
        who=who,
        headline=f"{words} waited in {operation} until its time limit"
        + (f"; {who} reported none, so the others waited for it" if who else ", and none is known to be elsewhere"),
        because=_quote(*found[:3]),
        next=steps,
        where=_at(first),
        weight=60,
    )


def _late_health(signs: Signs, _case: Case) -> Finding | None:
    """Return that the main process's event loop did not come round, where a health check's end came far too late."""
    for sign in signs.all("health"):
        began = _TIC.search(sign.text)
        if began is None or not sign.at:
            continue
        hours, minutes, seconds = (int(one) for one in began.groups())
        lag = (sign.at - (3600 * hours + 60 * minutes + seconds)) % 86400.0
        # What is off by half hours is another time zone.
        if lag % _HALF_HOUR > float(sign.groups[0]) + _LATE:
            late = (lag % _HALF_HOUR if lag > 43200 else lag) / 60
            return Finding(
                kind="tokenizer_stuck",
                who="tokenizer",
                component="tokenizer",
                restart="yes",
                headline=f"the main process's event loop did not come round for {late:.0f} minutes: a health check that"
                f" began at {began[1]}:{began[2]}:{began[3]} ended only then; the schedulers worked on meanwhile",
                because=_quote(sign),
                next=[
                    "`py-spy dump --pid PID` of the main process while it is silent, twice: what holds its event loop?",
                    "raise --tokenizer-worker-num, so that tokenizing does not run on that loop",
                ],
                where=_at(sign),
                weight=75,
            )
    for sign in signs.all("silent"):
        return Finding(
            kind="tokenizer_stuck",
            who="tokenizer",
            component="tokenizer",
            headline=f"the main process's event loop did not come round: {sign.text[:160]}",
            because=_quote(sign),
            where=_at(sign),
            weight=60,
        )
    return None


def _exchange(signs: Signs, _case: Case) -> Finding | None:
    """Return who kept the others waiting where an exchange between GPUs ran into its time limit."""
    found = signs.all("exchange")
    if not found:
        return None
    compiling = [one for one in signs.all("compile") if one.at <= found[-1].last_at and one.who]
    late = compiling[-1] if compiling else None
    component = (component_of(words=late.text) or "compiler") if late else "expert_parallel"
    steps = ["the network is not the first suspect: see what the ranks that did not join were doing"]
    if late:
        steps.insert(0, "precompile before serving: `python3 -m sglang.compile_deep_gemm` with the server's arguments")
        steps.append("send a warm-up request of each length to all ranks, or raise the exchange's time limit")
    who = (late.who or None) if late else None
    headline = f"{found[0].who or 'a rank'} waited for the exchange of experts until its time limit"
    if late:
        headline += f", while {who or 'another rank'} compiled kernels and did not join it"
    return Finding(
        kind="rank_stuck" if late else "symmetric_stall",
        who=who,
        component=component,
        restart="yes",
        headline=headline[:290],
        because=_quote(*found[:2], *([late] if late else [])),
        next=steps,
        where=_at(found[0]),
        weight=70,
    )


def _lost_peer(signs: Signs, _case: Case) -> Finding | None:
    found = signs.all("lost_prefill", "no_bootstrap")
    if not found:
        return None
    first = found[0]
    address = next((one.groups[1] for one in found if one.name == "lost_prefill"), "")
    at = f" ({address})" if address else ""
    return Finding(
        kind="peer_lost",
        who="prefill",
        component="pd_transfer",
        headline=f"the prefill server{at} does not answer any more; {first.who or 'decode'} gave up the requests of it",
        because=_quote(*_once(found)[:3]),
        next=[
            f"look at the prefill server's log, its pod and its node{at}: that one failed; decode is the victim",
            "give decode's liveness probe more time: its health check fails only while it waits for prefill",
        ],
        where=_at(first),
        weight=75,
    )


def _transfers(signs: Signs, case: Case) -> Finding | None:
    found = signs.all("transfer_timeout")
    if signs.all("lost_prefill"):
        return None
    if not found:
        return _standing_transfers(case)
    first = found[0]
    side = topology.topology_of(case, first.process.side).side
    other = {"prefill": "decode", "decode": "prefill"}.get(side)
    return Finding(
        kind="transfer_stuck",
        who=other,
        component="pd_transfer",
        headline=f"KV transfers did not end within their time limit; they wait for the {other or 'other'} side",
        because=_quote(*found[:3]),
        next=[f"read what the {other or 'other'} side says of the same room, and whether its transfer threads live"],
        where=_at(first),
        weight=55,
    )


def _standing_transfers(case: Case) -> Finding | None:
    """Return that KV transfers stand still: for a minute none has ended, and they outnumber what runs."""
    for process in case.schedulers:
        for one in process.progress:
            since = one.last_at - one.transfers_since
            if one.transfers > max(_FEW_TRANSFERS, 4 * one.running) and one.transfers_since and since >= _STANDS_S:
                return Finding(
                    kind="transfer_stuck",
                    who="prefill",
                    component="pd_transfer",
                    headline=f"{one.transfers} KV transfers to {topology.short_name(process)} are under way and none"
                    f" has ended for {since:.0f} s, while {one.running} requests run (#transfer-req in its batches)",
                    because=[f"{one.text[:200]} ({one.source})"],
                    next=[
                        "read the prefill server's log at that time: does it still send, and does its transfer thread"
                        " live?",
                        "look at the transfer engine (mooncake, NIXL) and the RDMA network between the two hosts; what"
                        " has begun has no time limit in every release",
                    ],
                    where=(one.transfers_since, one.last_order),
                    weight=55,
                )
    return None


# -- where nothing else tells


def judge_silence(signs: Signs, case: Case) -> list[Finding]:
    """Return what is known of a server that does not go on, or that does, where neither stacks nor words tell more."""
    for rule in (_watchdogs, _health, _standing, _starting):
        if (found := rule(signs, case)) is not None:
            return [found]
    if signs.is_alive:
        headline = f"nothing is wrong here: the server serves to the end of the evidence{_last_batch(case)}"
        return [_calm(case, "no_incident", headline)]
    return []


def _calm(case: Case, kind: str, headline: str, component: str | None = None) -> Finding:
    last = max((one.order for one in case.events), default=0)
    return Finding(kind=kind, headline=headline[:290], component=component, where=(case.last_at, last), weight=10)


def _standing(signs: Signs, case: Case) -> Finding | None:
    """Return that requests do not go on while the server answers its health check, where nothing else tells."""
    if not signs.stands_for or case.stops or _failed_after(case, (signs.last_batch, 0), (0.0, 0)):
        return None
    return Finding(
        kind="weight_update_deadlock" if is_of_update(signs) else "no_progress",
        component=signs.part,
        headline=f"requests are under way, and no batch has run for {signs.stands_for:.0f} s{_last_batch(case)}"
        f"{_said(signs)}"[:290],
        because=[f"nothing of a batch in the last {signs.stands_for:.0f} s"],
        next=[
            *steps_of_update(case),
            "`py-spy dump --native --pid PID` of every scheduler, twice, now: a health check does not show this",
        ],
        where=(signs.last_batch, 0),
        weight=41,
    )


def _said(signs: Signs) -> str:
    return f"; the last thing in its log: {signs.last_word}" if signs.last_word else ""


def is_of_update(signs: Signs) -> bool:
    """Return whether the last that a silent server was asked for is a pause or an update of weights."""
    return signs.part == "weight_update"


def steps_of_update(case: Case) -> list[str]:
    """Return what to look at where a server was asked to pause and is silent since; nothing where it was not asked."""
    asked = {one.text for one in case.progress if one.kind == "control"}
    if "/pause_generation" not in asked:
        return []
    return [
        "order of calls: `/pause_generation` (mode abort or retract where an update waits for running requests), the"
        " update, `/continue_generation`; with --tokenizer-worker-num above 1 a tokenizer worker may miss one of them",
        "no `/continue_generation` after a pause leaves requests waiting for ever: send it again; upgrade to a newer"
        " release, which may order its locks otherwise",
    ]


def _starting(signs: Signs, case: Case) -> Finding | None:
    """Return where a server stands that was not seen to get ready, and whether that takes too long."""
    order = list(_PATIENCE)
    places: dict[str, list[str]] = {}
    last = 0.0
    known = [one for one in case.processes.values() if one.stages and one.stages[-1].name in _PATIENCE]
    # What stands without a name is of one of the ranks.
    for process in [one for one in known if one.ranks] or known:
        name = process.stages[-1].name
        if process.stages[-1].is_done and order.index(name) + 1 < len(order):
            name = order[order.index(name) + 1]
        who = topology.short_name(process) if process.ranks else process.who or "the server"
        places.setdefault(name, []).append(who)
        last = max(last, process.stages[-1].at)
    if case.is_started or signs.last_batch or not places:
        return None
    # Not every rank says each stage, so that the least of them tells nothing.
    stage = max(places, key=lambda name: (len(places[name]), order.index(name)))
    told = "; ".join(f"{topology.name_ranks(who)}: {_STAGE_WORDS[name]}" for name, who in places.items())
    component = _STAGE_PARTS[stage]
    probe = _probe(case)
    if probe and any("will be restarted" in note for one in case.containers for note in one.notes):
        return Finding(
            kind="startup_timeout",
            component=component,
            restart="no",
            headline=f"the orchestrator's probe ended the server while it started: {told}"[:290],
            because=[probe[:200]],
            next=[
                "give the start more time: a startupProbe with failureThreshold times periodSeconds above its time",
                "load faster: weights on a local disk, or compiled kernels in a cache that stays",
            ],
            where=(last, 0),
            weight=50,
        )
    stands = case.last_at - last if last else 0.0
    if probe and (over := _OVER.search(probe)):
        # What Kubernetes counts goes on after the last line.
        hours, minutes = (int(one or 0) for one in over.groups())
        stands = max(stands, 3600.0 * hours + 60.0 * minutes - (last - case.first_at))
    if stands < _PATIENCE[stage]:
        return _calm(
            case, "busy", f"the server starts, and was not ready at the end of the evidence: {told}", component
        )
    headline = f"the start has not moved for {stands / 60:.0f} minutes: {told}"
    next_steps = ["`py-spy dump --native --pid PID` of each rank, twice, shows in what it is and whether it moves"]
    if way := way_out(component, case.arguments, is_seen=True):
        next_steps.append(f"it stands in {component}: {way}")
    behind = [who for name, some in places.items() if order.index(name) < order.index(stage) for who in some]
    named = behind if len(behind) <= 2 else []
    found = Finding(
        kind={"distributed": "startup_timeout", "weights": "slow_storage"}.get(stage, "no_progress"),
        who=topology.name_ranks(named) if named else None,
        component=component,
        headline=headline[:290],
        next=next_steps,
        where=(last, 0),
        weight=45,
    )
    if stage == "distributed":
        layout = topology.topology_of(case)
        nodes = topology.unseen_nodes(layout, (one.ranks for one in case.schedulers))
        found.who = topology.name_nodes(nodes) if nodes else found.who
        told = found.who or "each other node"
        found.next.insert(0, f"see whether {told} was started with the same --dist-init-addr, and reaches it")
    return found


def _watchdogs(signs: Signs, case: Case) -> Finding | None:
    found = signs.all("watchdog")
    if not found:
        return None
    first = found[0]
    secs = first.groups[1]
    name = first.groups[0].lower()
    for role in ("detokenizer", "tokenizer"):
        if name.startswith(role):
            headline = f"the {role} made no progress for {secs} s, says its watchdog"
            return Finding(
                kind=f"{role}_stuck",
                who=role,
                component=role,
                headline=headline,
                because=_quote(first),
                where=_at(first),
            )
    if _is_soft(first) and signs.last_batch > first.last_at + 1.0:
        headline = f"a batch took longer than {secs} s, and the server went on"
        return Finding(kind="busy", headline=headline, because=_quote(first), where=_at(first), weight=20)
    who = list(dict.fromkeys(one.who for one in found if one.who))
    layout = topology.topology_of(case, first.process.side, (one.ranks for one in case.schedulers))
    told = topology.name_ranks(who) if who else "the scheduler"
    every = f"all {len(who)} ranks" if len(who) == layout.ranks > 1 else told
    headline = f"{every} made no progress for {secs} s{_last_batch(case)}; what they wait in no stack shows"
    steps = [
        "`sglang-crashkit collect`, or `py-spy dump --native --pid PID` of every rank, while it hangs",
        f"do that before the watchdog's {secs} s are over; --soft-watchdog-timeout prints stacks and ends nothing",
    ]
    if nodes := topology.unseen_nodes(layout, (one.ranks for one in case.schedulers)):
        steps.insert(0, f"read the log of {topology.name_nodes(nodes)}, the other node, which is not in this evidence")
    return Finding(
        kind="no_progress", headline=headline[:290], because=_quote(*found[:4]), next=steps, where=_at(first), weight=45
    )


def _last_batch(case: Case) -> str:
    last = max(
        (
            (one.last_at, one.last_order, process, one)
            for process in case.processes.values()
            for one in process.progress
            if one.kind in ("prefill", "decode")
        ),
        key=lambda item: item[:2],
        default=None,
    )
    if last is None:
        return ""
    _at, _order, process, progress = last
    who = f" of {topology.short_name(process)}" if process.ranks else ""
    return f" after a {progress.kind} batch{who} ({progress.running} running, {progress.queued} queued)"


def _health(signs: Signs, case: Case) -> Finding | None:
    found = signs.all("health")
    probe = _probe(case)
    if not signs.is_hang or not (found or probe):
        return None
    where = _at(found[0]) if found else (case.last_at, len(case.events))
    because = [*_quote(*found[:2]), *([probe[:200]] if probe else [])]
    first_bad = found[0].at if found else 0.0
    goes_on = (
        signs.last_batch > max(first_bad + 20.0, signs.last_answer + 5.0)
        if found
        else (signs.last_batch > signs.last_answer + 5.0)
    )
    if goes_on and found:
        return Finding(
            kind="detokenizer_stuck",
            who="detokenizer",
            component="detokenizer",
            headline="batches go on while no answer comes back: the detokenizer does not pass them on",
            because=because,
            where=where,
            weight=55,
        )
    if goes_on or (not found and re.search(r"(?i)deadline exceeded|timeout", probe)):
        return Finding(
            kind="tokenizer_stuck",
            who="tokenizer",
            component="tokenizer",
            headline="the schedulers work on while the main process answers neither requests nor /health in time",
            because=because,
            next=[
                "`py-spy dump --pid PID` of the main process while the probe fails; raise --tokenizer-worker-num",
                "give the liveness probe more time (timeoutSeconds, failureThreshold): the engine behind it works",
            ],
            where=where,
            weight=50,
        )
    if not found:
        return None
    layout = topology.topology_of(case)
    steps = ["`sglang-crashkit collect`, or `py-spy dump --native --pid PID` of every rank, while it hangs"]
    if is_of_update(signs):
        steps += steps_of_update(case)
    if nodes := topology.unseen_nodes(layout, (one.ranks for one in case.schedulers)):
        steps.insert(0, f"read the log of {topology.name_nodes(nodes)}, the other node, which is not in this evidence")
    return Finding(
        kind="weight_update_deadlock" if is_of_update(signs) else "no_progress",
        component=signs.part,
        headline=f"no batch runs and no health check is answered{_last_batch(case)}{_said(signs)}"[:290],
        because=because,
        next=steps,
        where=where,
        weight=45,
    )


# -- components and kernels


def kernels_of(case: Case) -> list[str]:
    """Return the names of the kernels that a debugger saw on the GPUs, the most frequent first."""
    names = [one.name for one in case.gpu_kernels if one.name and not one.exception]
    names += [name for process in case.processes.values() for stack in process.stacks for name in stack.sample.kernels]
    return sorted(dict.fromkeys(names), key=lambda one: -names.count(one))


def component_of_kernel(name: str) -> str | None:
    """Return the component that a kernel on the GPU is of."""
    return next((component for pattern, component, _name in _kernels() if pattern.search(name)), None)


def steps_of_kernel(name: str) -> list[str]:
    """Return what to do about a kernel that does not end."""
    component = component_of_kernel(name)
    steps = []
    if component == "custom_all_reduce":
        steps.append(
            "--disable-custom-all-reduce takes that kernel out: it polls its peers' memory without a time limit"
        )
    elif component == "expert_parallel":
        steps.append("another --moe-a2a-backend (none), or --deepep-mode normal, takes that exchange out")
    elif component == "distributed_init":
        steps.append(
            "NCCL_DEBUG=INFO shows the transport; the rank whose GPU runs no such kernel is the one to look at"
        )
    elif component == "attention":
        steps.append("another --attention-backend takes that kernel out")
    return steps
