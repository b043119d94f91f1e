"""The verdict on an incident: which process failed first and how, and the cause, which `judge.verdict` finds.

Two facts fix the order of events. First, a rank that raises an exception waits until the stacks of the other ranks are
taken, before any other process is asked to end. So a rank that a fatal signal killed before that was not ended by the
server's own clean-up. Second, a lost connection is a consequence of a death, not its cause.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_crashkit.analysis.ranks import groups_of, name_some, rank_at
from sglang_crashkit.kernel.private_files import read_json, read_regular
from sglang_crashkit.model.incident import Cause, Failure, FailureEvent, Incident, ProcessReport, Verdict
from sglang_crashkit.model.lenient import mapping_of
from sglang_crashkit.model.peers import describe as describe_peers
from sglang_crashkit.model.sample import Frame, Sample
from sglang_crashkit.model.verdict import Level

if TYPE_CHECKING:
    from sglang_crashkit.model import verdict as answers
    from sglang_crashkit.model.event import Line

logger = logging.getLogger(__name__)

#: Triggers: ranks were busy for longer than any of their work takes; and SIGTERM came to a server whose health check
#: failed while no scheduler was known to be silent.
BUSY_TOO_LONG, UNHEALTHY = "busy_too_long", "unhealthy_at_sigterm"
#: Triggers of a silence that the kit itself noticed. Upstream's watchdog, by contrast, ends the server, busy or not.
_NOTICED = ("no_progress", "silent_at_sigterm")

#: A process that uses at least the first share of a CPU is busy all the time, one up to the second is at rest.
_BUSY, _RESTING, _STUCK = 0.5, 0.05, "was stuck in "
#: Failures up to this many seconds apart may have been noticed in the wrong order.
_SAME_MOMENT_SECS = 0.005
#: The verdict has the findings on this many process groups; the incident has all of them.
_MAX_COLLECTIVES = 2
#: Upstream's limit of new tokens in a batch is below this, unless prompts are not cut into chunks.
_MANY_TOKENS = 16_384
_LOST_PEER = re.compile(
    r"connection (closed|reset|timed out)|closed by peer|broken pipe|socket timeout|timed out waiting"
    r"|remote (process|peer)"
    r"|([nh]|one)ccl.{0,300}(abort|remote|unhandled system)|hccl.{0,300}time[sd]? ?out|store.{0,300}(timeout|closed)"
    r"|recv(?:value)? failed",
    re.IGNORECASE,
)
#: Characters of an exception to search: these patterns are slow on a text that repeats their words.
_MAX_LOOKED = 4096
#: Seconds by which a rank may report a lost connection before the end of the process that closed it is seen.
_TELLS_FIRST_SECS = 1.0
#: A failure of a process within this many seconds of the end of one of its threads may be due to the missing thread.
_LEADS_SECS = 10.0
#: In the exception of a rank whose collective exceeded its time limit.
_TIMED_OUT = re.compile(r"Timed out waiting|timeout caused pair closure|Watchdog caught")
#: How the exceptions of a library of collectives begin. After any other beginning the words may be those of a prompt.
_OF_COLLECTIVES = re.compile(
    r"(?:\w+\.)*(?:Dist\w*Error: |(?:RuntimeError: |Exception: Capture [\w -]{1,40} graph failed: )(?:"
    r"\[(?:[^\]'\"]{1,200}\.(?:cc|cpp|hpp|h)(?::\d+)?|Rank \d+|PG [^\]'\"]{1,100}|c10d|\d+)\] |NCCL"
    r"|(?:\[ERROR\] )?HCCL|oneCCL|[Gg]loo"
    r"|Connection (?:closed|reset)|Broken pipe|Socket [Tt]imeout|Timed out waiting|Application timeout"
    r"|TCPStore|recvValue|failed to recv))"
)
#: Exceptions of sockets of any kind. Together with a death they are its consequence; alone they point to no rank.
_OF_SOCKETS = re.compile(r"(?:BrokenPipe|Connection(?:Reset|Aborted))Error\b")
#: A system call of the rank's own failed, such as for memory or files. Together with a death it may be a consequence.
_OF_SYSTEM = re.compile(
    r"unhandled system error(?![\s\S]{0,999}(?:remote|[Cc]losed|[Rr]eset|[Rr]efused|[Tt]imed out|No route|Broken pipe))"
    r"|Error while creating shared memory|No space left on device"
)
#: The most bytes read of each file that may show the cause: an exception's record, the environment, a log.
_MAX_BYTES = 4 << 20
#: After this log line the HTTP server exits with a status, without an exception.
_NO_BIND = re.compile(r"\S{1,64} ERROR uvicorn\.error: (\[Errno 98\] .{0,300}).*")


def read_log(folder: Path) -> Incident | None:
    """Return the incident that the log in `folder` records, with its verdict; None if the log cannot be read."""
    from sglang_crashkit.sources.incident import incident_in_log

    try:
        incident = incident_in_log(folder)
    except OSError:
        return None
    try:
        incident.verdict = judge(incident, folder)
    except Exception as error:
        # The incident is worth more than a verdict on it.
        logger.error("the log in %s cannot be judged", folder, exc_info=error)
    return incident


def order_failures(events: Sequence[FailureEvent]) -> list[FailureEvent]:
    """Return the failures in the order in which they happened, consequences after their causes."""
    reported = {event.pid for event in events if event.kind == "exception"}
    lost = min((event.seconds for event in events if _is_lost_peer(event.message)), default=float("inf"))

    def is_death(event: FailureEvent) -> bool:
        # A process that reported an exception ended of that; one that ended much later did not close the connection.
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
    """Return whether a rank raises this exception because another rank is gone."""
    return _is_of_collectives(message) or _OF_SOCKETS.match(message) is not None


def _is_of_collectives(message: str) -> bool:
    """Return whether this is an exception of a library of collectives that lost a connection to another rank."""
    return _OF_COLLECTIVES.match(message) is not None and _LOST_PEER.search(message, 0, _MAX_LOOKED) is not None


def _by_time(event: FailureEvent) -> tuple[float, str, int, str]:
    # With pid and message, the order, and so the verdict, does not depend on the order in which the events arrived.
    return (event.seconds, event.kind, event.pid, event.message)


def judge(incident: Incident, folder: Path | None) -> Verdict:
    """Return which process failed first in an incident, and how; the failures may be in any order.

    Args:
        incident: with its processes and their evidence.
        folder: the incident's folder, with the evidence in files; with None `judge.verdict` is not asked which hangs.
    """
    verdict = _judge(incident, folder)
    verdict.basis += incident.remarks
    verdict.text = " ".join([verdict.text, *incident.remarks])
    return verdict


def _judge(incident: Incident, folder: Path | None) -> Verdict:
    ordered = order_failures([one for one in incident.failures if one.kind != "thread" or _counts(one, incident)])
    lost = describe_peers(incident.peers)
    if lost and not ordered:
        # SGLang gave the server up, which does not prove that the server failed: a broken network looks the same.
        return Verdict("peer_lost", None, "supported", " ".join(lost), lost)
    if (not ordered and incident.trigger.event == UNHEALTHY) or (ordered and ordered[0].kind == "hang"):
        return _judge_hang(incident, ordered, lost, folder)
    gone = next((one for one in incident.timeline if one.event == "found_gone"), None)
    if not ordered and gone is not None:
        text = (
            f"{incident.trigger.title} (pid {incident.trigger.pid}) and its crash handler ended without a report, "
            f"after {incident.trigger.time} and before {gone.time}."
        )
        return Verdict("vanished", None, "established" if gone.get("is_seen") is True else "supported", text, [text])
    checked = incident.divergence
    if checked is not None and checked.kind == "consensus":
        # Each rank ends after a failed check, so the first that ended is no more likely than others to be at fault.
        odd = incident.process(checked.pids[0]) if checked.against and len(checked.pids) == 1 else None
        told = [_consequence(event, other) for event in ordered if (other := incident.process(event.pid)) is not None]
        steps = [
            f"{_name(one)} was in step {step.number}, with {step.size} requests: {name_some(step.rids)}."
            for one in incident.processes
            if one.is_rank and (step := one.in_step) is not None and step.rids
        ]
        return _verdict("consensus_check", "established", [checked.statement, *steps, *told, *lost], odd)
    if not ordered:
        text = f"{incident.trigger.title} reported {incident.trigger.event}, but no process was seen to fail."
        return Verdict("unknown", None, "unknown", text)
    first = ordered[0]
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
    basis += [
        f"{_name(other)} was in {other.doing[0]}."
        for other in incident.processes
        # A process that goes on without a thread may wait for that thread.
        if (other.pid != failure.pid or kind == "thread_died") and other.is_rank and other.doing
    ]
    basis += [*_compared(incident), *_on_gpus(incident), *lost]
    is_for_thread = kind == "thread_died" and any(event.kind != "thread" for event in later)
    if len(ordered) > 1 and level == "established" and (is_for_thread or not _clearly_first(ordered)):
        level = "supported"
    return Verdict(kind, failure, level, " ".join(basis), basis)


def _name(process: ProcessReport) -> str:
    return f"{process.title} (pid {process.pid})"


def _counts(thread: FailureEvent, incident: Incident) -> bool:
    """Return whether the end of a thread may have led to a failure of its process; always so if it is the trigger."""
    if incident.trigger.event == "thread_died":
        return True
    own = [one for one in incident.failures if one.pid == thread.pid and one.kind != "thread"]
    hung = any(one.kind == "hang" for one in own)
    if hung and (process := incident.process(thread.pid)) is not None:
        from sglang_crashkit.judge.activity import of_frames
        from sglang_crashkit.sources.incident import frames_in

        hung = of_frames(frames_in(process.doing)).kind == "lock"
    return hung or any(-_SAME_MOMENT_SECS < one.seconds - thread.seconds < _LEADS_SECS for one in own)


def _awaited_peer(incident: Incident, ordered: Sequence[FailureEvent]) -> tuple[ProcessReport, str] | None:
    """Return the one rank that the first failed rank waited for in vain, and what it did; None if it is not known.

    If the first failure is an exception about a peer that did not answer, that peer is the one rank that is stopped, or
    the one that was not in a collective.
    """
    from sglang_crashkit.judge.activity import of_frames, of_state
    from sglang_crashkit.sources.incident import frames_in

    first = ordered[0]
    if first.kind != "exception":
        return None
    if _is_lost_peer(first.message):
        stopped = []
        for one in incident.processes:
            held = of_state(one.state_letter, str((one.state or {}).get("wchan") or ""))
            if one.is_rank and held is not None and held.kind in ("stopped", "traced"):
                stopped.append((one, held.words))
        if len(stopped) == 1 and stopped[0][0].pid != first.pid:
            return stopped[0]
    if not (_OF_COLLECTIVES.match(first.message) and _TIMED_OUT.search(first.message)):
        return None
    failed = {event.pid for event in ordered}
    ranks = [(rank_at(one.rank), one) for one in incident.processes if one.is_rank]
    # The ranks of another replica run other steps, so they don't take part in the same collectives.
    peers = [one for group in groups_of(ranks) for one in group if first.pid in [other.pid for other in group]]
    seen = [one for one in peers if one.doing and one.pid not in failed]
    elsewhere = [one for one in seen if of_frames(frames_in(one.doing)).waits != "ranks"]
    if len(elsewhere) != 1:
        return None
    return elsewhere[0], f"was in {elsewhere[0].doing[0]} while others waited for it in a collective"


def _judge_hang(
    incident: Incident, ordered: Sequence[FailureEvent], lost: Sequence[str], folder: Path | None
) -> Verdict:
    """Return the verdict on an incident that began with a hang, or with a failed health check and no known failure."""
    from sglang_crashkit.sources.incident import name_of

    silent = dict.fromkeys(event.pid for event in ordered if event.kind == "hang")
    told = [*_silences(incident, ordered), *_compared(incident, of_hang=True), *_on_gpus(incident), *lost]
    trigger = incident.trigger
    reason = told[0] if ordered and told else f"The health check of {trigger.title} (pid {trigger.pid}) had failed."
    # A watchdog reports its own rank only, and the watchdog of a stopped rank is stopped as well.
    alone = incident.process(next(iter(silent))) if len(silent) == 1 else None
    failure = Failure(alone.pid, alone.title) if alone is not None else None
    watched = Verdict("hang", failure, "unknown", reason)
    # Ask about the replicas of the silent ranks only: another replica does not take part in the hang.
    groups = groups_of([(rank_at(one.rank), one.pid) for one in incident.processes if one.is_rank])
    peers = {pid for group in groups for pid in group if not silent or not silent.keys().isdisjoint(group)}
    asked = [one for one in incident.processes if not one.is_rank or one.pid in peers]
    known = msgspec.structs.replace(incident, verdict=watched, processes=asked)
    answer = _ask(known, folder) if folder is not None else None
    if answer is None:
        return _verdict("hang", "unknown", told, alone)
    # A process that a rank has just forked still has the rank's name; of two with a name the silent one wins.
    by_likelihood = sorted(incident.processes, key=lambda one: one.pid in silent)
    by_name = {name_of(process): process for process in by_likelihood}
    named = by_name.get(answer.first or "")
    # If the judge names no rank, take the one that is late in the collectives, then the only silent one.
    named = named or _late_in_collectives(incident) or alone
    motion = _motion(named) if named is not None else ""
    is_busy = answer.kind == "busy" or (_take_in(incident, silent) and not motion.startswith(_STUCK))
    if is_busy and trigger.event in _NOTICED and all(event.kind == "hang" for event in ordered):
        return _verdict("busy", "supported", [f"{answer.headline}: at work, which may take long.", *told])
    if not ordered and named is None and answer.level != "established":
        where = "no process was seen to stand still" if answer.headline == reason else answer.headline
        return _verdict("unknown", "unknown", [f"{reason[:-1]}: {where}.", *told])
    headline = f"{answer.headline.rstrip('.')}."
    moved = [f"{_name(named)} {motion}."] if named is not None and motion else []
    basis = [headline, *moved, *(one for one in told if one != headline)]
    return _verdict("hang", answer.level, basis, named)


def _verdict(kind: str, level: Level, basis: Sequence[str], process: ProcessReport | None = None) -> Verdict:
    failure = Failure(process.pid, process.title) if process is not None else None
    return Verdict(kind, failure, level, " ".join(basis), list(basis))


def _motion(process: ProcessReport) -> str:
    """Return in words whether the stack of a process changed between samples; empty if that is not known."""
    seen = [sample for sample in process.samples if sample.doing or sample.gil]
    if len(seen) < 2 or seen[-1].state in ("T", "t", "Z", "X"):
        return ""
    if all(sample.gil == "taken" for sample in seen):
        return "let no other thread have the GIL in time to answer"
    seen = [sample for sample in seen if sample.doing]
    stacks = [[(frame.function, frame.file) for frame in _main_frames(sample)] for sample in seen]
    if any(stack != stacks[0] for stack in stacks):
        levels = zip(*map(reversed, stacks), strict=False)
        common = [level[0][0] for level in itertools.takewhile(lambda level: len({*level}) == 1, levels)]
        return f"moved below {common[-1]}" if common else "moved"
    if len(seen) < 2:
        return ""
    # The CPU time counts all threads; if the main thread is asleep in each sample, other threads use it.
    used, seconds = seen[-1].cpu_secs - seen[0].cpu_secs, seen[-1].time - seen[0].time
    if used >= _BUSY * seconds > 0:
        motion = (
            "" if all(sample.state == "S" for sample in seen) else f"spun in {seen[-1].doing[0]}, busy all the time"
        )
    else:
        motion = f"{_STUCK}{seen[-1].doing[0]}" if seconds > 0 and used <= _RESTING * seconds else ""
    # A thread that holds the GIL in some samples only is ordinary.
    holds = "held the GIL in each sample" if all(sample.gil == "main" for sample in seen) else ""
    return " and ".join(filter(None, (motion, holds)))


def _main_frames(sample: Sample) -> Sequence[Frame]:
    from sglang_crashkit.sources.incident import frames_in

    thread = sample.main_thread
    return thread.frames if thread is not None and thread.frames else frames_in(sample.doing)


def _take_in(incident: Incident, pids: Iterable[int]) -> bool:
    """Return whether each of the silent processes is in a batch of at least `_MANY_TOKENS` new tokens."""
    signs = [process.last_sign for pid in pids if (process := incident.process(pid)) is not None]
    return bool(signs) and all(sign is not None and sign.tokens >= _MANY_TOKENS for sign in signs)


def _silences(incident: Incident, ordered: Sequence[FailureEvent]) -> list[str]:
    """Return sentences on the ranks that made no progress, one for each message, and then on the other failures."""
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


def _compared(incident: Incident, *, of_hang: bool = False) -> list[str]:
    """Return sentences on where the ranks diverged, and on what their flight recorders show.

    For a hang, also say if the ranks did not diverge, or may have.
    """
    divergence, collectives = incident.divergence, incident.collectives
    told = [divergence.statement] if divergence is not None and (of_hang or divergence.is_one) else []
    findings = collectives.findings if collectives is not None else []
    return told + [one.statement for one in findings if one.level != "unknown"][:_MAX_COLLECTIVES]


def _late_in_collectives(incident: Incident) -> ProcessReport | None:
    """Return the one process that the others wait for in their collectives; None if there is not exactly one.

    A process that is behind in one process group but waits for other processes in another one does not count.
    """
    findings = incident.collectives.findings if incident.collectives is not None else []
    abnormal = [one for one in findings if one.level != "unknown"]
    late = {pid for finding in abnormal[:1] for pid in finding.pids}
    behind = [finding for finding in abnormal if finding.kind == "behind"]
    if abnormal[:1] == behind[:1]:
        late = {pid for finding in behind for pid in finding.pids}
        late -= {pid for finding in behind for pid in finding.waiting_pids}
    return incident.process(late.pop()) if len(late) == 1 else None


def _on_gpus(incident: Incident) -> list[str]:
    """Return a sentence on each GPU core: what failed, which comes after the kernels, or else the first kernel."""
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
    if event.kind == "thread":
        from sglang_crashkit.judge.knowledge import rows

        thread = event.message.partition(", which raised ")[0]
        stopped = (row["stops"] for row in rows("failures", "threads") if row["pattern"].search(thread))
        words = "; ".join([f"{name} goes on without {event.message}", *itertools.islice(stopped, 1)])
        return f"{words}.", "thread_died", "established"
    if event.kind == "exception":
        if _is_of_collectives(event.message) and not _OF_SYSTEM.search(event.message, 0, _MAX_LOOKED):
            # No process of this server was seen to fail before; with several nodes, the peer was on another node.
            return f"{name} lost the connection to a peer: it raised {event.message}.", "lost_peer", "supported"
        caught = ", which SGLang caught; it serves on" if event.caught else ""
        return f"{name} raised {event.message}{caught}.", "exception", "established"
    end = process.exit if process else None
    if end is None or end.cause == "unknown":
        return f"{name} ended; it is not known how.", "unknown", "supported"
    if end.cause == "parent_ended":
        return f"{name} ended: {end.detail}.", "parent_ended", "established"
    if end.cause == "oom_kill":
        return f"{name} was killed by the kernel for lack of memory: {end.detail}.", "oom_kill", "established"
    if end.signal is not None:
        return f"{name} was killed by {end.signal}: {end.detail}.", "signal", "established"
    return f"{name} ended with exit status {end.code}: {end.detail}.", "exit_status", "established"


def _consequence(event: FailureEvent, process: ProcessReport) -> str:
    how = (process.exit.signal or f"exit status {process.exit.code}") if process.exit else "an unknown cause"
    did = {
        "exception": f"raised {event.message}",
        "thread": f"lost {event.message}",
        "hang": event.message,
        "exit": "ended with the process that had started it" if event.with_parent else f"ended by {how}",
    }
    # In a log that is read later, the kind may be any text.
    return f"{_name(process)} then {did.get(event.kind, did['exit'])}."


# -- the cause


def explain(incident: Incident, folder: Path) -> Cause | None:
    """Return the cause of a judged incident; None if it is not known."""
    answer = _ask(incident, folder) if incident.kind != "snapshot" else None
    if answer is None:
        return None
    cause = Cause.of(answer)
    # The headline, on where all ranks stand, says more than the first reason, which is a quote.
    cause.reasons = [answer.headline, *answer.because[1:]]
    cause.next_steps = [*_commands(incident, answer.kind), *answer.next]
    return cause


def _ask(incident: Incident, folder: Path) -> answers.Verdict | None:
    """Return the answer of `judge.verdict` for an incident and the files in its folder; None if it raises."""
    try:
        from sglang_crashkit.judge.verdict import judge as ask
        from sglang_crashkit.model.case import case_of
        from sglang_crashkit.sources.incident import events_of

        exceptions = _paths(incident, "exception").items()
        records = {pid: record for pid, path in exceptions if (record := _read(folder / path))}
        samples = {one.pid: one.samples for one in incident.processes}
        events = events_of(incident.shown(), _read(folder / "environment.json"), records, samples)
        return ask(case_of([*events, *_last_lines(incident, folder)]))
    except Exception as error:
        logger.error("the cause of incident %s was not looked for", incident.id, exc_info=error)
        return None


def _commands(incident: Incident, kind: str) -> Iterator[str]:
    """Yield the kit's own commands that are the next steps."""
    if kind == "poison_request" or any(one.level != "unknown" for one in incident.suspects[:1]):
        yield f'`sglang-crashkit replay {incident.id} --bisect --serve "COMMAND"` finds the request'
    if kind == "rank_divergence":
        yield f"`sglang-crashkit steps {incident.id}` shows at which step, and by which request, the ranks diverged"


def _last_lines(incident: Incident, folder: Path) -> Iterator[Line]:
    """Yield the HTTP server's log lines on a port that it cannot bind, if the first failed process exited by itself."""
    from sglang_crashkit.model.event import Line

    report = incident.first_failure
    path = _paths(incident, "log").get(report.pid) if report is not None else None
    if report is None or path is None or (report.exit is not None and report.exit.cause != "exit_status"):
        return
    with contextlib.suppress(OSError):
        text = read_regular(folder / path, _MAX_BYTES).decode(errors="replace")
        for line in text.splitlines():
            if said := _NO_BIND.fullmatch(line):
                yield Line(text=said[1], level="error", source=path)


def _paths(incident: Incident, kind: str) -> dict[int, str]:
    """Return the files of one kind of evidence by pid; paths are relative to the incident's folder."""
    return {
        process.pid: piece.path
        for process in incident.processes
        for piece in process.evidence
        if piece.kind == kind and piece.path is not None
    }


def _read(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return mapping_of(read_json(path, _MAX_BYTES))
    return {}
