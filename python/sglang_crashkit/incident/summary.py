"""An incident in words, as Markdown, from what its ``incident.json`` holds.

Any kit version may have written that: what is missing, or has another form, is passed over.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.first_screen import (
    consequence_in_words,
    counts_of,
    cut,
    first_screen,
    sizes_in_words,
    undecided_in_words,
    without_build_paths,
)
from sglang_crashkit.incident.names import Names, first_failure_of, join_names, stopped_state, without_own_numbers
from sglang_crashkit.model.checked_json import mapping_of as mapping_of
from sglang_crashkit.model.checked_json import mappings_of as mappings_of
from sglang_crashkit.model.checked_json import seconds_of, texts_of
from sglang_crashkit.redact import redact_text
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

Process = Mapping[str, Any]
Event = Mapping[str, Any]


def format_summary(document: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return ``summary.md``: the first screen, and below it the whole of each text.

    Commands name an incident by its finished `folder`: its id alone is found nowhere but where the server runs.
    """
    where = shlex.quote(str(folder.absolute())) if folder is not None else ""
    return visible(redact_text("\n".join(_lines(document, where)) + "\n"))


def headline(document: Mapping[str, Any]) -> str:
    """Return in one line what an incident is about: its kind, and who failed first; not who was the first to tell."""
    kind, verdict = document.get("kind", "incident"), mapping_of(document.get("verdict"))
    first, trigger = mapping_of(verdict.get("first_failure")), mapping_of(document.get("trigger"))
    peers = mappings_of(document.get("peers"))
    if first:
        return f"{kind}: {first.get('title')} (pid {first.get('pid')})"
    if kind == "peer_lost" and peers:
        return f"{kind}: " + ", ".join(f"{peer.get('role')} server {peer.get('address')}" for peer in peers)
    who = trigger.get("title", "unknown")
    return f"{kind}: who failed first is not known" + (f" (reported by {who})" if who != "unknown" else "")


