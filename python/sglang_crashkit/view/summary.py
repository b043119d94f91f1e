"""An incident in words, as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.names import Names, join_names, stopped_state, without_own_numbers
from sglang_crashkit.model.checked_json import mappings_of, seconds_of
from sglang_crashkit.model.incident import (
    Entry,
    Evidence,
    Incident,
    InStep,
    LastSign,
    Occurrence,
    ProcessReport,
    Requests,
    Surroundings,
)
from sglang_crashkit.model.step import Step
from sglang_crashkit.redact import redact_text
from sglang_crashkit.view.first_screen import (
    consequence_in_words,
    counts_of,
    cut,
    first_screen,
    sizes_in_words,
    undecided_in_words,
    without_build_paths,
)
from sglang_crashkit.visible import visible

#: Of so many requests the ids are told.
_MAX_RIDS = 8
#: Of so many processes of a group the pids are told, and so many lines of their GPUs and of evidence.
_MAX_PIDS, _MAX_GPU_LINES, _MAX_LINES = 8, 8, 24
_MAX_NAMES = 160
#: So many events that are alike are told one by one, and so many entries of a list in one.
_FEW, _MAX_LIST = 8, 8
#: Two events that are further apart are of two runs.
_AT_ONCE_SECS = 1.0


def format_summary(incident: Incident, folder: Path | None = None) -> str:
    """Return ``summary.md``: the first screen, and below it the whole of each text.

    Args:
        incident: as it is shown; see `Incident.shown`.
        folder: its finished folder, by which commands name it: its id alone is found nowhere but where the server runs.
    """
    where = shlex.quote(str(folder.absolute())) if folder is not None else ""
    return visible(redact_text("\n".join(_lines(incident, where)) + "\n"))


def headline(incident: Incident) -> str:
    """Return in one line what an incident is about: its kind, and who failed first; not who was the first to tell."""
    kind, who = incident.kind or "incident", incident.trigger.title
    if incident.verdict is not None and (first := incident.verdict.first_failure) is not None:
        return f"{kind}: {first.title} (pid {first.pid})"
    if kind == "peer_lost" and incident.peers:
        return f"{kind}: " + ", ".join(f"{peer.role} server {peer.address}" for peer in incident.peers)
    return f"{kind}: who failed first is not known" + (f" (reported by {who})" if who not in ("", "unknown") else "")


def was_aborted_before(fields: Mapping[str, Any], incident: Incident) -> bool:
    """Say whether a request was aborted before anything failed.

    A client that does not wait for a server that hangs tells nothing of the hang, nor of a crash that ends it: a rank
    has taken in nothing since its last step began. Nor does one of a hang of which it is not known when it began.

    Args:
        fields: a line of ``requests/requests.jsonl``.
        incident: whose request it is.
    """
    aborted = seconds_of(fields.get("aborted"))
    if aborted is None:
        return False
    first, is_known = incident.first_failure, incident.verdict is None or incident.verdict.kind != "hang"
    began = [seconds_of(incident.trigger.time)]
    if first is not None and first.in_step is not None:
        began.append(seconds_of(first.in_step.began))
    for event in incident.timeline:
        if event.seconds is not None and event.silent_secs is not None:
            began.append(event.seconds - event.silent_secs)
            is_known = True
        elif first is not None and event.pid == first.pid:
            began.append(event.seconds)
    known = [one for one in began if one is not None]
    return is_known and bool(known) and aborted < min(known)


def format_termination_message(incident: Incident, path: str) -> str:
    """Return the little that a pod's status shows of a container that ended, with the path of the incident."""
    verdict = incident.verdict
    told = visible(redact_text(f"{verdict.text} ({verdict.level})" if verdict is not None else headline(incident)))
    return f"{told}\nincident {path}, {incident.trigger.time}, requests: {requests_in_words(incident.requests)}\n"


