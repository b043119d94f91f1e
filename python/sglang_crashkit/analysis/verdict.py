"""Name the first failure of a crash and say how well the evidence supports it.

Two things are known of the order of events. A rank that raises an exception waits, before anything else is told to
end, until the other ranks were photographed; so a rank killed by a fatal signal before that was not ended by the
server's own clean-up. And a lost connection is a consequence of a death, not its cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_crashkit.analysis.busy import find_busy
from sglang_crashkit.analysis.grouping import groups_of, rank_at
from sglang_crashkit.analysis.hang import all_stopped, find_suspect, frame_of, tell
from sglang_crashkit.analysis.member import name_some
from sglang_crashkit.analysis.states import of_frames
from sglang_crashkit.analysis.unhealthy import UNHEALTHY, judge_unhealthy
from sglang_crashkit.model.incident import Failure, Incident, Level, ProcessReport, Verdict
from sglang_crashkit.model.peers import describe

FailureKind = Literal["exit", "exception", "hang"]

#: Two failures this close, in seconds, may have been noticed in the wrong order.
_SAME_MOMENT_SECS = 0.005
#: Of so many process groups the verdict tells what is seen; of the others, the incident does.
_MOST_COLLECTIVES = 2
#: Triggers by which the kit itself noticed a silence; upstream's watchdog ends the server, busy or not.
_NOTICED = ("no_progress", "silent_at_sigterm")
_LOST_PEER = re.compile(
    r"connection (closed|reset)|closed by peer|broken pipe|socket timeout|timed out waiting|remote (process|peer)"
    r"|nccl.*(abort|remote|unhandled)|store.*(timeout|closed)|recv(?:value)? failed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class FailureEvent:
    """A failure as it was seen.

    Attributes:
        pid: the process.
        seconds: when, since the epoch.
        kind: it exited, it reported an exception, or its watchdog saw no progress.
        message: the exception, or what the watchdog saw, in one line; empty for an exit.
        fatal_signal: the exit was by a signal of `exit_status.FATAL_SIGNALS`.
        before_photograph: it was seen before the server's own clean-up could begin.
        with_parent: the exit came of the end of the process that had started it.
        is_answer: the main process ended with a status by which it tells of a crash, so of another process's.
    """

    pid: int
    seconds: float
    kind: FailureKind
    message: str = ""
    fatal_signal: bool = False
    before_photograph: bool = True
    with_parent: bool = False
    is_answer: bool = False


def order_failures(events: Sequence[FailureEvent]) -> list[FailureEvent]:
    """Return the failures, the first one first, consequences behind their causes."""

    def rank(event: FailureEvent) -> tuple[int, float, str, int, str]:
        if event.kind == "exit":
            return (0 if event.fatal_signal and event.before_photograph else 1, *_by_time(event))
        return (2 if _LOST_PEER.search(event.message) else 1, *_by_time(event))

    last = sorted((event for event in events if event.is_answer), key=_by_time)
    last += sorted((event for event in events if event.with_parent and not event.is_answer), key=_by_time)
    events = [event for event in events if not (event.with_parent or event.is_answer)]
    deaths = [event for event in events if event.kind == "exit" and event.fatal_signal and event.before_photograph]
    consequences = [event for event in events if _LOST_PEER.search(event.message)]
    if deaths and consequences:
        return sorted(events, key=rank) + last
    return sorted(events, key=_by_time) + last


def _by_time(event: FailureEvent) -> tuple[float, str, int, str]:
    # With pid and message the order, and so the verdict, depends on the events alone and not on how they came in.
    return (event.seconds, event.kind, event.pid, event.message)


def judge(incident: Incident, events: Sequence[FailureEvent]) -> Verdict:
    """Return the verdict on an incident.

    Args:
        incident: with its processes and their evidence.
        events: the failures in any order.
    """
    ordered = order_failures(events)
    lost = describe(incident.peers)
    if lost and not ordered:
        # Who refuses a connection is not there; that others gave it up is their word.
        certain = all(peer.sign == "refused" for peer in incident.peers)
        return Verdict("peer_lost", None, "established" if certain else "supported", " ".join(lost), lost)
    if not ordered and incident.trigger.event == UNHEALTHY:
        return judge_unhealthy(incident)
    if not ordered:
        return Verdict(
            kind="unknown",
            first_failure=None,
            level="unknown",
            text=f"{incident.trigger.title} reported {incident.trigger.event}, but no process was seen to fail.",
            basis=[],
        )
    first = ordered[0]
    if first.kind == "hang":
        return _judge_hang(incident, ordered, lost)
    process = incident.process(first.pid)
    title = process.title if process else incident.trigger.title
    statement, kind, level = _statement(first, process, title)
    basis = [statement]
    for event in ordered[1:]:
        other = incident.process(event.pid)
        if other is not None:
            basis.append(_consequence(event, other))
    basis += [*_doings(incident, without=first.pid), *_collectives(incident), *_on_gpus(incident)]
    basis += lost
    if len(ordered) > 1 and level == "established" and not _clearly_first(ordered):
        level = "supported"
    return Verdict(kind, Failure(first.pid, title), level, " ".join(basis), basis)


def _judge_hang(incident: Incident, ordered: Sequence[FailureEvent], lost: Sequence[str]) -> Verdict:
    """Return the verdict where the first that was seen is that a rank made no progress.

    Args:
        incident: as for `judge`.
        ordered: the failures, the first one first.
        lost: what is known of the other servers of a pair.
    """
    hung = list(dict.fromkeys(event.pid for event in ordered if event.kind == "hang"))
    # A watchdog speaks of its own rank only, and that of a stopped rank is stopped with it.
    ranks = [(rank_at(process.rank), process.pid) for process in incident.processes if process.role == "scheduler"]
    pids = {pid for group in groups_of(ranks) if not set(hung).isdisjoint(group) for pid in group}
    peers = [process for process in incident.processes if process.pid in pids or process.pid in hung]
    peers.sort(key=lambda process: (hung.index(process.pid) if process.pid in hung else -1, process.pid))
    silences, collectives = _silences(incident, ordered), _collectives(incident)
    busy = find_busy(peers) if incident.trigger.event in _NOTICED else ""
    if busy and all(event.kind == "hang" for event in ordered):
        basis = [busy, *silences, *_doings(incident), *_on_gpus(incident), *lost]
        return Verdict("busy", None, "supported", " ".join(basis), basis)
    if stopped := all_stopped(peers):
        basis = [stopped, *silences, *collectives, *_doings(incident), *_on_gpus(incident), *lost]
        return Verdict("hang", None, "established", " ".join(basis), basis)
    suspect = find_suspect(peers)
    if suspect is not None:
        named, basis = suspect.process.pid, [suspect.statement, *silences, *collectives]
    elif (late := _late_in_collectives(incident)) is not None:
        named, basis = late, [*collectives, *silences]
    elif len(hung) == 1:
        named, basis = hung[0], [*silences, *tell(incident.process(hung[0])), *collectives]
    else:
        text = f"{len(hung)} processes made no progress, and no single rank looks responsible."
        basis = [text, *silences, *collectives, *_doings(incident), *_on_gpus(incident), *lost]
        return Verdict("hang", None, "unknown", " ".join(basis), basis)
    basis += [*_doings(incident, without=named), *_on_gpus(incident), *lost]
    process = incident.process(named)
    title = process.title if process else incident.trigger.title
    # Who waits is not necessarily whom the others wait for.
    return Verdict("hang", Failure(named, title), "supported", " ".join(basis), basis)


def _silences(incident: Incident, ordered: Sequence[FailureEvent]) -> list[str]:
    """Return what is known of who made no progress, those with the same words together, and of what came after."""
    said: dict[str, list[str]] = {}
    after = []
    for event in ordered:
        process = incident.process(event.pid)
        if process is None:
            continue
        if event.kind == "hang":
            said.setdefault(event.message, []).append(f"{process.title} (pid {process.pid})")
        else:
            after.append(_consequence(event, process))
    return [f"{name_some(names)} {message}." for message, names in said.items()] + after


def _telling(incident: Incident) -> list[dict[str, Any]]:
    """Return what the flight recorders show of collectives that go wrong."""
    findings = incident.collectives.findings if incident.collectives is not None else []
    return [one for one in findings if one["kind"] != "in_step" and one["level"] != "unknown"]


def _collectives(incident: Incident) -> list[str]:
    return [str(finding["statement"]) for finding in _telling(incident)[:_MOST_COLLECTIVES]]


def _late_in_collectives(incident: Incident) -> int | None:
    """Return the one process for which the others wait in their collectives, None where it is not one."""
    pids = [pid for finding in _telling(incident)[:1] for pid in finding["pids"]]
    return pids[0] if len(pids) == 1 else None


def _doings(incident: Incident, without: int | None = None) -> list[str]:
    return [
        f"{other.title} (pid {other.pid}) {_doing(other.doing)}."
        for other in incident.processes
        if other.pid != without and other.role == "scheduler" and other.doing
    ]


def _doing(frames: Sequence[str]) -> str:
    activity = of_frames([frame_of(text) for text in frames])
    return activity.words if activity.kind in ("compiling", "loading", "profiling") else f"was in {frames[0]}"


def _on_gpus(incident: Incident) -> list[str]:
    """Return what the GPU cores tell: of each the first kernel, or what failed, which comes after the kernels."""
    told = []
    for process in incident.processes:
        failed = next((line for line in process.gpu if line.startswith("exception: ")), None)
        if process.gpu:
            told.append(f"{process.title} (pid {process.pid}) had on its GPU: {failed or process.gpu[0]}.")
    return told


def _clearly_first(ordered: Sequence[FailureEvent]) -> bool:
    first = ordered[0]
    is_death = first.kind == "exit" and first.fatal_signal and first.before_photograph
    return all(
        event.with_parent
        or event.is_answer
        or event.seconds - first.seconds > (0.0 if is_death and event.kind == "exception" else _SAME_MOMENT_SECS)
        or (is_death and _LOST_PEER.search(event.message) is not None)
        for event in ordered[1:]
    )


def _statement(event: FailureEvent, process: ProcessReport | None, title: str) -> tuple[str, str, Level]:
    name = f"{title} (pid {event.pid})"
    if event.kind == "exception":
        if _LOST_PEER.search(event.message):
            # Nothing of this server was seen to fail before: with several nodes, it was another node's.
            return f"{name} lost the connection to a peer: it raised {event.message}.", "lost_peer", "supported"
        return f"{name} raised {event.message}.", "exception", "established"
    end = process.exit if process else None
    if end is None or end.cause == "unknown":
        return f"{name} ended; nobody could tell how.", "unknown", "supported"
    if end.cause == "parent_ended":
        return f"{name} ended: {end.detail}.", "parent_ended", "established"
    if end.cause == "oom_kill":
        return (
            f"{name} was killed by the kernel for lack of memory: {end.detail}.",
            "oom_kill",
            "established",
        )
    if end.signal is not None:
        return f"{name} was killed by {end.signal}: {end.detail}.", "signal", "established"
    return f"{name} ended with exit status {end.code}: {end.detail}.", "exit_status", "established"


def _consequence(event: FailureEvent, process: ProcessReport) -> str:
    if event.kind == "exception":
        return f"{process.title} (pid {process.pid}) then raised {event.message}."
    if event.kind == "hang":
        return f"{process.title} (pid {process.pid}) then {event.message}."
    if event.with_parent:
        return f"{process.title} (pid {process.pid}) then ended with the process that had started it."
    how = (process.exit.signal or f"exit status {process.exit.code}") if process.exit else "an unknown cause"
    return f"{process.title} (pid {process.pid}) then ended by {how}."
