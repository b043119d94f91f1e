"""Rules about who makes no progress, and of what; `rules` has their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sglang_crashkit.analysis.causes.case import Case, Finding, name_of
from sglang_crashkit.analysis.ranks import groups_of, rank_at
from sglang_crashkit.analysis.waits import FREEZER
from sglang_crashkit.model.checked_json import mapping_of, seconds_of
from sglang_crashkit.model.incident import Level

#: With less of a CPU than this, a process that wants to run is starved.
_STARVED_SHARE = 0.1
_ABORTED = "It ended by abort(), as gloo has it where ranks do not match, and NCCL's watchdog where one waits too long."
#: Of so many processes it is told.
_MAX_NAMED = 3
_UPDATES = re.compile(
    r"(update_weights?_from_\w+|init_weights_update_group|post_process_weights|pause_generation"
    r"|(release|resume)_memory_occupation|load_lora_adapter|flush_cache) \("
)
#: Where a scheduler begins a round of its event loop.
_RECEIVES = re.compile(r"(recv_requests|ingest_requests) \(")
#: What it goes through there.
_RECEIVING = re.compile(r"(_broadcast_reqs_across_ranks|\w*broadcast_pyobj) \(")
#: Files through which any collective passes.
_DISTRIBUTED = re.compile(r"\((distributed_c10d|c10d_logger|parallel_state|communication_op|pynccl\w*)\.py\)")
#: Who is within a collective in no other file than these waits in it; a signal's handler may run within one, too.
_WITHIN = re.compile(rf"{_DISTRIBUTED.pattern}|\((_ops|_contextlib|streams)\.py\)")
_COLLECTIVES = re.compile(
    r"(all_reduce|_?all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|all_to_all\w*|gather|scatter) \("
)


def stopped(case: Case) -> Finding | None:
    """A process of the server is stopped, says the kernel, and others made no progress or waited for a peer in vain."""
    if not (case.is_hang or case.verdict.get("kind") == "lost_peer"):
        return None
    found = [one for one in case.processes if one.get("role") != "helper" and _how_stopped(one)]
    if not found:
        return None
    told = found[:_MAX_NAMED]
    reasons = tuple(f"{name_of(one)} is {_how_stopped(one)}, says the kernel." for one in told)
    steps = tuple(f"`kill -CONT {one.get('pid')}` lets {one.get('title')} go on" for one in told if _state(one) == "T")
    named = case.first.get("pid")
    certain = named is None or named in [one.get("pid") for one in found]
    return Finding("established" if certain else "supported", reasons, steps)


def _how_stopped(process: Mapping[str, Any]) -> str:
    """Return how a process was stopped from outside, in words; empty where it was not."""
    state = _state(process)
    if state == "S" and mapping_of(process.get("state")).get("wchan") in FREEZER:
        return "frozen by its cgroup"
    return {"T": "stopped", "t": "stopped by a debugger"}.get(state, "")


def _state(process: Mapping[str, Any]) -> str:
    state = process.get("state")
    states = [str(one.get("state") or "") for one in process.get("looks") or () if isinstance(one, dict)]
    states += [str(state.get("State") or "")] if isinstance(state, dict) else []
    letters = {one[:1] for one in states if one}
    return letters.pop() if len(letters) == 1 else ""


def hangs_by_itself(case: Case) -> bool:
    """Say whether the first failure is stopped, or in something else than a collective."""
    if not case.first:
        return False
    return bool(_how_stopped(case.first) or (case.doing(case.first) and not _collective(case, case.first)))


def starved(case: Case) -> Finding | None:
    """The first failure wants to run in every sample, and hardly uses its CPU."""
    if not case.is_hang or not case.first or _state(case.first) != "R":
        return None
    looks = [one for one in case.first.get("looks") or () if isinstance(one, dict) and one.get("cpu_secs") is not None]
    if len(looks) < 2:
        return None
    began, ended = (seconds_of(look.get("time")) for look in (looks[0], looks[-1]))
    took = ended - began if began is not None and ended is not None else 0.0
    used = float(looks[-1]["cpu_secs"]) - float(looks[0]["cpu_secs"])
    if took < 1.0 or used > _STARVED_SHARE * took:
        return None
    return Finding("supported", (f"{name_of(case.first)} wants to run and got {used:.1f} s of CPU in {took:.1f} s.",))


def in_kernel(case: Case) -> Finding | None:
    """The first failure is in uninterruptible sleep in every sample."""
    if not case.is_hang or not case.first or _state(case.first) != "D":
        return None
    steps = (
        f"`cat /proc/{case.first.get('pid')}/stack` has where in the kernel it waits, for root, as long as it does",
    )
    reasons = (f"{name_of(case.first)} is in uninterruptible sleep whenever it is looked at.",)
    return Finding("supported", reasons, steps)


def divergence(case: Case) -> Finding | None:
    """Ranks that must agree went different ways; what a fatal signal does to them is none."""
    found = case.divergence
    if case.signal or _is_beside_ranks(case):
        return None
    if not found:
        return _left_out(case)
    level: Level = "established" if found.get("level") == "established" else "supported"
    return Finding(level, (str(found.get("statement")),))


def aborted(upon: Callable[[Case], Mapping[str, Any]]) -> Callable[[Case], Finding | None]:
    """Return the rule that one aborted upon what `upon` finds, as gloo and NCCL's watchdog have it."""

    def rule(case: Case) -> Finding | None:
        # It may have had another reason to.
        found = upon(case) if case.signal == "SIGABRT" else {}
        return Finding("supported", (str(found.get("statement")), _ABORTED)) if found else None

    return rule


