"""Evidence that only the crash handler has: which process failed first, steps, flight recorders, suspected requests.

Its conclusion decides which other evidence counts: after a crash, the stacks of other processes are a consequence.
"""

from __future__ import annotations

from sglang_crashkit.judge.activity import bare
from sglang_crashkit.judge.finding import Finding, Place, finding_of, steps_of
from sglang_crashkit.judge.knowledge import load, pattern
from sglang_crashkit.judge.known_issues import known_issues
from sglang_crashkit.model.case import Case
from sglang_crashkit.model.event import Compared, Container, Raised

#: Classes that only say that something failed or makes no progress: a suspected request explains more.
_VAGUE = frozenset({"exception", "exception_in_sglang", "no_progress", "unknown"})
#: Classes that a request may cause if a similar request was suspected in an earlier incident.
_ROLES = frozenset({"detokenizer_lost", "tokenizer_lost"})
_STUCK = {"detokenizer": "detokenizer_stuck", "server": "tokenizer_stuck", "tokenizer_worker": "tokenizer_stuck"}
_OF_A_PAIR = "sglang/srt/disaggregation/"


def waited_in_vain(case: Case) -> bool:
    """Return whether others gave up waiting for the named process, and no process raised an exception first."""
    seen = case.watched
    return seen is not None and seen.kind == "lost_peer" and bool(seen.who) and _raised(case) is None


def beside_ranks(case: Case) -> int | None:
    """Return the pid of the process that hangs if it is not a rank; the stacks of ranks then show nothing about it."""
    seen = case.watched
    return seen.pid if seen is not None and seen.is_hang and seen.role in _STUCK else None


def _raised(case: Case) -> Raised | None:
    return next((one for process in case.processes.values() for one in process.raised if not one.follows), None)


def compare(case: Case, where: Place = (0.0, 0)) -> list[Finding]:
    """Return a finding about ranks that must agree and differ, by their steps and flight recorders.

    Ranks are not compared after a death by a signal other than SIGABRT, with which gloo ends ranks that disagree.
    """
    ends = (one for process in case.processes.values() for one in process.exits)
    died = {one.signal for one in ends if one.signal and not one.follows}
    is_busy = case.watched is not None and case.watched.kind == "busy"
    if is_busy or died - {"SIGABRT"} or beside_ranks(case) is not None:
        return []
    for kind, name in (("divergence", "rank_divergence"), ("mismatch", "collective_mismatch")):
        if some := [one for one in case.compared if one.kind == kind and one.level != "unknown"]:
            if died and any(one.kind == "xid" for one in case.kernel):
                return []  # a fault of its GPU is a better reason to abort
            return [_finding(name, some[:1], where, is_sure=some[0].level == "established" and not died)]
    pid = case.watched.pid if case.watched else 0
    behind = [one for one in case.compared if one.kind == "behind" and one.level != "unknown" and pid in one.waiting]
    return [_finding("rank_stuck", behind[:1], where)] if died and behind else []


def compare_waits(case: Case, where: Place) -> list[Finding]:
    """Return the rank that is behind by the flight recorders, or ranks that wait for each other in different groups."""
    behind = [one for one in case.compared if one.kind == "behind"]
    for place, one in enumerate(behind):
        for other in behind[:place]:
            if {*one.waiting} & {*other.late} and {*other.waiting} & {*one.late}:
                return [_finding("collective_mismatch", [other, one], where)]
    sure = [one for one in behind if one.level != "unknown"]
    return [_finding("rank_stuck", sure[:1], where)] if sure else []


def _finding(kind: str, some: list[Compared], where: Place, *, is_sure: bool = False) -> Finding:
    texts = [one.text for one in some]
    return finding_of("compared", where, texts, kind=kind, level=is_sure and "established", text=texts[0])