def _lines(incident: Incident, where: str) -> Iterator[str]:
    server, verdict, fault = incident.server, incident.verdict, incident.fault
    yield f"# {headline(incident)}"
    yield ""
    # A fence keeps the columns where it is rendered.
    yield "```text"
    yield from first_screen(incident, where=where)
    yield "```"
    yield ""
    if verdict is not None:
        yield f"**{without_build_paths(verdict.text or 'no verdict')}** ({verdict.level})"
        yield ""
    yield f"- incident {incident.id} on {server.hostname}, {incident.trigger.time}"
    yield f"- SGLang {server.sglang_version}, server pid {server.pid}, crash kit {server.kit_version}"
    yield from (f"- {line}" for line in environment_in_words(incident.surroundings))
    yield f"- requests: {requests_in_words(incident.requests)}"
    if incident.suspects:
        yield f"- {suspect_in_words(incident)}"
    if fault is not None and fault.count != 1:
        yield f"- {occurrence_in_words(fault)}"
    if not incident.complete:
        yield "- not complete: what is missing is listed as failed or skipped"
    yield ""
    yield from _cause(incident)
    yield from _peers(incident)
    yield from _steps(incident)
    yield from _collectives(incident)
    yield from _gpus(incident)
    yield "## Processes"
    yield from process_sections(incident)
    yield ""
    yield "## Timeline"
    yield ""
    names = Names(incident)
    for run in runs_of(incident):
        many = [run.who(names)] if len(run.events) > 1 else []
        told = ", ".join(filter(None, [*many, run.details(of_process=True)]))
        yield f"- {run.first.time} {run.first.event}{': ' if told else ''}{told}"


def _cause(incident: Incident) -> Iterator[str]:
    cause = incident.cause
    if cause is None:
        return
    yield "## Cause"
    yield ""
    yield f"**{cause.words or cause.kind}** ({cause.kind}, {cause.level})"
    yield ""
    yield from (f"- {reason}" for reason in cause.reasons[:1])
    yield from (f"- next: {step}" for step in cause.next_steps)
    yield f"- a restart helps: {cause.restart_helps}"
    for issue in cause.known_issues:
        fixed = f"fixed in {issue.fixed_in}" if issue.fixed_in else "no release with a fix is known"
        workaround = f"; until then: {issue.workaround}" if issue.workaround else ""
        yield f"- known upstream: sgl-project/sglang #{issue.issue}, {issue.title} ({fixed}{workaround})"
    yield ""


def _peers(incident: Incident) -> Iterator[str]:
    if not incident.peers:
        return
    yield "## Lost servers of the pair"
    for peer in incident.peers:
        yield ""
        yield f"### {peer.role} server {peer.address}: {peer.sign}, since {peer.since}"
        if peer.reason:
            yield f"- SGLang says: {peer.reason}"
        for request in peer.requests:
            since = f", since {request.since}" if request.since else ""
            yield f"- waits for it: {request.rid} (room {request.room}{since})"
        if peer.count > len(peer.requests):
            yield f"- waits for it: {peer.count - len(peer.requests)} more"
    yield ""


def _collectives(incident: Incident) -> Iterator[str]:
    collectives = incident.collectives
    if collectives is None or not collectives.findings:
        # Of whom there is no flight recorder, and why, is among the evidence of each process.
        return
    yield "## Collectives"
    for finding in collectives.findings:
        yield ""
        yield f"### {finding.group}: {finding.kind} ({finding.level})"
        yield f"- {finding.statement}"
    if collectives.missing:
        yield ""
        yield "No flight recorder:"
        yield from (f"- {line}" for line in collectives.missing)
    yield ""


def suspect_in_words(incident: Incident) -> str:
    """Say which of the suspects of an incident is suspected most, and why; or that nothing is between them."""
    suspects, left_out = incident.suspects, incident.suspects_left_out
    if undecided := undecided_in_words(incident):
        return f"suspect: {undecided}; {len(suspects) if left_out else 'all'} in incident.json"
    first, more = suspects[0], len(suspects) - 1
    others = f"; {more} more in incident.json" if more else ""
    cut_off = f"; {left_out:,} more are not listed" if left_out else ""
    return f"suspect: request {first.rid} ({first.level}): {'; '.join(first.reasons)}{others}{cut_off}"


def _gpus(incident: Incident) -> Iterator[str]:
    if incident.gpus is None or not incident.gpus.lines:
        return
    yield "## GPUs"
    yield ""
    yield from (f"- {line}" for line in incident.gpus.lines)
    yield ""