def first_mismatch(case: Case) -> Mapping[str, Any]:
    """Return the first finding of the recorders that ranks are in different collectives of one group; empty without."""
    return next((one for one in _sure(case) if one.get("kind") == "mismatch"), {})


def first_wait(case: Case) -> Mapping[str, Any]:
    """Return the first finding of the recorders that the first failure waited for a rank behind; empty without."""
    pid = case.first.get("pid")
    found = (one for one in _sure(case) if one.get("kind") == "behind")
    return next((one for one in found if pid in (one.get("waiting_pids") or ())), {})


def _sure(case: Case) -> list[Mapping[str, Any]]:
    return [one for one in case.findings if one.get("level") in ("established", "supported")]


def _left_out(case: Case) -> Finding | None:
    """A rank waits for the next requests while one that must agree with it is in a step: it took it there was none."""
    if not case.is_hang:
        return None
    for late in case.schedulers:
        if _in_step(late) or not _receives(case, late):
            continue
        for ahead in case.schedulers:
            step = _in_step(ahead)
            if step.get("phase") == "forward_begun" and _replica(ahead) == _replica(late):
                number, mode = step.get("number"), step.get("mode")
                words = f"{name_of(late)} waits for requests while {name_of(ahead)} is in step {number} ({mode})."
                told = str(mapping_of(case.document.get("divergence")).get("statement") or "")
                return Finding("supported", (words, told) if told else (words,))
    return None


def _receives(case: Case, rank: Mapping[str, Any]) -> bool:
    """Say whether a rank waits for the next requests, and for nothing else that was called meanwhile."""
    places = (one for one in case.doing(rank) if not (_DISTRIBUTED.search(one) or _RECEIVING.match(one)))
    return bool(_RECEIVES.match(next(places, "")))


