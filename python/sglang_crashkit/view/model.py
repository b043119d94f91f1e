"""What is shown of an incident, as typed rows and sections.

The modules that print them (terminal, Markdown, page) add no statement of their own. Any kit version may have written
the incident, and anybody may have changed it since, so every list is bounded and says how many entries it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from sglang_crashkit.incident.names import Names, join_names, without_own_numbers
from sglang_crashkit.model.incident import Entry, Evidence, Incident, ProcessReport, Surroundings
from sglang_crashkit.view import words

_MAX_NAMES, _MAX_GPU_LINES, _MAX_LINES = 160, 8, 24
#: Up to this many events that are alike are shown one by one.
_FEW = 8
#: Events that are alike but further apart than this, in seconds, belong to two runs.
_AT_ONCE_SECS = 1.0
_VERSIONS = ("torch", "transformers", "cuda", "hip", "driver", "python")
#: The states of a process, the most telling first, with their names in the legend.
STATES = {
    "first": "failed first",
    "stopped": "stopped",
    "raised": "raised an exception",
    "dead": "dead",
    "unseen": "alive, nothing seen",
    "alive": "alive",
}


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    lines: Sequence[str] = ()
    lead: str = ""  # a sentence above the lines that matters more
    parts: Sequence[Section] = ()
    code: Sequence[str] = ()  # lines that are shown as they are


def headline(incident: Incident) -> str:
    """Return one line: the incident's kind, and the process that failed first; else the one that reported it."""
    kind, who = incident.kind or "incident", incident.trigger.title
    if incident.verdict is not None and (first := incident.verdict.first_failure) is not None:
        return f"{kind}: {first.title} (pid {first.pid})"
    if kind == "vanished":
        return f"{kind}: {who} (pid {incident.trigger.pid})"
    if kind == "peer_lost" and incident.peers:
        return f"{kind}: " + ", ".join(f"{peer.role} server {peer.address}" for peer in incident.peers)
    return f"{kind}: who failed first is not known" + (f" (reported by {who})" if who not in ("", "unknown") else "")


def facts(incident: Incident) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each short fact about an incident and its server."""
    server, fault = incident.server, incident.fault
    yield "incident", f"{incident.id} on {server.hostname}, {incident.trigger.time}"
    yield "SGLang", f"{server.sglang_version}, main process {server.pid}, crash kit {server.kit_version}"
    yield from surroundings(incident.surroundings)
    yield "requests", words.requests(incident.requests)
    if suspects := incident.suspects:
        left_out, told = incident.suspects_left_out, words.suspect(incident, _MAX_NAMES)
        if words.undecided(incident):
            told += f"; {len(suspects) if left_out else 'all'} in incident.json"
        else:
            told += f"; {len(suspects) - 1} more in incident.json" if suspects[1:] else ""
            told += f"; {left_out:,} more are not listed" if left_out else ""
        yield "suspect", told
    if fault is not None and fault.count != 1:
        short = f"; in short: incident {fault.repeats} has the stacks of all processes" if fault.repeats else ""
        yield "seen", f"the same fault {fault.count} times since {fault.first}{short}"
    if not incident.complete:
        yield "complete", "no: what is missing is listed as failed or skipped"


def surroundings(known: Surroundings) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each known group of facts around the server, such as versions and memory."""
    versions, memory, shared = known.versions, known.memory, known.shared_memory
    sizes = {
        "used": memory.used_bytes,
        "peak": memory.peak_bytes,
        "limit": memory.limit_bytes,
        "shared memory used": shared.used_bytes,
        "of": shared.total_bytes,
    }
    taken = [f"{name} {size / (1 << 30):.2f} GiB" for name, size in sizes.items() if size is not None]
    kills, place = memory.events.get("oom_kill"), known.place
    where = [f"container {place.container[:12]}"] if place.container else []
    for kind, its, names in (
        ("kubernetes", place.kubernetes, ("pod_namespace", "pod_name", "node_name")),
        ("slurm", place.slurm, ("job_id", "node")),
    ):
        where += [f"{kind} {name} {its[name]}" for name in names if its.get(name)]
    ready = [f"ready since {known.ready_since}"] if known.ready_since else []
    up = [f"up {known.uptime_secs:.0f} s"] if known.uptime_secs is not None else []
    for label, parts in (
        ("model", [*filter(None, [known.model]), *words.sizes(known.parallel)]),
        ("versions", [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)]),
        ("started", [*filter(None, [known.started]), *ready, *up]),
        ("memory", [*taken, *([f"OOM kills {kills}"] if kills else [])]),
        ("where", where),
        ("more", filter(None, [known.path])),
    ):
        if text := ", ".join(parts):
            yield label, text


# -- what was found