def environment_in_words(surroundings: Surroundings) -> Iterator[str]:
    """Say in a few lines what surrounded the server, of what is known."""
    versions, place = surroundings.versions, surroundings.place
    memory, shared = surroundings.memory, surroundings.shared_memory
    served = [f"model {surroundings.model}"] if surroundings.model else []
    served += sizes_in_words(surroundings.parallel)
    named = ("torch", "transformers", "cuda", "hip", "driver", "python")
    built = [f"{name} {versions[name]}" for name in named if versions.get(name)]
    times = [f"started {surroundings.started}"] if surroundings.started else []
    times += [f"ready since {surroundings.ready_since}"] if surroundings.ready_since else []
    times += [f"up {surroundings.uptime_secs:.0f} s"] if surroundings.uptime_secs is not None else []
    sizes = {
        "memory used": memory.used_bytes,
        "peak": memory.peak_bytes,
        "limit": memory.limit_bytes,
        "shared memory used": shared.used_bytes,
        "of": shared.total_bytes,
    }
    taken = [f"{name} {size / (1 << 30):.2f} GiB" for name, size in sizes.items() if size is not None]
    kills = memory.events.get("oom_kill")
    taken += [f"OOM kills {kills}"] if kills else []
    where = [f"container {place.container[:12]}"] if place.container else []
    for kind, its, names in (
        ("kubernetes", place.kubernetes, ("pod_namespace", "pod_name", "node_name")),
        ("slurm", place.slurm, ("job_id", "node")),
    ):
        where += [f"{kind} {name} {its[name]}" for name in names if its.get(name)]
    for parts in (served, built, times, taken, where):
        if parts:
            yield ", ".join(parts)
    if surroundings.path:
        yield f"more of it in {surroundings.path}"


def requests_in_words(requests: Requests) -> str:
    """Say what became of the requests."""
    number, journal = counts_of(requests), requests.journal
    finished, unfinished = (number.finished, number.unfinished) if number is not None else (None, None)
    counts = f"{finished} finished and {unfinished} unfinished"
    if requests.path is not None:
        others = f", with {number.others} health checks and the like" if number is not None and number.others else ""
        return f"{counts} in {requests.path}{others}"
    if requests.source != "journal" or journal is None:
        return f"not saved: {requests.reason}"
    lost = f", {journal.lost} more found no room in it" if journal.lost else ""
    return f"{counts}, from the journal, in {journal.path}{lost} (the server saved none: {requests.reason})"


def occurrence_in_words(fault: Occurrence) -> str:
    """Say how often a fault had been seen by then, and where the stacks are of an incident that is kept in short."""
    short = f"; in short: incident {fault.repeats} has the stacks of all processes" if fault.repeats else ""
    return f"the same fault {fault.count} times since {fault.first}{short}"


# -- steps


def _steps(incident: Incident) -> Iterator[str]:
    """Yield how the ranks diverged, and the steps of the process that failed first, or else of who reported it."""
    process, divergence = incident.first_failure or incident.process(incident.trigger.pid), incident.divergence
    steps = process.steps.last if process is not None and process.steps is not None else []
    if not steps and divergence is None:
        return
    yield "## Steps"
    yield ""
    if divergence is not None:
        yield f"- {divergence.statement} ({divergence.level})"
    if process is not None and steps:
        in_step, name = process.in_step, f"{process.title} (pid {process.pid})"
        if in_step is not None:
            yield f"- {name} {'was' if process.exit is None else 'died'} in {_current_in_words(in_step)}"
            if in_step.rids:
                yield f"- its requests: {_named(in_step.rids[:_MAX_RIDS], in_step.size)}"
        else:
            yield f"- {name} was in no step"
        yield f"- the last {len(steps)} of its steps:"
        yield from (f"    - {_step(step)}" for step in steps)
    yield ""


def _current_in_words(*steps: InStep) -> str:
    """Say of the steps that processes that agree are in which it was, how far it had come, and how long it ran."""
    first = steps[0]
    ran = _span([step.seconds for step in steps], ", for ", " s", 3)
    return f"step {first.number:,}: {_batch(first)}, {first.phase.replace('_', ' ')}{ran}"


def _step(step: Step) -> str:
    how_far = step.phase.replace("_", " ") if step.ended is None else f"{(step.ended - step.began) * 1000:.1f} ms"
    tokens = f", {step.tokens:,} token{'' if step.tokens == 1 else 's'}" if step.tokens else ""
    rids = [request.rid for request in step.requests[:_MAX_RIDS]]
    of = f" ({_named(rids, step.size)})" if rids else ""
    return f"step {step.number:,}: {_batch(step)}{tokens}{of}, {how_far}"


def _batch(step: InStep | Step) -> str:
    return f"{step.mode or 'not yet scheduled'}, {step.size:,} request{'' if step.size == 1 else 's'}"


# -- processes: those that agree in one section


