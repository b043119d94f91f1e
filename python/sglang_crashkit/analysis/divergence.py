"""Finds the first step that differs between ranks that must run the same steps, and how it differs.

Ranks of one pipeline stage and one data-parallel replica run the same batches in the same order. If one rank does not,
the next collective combines unrelated data, or hangs. The stacks at that time show the victims; the earlier steps show
which rank diverged. Ranks are read at different times: a step that a rank does not have yet is not a difference.

SGLang's own checker (``SGLANG_ENABLE_RANK_CONSENSUS_CHECKER``) compares ordered events that must be equal on all ranks.
If they differ, each rank logs its own events and ends with status 1, healthy ranks too, in any order.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_crashkit.analysis.ranks import Rank, RankSet, name_some
from sglang_crashkit.model.incident import Divergence
from sglang_crashkit.model.step import DIVERGED, PHASES, DivergenceKind, Step, StepRequest
from sglang_crashkit.model.verdict import Level

#: Returns the names of ranks, without the parts, other than numbers, that all of them share.
_Names = Callable[[Iterable["RankSteps"]], str]
_BY_WEIGHT: tuple[DivergenceKind, ...] = (*DIVERGED, "ended_earlier", "unknown", "none")
#: The phases in which the batch of a step is known.
_SCHEDULED = frozenset(PHASES[PHASES.index("scheduled") :])
#: A rank that has not begun a step that others began this many seconds ago is behind, not merely slow.
_LAG_SECS = 2.0
#: Most requests to name.
_MAX_NAMED = 3
#: Forward modes that take in new requests.
_TAKES_IN = frozenset({"extend", "mixed", "split_prefill", "dllm_extend"})
#: Decisions that depend on a rank's own state, so that a rank that takes one alone is the outlier; and decisions that
#: follow from a request that all ranks have, so that a rank that does not take one is the outlier.
_BY_ITSELF, _OF_REQUEST = ("retract", "timeout"), ("prefetch",)
#: The line that a rank logs for the checker, which may be cut off; and one event in it, as a Python string literal.
_LINE = re.compile(r"Found rank divergence for \d{1,9} events?\(s\)! local hash: \w{1,64}, events = \[(?P<events>.*)")
_EVENT = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_MAX_EVENT = 120


@dataclass(frozen=True)
class RankSteps:
    """The last steps of one rank."""

    rank: Rank  # its place among all ranks
    steps: Sequence[Step]  # the known steps, in any order
    pid: int = 0  # of its process


@dataclass(frozen=True)
class Moment:
    """The event from which the time of a divergence is counted."""

    at: float  # in seconds of the monotonic clock
    name: str  # the event in words, such as ``the hang``
    #: When the steps were read, in seconds of the monotonic clock; None if not known.
    read_at: float | None = None


def find_divergence(ranks: Iterable[RankSteps], moment: Moment | None = None) -> Divergence | None:
    """Return the first divergence; else a result of kind ``none``, or ``unknown`` with the reason why it is not known.

    None if no two ranks must agree.
    """
    groups: dict[Hashable, list[RankSteps]] = {}
    for one in ranks:
        groups.setdefault(group_in_step(one.rank), []).append(one)
    # Skip groups with equal ranks: of different engines, or of a rank and its successor, which counts from 1 again.
    several = [group for group in groups.values() if len({one.rank for one in group}) == len(group) > 1]
    if not several:
        return None
    everyone = RankSet(one.rank for group in groups.values() for one in group)
    hidden = [place for place in everyone.places() if place[0] in ("server", "side")]

    def names(of: Iterable[RankSteps]) -> str:
        return RankSet(one.rank for one in of).format(hidden)

    # The first divergence of several groups is the cause of the others.
    return min(
        (_compare(group, names, moment) for group in several),
        key=lambda its: (its.kind not in DIVERGED, -(its.seconds_before or 0.0), _BY_WEIGHT.index(its.kind)),
    )


def group_in_step(rank: Rank) -> Hashable:
    """Return the key of the ranks that run the same steps: the server, the pipeline stage and the replica."""
    return rank.scope if rank.axis == "tp" else (rank.scope, rank.axis, rank.number)


def describe_step(step: Step, of: Sequence[StepRequest] = ()) -> str:
    """Return the batch of a step, such as ``extend of request ab12 (37 tokens)``, for all its requests or `of`."""
    mode = step.mode or "a batch"
    told = of or step.requests
    if len(told) == 1:
        more = f" and {_count(step.size - 1, 'other')}" if step.size > 1 else ""
        return f"{mode} of request {told[0].rid} ({_count(told[0].tokens, 'token')}){more}"
    if not step.size:
        return mode
    return f"{mode} of {_count(step.size, 'request')} ({_count(step.tokens, 'token')})"


def _compare(group: Sequence[RankSteps], names: _Names, moment: Moment | None) -> Divergence:
    """Compare the steps of ranks that must agree."""
    # The batch of a step is not known before the step is scheduled, so earlier phases are not compared.
    told = [(one, {step.number: step for step in one.steps if step.phase in _SCHEDULED}) for one in group]
    known, silent = [one for one in told if one[1]], [one for one, steps in told if not steps]
    without = f" Of {names(silent)} there are no steps." if silent else ""
    if len(known) < 2:
        text = f"Whether the ranks diverged is unknown: of {names(silent)} there are no steps."
        return Divergence("unknown", "unknown", text)
    counts = Counter(number for _one, steps in known for number in steps)
    common = sorted(number for number, count in counts.items() if count > 1)
    for position, number in enumerate(common):
        there = [(one, steps[number]) for one, steps in known if number in steps]
        is_oldest = position == 0 and number > 1
        found = _differ(there, names, moment, is_oldest=is_oldest, compared=position + 1)
        if found is not None:
            return found
    apart = [one for one, steps in known if not any(counts[number] > 1 for number in steps)]
    if apart or not common:
        spans = ", ".join(f"{names([one])} {min(steps):,} to {max(steps):,}" for one, steps in known[:_MAX_NAMED])
        text = f"Whether the ranks diverged is unknown: the steps that are kept do not overlap ({spans}).{without}"
        return Divergence("unknown", "unknown", text, compared=len(common))
    behind = _behind(known, names, moment, len(common))
    if behind is not None:
        return behind
    of = names(one for one, _steps in known)
    text = f"No divergence in the last {_count(len(common), 'step')} of {of}.{without}"
    return Divergence("none", "supported" if silent else "established", text, compared=len(common))


# -- one step


def _differ(
    there: Sequence[tuple[RankSteps, Step]], names: _Names, moment: Moment | None, *, is_oldest: bool, compared: int
) -> Divergence | None:
    """Return how the ranks differ in the step of one number; None if they do not differ."""
    hashes = {step.agreed_hash for _one, step in there}
    with_hash = 0 not in hashes
    if with_hash and len(hashes) == 1:
        # The hash covers everything that is compared below.
        return None
    room = min(len(step.requests) for _one, step in there)
    ways: dict[Hashable, list[tuple[RankSteps, Step]]] = {}
    for one, step in there:
        requests = step.requests[:room]
        decided = tuple(sorted((name, number) for name, number in step.decisions.items() if number))
        way = (step.mode, step.size, step.tokens, requests, decided, with_hash and step.agreed_hash)
        ways.setdefault(way, []).append((one, step))
    if len(ways) == 1:
        return None
    usual, second, *_fewer = sorted(ways.values(), key=len, reverse=True)
    known: Level = "established"
    if len(usual) == len(second):
        is_second, known = _outlier(second[0][1], usual[0][1])
        usual, second = (second, usual) if is_second is False else (usual, second)
    (_, ours), (_, theirs) = second[0], usual[0]
    odd, rest = [one for one, _step in second], [one for one, _step in usual]
    kind, words, request, decision = _difference(ours, theirs, names(odd), names(rest))
    number = ours.number
    if kind == "hash" and is_oldest:
        words = f"{names(odd)} and {names(rest)} had diverged before step {number:,}, the oldest that both still have"
    elif is_oldest:
        words += "; it is the oldest step that both still have, and they may have diverged before"
    secs, when = _before(min(ours.began, theirs.began), moment)
    is_sure = known == "established" and kind != "hash" and not is_oldest
    named = odd if known != "unknown" else [*rest, *odd]
    return Divergence(
        kind,
        "established" if is_sure else "supported",
        f"{words}{when}.",
        step=number,
        ranks=names(named),
        pids=tuple(one.pid for one in named),
        against=names(rest) if named is odd else "",
        request=request,
        decision=decision,
        seconds_before=secs,
        compared=compared,
    )


def _outlier(ours: Step, theirs: Step) -> tuple[bool | None, Level]:
    """Return whether `ours`, of two steps that as many ranks ran, is the outlier, and how certain that is.

    No rank invents a request, so a rank that did not take in another rank's new request lost it. That a rank
    lacks a running request is weaker: the other may have missed its abort. None, ``unknown`` if nothing shows it.
    """
    decision = _decision(ours, theirs)
    if decision is not None:
        did, other_did = bool(ours.decisions.get(decision)), bool(theirs.decisions.get(decision))
        if did == other_did or decision not in (*_BY_ITSELF, *_OF_REQUEST):
            return None, "unknown"
        return did is (decision in _BY_ITSELF), "supported"
    mine, other = _only(ours, theirs), _only(theirs, ours)
    taken, other_taken = (bool(own) and step.mode in _TAKES_IN for own, step in ((mine, ours), (other, theirs)))
    if taken != other_taken:
        return not taken, "established"
    if not taken and bool(mine) != bool(other):
        return not mine, "supported"
    return None, "unknown"


def _decision(ours: Step, theirs: Step) -> str | None:
    """Return the name of the first decision that differs; None if all are equal."""
    names = sorted({*ours.decisions, *theirs.decisions})
    return next((name for name in names if ours.decisions.get(name, 0) != theirs.decisions.get(name, 0)), None)


def _difference(ours: Step, theirs: Step, odd: str, rest: str) -> tuple[DivergenceKind, str, str | None, str | None]:
    """Return how two steps of one number differ: the kind, words, and the request and the decision concerned."""
    in_step, rids = f"in step {ours.number:,}", {one.rid for step in (ours, theirs) for one in step.requests}
    alone = next(iter(rids)) if len(rids) == 1 else None
    mine, other = _only(ours, theirs), _only(theirs, ours)
    ran, them = describe_step(ours, mine[:2]), describe_step(theirs, other[:2])
    apart = f"{odd} ran {ran} {in_step} where {rest} ran {them}"
    if max(ours.size, theirs.size) > 1:
        told = [
            f"{_some(requests)} {'is' if len(requests) == 1 else 'are'} {who}'s only"
            for requests, who in ((mine, odd), (other, rest))
            if requests
        ]
        apart += f" ({'; '.join(told)})" if told else ""
    # If one request is new and one is running, the ranks differ about the new one, which has more tokens.
    first = max((*mine, *other), key=lambda one: one.tokens, default=None)
    request = first.rid if first is not None else None
    decision = _decision(ours, theirs)
    if decision is not None:
        did, did_not = (odd, rest) if ours.decisions.get(decision) else (rest, odd)
        both = ours.decisions.get(decision) and theirs.decisions.get(decision)
        # A decision records the checksum of its request; see ``StepRecorder._decide``.
        sums = {} if both else {zlib.crc32(f"{rid} ".encode(errors="surrogatepass")): rid for rid in rids}
        decided_of = sums.get(ours.decisions.get(decision) or theirs.decisions.get(decision) or 0)
        of = f" of request {decided_of}" if decided_of else ""
        decided = f"{did} decided {'another ' if both else ''}{decision}{of} on the way to step {ours.number:,}"
        same = (ours.mode, ours.size, ours.tokens) == (theirs.mode, theirs.size, theirs.tokens) and not request
        than = f"{decided} {'than ' + did_not if both else 'where ' + did_not + ' did not'}"
        request = decided_of or request or alone
        return "decision", than if same else f"{than}: {apart}", request, decision
    if ours.mode != theirs.mode:
        return "mode", apart, request or alone, None
    if mine or other or ours.size != theirs.size:
        return "requests", apart, request, None
    for one, another in zip(ours.requests, theirs.requests, strict=False):
        if one.rid != another.rid:
            text = f"{odd} ran {ran} {in_step} where {rest} ran the same requests in another order"
            return "requests", text, one.rid, None
        if (one.tokens, one.length) != (another.tokens, another.length):
            text = (
                f"{odd} ran {ours.mode or 'a batch'} {in_step} with {_count(one.tokens, 'token')} of request {one.rid}"
                f" ({one.length:,} long) where {rest} had {another.tokens:,} ({another.length:,} long)"
            )
            return "lengths", text, one.rid, None
    if ours.tokens != theirs.tokens:
        return "lengths", apart, None, None
    return "hash", f"{odd} and {rest} ran the same batch {in_step}, and what led to it differs", None, None


def _only(ours: Step, theirs: Step) -> list[StepRequest]:
    """Return the requests of one step that the other does not have; empty if not all of the other's are known."""
    if len(theirs.requests) < theirs.size:
        return []
    # An id may occur several times, so occurrences are counted.
    known = Counter(request.rid for request in theirs.requests)
    only = []
    for request in ours.requests:
        known[request.rid] -= 1
        if known[request.rid] < 0:
            only.append(request)
    return only