def cause_of(incident: Incident) -> Iterator[Section]:
    """Yield the cause, where there is one, and what to do."""
    cause = incident.cause
    if cause is None:
        return
    lines = [*cause.reasons[:1], *(f"next: {step}" for step in cause.next_steps)]
    lines.append(f"a restart helps: {cause.restart_helps}")
    for issue in cause.known_issues:
        fixed = f"fixed in {issue.fixed_in}" if issue.fixed_in else "no release with a fix is known"
        workaround = f"; until then: {issue.workaround}" if issue.workaround else ""
        lines.append(f"known upstream: sgl-project/sglang #{issue.issue}, {issue.title} ({fixed}{workaround})")
    yield Section("Cause", lines, f"**{cause.words or cause.kind}** ({cause.kind}, {cause.level})")


def findings_of(incident: Incident) -> Iterator[Section]:
    """Yield what is reported of lost peers, collectives and GPUs."""
    if incident.peers:
        peers = []
        for peer in incident.peers:
            lines = [f"SGLang says: {peer.reason}"] if peer.reason else []
            for one in peer.requests:
                since = f", since {one.since}" if one.since else ""
                lines.append(f"waits for it: {one.rid} (room {one.room}{since})")
            if peer.count > len(peer.requests):
                lines.append(f"waits for it: {peer.count - len(peer.requests)} more")
            peers.append(Section(f"{peer.role} server {peer.address}: {peer.sign}, since {peer.since}", lines))
        yield Section("Lost servers of the pair", parts=peers)
    # A process's evidence also says why it has no flight recorder, so `missing` alone makes no section.
    if (found := incident.collectives) is not None and found.findings:
        groups = [Section(f"{one.group}: {one.kind} ({one.level})", [one.statement]) for one in found.findings]
        missing = [Section("No flight recorder", found.missing)] if found.missing else []
        yield Section("Collectives", parts=[*groups, *missing])
    if incident.gpus is not None and incident.gpus.lines:
        yield Section("GPUs", incident.gpus.lines)


def steps_of(incident: Incident) -> Iterator[Section]:
    """Yield how the ranks diverged, and the last steps of the process that failed first, or else reported it."""
    process, divergence = incident.first_failure or incident.process(incident.trigger.pid), incident.divergence
    lines = [f"{divergence.statement} ({divergence.level})"] if divergence is not None else []
    if process is not None and process.steps is not None and (steps := process.steps.last):
        in_step, name = process.in_step, f"{process.title} (pid {process.pid})"
        if in_step is None:
            lines.append(f"{name} was in no step")
        else:
            lines.append(f"{name} {'was' if process.exit is None else 'died'} in {words.in_step(in_step)}")
            lines += [f"its requests: {words.some(in_step.rids, in_step.size)}"] if in_step.rids else []
        for step in steps:
            of = f" ({words.some([one.rid for one in step.requests], step.size)})" if step.requests else ""
            lines.append(f"its step {step.number:,}: {words.step_done(step)}{of}")
    if lines:
        yield Section("Steps", lines)


# -- processes: those that agree are one group


@dataclass(frozen=True)
class Group:
    """Processes that agree in what they did."""

    names: str  # their short names in one text
    state: str  # a key of `STATES`
    words: str  # the state in words, and how the process ended
    doing: Sequence[str]  # the innermost frames
    sign: str  # the last sign of life
    step: str  # the step that they were in
    evidence: Sequence[tuple[str, str]]  # status and text of each piece; lines about the GPU have an empty status
    members: Sequence[ProcessReport]
    number: int


def groups_of(incident: Incident) -> list[Group]:
    """Return the groups: the first failure, then ranks, then the rest, each ordered by how telling their state is."""
    first, names = incident.first_failure, Names(incident)
    alike: dict[object, list[ProcessReport]] = {}
    for process in incident.processes:
        sign, step = process.last_sign, process.in_step
        at = step and (step.number, step.mode, step.phase, step.size)
        gpu = [without_own_numbers(line) for line in process.gpu]
        did = (process is first, process.role, words.state(process), process.doing, sign and sign.doing, at, gpu)
        alike.setdefault(repr(did), []).append(process)
    groups = []
    for number, members in enumerate(alike.values()):
        one = members[0]
        signs = [each.last_sign for each in members if each.last_sign is not None]
        steps = [each.in_step for each in members if each.in_step is not None]
        alive = "stopped" if one.stopped else "raised" if one.has("exception") else "alive" if one.doing else "unseen"
        group = Group(
            names=words.cut(join_names(map(names.short, members)), _MAX_NAMES),
            state="first" if one is first else "dead" if one.exit is not None else alive,
            words=words.state(one),
            doing=one.doing,
            sign=words.last_sign(*signs) if signs else "",
            step=words.in_step(*steps) if steps else "",
            evidence=[*evidence_of(members, names)],
            members=members,
            number=number,
        )
        groups.append(group)
    order = list(STATES)
    return sorted(groups, key=lambda its: (its.state != "first", not its.members[0].is_rank, order.index(its.state)))


