"""The parts of an incident as lines, for a terminal and for a bug report: stacks, requests, timeline, environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sglang_crashkit.incident.names import Names, join_names
from sglang_crashkit.incident.store import StoredSteps
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.lenient import seconds_of
from sglang_crashkit.view import model, words
from sglang_crashkit.view.evidence import ENVIRONMENT, REQUESTS, IncidentFiles, flat, requests_of, stacks_of
from sglang_crashkit.view.first_screen import first_screen
from sglang_crashkit.view.markdown import fenced
from sglang_crashkit.view.steps import tables_of
from sglang_crashkit.visible import visible

#: Most bytes that are read of the first failure's exception.
_MAX_BYTES = 1 << 20
#: Most requests that are shown; the file has them all.
_MAX_REQUESTS = 1000
#: Most characters of what is known of a request, and of a line of the timeline; the files have the whole.
_MAX_KNOWN, _MAX_EVENT = 400, 200
_FRAME = re.compile(r' +File "[^"]+", line \d+, in [\w<>.]+')


def stack_lines(incident: Incident, files: IncidentFiles, *, messages: bool = True) -> Iterator[str]:
    """Yield the exception of the first failure (without `messages` only its frames), and the main threads' stacks."""
    names, first = Names(incident), incident.first_failure
    for path in files.listed if first is not None else ():
        if first is not None and path.startswith("ranks/") and path.endswith(f"-{first.pid}.exception.txt"):
            yield f"{names.short(first)} raised:"
            lines = files.read(path, _MAX_BYTES).decode(errors="replace").splitlines()
            yield from (f"    {line}" for line in lines if messages or _FRAME.fullmatch(line))
            yield ""
    groups: dict[tuple[bool, bool, str, tuple[str, ...]], list[str]] = {}
    for process in incident.processes:
        if process.role != "helper":
            main = next((frames for is_main, frames in stacks_of(process, files) if is_main), ())
            frames = tuple(str(frame) if frame.file else frame.function for frame in main)
            key = (process is not first, not process.is_rank, words.state(process), frames)
            groups.setdefault(key, []).append(names.short(process))
    # The first failure, then the ranks, then the others; larger groups first.
    for (*_order, state, frames), members in sorted(groups.items(), key=lambda item: (*item[0][:2], -len(item[1]))):
        yield f"{join_names(members)}: {state}"
        yield from (f"    {frame}" for frame in frames)
    if groups:
        yield f"other threads, and further samples: {files.folder / 'stacks'}"


def request_lines(incident: Incident, files: IncidentFiles) -> Iterator[str]:
    """Yield a line for each request, the suspects first and marked, then those in flight; no prompt."""
    rows, left_out = requests_of(incident, files, _MAX_REQUESTS, shortens=True)
    if not rows:
        return
    yield "  state       arrived (UTC)  request                           prompt, parameters"
    for one in rows:
        known = words.cut(", ".join(one.known), _MAX_KNOWN)
        yield f"{'*' if one.is_suspect else ' '} {one.state:<11} {one.arrived[11:23]:<14} {one.rid:<33} {known}"
    mark = f"* {words.undecided(incident) or 'suspect'}; " if incident.suspects else ""
    more = f"{left_out:,} more, and " if left_out else ""
    yield f"{mark}{more}the whole of each, with its prompt: {files.folder / REQUESTS}"


def step_lines(everyone: Sequence[StoredSteps], marked: int | None, last: int) -> Iterator[str]:
    """Yield a table for each set of ranks that must agree, a line a step."""
    for table in tables_of(everyone, marked, last):
        yield ""
        rows = [["step", *table.columns]]
        rows += [
            [f"{'> ' if is_marked else '  '}{n:,}", *(text for _, text in row)] for n, is_marked, row in table.rows
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for name, one in table.requests:
            yield f"step {table.about:,} of {name}: request {one.rid}: {one.tokens:,} of {one.length:,} tokens"


def timeline_lines(incident: Incident) -> Iterator[str]:
    """Yield the events, with their seconds since the incident began; many events that are alike are one line."""
    began = seconds_of(incident.trigger.time) or 0.0
    for run in model.runs_of(incident):
        yield words.cut(f"{(run.first.seconds or 0.0) - began:+9.3f} s  {run}", _MAX_EVENT)


def environment_lines(incident: Incident, files: IncidentFiles) -> Iterator[str]:
    """Yield the facts around the server: a summary, then every value of ``environment.json`` with its name."""
    short = [f"{label:<10}{text}" for label, text in model.surroundings(incident.surroundings)]
    yield from short
    if whole := files.read_object(ENVIRONMENT):
        yield from [""] if short else []
        yield from (f"{name}  {value}" for name, value in flat(whole))


def format_report(incident: Incident, files: IncidentFiles, *, messages: bool = True) -> str:
    """Return the text of a bug report; without `messages`, exceptions have only their frames."""
    verdict, cause = incident.verdict, incident.cause
    # The `next` rows at the end are left out: they are for the operator of the server.
    screen = first_screen(incident)
    ends = next((place for place, line in enumerate(screen) if line.startswith("next    ")), len(screen))
    told = [f"### SGLang {incident.server.sglang_version}: {first_screen(incident, wraps=False)[0]}", ""]
    told += [*fenced(screen[:ends]), ""]
    if verdict is not None and verdict.text:
        told += [f"**Verdict** ({verdict.level})", *fenced([verdict.text]), ""]
    if cause is not None:
        told.append(f"**Cause** {cause.kind} ({cause.level})")
        if cause.known_issues:
            issues = ", ".join(f"sgl-project/sglang#{one.issue}" for one in cause.known_issues)
            told.append(f"It looks like {issues}.")
        told.append("")
    whole = files.read_object(ENVIRONMENT)
    versions = whole.get("versions", {}) if whole else incident.surroundings.versions
    environment = [str(command)] if (command := whole.get("command_line")) else []
    environment += (f"{name} {text}" for name, text in (versions.items() if isinstance(versions, dict) else ()))
    environment += incident.gpus.lines if incident.gpus is not None else ()
    for title, lines in (
        ("Environment", environment),
        ("Stacks, innermost frame first", stack_lines(incident, files, messages=messages)),
        ("Timeline", timeline_lines(incident)),
    ):
        if part := list(lines):
            told += [f"<details><summary>{title}</summary>", "", *fenced(part), "", "</details>", ""]
    return visible("\n".join(told) + "\n")