def _some(requests: Sequence[StepRequest]) -> str:
    rids = name_some([request.rid for request in requests], _MAX_NAMED)
    return f"request{'' if len(requests) == 1 else 's'} {rids}"


# -- ranks that stopped earlier


def _behind(
    known: Sequence[tuple[RankSteps, Mapping[int, Step]]], names: _Names, moment: Moment | None, compared: int
) -> Divergence | None:
    """Return the ranks that have not begun a step that others ran, unless they are merely slow; None without any."""
    end = min(max(steps) for _one, steps in known)
    slow = [(one, steps[end]) for one, steps in known if max(steps) == end]
    missed = [(number, one, steps[number]) for one, steps in known for number in steps if number > end]
    if not missed:
        return None
    number, ahead, step = min(missed, key=lambda item: item[0])
    if moment is not None and moment.read_at is not None and not moment.read_at - step.began >= _LAG_SECS:
        return None
    names_of_slow, own = names(one for one, _step in slow), slow[0][1]
    secs, when = _before(step.began, moment)
    request = step.requests[0].rid if len(step.requests) == step.size == 1 else None
    text = (
        f"{names_of_slow} ended earlier, with step {end:,} ({own.phase.replace('_', ' ')}), where {names([ahead])}"
        f" went on and ran {describe_step(step)} in step {number:,}{when}; up to then they did the same."
    )
    had = [(one, step) for one, _end in slow for step in one.steps if step.number == number and step.requests]
    if had:
        text += f" {names(one for one, _step in had)} had received {_some(had[0][1].requests)} for it."
    return Divergence(
        "ended_earlier",
        "supported",
        text,
        step=number,
        ranks=names_of_slow,
        pids=tuple(one.pid for one, _step in slow),
        against=names([ahead]),
        request=request,
        seconds_before=secs,
        compared=compared,
    )