def process_sections(incident: Incident) -> Iterator[str]:
    """Yield a section for each group of processes that agree: who failed first, the other ranks, the rest."""
    first = incident.first_failure
    groups: dict[str, list[ProcessReport]] = {}
    for process in incident.processes:
        groups.setdefault(_likeness(process, is_first=process is first), []).append(process)
    names = Names(incident)
    for members in sorted(groups.values(), key=lambda its: (its[0] is not first, not its[0].is_rank)):
        yield ""
        yield from _section(members, names)


def state_in_words(process: ProcessReport) -> str:
    """Say whether a process was alive when it was looked at, was stopped, or raised; and how it ended otherwise."""
    end = process.exit
    if end is None:
        raised = any(piece.kind == "exception" and piece.status == "captured" for piece in process.evidence)
        return stopped_state(process) or ("raised an exception" if raised else "alive then")
    # That it was a signal goes without saying.
    cause = "" if end.cause == "signal" else f"{end.cause}: "
    return f"dead, {end.signal or f'exit status {end.code}'} ({cause}{end.detail})"


def last_sign_in_words(*signs: LastSign) -> str:
    """Say what schedulers that agree were about when their heartbeats were last written to, and when that was."""
    return f"{signs[0].doing}{_span([sign.seconds_before for sign in signs], ', ', ' s before', 1)}"


def piece_in_words(piece: Evidence) -> str:
    """Say of a piece of evidence what it is, whether it is there, and where or why not."""
    return _evidence_in_words([piece])


def _likeness(process: ProcessReport, *, is_first: bool) -> str:
    """Return what processes of one group have in common; numbers that differ with the process are left out."""
    sign, step = process.last_sign, process.in_step
    at = step and (step.number, step.mode, step.phase, step.size)
    gpu = [without_own_numbers(line) for line in process.gpu]
    return repr((is_first, process.role, state_in_words(process), process.doing, sign and sign.doing, at, gpu))


def _section(members: Sequence[ProcessReport], names: Names) -> Iterator[str]:
    process, is_one = members[0], len(members) == 1
    if is_one:
        yield f"### {process.title} (pid {process.pid}): {state_in_words(process)}"
    else:
        who = cut(join_names(one.title for one in members), _MAX_NAMES)
        yield f"### {who} ({len(members):,} processes): {state_in_words(process)}"
        pids = [f"{names.short(one)} {one.pid}" for one in members]
        yield f"- pids: {_named(pids[:_MAX_PIDS], len(pids))}{' in incident.json' * (len(pids) > _MAX_PIDS)}"
    yield from (f"- {frame}" for frame in process.doing)
    if signs := [one.last_sign for one in members if one.last_sign is not None]:
        yield f"- last sign: {last_sign_in_words(*signs)}"
    if steps := [one.in_step for one in members if one.in_step is not None]:
        yield f"- in {_current_in_words(*steps)}"
    of_gpu: dict[str, list[str]] = {}
    of_evidence: dict[tuple[object, ...], list[tuple[str, Evidence]]] = {}
    for one in members:
        for line in one.gpu:
            of_gpu.setdefault(line, []).append(names.short(one))
        for number, piece in enumerate(one.evidence):
            its = (piece.kind, piece.status, piece.source or "", without_own_numbers(piece.reason or ""))
            of_evidence.setdefault((number,) if is_one else its, []).append((names.short(one), piece))
    gpus = (f"GPU{'' if is_one else f' of {join_names(some)}'}: {line}" for line, some in of_gpu.items())
    yield from _few(list(gpus), _MAX_GPU_LINES)
    lines = []
    for having in of_evidence.values():
        some = dict.fromkeys(name for name, _piece in having)
        of = "" if len(some) == len(members) else cut(join_names(some), _MAX_NAMES)
        lines.append(_evidence_in_words([piece for _name, piece in having], of=of))
    yield from _few(lines, _MAX_LINES)


def _few(lines: Sequence[str], most: int) -> Iterator[str]:
    yield from (f"- {line}" for line in lines[:most])
    if len(lines) > most:
        yield f"- {len(lines) - most:,} more in incident.json"