def evidence_of(members: Sequence[ProcessReport], names: Names) -> Iterator[tuple[str, str]]:
    """Yield (status, text) for the GPU lines, then for each piece of evidence, of processes that agree."""
    is_one = len(members) == 1
    of_gpu: dict[str, list[str]] = {}
    pieces: dict[tuple[object, ...], list[tuple[str, Evidence]]] = {}
    for one in members:
        for line in one.gpu:
            of_gpu.setdefault(line, []).append(names.short(one))
        for number, piece in enumerate(one.evidence):
            its = (piece.kind, piece.status, piece.source or "", without_own_numbers(piece.reason or ""))
            pieces.setdefault((number,) if is_one else its, []).append((names.short(one), piece))
    gpus = [("", f"GPU{'' if is_one else f' of {join_names(some)}'}: {line}") for line, some in of_gpu.items()]
    lines = []
    for having in pieces.values():
        some = dict.fromkeys(name for name, _piece in having)
        of = "" if len(some) == len(members) else words.cut(join_names(some), _MAX_NAMES)
        lines.append((having[0][1].status, words.evidence(*(piece for _name, piece in having), of=of)))
    for told, most in ((gpus, _MAX_GPU_LINES), (lines, _MAX_LINES)):
        yield from told[:most]
        if len(told) > most:
            yield "", f"{len(told) - most:,} more in incident.json"


def processes_of(incident: Incident) -> Section:
    """Return all groups of processes."""
    names, parts = Names(incident), []
    for group in groups_of(incident):
        one, number = group.members[0], len(group.members)
        pids = words.some([f"{names.short(each)} {each.pid}" for each in group.members])
        lines = [f"pids: {pids}{' in incident.json' * (' more' in pids)}"] if number > 1 else []
        lines += [*group.doing, *(f"last sign: {sign}" for sign in [group.sign] if sign)]
        lines += [*(f"in {step}" for step in [group.step] if step), *(text for _status, text in group.evidence)]
        who = f"{group.names} ({number:,} processes)" if number > 1 else f"{one.title} (pid {one.pid})"
        parts.append(Section(f"{who}: {group.words}", lines))
    return Section("Processes", parts=parts)


# -- the timeline: events of many processes that are alike and close in time are one run


@dataclass(frozen=True)
class Run:
    """Events at about the same time that differ only in process and numbers; often a single event."""

    events: Sequence[Entry]  # in order of time
    names: Names = field(repr=False)

    @property
    def first(self) -> Entry:
        """The earliest event."""
        return self.events[0]

    @property
    def who(self) -> str:
        """The short names of the events' processes; empty where the events have no process."""
        if self.first.pid is None:
            return ""
        names = (self.names.short(event) or f"pid {event.pid}" for event in self.events)
        told = words.cut(join_names(names), _MAX_NAMES)
        return told if len(self.events) == 1 else f"{told} ({len(self.events):,} processes)"

    @property
    def details(self) -> str:
        """The details of the first event, and the seconds from the first event to the last."""
        told = words.details(self.first)
        if len(self.events) == 1:
            return told
        differs = told and len({words.details(event) for event in self.events}) > 1
        first, last = self.first.seconds, self.events[-1].seconds
        took = f"within {last - first:.3f} s" if first is not None and last is not None else ""
        return ", ".join(filter(None, [took, f"{told} (the first)" if differs else told]))

    def __str__(self) -> str:
        return " ".join(filter(None, [self.first.event, self.who])) + (f": {self.details}" if self.details else "")


def runs_of(incident: Incident) -> list[Run]:
    """Return the events in order of time; more than `_FEW` that are alike are one run, at the place of the first."""
    runs: list[list[tuple[int, Entry]]] = []
    open_runs: dict[tuple[str, str], tuple[float, list[tuple[int, Entry]]]] = {}
    for place, event in enumerate(sorted(incident.timeline, key=lambda entry: entry.time)):
        seconds = event.seconds
        alike = event.event, without_own_numbers(words.details(event))
        before, run = open_runs.get(alike, (-inf, []))
        if seconds is None or event.pid is None or seconds - before > _AT_ONCE_SECS:
            run = []
            runs.append(run)
        run.append((place, event))
        if seconds is not None:
            open_runs[alike] = (seconds, run)
    placed = [[run] if len(run) > _FEW else [[one] for one in run] for run in runs]
    told = sorted((run for some in placed for run in some), key=lambda run: run[0][0])
    names = Names(incident)
    return [Run([event for _place, event in run], names) for run in told]


def sections(incident: Incident) -> Iterator[Section]:
    """Yield the sections below the first screen."""
    yield from (*cause_of(incident), *findings_of(incident), *steps_of(incident), processes_of(incident))
    yield Section("Timeline", [f"{run.first.time} {run}" for run in runs_of(incident)])