def _before(began: float, moment: Moment | None) -> tuple[float | None, str]:
    """Return the time from `began` to the moment, in seconds and in words; None and empty if not known."""
    secs = moment.at - began if moment is not None else -1.0
    if moment is None or not 0 <= secs < float("inf"):
        return None, ""
    told = f"{secs / 60:.0f} minutes" if secs < 7200 else f"{secs / 3600:.0f} hours"
    if secs < 120:
        told = f"{secs:.1f} s" if secs < 10 else f"{secs:.0f} s"
    return round(secs, 3), f"; {told} before {moment.name}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- SGLang's consensus checker


def events_in(log: str) -> list[str] | None:
    """Return the events that a rank logged last when it ended because of a divergence; None if it logged none."""
    found = [*_LINE.finditer(log)]
    return [one[1] or one[2] or "" for one in _EVENT.finditer(found[-1]["events"])] if found else None


def disagreement(told: Mapping[int, tuple[str, Sequence[str]]]) -> Divergence | None:
    """Return how ranks differ, from the name and the events of each, by pid; None if no rank logged events.

    The outliers are the smaller one of two sides; in all other cases no rank is an outlier.
    """
    if not told:
        return None
    sequences = [events for _name, events in told.values()]
    shared = min(map(len, sequences))
    place = next((at for at in range(shared) if len({events[at] for events in sequences}) > 1), None)
    words, odd, against = f"only what {next(iter(told.values()))[0]} did is known", list[int](), ""
    if place is not None:
        sides: dict[str, list[int]] = {}
        for pid, (_name, events) in told.items():
            sides.setdefault(events[place], []).append(pid)
        names = {event: name_some([told[pid][0] for pid in pids]) for event, pids in sides.items()}
        # A long event is shown from shortly before the first difference.
        same = next((at for at, letters in enumerate(zip(*sides, strict=False)) if len({*letters}) > 1), None)
        begin = max(0, (min(map(len, sides)) if same is None else same) - _MAX_EVENT // 2)
        cut = "..." if begin else ""
        words = "; ".join(f"{names[event]}: {cut}{event[begin : begin + _MAX_EVENT]}" for event in sides)
        fewest, *others = sorted(sides.values(), key=len)
        if len(others) == 1 and len(fewest) < len(others[0]):
            odd, against = fewest, name_some([told[pid][0] for pid in others[0]])
    elif len(told) > 1:
        words = f"they differ behind the first {shared} events, which is all that the logs keep"
    return Divergence(
        "consensus",
        "established",
        f"SGLang's rank consensus checker found that the ranks diverged: {words}.",
        ranks=name_some([told[pid][0] for pid in odd or told]),
        pids=tuple(odd or told),
        against=against,
        compared=shared,
    )