def was_aborted_before(fields: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    """Say whether a request was aborted before anything failed.

    A client that does not wait for a server that hangs tells nothing of the hang, nor of a crash that ends it: a rank
    has taken in nothing since its last step began. Nor does one of a hang of which it is not known when it began.

    Args:
        fields: a line of ``requests/requests.jsonl``.
        document: the incident.
    """
    aborted = seconds_of(fields.get("aborted"))
    if aborted is None:
        return False
    first, is_known = first_failure_of(document), mapping_of(document.get("verdict")).get("kind") != "hang"
    pid, trigger = first.get("pid"), mapping_of(document.get("trigger"))
    began = [seconds_of(trigger.get("time")), seconds_of(_step_of(first).get("began"))]
    for event in mappings_of(document.get("timeline")):
        silent, noticed = event.get("silent_secs"), seconds_of(event.get("time"))
        if noticed is not None and isinstance(silent, (int, float)):
            began.append(noticed - silent)
            is_known = True
        elif pid is not None and event.get("pid") == pid:
            began.append(noticed)
    known = [one for one in began if one is not None]
    return is_known and bool(known) and aborted < min(known)


def format_termination_message(document: Mapping[str, Any], path: str) -> str:
    """Return the little that a pod's status shows of a container that ended, with the path of the incident."""
    trigger, verdict = mapping_of(document.get("trigger")), mapping_of(document.get("verdict"))
    text = f"{verdict.get('text')} ({verdict.get('level')})" if verdict else headline(document)
    requests = requests_in_words(mapping_of(document.get("requests")))
    told = visible(redact_text(text))
    return f"{told}\nincident {path}, {trigger.get('time')}, requests: {requests}\n"


def _lines(document: Mapping[str, Any], where: str) -> Iterator[str]:
    server, trigger, verdict = (mapping_of(document.get(name)) for name in ("server", "trigger", "verdict"))
    yield f"# {headline(document)}"
    yield ""
    # A fence keeps the columns where it is rendered.
    yield "```text"
    yield from first_screen(document, where=where)
    yield "```"
    yield ""
    if verdict:
        yield f"**{without_build_paths(str(verdict.get('text', 'no verdict')))}** ({verdict.get('level', 'unknown')})"
        yield ""
    yield f"- incident {document.get('id')} on {server.get('hostname')}, {trigger.get('time')}"
    kit = server.get("kit_version")
    yield f"- SGLang {server.get('sglang_version')}, server pid {server.get('pid')}, crash kit {kit}"
    yield from (f"- {line}" for line in environment_in_words(mapping_of(document.get("environment"))))
    yield f"- requests: {requests_in_words(mapping_of(document.get('requests')))}"
    if suspects := mappings_of(document.get("suspects")):
        yield f"- {suspect_in_words(document, suspects)}"
    fault = mapping_of(document.get("fault"))
    if fault and fault.get("count") != 1:
        yield f"- {occurrence_in_words(fault)}"
    if not document.get("complete"):
        yield "- not complete: what is missing is listed as failed or skipped"
    yield ""
    yield from _cause(document)
    yield from _peers(document)
    yield from _steps(_first_failure(document), mapping_of(document.get("divergence")))
    yield from _collectives(document)
    yield from _gpus(document)
    yield "## Processes"
    yield from process_sections(document)
    yield ""
    yield "## Timeline"
    yield ""
    names = Names(document)
    for run in runs_of(document):
        many = [run.who(names)] if len(run.events) > 1 else []
        told = ", ".join(filter(None, [*many, run.details(of_process=True)]))
        yield f"- {run.first.get('time')} {run.first.get('event')}{': ' if told else ''}{told}"


def _first_failure(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the process that failed first, or that reported the failure where nobody is known to; may be empty."""
    pid = mapping_of(document.get("trigger")).get("pid")
    told = (one for one in mappings_of(document.get("processes")) if one.get("pid") == pid is not None)
    return first_failure_of(document) or next(told, {})


def _cause(document: Mapping[str, Any]) -> Iterator[str]:
    cause = mapping_of(document.get("cause"))
    if not cause:
        return
    yield "## Cause"
    yield ""
    yield f"**{cause.get('words', cause.get('class'))}** ({cause.get('class')}, {cause.get('level')})"
    yield ""
    yield from (f"- {reason}" for reason in (cause.get("reasons") or ())[:1])
    yield from (f"- next: {step}" for step in cause.get("next_steps") or ())
    yield f"- a restart helps: {cause.get('restart_helps')}"
    for issue in mappings_of(cause.get("known_issues")):
        fixed = f"fixed in {issue['fixed_in']}" if issue.get("fixed_in") else "no release with a fix is known"
        workaround = f"; until then: {issue['workaround']}" if issue.get("workaround") else ""
        yield f"- known upstream: sgl-project/sglang #{issue.get('issue')}, {issue.get('title')} ({fixed}{workaround})"
    yield ""


def _peers(document: Mapping[str, Any]) -> Iterator[str]:
    peers = mappings_of(document.get("peers"))
    if not peers:
        return
    yield "## Lost servers of the pair"
    for peer in peers:
        yield ""
        yield f"### {peer.get('role')} server {peer.get('address')}: {peer.get('sign')}, since {peer.get('since')}"
        if peer.get("reason"):
            yield f"- SGLang says: {peer.get('reason')}"
        requests = mappings_of(peer.get("requests"))
        for request in requests:
            since = f", since {request.get('since')}" if request.get("since") else ""
            yield f"- waits for it: {request.get('rid')} (room {request.get('room')}{since})"
        count = peer.get("count")
        if isinstance(count, int) and count > len(requests):
            yield f"- waits for it: {count - len(requests)} more"
    yield ""


def _collectives(document: Mapping[str, Any]) -> Iterator[str]:
    collectives = mapping_of(document.get("collectives"))
    findings, missing = mappings_of(collectives.get("findings")), collectives.get("missing")
    if not findings:
        # Of whom there is no flight recorder, and why, is among the evidence of each process.
        return
    yield "## Collectives"
    for finding in findings:
        yield ""
        yield f"### {finding.get('group')}: {finding.get('kind')} ({finding.get('level')})"
        yield f"- {finding.get('statement')}"
    if isinstance(missing, list) and missing:
        yield ""
        yield "No flight recorder:"
        yield from (f"- {line}" for line in missing)
    yield ""


def suspect_in_words(document: Mapping[str, Any], suspects: Sequence[Mapping[str, Any]]) -> str:
    """Say which of the suspects of an incident is suspected most, and why; or that nothing is between them."""
    left_out = document.get("suspects_left_out")
    is_cut = type(left_out) is int and left_out > 0
    if undecided := undecided_in_words(document):
        return f"suspect: {undecided}; {len(suspects) if is_cut else 'all'} in incident.json"
    first, more = suspects[0], len(suspects) - 1
    reasons = "; ".join(str(reason) for reason in first.get("reasons") or ())
    others = f"; {more} more in incident.json" if more else ""
    cut_off = f"; {left_out:,} more are not listed" if is_cut else ""
    return f"suspect: request {first.get('rid')} ({first.get('level')}): {reasons}{others}{cut_off}"


def _gpus(document: Mapping[str, Any]) -> Iterator[str]:
    lines = mapping_of(document.get("gpus")).get("lines")
    if not isinstance(lines, list) or not lines:
        return
    yield "## GPUs"
    yield ""
    yield from (f"- {line}" for line in lines)
    yield ""


def environment_in_words(environment: Mapping[str, Any]) -> Iterator[str]:
    """Say in a few lines what surrounded the server, of what is known."""
    versions, place = mapping_of(environment.get("versions")), mapping_of(environment.get("place"))
    sizes = mapping_of(environment.get("parallel"))
    served = [f"model {environment['model']}"] if environment.get("model") else []
    served += sizes_in_words(sizes)
    named = ("torch", "transformers", "cuda", "hip", "driver", "python")
    built = [f"{name} {versions[name]}" for name in named if versions.get(name)]
    times = [f"started {environment['started']}"] if environment.get("started") else []
    times += [f"ready since {environment['ready_since']}"] if environment.get("ready_since") else []
    if isinstance(environment.get("uptime_secs"), (int, float)):
        times.append(f"up {environment['uptime_secs']:.0f} s")
    memory, shared = (mapping_of(environment.get(name)) for name in ("memory", "shared_memory"))
    sizes_of = {
        "memory used": memory.get("used_bytes"),
        "peak": memory.get("peak_bytes"),
        "limit": memory.get("limit_bytes"),
        "shared memory used": shared.get("used_bytes"),
        "of": shared.get("total_bytes"),
    }
    taken = [f"{name} {size / (1 << 30):.2f} GiB" for name, size in sizes_of.items() if isinstance(size, int)]
    kills = mapping_of(memory.get("events")).get("oom_kill")
    taken += [f"OOM kills {kills}"] if kills else []
    where = [f"container {str(place['container'])[:12]}"] if place.get("container") else []
    for kind, names in (("kubernetes", ("pod_namespace", "pod_name", "node_name")), ("slurm", ("job_id", "node"))):
        its = mapping_of(place.get(kind))
        where += [f"{kind} {name} {its[name]}" for name in names if its.get(name)]
    for parts in (served, built, times, taken, where):
        if parts:
            yield ", ".join(parts)
    if environment.get("path"):
        yield f"more of it in {environment['path']}"


def requests_in_words(requests: Mapping[str, Any]) -> str:
    """Say what became of the requests."""
    number = counts_of(requests)
    finished, unfinished = (number.finished, number.unfinished) if number is not None else (None, None)
    counts = f"{finished} finished and {unfinished} unfinished"
    if requests.get("path") is not None:
        others = f", with {number.others} health checks and the like" if number is not None and number.others else ""
        return f"{counts} in {requests['path']}{others}"
    reason, journal = requests.get("reason", "unknown"), mapping_of(requests.get("journal"))
    if requests.get("source") != "journal" or not journal:
        return f"not saved: {reason}"
    lost = f", {journal['lost']} more found no room in it" if journal.get("lost") else ""
    return f"{counts}, from the journal, in {journal.get('path')}{lost} (the server saved none: {reason})"


def occurrence_in_words(fault: Mapping[str, Any]) -> str:
    """Say how often a fault had been seen by then, and where the stacks are of an incident that is kept in short."""
    short = f"; in short: incident {fault['repeats']} has the stacks of all processes" if fault.get("repeats") else ""
    return f"the same fault {fault.get('count')} times since {fault.get('first')}{short}"


# -- steps


def _steps(process: Mapping[str, Any], divergence: Mapping[str, Any]) -> Iterator[str]:
    steps = mapping_of(process.get("steps"))
    last = mappings_of(steps.get("last"))
    if not last and not divergence:
        return
    yield "## Steps"
    yield ""
    if divergence:
        yield f"- {divergence.get('statement')} ({divergence.get('level')})"
    if last:
        in_step, name = mapping_of(steps.get("in_step")), f"{process.get('title')} (pid {process.get('pid')})"
        if in_step:
            yield f"- {name} {'died' if process.get('exit') else 'was'} in {_current_in_words(in_step)}"
            if isinstance(rids := in_step.get("rids"), list) and rids:
                yield f"- its requests: {_rids(rids, in_step.get('size'))}"
        else:
            yield f"- {name} was in no step"
        yield f"- the last {len(last)} of its steps:"
        yield from (f"    - {_step(step)}" for step in last)
    yield ""


def _current_in_words(*steps: Mapping[str, Any]) -> str:
    """Say of the ``in_step`` of processes that agree which step it was, how far it had come, and how long it ran."""
    first = steps[0]
    ran = _span([step.get("seconds") for step in steps], ", for ", " s", 3)
    phase = str(first.get("phase")).replace("_", " ")
    return f"step {_number(first.get('number'))}: {_batch(first)}, {phase}{ran}"


def _step(step: Mapping[str, Any]) -> str:
    began, ended = step.get("began"), step.get("ended")
    if isinstance(began, (int, float)) and isinstance(ended, (int, float)):
        how_far = f"{(ended - began) * 1000:.1f} ms"
    else:
        how_far = str(step.get("phase")).replace("_", " ")
    rids = [request.get("rid") for request in mappings_of(step.get("requests"))]
    of = f" ({_rids(rids, step.get('size'))})" if rids else ""
    return f"step {_number(step.get('number'))}: {_batch(step)}{of}, {how_far}"


def _batch(step: Mapping[str, Any]) -> str:
    size, tokens = step.get("size"), step.get("tokens")
    of = f"{_number(size)} request{'' if size == 1 else 's'}"
    return f"{step.get('mode') or 'not yet scheduled'}, {of}" + (
        f", {_number(tokens)} token{'' if tokens == 1 else 's'}" if tokens else ""
    )


def _rids(rids: Sequence[object], size: object) -> str:
    shown = rids[:_MAX_RIDS]
    return _named(shown, size if isinstance(size, int) else 0)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


# -- processes: those that agree in one section


def process_sections(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a section for each group of processes that agree: who failed first, the other ranks, the rest."""
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    groups: dict[str, list[Process]] = {}
    for process in mappings_of(document.get("processes")):
        groups.setdefault(_likeness(process, is_first=process.get("pid") == first is not None), []).append(process)
    names = Names(document)
    for members in sorted(groups.values(), key=lambda its: (its[0].get("pid") != first, not _is_rank(its[0]))):
        yield ""
        yield from _section(members, names)


def state_in_words(process: Process) -> str:
    """Say whether a process was alive when it was looked at, was stopped, or raised; and how it ended otherwise."""
    end = mapping_of(process.get("exit"))
    if not end:
        pieces = mappings_of(process.get("evidence"))
        raised = any(piece.get("kind") == "exception" and piece.get("status") == "captured" for piece in pieces)
        return stopped_state(process) or ("raised an exception" if raised else "alive then")
    how = end.get("signal") or f"exit status {end.get('code')}"
    # That it was a signal goes without saying.
    cause = "" if end.get("cause") == "signal" else f"{end.get('cause')}: "
    return f"dead, {how} ({cause}{end.get('detail')})"


def last_sign_in_words(*signs: Mapping[str, Any]) -> str:
    """Say what schedulers that agree were about when their heartbeats were last written to, and when that was."""
    return f"{signs[0].get('doing')}{_span([sign.get('seconds_before') for sign in signs], ', ', ' s before', 1)}"


def piece_in_words(piece: Mapping[str, Any]) -> str:
    """Say of a piece of evidence what it is, whether it is there, and where or why not."""
    return _evidence_in_words([piece])


def _is_rank(process: Process) -> bool:
    return process.get("role") == "scheduler"


def _likeness(process: Process, *, is_first: bool) -> str:
    """Return what processes of one group have in common; numbers that differ with the process are left out."""
    sign, step = mapping_of(process.get("last_sign")), _step_of(process)
    at = [step.get(name) for name in ("number", "mode", "phase", "size")]
    gpu = [without_own_numbers(line) for line in texts_of(process.get("gpu"))]
    told = (process.get("role"), state_in_words(process), texts_of(process.get("doing")), sign.get("doing"), at, gpu)
    return repr((is_first, *told))


def _section(members: Sequence[Process], names: Names) -> Iterator[str]:
    process, is_one = members[0], len(members) == 1
    if is_one:
        yield f"### {process.get('title')} (pid {process.get('pid')}): {state_in_words(process)}"
    else:
        who = cut(join_names(str(one.get("title")) for one in members), _MAX_NAMES)
        yield f"### {who} ({len(members):,} processes): {state_in_words(process)}"
        pids = [f"{names.short(one)} {one.get('pid')}" for one in members]
        yield f"- pids: {_named(pids[:_MAX_PIDS], len(pids))}{' in incident.json' * (len(pids) > _MAX_PIDS)}"
    yield from (f"- {frame}" for frame in texts_of(process.get("doing")))
    if mapping_of(process.get("last_sign")):
        yield f"- last sign: {last_sign_in_words(*(mapping_of(one.get('last_sign')) for one in members))}"
    if _step_of(process):
        yield f"- in {_current_in_words(*map(_step_of, members))}"
    of_gpu: dict[str, list[str]] = {}
    of_evidence: dict[tuple[object, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for one in members:
        for line in texts_of(one.get("gpu")):
            of_gpu.setdefault(line, []).append(names.short(one))
        for number, piece in enumerate(mappings_of(one.get("evidence"))):
            its = [str(piece.get(name) or "") for name in ("kind", "status", "source")]
            key = (number,) if is_one else (*its, without_own_numbers(str(piece.get("reason") or "")))
            of_evidence.setdefault(key, []).append((names.short(one), piece))
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


def _evidence_in_words(pieces: Sequence[Mapping[str, Any]], *, of: str = "") -> str:
    """Say of a piece of evidence, which several processes may have, what became of it.

    Args:
        pieces: alike but for their files, times, and the numbers in their reasons.
        of: whose they are, where not all of a group have one.
    """
    one = pieces[0]
    paths = list(dict.fromkeys(str(piece["path"]) for piece in pieces if piece.get("path")))
    reasons = list(dict.fromkeys(str(piece["reason"]) for piece in pieces if piece.get("reason")))
    # Such as the pid in a path; whose it is, is no more than a number here.
    why = reasons if len(reasons) < 2 else [without_own_numbers(reasons[0], "N")]
    folder = [f"{paths[0].rpartition('/')[0]}/, {len(paths):,} files"] if len(paths) > 1 else paths
    where = "; ".join([*folder, *why]) or "in incident.json"
    by = f" by {one['source']}" if one.get("source") else ""
    took = _span([piece.get("seconds") for piece in pieces], ", ", " s", 3)
    return f"{one.get('kind')}: {one.get('status')}{f' of {of}' if of else ''}{by} ({where}{took})"


def _span(values: Iterable[object], before: str, behind: str, digits: int) -> str:
    """Return from where to where numbers lie, between two texts; nothing where none is a number."""
    numbers = [value for value in values if isinstance(value, (int, float))]
    if not numbers:
        return ""
    told = dict.fromkeys(f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return f"{before}{' to '.join(told)}{behind}"


def _step_of(process: Process) -> Mapping[str, Any]:
    return mapping_of(mapping_of(process.get("steps")).get("in_step"))


# -- the timeline: events of many processes that are alike and close to one another are one line


@dataclass(frozen=True)
class Run:
    """Events at about the same time that are alike but for their processes and numbers; often one alone."""

    events: Sequence[Event]  # in order of time

    @property
    def first(self) -> Event:
        """The first of them."""
        return self.events[0]

    def who(self, names: Names) -> str:
        """Return whom it happened to, in short; empty where it did to no process."""
        if "pid" not in self.first:
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
        first, last = (seconds_of(self.events[place].get("time")) for place in (0, -1))
        took = f"within {last - first:.3f} s" if first is not None and last is not None else ""
        return ", ".join(filter(None, [took, f"{words} (the first)" if words and differs else words]))


def timeline_of(document: Mapping[str, Any]) -> list[Event]:
    """Return the events in order of time."""
    return sorted(mappings_of(document.get("timeline")), key=lambda entry: str(entry.get("time")))


def runs_of(document: Mapping[str, Any]) -> list[Run]:
    """Return the events in order of time, more than a few alike as one run where the first of them stands."""
    runs: list[list[tuple[int, Event]]] = []
    open_runs: dict[tuple[str, str], tuple[float, list[tuple[int, Event]]]] = {}
    for place, event in enumerate(timeline_of(document)):
        seconds, alike = seconds_of(event.get("time")), _event_likeness(event)
        before, run = open_runs.get(alike, (-inf, []))
        if seconds is None or "pid" not in event or seconds - before > _AT_ONCE_SECS:
            run = []
            runs.append(run)
        run.append((place, event))
        if seconds is not None:
            open_runs[alike] = (seconds, run)
    placed = [[run] if len(run) > _FEW else [[one] for one in run] for run in runs]
    told = sorted((run for some in placed for run in some), key=lambda run: run[0][0])
    return [Run([event for _place, event in run]) for run in told]


def _event_likeness(event: Event) -> tuple[str, str]:
    return str(event.get("event")), without_own_numbers(_details(event, of_process=False))


def _details(event: Event, *, of_process: bool) -> str:
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
