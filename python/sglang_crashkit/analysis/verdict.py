"""Name the first failure of a crash and say how well the evidence supports it.

Two things are known of the order of events. A rank that raises an exception waits, before anything else is told to
end, until the stacks of the other ranks were taken; so a rank killed by a fatal signal before that was not ended by the
server's own clean-up. And a lost connection is a consequence of a death, not its cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from sglang_crashkit.analysis.groups import find_outlier, judge_group
from sglang_crashkit.analysis.member import (
    Member,
    Moment,
    describe,
    describe_some,
    motion_words,
    name_members,
    name_some,
)
from sglang_crashkit.analysis.ranks import groups_of, rank_at
from sglang_crashkit.analysis.waits import WAITS_FOR_OTHERS, Activity, activity_of, of_frames, of_state
from sglang_crashkit.model.incident import LEVELS, Failure, Incident, Level, ProcessReport, Verdict
from sglang_crashkit.model.peers import describe as describe_peers
from sglang_crashkit.model.sample import Frame, Sample, Thread
from sglang_crashkit.model.step import DIVERGED

FailureKind = Literal["exit", "exception", "hang"]

#: The triggers of an incident of ranks that were busy for longer than anything of theirs takes, and of a server whose
#: health check failed while no scheduler was silent, or nobody knows whether one was.
BUSY_TOO_LONG, UNHEALTHY = "busy_too_long", "unhealthy_at_sigterm"

#: Two failures this close, in seconds, may have been noticed in the wrong order.
_SAME_MOMENT_SECS = 0.005
#: Of so many process groups the verdict tells what is seen; of the others, the incident does.
_MAX_COLLECTIVES = 2
#: Triggers by which the kit itself noticed a silence; upstream's watchdog ends the server, busy or not.
_NOTICED = ("no_progress", "silent_at_sigterm")
#: More tokens than upstream lets a batch take in, unless prompts are not cut into chunks.
_MANY_TOKENS = 16_384
#: Of so many ranks it is told what holds them.
_MAX_DESCRIBED = 3
_FRAME = re.compile(r"(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)")
_LOST_PEER = re.compile(
    r"connection (closed|reset|timed out)|closed by peer|broken pipe|socket timeout|timed out waiting"
    r"|remote (process|peer)"
    r"|([nh]|one)ccl.{0,300}(abort|remote|unhandled system)|hccl.{0,300}time[sd]? ?out|store.{0,300}(timeout|closed)"
    r"|recv(?:value)? failed",
    re.IGNORECASE,
)
#: Of an exception so many characters are looked at: these patterns are slow where their words come again and again.
_MAX_LOOKED = 4096
#: A rank may report the connection that it lost so much sooner than the end of who closed it is seen, in seconds.
_TELLS_FIRST_SECS = 1.0
#: What one says whose collective took longer than its time limit.
_TIMED_OUT = re.compile(r"Timed out waiting|timeout caused pair closure|Watchdog caught")
#: How exceptions begin that a library of collectives raises; behind another beginning the words may be a prompt's.
_OF_COLLECTIVES = re.compile(
    r"(?:\w+\.)*(?:Dist\w*Error: |(?:RuntimeError: |Exception: Capture [\w -]{1,40} graph failed: )(?:"
    r"\[(?:[^\]'\"]{1,200}\.(?:cc|cpp|hpp|h)(?::\d+)?|Rank \d+|PG [^\]'\"]{1,100}|c10d|\d+)\] |NCCL"
    r"|(?:\[ERROR\] )?HCCL|oneCCL|[Gg]loo"
    r"|Connection (?:closed|reset)|Broken pipe|Socket [Tt]imeout|Timed out waiting|Application timeout"
    r"|TCPStore|recvValue|failed to recv))"
)
#: Those of a socket of any kind. Beside a death they are its consequence; alone they tell of no rank.
_OF_SOCKETS = re.compile(r"(?:BrokenPipe|Connection(?:Reset|Aborted))Error\b")
#: A call of the rank's own failed, such as for memory or files; beside a death that may be its consequence.
_OF_SYSTEM = re.compile(
    r"unhandled system error(?![\s\S]{0,999}(?:remote|[Cc]losed|[Rr]eset|[Rr]efused|[Tt]imed out|No route|Broken pipe))"
    r"|Error while creating shared memory|No space left on device"
)


@dataclass(frozen=True)
class FailureEvent:
    """A failure as it was seen."""

    pid: int
    seconds: float  # when, since the epoch, in the order of the monotonic clock
    kind: FailureKind  # it exited, it reported an exception, or its watchdog saw no progress
    message: str = ""  # the exception, or what the watchdog saw, in one line; empty for an exit
    fatal_signal: bool = False  # the exit was by a signal of `exit_status.FATAL_SIGNALS`
    before_capture: bool = True  # it was seen before the server's own clean-up could begin
    with_parent: bool = False  # the exit came of the end of the process that had started it
    #: The main process ended with a status by which it tells of a crash, so of another process's.
    is_answer: bool = False


def order_failures(events: Sequence[FailureEvent]) -> list[FailureEvent]:
    """Return the failures, the first one first, consequences behind their causes."""
    reported = {event.pid for event in events if event.kind == "exception"}
    lost = min((event.seconds for event in events if _is_lost_peer(event.message)), default=float("inf"))

    def is_death(event: FailureEvent) -> bool:
        # One that reported an exception ended of that; one that ended much later did not take the peer's connection.
        is_own = event.fatal_signal or (event.pid not in reported and event.seconds <= lost + _TELLS_FIRST_SECS)
        return event.kind == "exit" and is_own and event.before_capture

    def rank(event: FailureEvent) -> tuple[int, float, str, int, str]:
        if event.kind == "exit":
            return (0 if is_death(event) else 1, *_by_time(event))
        return (2 if _is_lost_peer(event.message) else 1, *_by_time(event))

    last = sorted((event for event in events if event.is_answer), key=_by_time)
    last += sorted((event for event in events if event.with_parent and not event.is_answer), key=_by_time)
    events = [event for event in events if not (event.with_parent or event.is_answer)]
    if any(map(is_death, events)) and any(_is_lost_peer(event.message) for event in events):
        return sorted(events, key=rank) + last
    return sorted(events, key=_by_time) + last


def _is_lost_peer(message: str) -> bool:
    """Say whether an exception is one that a rank raises as another one is gone."""
    return _is_of_collectives(message) or _OF_SOCKETS.match(message) is not None


def _is_of_collectives(message: str) -> bool:
    """Say whether it is a library of collectives that lost a connection to another rank."""
    return _OF_COLLECTIVES.match(message) is not None and _LOST_PEER.search(message, 0, _MAX_LOOKED) is not None


def _by_time(event: FailureEvent) -> tuple[float, str, int, str]:
    # With pid and message the order, and so the verdict, depends on the events alone and not on how they came in.
    return (event.seconds, event.kind, event.pid, event.message)


def judge(incident: Incident, events: Sequence[FailureEvent]) -> Verdict:
    """Return the verdict on an incident with its processes and their evidence; the failures may come in any order."""
    ordered = order_failures(events)
    lost = describe_peers(incident.peers)
    if lost and not ordered:
        # That SGLang gave a server up is its word: a network that is broken looks the same.
        return Verdict("peer_lost", None, "supported", " ".join(lost), lost)
    if not ordered and incident.trigger.event == UNHEALTHY:
        return _judge_unhealthy(incident)
    if not ordered:
        text = f"{incident.trigger.title} reported {incident.trigger.event}, but no process was seen to fail."
        return Verdict("unknown", None, "unknown", text)
    first = ordered[0]
    if first.kind == "hang":
        return _judge_hang(incident, ordered, lost)
    process = incident.process(first.pid)
    awaited = _awaited_peer(incident, ordered)
    level: Level
    if awaited is not None:
        peer, words = awaited
        failure, later = Failure(peer.pid, peer.title), ordered
        statement, kind, level = f"{_name(peer)} {words}.", "lost_peer", "supported"
    else:
        failure, later = Failure(first.pid, process.title if process else incident.trigger.title), ordered[1:]
        statement, kind, level = _statement(first, process, failure.title)
    basis = [statement]
    basis += [_consequence(event, other) for event in later if (other := incident.process(event.pid)) is not None]
    basis += [*_activities(incident, without=failure.pid), *_divergence(incident), *_collectives(incident)]
    basis += [*_on_gpus(incident), *lost]
    if len(ordered) > 1 and level == "established" and not _clearly_first(ordered):
        level = "supported"
    return _verdict(kind, level, basis, failure)


def _verdict(kind: str, level: Level, basis: Sequence[str], failure: Failure | None = None) -> Verdict:
    return Verdict(kind, failure, level, " ".join(basis), list(basis))


def _name(process: ProcessReport) -> str:
    return f"{process.title} (pid {process.pid})"


def _awaited_peer(incident: Incident, ordered: Sequence[FailureEvent]) -> tuple[ProcessReport, str] | None:
    """Return the one rank for which the first that failed waited in vain, and what it did; None where it is not known.

    An exception about a peer that did not answer tells of that one: it is stopped, or was elsewhere than in a
    collective.
    """
    first = ordered[0]
    if first.kind != "exception":
        return None
    if _is_lost_peer(first.message):
        stopped = []
        for one in incident.processes:
            state = one.state or {}
            held = of_state(str(state.get("State", ""))[:1], str(state.get("wchan", "")))
            if one.role == "scheduler" and held is not None and held.kind in ("stopped", "traced"):
                stopped.append((one, held.words.replace("was ", "is ", 1)))
        if len(stopped) == 1 and stopped[0][0].pid != first.pid:
            return stopped[0]
    if not (_OF_COLLECTIVES.match(first.message) and _TIMED_OUT.search(first.message)):
        return None
    failed, peers = {event.pid for event in ordered}, _peers_of(incident, [first.pid])
    seen = [one for one in incident.processes if one.pid in peers and one.doing and one.pid not in failed]
    elsewhere = [one for one in seen if _activity_in(one.doing).kind not in (*WAITS_FOR_OTHERS, "idle")]
    if len(elsewhere) != 1:
        return None
    return elsewhere[0], f"{_doing(elsewhere[0].doing)} while others waited for it in a collective"


def _peers_of(incident: Incident, pids: Sequence[int]) -> set[int]:
    """Return the ranks that run the same steps as any of these."""
    ranks = [(rank_at(process.rank), process.pid) for process in incident.processes if process.role == "scheduler"]
    return {pid for group in groups_of(ranks) if not set(pids).isdisjoint(group) for pid in group}


def _judge_hang(incident: Incident, ordered: Sequence[FailureEvent], lost: Sequence[str]) -> Verdict:
    """Return the verdict where the first of the failures, which are in order, is that a rank made no progress."""
    hung = list(dict.fromkeys(event.pid for event in ordered if event.kind == "hang"))
    # A watchdog speaks of its own rank only, and that of a stopped rank is stopped with it.
    pids = _peers_of(incident, hung)
    peers = [process for process in incident.processes if process.pid in pids or process.pid in hung]
    peers.sort(key=lambda process: (hung.index(process.pid) if process.pid in hung else -1, process.pid))
    silences = _silences(incident, ordered)
    collectives = [*_divergence(incident, of_hang=True), *_collectives(incident)]
    more = [*_on_gpus(incident), *lost]
    busy = find_busy(peers) if incident.trigger.event in _NOTICED else ""
    if busy and all(event.kind == "hang" for event in ordered):
        return _verdict("busy", "supported", [busy, *silences, *_activities(incident), *more])
    if stopped := all_stopped(peers):
        return _verdict("hang", "established", [stopped, *silences, *collectives, *_activities(incident), *more])
    suspect = find_suspect(peers)
    if suspect is not None:
        named, basis = suspect[0].pid, [suspect[1], *silences, *collectives]
    elif (late := _late_in_collectives(incident)) is not None:
        named, basis = late, [*collectives, *silences]
    elif len(hung) == 1:
        named, basis = hung[0], [*silences, *describe_alone(incident.process(hung[0])), *collectives]
    else:
        text = f"{len(hung)} processes made no progress, and no single rank looks responsible."
        # That they diverged is the reason, though of two ranks nobody knows which one went astray.
        diverged = bool(_divergence(incident))
        basis = [*collectives, *silences] if diverged else [text, *silences, *collectives]
        return _verdict("hang", "supported" if diverged else "unknown", [*basis, *_activities(incident), *more])
    basis += [*_activities(incident, without=named), *more]
    process = incident.process(named)
    title = process.title if process else incident.trigger.title
    # Who waits is not necessarily whom the others wait for.
    return _verdict("hang", "supported", basis, Failure(named, title))


def _judge_unhealthy(incident: Incident) -> Verdict:
    """Return the verdict on an incident of which no failure is known.

    Nothing but the stacks and what the kernel says tell who it is: of the schedulers the outlier of its group, of the
    other processes one that is stopped, such as a detokenizer.
    """
    ranks = [process for process in incident.processes if process.role == "scheduler" and process.samples]
    others = [process for process in incident.processes if process.role not in ("scheduler", "helper")]
    stopped = all_stopped(ranks)
    if stopped:
        return _verdict("hang", "established", [stopped])
    groups = groups_of([(rank_at(process.rank), process) for process in ranks])
    findings = [judge_group([member_of(process) for process in group]) for group in groups]
    named = [(one.level, one.named[0].source, one.statement) for one in findings if one.named]
    for process in others:
        # One alone is an outlier by nothing but what the kernel says of it.
        alone = find_outlier([member_of(process)])
        if alone is not None and alone.level == "established":
            named.append((alone.level, process, alone.statement))
    if named:
        level, process, statement = min(named, key=lambda one: LEVELS.index(one[0]))
        return _verdict("hang", level, [statement], Failure(process.pid, process.title))
    name = f"{incident.trigger.title} (pid {incident.trigger.pid})"
    basis = [f"The health check of {name} had failed, but no process was seen to stand still."]
    return _verdict("unknown", "unknown", [*basis, *(one.statement for one in findings)])


def _silences(incident: Incident, ordered: Sequence[FailureEvent]) -> list[str]:
    """Return what is known of who made no progress, those with the same words together, and of what came after."""
    said: dict[str, list[str]] = {}
    after = []
    for event in ordered:
        process = incident.process(event.pid)
        if process is None:
            continue
        if event.kind == "hang":
            said.setdefault(event.message, []).append(_name(process))
        else:
            after.append(_consequence(event, process))
    return [f"{name_some(names)} {message}." for message, names in said.items()] + after


def _abnormal(incident: Incident) -> list[dict[str, Any]]:
    """Return what the flight recorders show of collectives that go wrong."""
    findings = incident.collectives.findings if incident.collectives is not None else []
    return [one for one in findings if one["level"] != "unknown"]


def _divergence(incident: Incident, *, of_hang: bool = False) -> list[str]:
    """Return where the ranks went different ways, in a sentence; of a hang also that they did not, or may have."""
    found = incident.divergence
    if not found or not (of_hang or found.get("kind") in DIVERGED):
        return []
    return [str(found["statement"])]


def _collectives(incident: Incident) -> list[str]:
    return [str(finding["statement"]) for finding in _abnormal(incident)[:_MAX_COLLECTIVES]]


def _late_in_collectives(incident: Incident) -> int | None:
    """Return the one process for which the others wait in their collectives, None where it is not one.

    Who is behind in one process group and waits in another for somebody else is not it.
    """
    abnormal = _abnormal(incident)
    late = {pid for finding in abnormal[:1] for pid in finding["pids"]}
    behind = [finding for finding in abnormal if finding["kind"] == "behind"]
    if abnormal[:1] == behind[:1]:
        waiting = {pid for finding in behind for pid in finding.get("waiting_pids", ())}
        late = {pid for finding in behind for pid in finding["pids"]} - waiting
    return late.pop() if len(late) == 1 else None


def _activities(incident: Incident, without: int | None = None) -> list[str]:
    return [
        f"{_name(other)} {_doing(other.doing)}."
        for other in incident.processes
        if other.pid != without and other.role == "scheduler" and other.doing
    ]


def _doing(frames: Sequence[str]) -> str:
    activity = _activity_in(frames)
    return activity.words if activity.is_work else f"was in {frames[0]}"


def _activity_in(frames: Sequence[str]) -> Activity:
    return of_frames([frame_of(text) for text in frames])


def _on_gpus(incident: Incident) -> list[str]:
    """Return what the GPU cores tell: of each the first kernel, or what failed, which comes after the kernels."""
    told = []
    for process in incident.processes:
        failed = next((line for line in process.gpu if line.startswith("exception: ")), None)
        if process.gpu:
            told.append(f"{_name(process)} had on its GPU: {failed or process.gpu[0]}.")
    return told


def _clearly_first(ordered: Sequence[FailureEvent]) -> bool:
    first = ordered[0]
    is_death = first.kind == "exit" and first.fatal_signal and first.before_capture
    return all(
        event.with_parent
        or event.is_answer
        or event.seconds - first.seconds > (0.0 if is_death and event.kind == "exception" else _SAME_MOMENT_SECS)
        or (is_death and _is_lost_peer(event.message))
        for event in ordered[1:]
    )


def _statement(event: FailureEvent, process: ProcessReport | None, title: str) -> tuple[str, str, Level]:
    name = f"{title} (pid {event.pid})"
    if event.kind == "exception":
        if _is_of_collectives(event.message) and not _OF_SYSTEM.search(event.message, 0, _MAX_LOOKED):
            # Nothing of this server was seen to fail before: with several nodes, it was another node's.
            return f"{name} lost the connection to a peer: it raised {event.message}.", "lost_peer", "supported"
        return f"{name} raised {event.message}.", "exception", "established"
    end = process.exit if process else None
    if end is None or end.cause == "unknown":
        return f"{name} ended; nobody could tell how.", "unknown", "supported"
    if end.cause == "parent_ended":
        return f"{name} ended: {end.detail}.", "parent_ended", "established"
    if end.cause == "oom_kill":
        return f"{name} was killed by the kernel for lack of memory: {end.detail}.", "oom_kill", "established"
    if end.signal is not None:
        return f"{name} was killed by {end.signal}: {end.detail}.", "signal", "established"
    return f"{name} ended with exit status {end.code}: {end.detail}.", "exit_status", "established"


def _consequence(event: FailureEvent, process: ProcessReport) -> str:
    if event.kind == "exception":
        return f"{_name(process)} then raised {event.message}."
    if event.kind == "hang":
        return f"{_name(process)} then {event.message}."
    if event.with_parent:
        return f"{_name(process)} then ended with the process that had started it."
    how = (process.exit.signal or f"exit status {process.exit.code}") if process.exit else "an unknown cause"
    return f"{_name(process)} then ended by {how}."


# -- a hang


def find_suspect(ranks: Sequence[ProcessReport]) -> tuple[ProcessReport, str] | None:
    """Return the rank that the others wait for, and what is seen of it, in sentences; None where none is an outlier.

    Of several that are alike it is the first of `ranks`, which stand in the order of their last signs of life.
    """
    members = [member_of(rank) for rank in ranks]
    outlier = find_outlier(members)
    if outlier is None:
        return None
    if outlier.level == "established":
        # What the kernel says of it is all there is to say.
        return (outlier.named[0].source, outlier.statement)
    # One without a stack may be the one, and whoever is named here is named without a level that says so.
    if not all(member.seen for member in members):
        return None
    more = [sentence for member in outlier.named[:_MAX_DESCRIBED] for sentence in _more_of(member)]
    return (outlier.named[0].source, " ".join([outlier.statement, *more]))


def describe_alone(report: ProcessReport | None) -> list[str]:
    """Return what one rank alone was seen doing, in sentences; nothing where it was not seen."""
    member = member_of(report) if report is not None else None
    if member is None:
        return []
    if not member.seen:
        return _of_lock(member)
    return [f"{member.name} {describe(member)}.", *_more_of(member)]


def all_stopped(ranks: Sequence[ProcessReport]) -> str:
    """Return what is seen where all of several ranks are stopped, so that none is an outlier; empty otherwise."""
    members = [member_of(rank) for rank in ranks]
    if len(members) < 2 or not all(member.always("stopped") for member in members):
        return ""
    words = members[0].last.words.removeprefix("was ") if members[0].last is not None else "stopped"
    return f"{name_members(members)} are all {words}: no single rank looks responsible."


def member_of(report: ProcessReport) -> Member:
    """Return a process of an incident as it is compared with others."""
    seen = [sample for sample in report.samples if sample.doing]
    # It has the GIL for a moment now and then.
    holds_gil = len(seen) > 1 and all(sample.gil == "main" for sample in seen)
    moments = tuple(_moment(report, one, holds_gil=holds_gil) for one in report.samples if one.state or one.doing)
    return Member(_name(report), moments, source=report)


def _moment(report: ProcessReport, sample: Sample, *, holds_gil: bool) -> Moment:
    main = sample.main_thread
    frames = main.frames if main is not None and main.frames else tuple(frame_of(text) for text in sample.doing)
    threads = (Thread("MainThread", report.pid, False, holds_gil, frames),) if frames else ()
    wchan = str((report.state or {}).get("wchan") or "")
    process = replace(sample, pid=report.pid, wchan=wchan, threads=threads)
    return Moment(sample.state, sample.cpu_secs, activity_of(process), frames, sample.time)


def _more_of(member: Member) -> list[str]:
    """Return in sentences what the samples of one say together."""
    # The CPU time is that of all threads; a main thread that is asleep in each sample does not use it.
    sleeps = all(moment.state == "S" for moment in member.moments)
    is_known = member.seconds() > 0 and not (sleeps and member.motion() == "spinning")
    motion = motion_words(member).removeprefix("; it ") if is_known else ""
    return [*([f"{member.name} {motion}."] if motion else []), *_of_lock(member)]


def _of_lock(member: Member) -> list[str]:
    """Return in a sentence that nobody in a process got its GIL, where that is so."""
    report: ProcessReport = member.source
    seen = [sample for sample in report.samples if sample.doing or sample.gil]
    if len(seen) > 1 and all(sample.gil == "taken" for sample in seen):
        return [f"No other thread of {member.name} got the GIL in time to answer."]
    return []


@lru_cache(maxsize=1024)
def frame_of(text: str) -> Frame:
    """Return the frame that `text` is the form of."""
    found = _FRAME.fullmatch(text)
    return Frame(found["function"], found["file"], int(found["line"])) if found else Frame(text, "", 0)


def find_busy(ranks: Sequence[ProcessReport]) -> str:
    """Return who is at work, in a sentence; empty where that is not plain.

    What may take minutes and is no hang: a compiler that runs within the rank, such as Triton's, NVRTC or the driver's;
    the export of a profile; weights that are read; a prompt of very many tokens that is taken in at once. A rank that
    does the first three uses its CPU or moves on; one that stands still there, as for a lock of a compiler's cache, may
    hang.
    """
    members = [member_of(rank) for rank in ranks]
    if not members or not all(member.seen for member in members):
        return ""
    outlier = find_outlier(members)
    if outlier is not None and outlier.level == "established":
        # One that is stopped or gone does nothing, whatever the others do.
        return ""
    elsewhere = [member for member in members if not (member.waits() or member.always("idle"))]
    if elsewhere and all(_works(member) or _takes_in(member) for member in elsewhere):
        return f"{describe_some(elsewhere)}: at work, which may take long."
    if all(_takes_in(member) for member in members):
        return f"{describe_some(members)}: at work on the GPU, as so long a prompt may take."
    return ""


def _works(member: Member) -> bool:
    """Say whether it does in most samples what may take long, and does not rest."""
    # Nobody stops it for a sample, so that frames may be missing in one of them.
    working = [moment for moment in member.seen if moment.activity.is_work]
    return 2 * len(working) > len(member.seen) and not member.rests()


def _takes_in(member: Member) -> bool:
    """Say whether it is in a batch that takes in very many tokens in one piece, and waits for the GPU at most."""
    report: ProcessReport = member.source
    sign = report.last_sign
    if sign is None or sign.tokens < _MANY_TOKENS or not all(moment.activity.batch for moment in member.seen):
        return False
    return member.waits() or not member.rests()