def conclude(case: Case, where: Place = (0.0, 0)) -> list[Finding]:
    """Return a finding from the crash handler's conclusion, unless other evidence, such as Docker's, explains it."""
    seen = case.watched
    if seen is None or (seen.kind == "vanished" and any(isinstance(one, Container) for one in case.events)):
        return []
    exits = [one for process in case.processes.values() for one in process.exits]
    bus_error = any(one.signal == "SIGBUS" and (seen.is_starting or not one.follows) for one in exits)
    full = next((one.text for one in case.kernel if one.kind == "shm_full"), "")
    text, kind = seen.text, _STUCK.get(seen.role) if seen.is_hang else None
    if bus_error and full:
        row, text, kind = "shm_full", f"{seen.who or 'a process'} died of SIGBUS while {full}", None
    elif seen.is_hang:
        row = "role_hangs" if kind else "hangs"
    elif waited_in_vain(case):
        row = "given_up"
    elif seen.kind in ("startup_timeout", "peer_lost", "failed_transfer", "busy", "vanished", "consensus_check"):
        row = f"watched_{seen.kind}"
    else:
        return []
    level = row in ("watched_peer_lost", "watched_vanished") and seen.level == "established" and "established"
    return [finding_of(row, where, [text], kind=kind, level=level, who=seen.who, text=text)]


def refine(case: Case, chosen: Finding) -> Finding:
    """Return the finding, changed if another node, a thread or one request explains more than it does."""
    seen, raised = case.watched, _raised(case)
    if seen is None:
        return chosen
    if seen.kind in ("thread_died", "consensus_check"):
        # Exceptions of the thread and exits of ranks are consequences of it.
        chosen.kind, chosen.restart = seen.kind, None
        chosen.level = "established" if seen.level == "established" else "supported"
        return chosen
    has_nodes = case.arguments.get("nnodes") not in (None, 1, "1")
    is_lost = seen.kind == "lost_peer" and (has_nodes or not seen.is_starting)
    if is_lost and chosen.kind in _VAGUE | {"startup_failed"}:
        chosen.kind = "connection_lost"
        chosen.next[:0] = steps_of("lost_peer")
    if chosen.kind in _ROLES and seen.role in _STUCK and seen.level == "established":
        chosen.level = "established"  # the crash handler knows that it failed, whatever it raised
    if seen.is_starting and raised is not None and chosen.restart is None:
        # An exception of one start is likely to occur at the next start, so a restart may not help.
        chosen.restart = "unknown" if load("classes")[chosen.kind]["restart"] == "yes" else None
    is_of_request = chosen.kind in _VAGUE | _ROLES | {"poison_request"}
    if seen.is_starting or not is_of_request or (raised is None and not seen.is_hang):
        return chosen
    text, frames = (raised.error.text, raised.error.frames) if raised is not None else ("", ())
    takes_in = pattern("failures", "takes_in")
    is_of_host = pattern("failures", "of_host").match(text) is not None
    # Without the other server of a pair any request fails, so an exception in the pair's code blames no request.
    places = (frame for frame in frames if takes_in.match(bare(frame.function)) or _OF_A_PAIR in frame.file)
    taker = next((bare(frame.function) for frame in places), "")
    suspect = next(iter(case.suspects), None)
    repeated = next((one for one in case.suspects if one.is_repeated), None)
    issue = next((one for one in known_issues(case, is_hang=False) if one.get("by_request")), None)
    is_suspected = suspect is not None and suspect.level != "unknown"
    reason = ""
    if raised is not None and issue is not None:
        reason = f"upstream's issue {issue['issue']} tells of one request that ends a server so: {issue['title']}"
    elif raised is not None and repeated is not None:
        reason = f"a request like {repeated.rid} was suspected in an earlier incident of the same fault"
    elif chosen.kind in _ROLES:
        return chosen
    elif takes_in.match(taker) and not is_of_host:
        reason = "it came while one request was taken in"
    elif suspect is not None and is_suspected and not suspect.is_alone and not is_of_host:
        reason = f"request {suspect.rid} is suspected most: {'; '.join(suspect.reasons)}"
    if not reason and chosen.kind != "poison_request":
        return chosen
    rid = suspect.rid if suspect and is_suspected else repeated.rid if repeated else ""
    reasons = [reason] * bool(reason) + [f"request {rid} is suspected most"] * bool(rid and rid not in reason)
    chosen.kind, chosen.level, chosen.restart, chosen.cause = "poison_request", "supported", None, ""
    chosen.because[1:1] = reasons
    chosen.next[:0] = steps_of("poison_request", rid=rid)
    return chosen
