"""An incident in words, as Markdown, from what its ``incident.json`` holds.

Any kit version may have written that: what is missing, or has another form, is passed over.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_crashkit.incident import process_words, step_words
from sglang_crashkit.incident.first_screen import (
    counts_of,
    first_screen,
    sizes_in_words,
    undecided_in_words,
    without_build_paths,
)
from sglang_crashkit.incident.names import Names
from sglang_crashkit.incident.timeline_words import runs_of
from sglang_crashkit.model.checked_json import mapping_of as mapping_of
from sglang_crashkit.model.checked_json import mappings_of as mappings_of


def format_summary(document: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return ``summary.md``: the first screen, and below it the whole of each text.

    Args:
        document: an incident.
        folder: its folder once it is finished, which commands name it by; its id alone is found nowhere but where the
            server runs.
    """
    where = shlex.quote(str(folder.absolute())) if folder is not None else ""
    text = "\n".join(_lines(document, where)) + "\n"
    if text.replace("\n", " ").isprintable():
        return text
    # Whoever wrote a message is not to move the cursor of whoever reads this on a terminal.
    return "".join(char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in text)


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


def format_termination_message(document: Mapping[str, Any], path: str) -> str:
    """Return the little that a pod's status shows of a container that ended.

    Args:
        document: of a finished incident.
        path: its folder.
    """
    trigger, verdict = mapping_of(document.get("trigger")), mapping_of(document.get("verdict"))
    text = f"{verdict.get('text')} ({verdict.get('level')})" if verdict else headline(document)
    requests = requests_in_words(mapping_of(document.get("requests")))
    return f"{text}\nincident {path}, {trigger.get('time')}, requests: {requests}\n"


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
    yield from step_words.lines_of(_first_failure(document), mapping_of(document.get("divergence")))
    yield from _collectives(document)
    yield from _gpus(document)
    yield "## Processes"
    yield from process_words.lines_of(document)
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
    processes = mappings_of(document.get("processes"))
    named = [mapping_of(document.get("verdict")).get("first_failure"), document.get("trigger")]
    pids = [mapping_of(one).get("pid") for one in named]
    return next((process for pid in pids for process in processes if pid == process.get("pid") is not None), {})


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
        role = peer.get("role")
        yield ""
        yield f"### {role} server {peer.get('address')}: {peer.get('sign')}, since {peer.get('since')}"
        for what, name in (("waits for it", "requests"), (f"waits for a {role} server", "unassigned")):
            requests = mappings_of(peer.get(name))
            yield from (f"- {what}: {request.get('rid')} (room {request.get('room')})" for request in requests)
            count = peer.get("count" if name == "requests" else "unassigned_count")
            if isinstance(count, int) and count > len(requests):
                yield f"- {what}: {count - len(requests)} more"
    yield ""


def _collectives(document: Mapping[str, Any]) -> Iterator[str]:
    collectives = mapping_of(document.get("collectives"))
    findings, missing = mappings_of(collectives.get("findings")), collectives.get("missing")
    if not findings:
        # Of whom there is no flight recorder, and why, is among the evidence of each process.
        return
    yield "## Collectives"
    in_step = [str(finding.get("group")) for finding in findings if finding.get("kind") == "in_step"]
    for finding in findings:
        if finding.get("kind") == "in_step":
            continue
        yield ""
        yield f"### {finding.get('group')}: {finding.get('kind')} ({finding.get('level')})"
        yield f"- {finding.get('statement')}"
        yield from (f"- {line}" for line in finding.get("evidence") or ())
    if in_step:
        yield ""
        yield f"Nobody waits in {'; '.join(in_step)}."
    if isinstance(missing, list) and missing:
        yield ""
        yield "No flight recorder:"
        yield from (f"- {line}" for line in missing)
    yield ""


def suspect_in_words(document: Mapping[str, Any], suspects: Sequence[Mapping[str, Any]]) -> str:
    """Say which request is suspected most, and why; or that nothing is between them.

    Args:
        document: the incident.
        suspects: those in it, at least one.
    """
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