def _evidence_in_words(pieces: Sequence[Evidence], *, of: str = "") -> str:
    """Say of a piece of evidence, which several processes may have, what became of it.

    Args:
        pieces: alike but for their files, times, and the numbers in their reasons.
        of: whose they are, where not all of a group have one.
    """
    one = pieces[0]
    paths = list(dict.fromkeys(piece.path for piece in pieces if piece.path))
    reasons = list(dict.fromkeys(piece.reason for piece in pieces if piece.reason))
    # Such as the pid in a path; whose it is, is no more than a number here.
    why = reasons if len(reasons) < 2 else [without_own_numbers(reasons[0], "N")]
    folder = [f"{paths[0].rpartition('/')[0]}/, {len(paths):,} files"] if len(paths) > 1 else paths
    where = "; ".join([*folder, *why]) or "in incident.json"
    by = f" by {one.source}" if one.source else ""
    took = _span([piece.seconds for piece in pieces if piece.seconds is not None], ", ", " s", 3)
    return f"{one.kind}: {one.status}{f' of {of}' if of else ''}{by} ({where}{took})"


def _span(numbers: Sequence[float], before: str, behind: str, digits: int) -> str:
    """Return the range of some numbers between two texts; an empty text where there is no number."""
    if not numbers:
        return ""
    told = dict.fromkeys(f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return f"{before}{' to '.join(told)}{behind}"


# -- the timeline: events of many processes that are alike and close to one another are one line


@dataclass(frozen=True)
class Run:
    """Events at about the same time that are alike but for their processes and numbers; often one alone."""

    events: Sequence[Entry]  # in order of time

    @property
    def first(self) -> Entry:
        """The first of them."""
        return self.events[0]

    def who(self, names: Names) -> str:
        """Return whom it happened to, in short; empty where it did to no process."""
        if self.first.pid is None:
            return ""
        told = cut(join_names(map(names.short, self.events)), _MAX_NAMES)
        return told if len(self.events) == 1 else f"{told} ({len(self.events):,} processes)"

    def details(self, *, of_process: bool = False) -> str:
        """Return what is told beside the time, and how long it took until the last of them.

        `of_process` has the pid and the title of a single one with it.
        """
        words = _details(self.first, of_process=of_process and len(self.events) == 1)
        if len(self.events) == 1:
            return words
        differs = len({_details(event, of_process=False) for event in self.events}) > 1
        first, last = self.first.seconds, self.events[-1].seconds
        took = f"within {last - first:.3f} s" if first is not None and last is not None else ""
        return ", ".join(filter(None, [took, f"{words} (the first)" if words and differs else words]))


def timeline_of(incident: Incident) -> list[Entry]:
    """Return the events in order of time."""
    return sorted(incident.timeline, key=lambda entry: entry.time)


def runs_of(incident: Incident) -> list[Run]:
    """Return the events in order of time, more than a few alike as one run where the first of them stands."""
    runs: list[list[tuple[int, Entry]]] = []
    open_runs: dict[tuple[str, str], tuple[float, list[tuple[int, Entry]]]] = {}
    for place, event in enumerate(timeline_of(incident)):
        seconds = event.seconds
        alike = event.event, without_own_numbers(_details(event, of_process=False))
        before, run = open_runs.get(alike, (-inf, []))
        if seconds is None or event.pid is None or seconds - before > _AT_ONCE_SECS:
            run = []
            runs.append(run)
        run.append((place, event))
        if seconds is not None:
            open_runs[alike] = (seconds, run)
    placed = [[run] if len(run) > _FEW else [[one] for one in run] for run in runs]
    told = sorted((run for some in placed for run in some), key=lambda run: run[0][0])
    return [Run([event for _place, event in run]) for run in told]


def _details(event: Entry, *, of_process: bool) -> str:
    hidden = ("time", "event") if of_process else ("time", "event", "pid", "title")
    told = {name: value for name, value in event.items() if name not in hidden and value is not None}
    return ", ".join(_detail_in_words(name, value) for name, value in told.items())


def _detail_in_words(name: str, value: object) -> str:
    if name == "message":
        # The whole of it stands in the verdict, or in the process's own record.
        return consequence_in_words(str(value))
    if name == "segments" and isinstance(value, list):
        segments = mappings_of(value)
        size = sum(one["bytes"] for one in segments if isinstance(one.get("bytes"), int))
        told = [f"{one.get('name')} ({one.get('why')})" for one in segments[:_MAX_LIST]]
        count = f"{len(segments)} segment{'' if len(segments) == 1 else 's'} left, {size / 1e3:,.0f} kB"
        return f"{count}: {_named(told, len(segments))}"
    if isinstance(value, list):
        return f"{name} {_named(value[:_MAX_LIST], len(value))}"
    return f"{name} {value}"


def _named(shown: Sequence[object], count: int) -> str:
    """Name the first few of so many."""
    return ", ".join(map(str, shown)) + (f" and {count - len(shown):,} more" if count > len(shown) else "")