def _in_step(process: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping_of(mapping_of(process.get("steps")).get("in_step"))


def _replica(process: Mapping[str, Any]) -> tuple[object, object]:
    """Return what ranks have in common that run the same steps."""
    rank = mapping_of(process.get("rank"))
    return rank.get("pp"), rank.get("dp")


def mismatch(case: Case) -> Finding | None:
    """Ranks are in different collectives of one group, by their recorders or by their stacks."""
    if case.signal or _is_beside_ranks(case):
        return None
    if found := first_mismatch(case):
        return Finding(found["level"], (str(found.get("statement")),))
    if hangs_by_itself(case):
        # It waits for nobody, so what the others wait in is its doing.
        return None
    crossed = _crossed(case)
    if crossed:
        return Finding("supported", tuple(str(finding.get("statement")) for finding in crossed))
    for group in groups_of((rank_at(mapping_of(rank.get("rank"))), rank) for rank in case.schedulers):
        waiting = {call: name_of(rank) for rank in group if (call := _collective(case, rank))}
        if not case.is_hang or len(waiting) == 0:
            continue
        if len({call.split(" ")[0] for call in waiting}) > 1:
            words = ", ".join(f"{name} in {call}" for call, name in sorted(waiting.items())[:4])
            return Finding("supported", (f"Ranks wait in different collectives: {words}.",))
        callers = {caller: name_of(rank) for rank in group if (caller := _caller(case, rank))}
        are_here = all(_collective(case, rank) for rank in group) and not case.has_other_nodes
        if len(callers) > 1 and are_here:
            words = ", ".join(f"{name} in that of {caller}" for caller, name in sorted(callers.items())[:4])
            return Finding("supported", (f"Ranks wait in {next(iter(waiting))}, and not in the same one: {words}.",))
    return None


def _crossed(case: Case) -> list[Mapping[str, Any]]:
    """Return two findings by which ranks wait for each other, each in another process group; none where none do."""
    behind = [one for one in case.findings if one.get("kind") == "behind"]
    for place, one in enumerate(behind):
        for other in behind[:place]:
            if _waits_for(one, other) and _waits_for(other, one):
                return [other, one]
    return []


def _waits_for(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether who waits in one group is whom another one waits for."""
    waiting, late = one.get("waiting_pids"), other.get("pids")
    return isinstance(waiting, list) and isinstance(late, list) and not set(waiting).isdisjoint(late)


def _collective(case: Case, rank: Mapping[str, Any]) -> str:
    """Return the collective that a rank waits in; empty where it waits in none, or something else runs within one."""
    for place in case.doing(rank)[:3]:
        if _COLLECTIVES.match(place):
            return place
        if not _WITHIN.search(place):
            break
    return ""


def _caller(case: Case, rank: Mapping[str, Any]) -> str:
    """Return who asked for the collective that a rank is in; empty where the frames do not reach so far."""
    return next((place for place in case.doing(rank) if not _WITHIN.search(place)), "")


def weight_update(case: Case) -> Finding | None:
    """A process is in an update of weights, or in what pauses the server for one."""
    if not case.is_hang:
        return None
    # Who asked for an update waits for a rank that hangs in something else, as everybody does.
    for process in [case.first] if hangs_by_itself(case) else case.processes:
        place = next((place for place in case.doing(process) if _UPDATES.match(place)), None)
        if place:
            return Finding("supported", (f"{name_of(process)} is in {place} and does not come out of it.",))
    return None


def stall(case: Case) -> Finding | None:
    """All ranks of this host wait in the same collective, and no rank is an outlier."""
    is_behind = any(one.get("kind") == "behind" for one in case.findings)
    if not case.is_hang or is_behind or (case.first and not _collective(case, case.first)):
        return None
    calls = [_collective(case, rank) for rank in case.schedulers]
    # One that was asked for in two places is two.
    callers = {caller for rank in case.schedulers if (caller := _caller(case, rank))}
    if not calls or not all(calls) or len(set(calls)) != 1 or len(callers) > 1:
        return None
    if len(calls) > 1:
        return Finding("supported", (f"All {len(calls)} ranks wait in {calls[0]}.",))
    if not case.has_other_nodes:
        return None
    reason = f"{name_of(case.schedulers[0])}, the only rank of this host, waits in {calls[0]}."
    return Finding("supported", (reason,), ("`sglang-crashkit incidents` on the other nodes tells of their ranks",))


def rank_stuck(case: Case) -> Finding | None:
    """One rank is elsewhere while the others wait in a collective."""
    if case.verdict.get("kind") != "hang" or not case.first or len(case.schedulers) < 2 or _is_beside_ranks(case):
        return None
    others = [one for one in case.schedulers if one is not case.first and _collective(case, one)]
    behind = [str(one.get("statement")) for one in case.findings if one.get("kind") == "behind"]
    if not others and not behind:
        return None
    place = (case.doing(case.first) or ("a place that nobody saw",))[0]
    reasons = [f"{name_of(case.first)} is in {place} while the others wait in a collective.", *behind[:1]]
    return Finding("supported", tuple(reasons))


def _is_beside_ranks(case: Case) -> bool:
    """Say whether it is no rank that hangs: what the ranks are in meanwhile tells nothing."""
    return case.verdict.get("kind") == "hang" and case.first.get("role", "scheduler") != "scheduler"


def awaited(case: Case) -> Finding | None:
    """One rank was elsewhere while another one waited for it in a collective until its time limit."""
    if case.verdict.get("kind") != "lost_peer" or not case.first or case.error is not None:
        return None
    return Finding("supported", (case.statement,))


def stuck(*roles: str) -> Callable[[Case], Finding | None]:
    """Return the rule that a process of one of these roles, which are no ranks, does not come back to its loop."""

    def rule(case: Case) -> Finding | None:
        if case.verdict.get("kind") != "hang" or case.first.get("role") not in roles:
            return None
        place = (case.doing(case.first) or ("a place that nobody saw",))[0]
        return Finding("supported", (f"{name_of(case.first)} is in {place} and does not come back to its loop.",))

    return rule


def no_progress(case: Case) -> Finding | None:
    """Nobody makes progress, and nothing above tells why."""
    if not case.is_hang:
        return None
    return Finding("unknown", (str((case.verdict.get("basis") or ["Nobody made progress."])[0]),))


def busy(case: Case) -> Finding | None:
    """The ranks are at work, which may take long."""
    return Finding("supported", (str(case.verdict.get("text")),)) if case.verdict.get("kind") == "busy" else None
