"""The parts of an incident in full, for a person: stacks, requests, timeline, environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.names import Names, join_names
from sglang_crashkit.incident.requests import parameters_of
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.model.checked_json import mapping_of, mappings_of, seconds_of
from sglang_crashkit.model.incident import Incident, ProcessReport
from sglang_crashkit.view.files import object_of
from sglang_crashkit.view.first_screen import cut, first_screen, undecided_in_words, without_build_paths
from sglang_crashkit.view.summary import environment_in_words, runs_of, state_in_words, was_aborted_before
from sglang_crashkit.visible import visible

_ENVIRONMENT = "environment.json"
_REQUESTS = Path("requests", "requests.jsonl")
#: Of one file of an incident, which may be anybody's.
_MAX_BYTES = 64 << 20
#: So many requests are told; the file has them all.
_MAX_REQUESTS = 1000
#: A line of the timeline is no longer than this; incident.json has the whole.
_MAX_EVENT = 200
#: A parameter of a request, and all of them, are no longer than this.
_MAX_PARAMETER, _MAX_PARAMETERS = 60, 400
_SAMPLING = "sampling_params."
_FRAME = re.compile(r' +File "[^"]+", line \d+, in [\w<>.]+')
#: What SGLang takes where a request does not say; OpenAI's API writes these down.
_DEFAULTS: Mapping[str, object] = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "n": 1},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
}


def stack_lines(folder: Path, incident: Incident, *, messages: bool = True) -> Iterator[str]:
    """Yield the exception of the first failure, and the main threads, those that agree once; innermost frame first.

    Without `messages` of the exception only its frames.
    """
    names, first = Names(incident), incident.first_failure
    if first is not None:
        for path in sorted(folder.glob(f"ranks/*-{first.pid}.exception.txt")):
            yield f"{names.short(first)} raised:"
            lines = _read(path).decode(errors="replace").splitlines()
            yield from (f"    {line}" for line in lines if messages or _FRAME.fullmatch(line))
            yield ""
    groups: dict[tuple[bool, bool, str, tuple[str, ...]], list[str]] = {}
    for process in incident.processes:
        if process.role != "helper":
            key = (process is not first, not process.is_rank, state_in_words(process), _main_thread(folder, process))
            groups.setdefault(key, []).append(names.short(process))
    # Who failed first, then the ranks, of them those of which there are most.
    for (*_order, state, frames), members in sorted(groups.items(), key=lambda item: (*item[0][:2], -len(item[1]))):
        yield f"{join_names(members)}: {state}"
        yield from (f"    {frame}" for frame in frames)
    if groups:
        yield f"other threads, and further samples: {folder / 'stacks'}"


def _main_thread(folder: Path, process: ProcessReport) -> tuple[str, ...]:
    """Return the frames of a process's main thread; what the incident itself has of it where there is no file.

    One that raised was in the kit's own hook by then; the incident has where it raised.
    """
    has_raised = any(piece.kind == "exception" for piece in process.evidence)
    for piece in process.evidence if not has_raised else ():
        if piece.kind == "stack" and piece.path is not None:
            file = _read(folder / f"{piece.path.removesuffix('.txt')}.json")
            for thread in mappings_of(object_of(file).get("threads")):
                if thread.get("native_id") == process.pid or thread.get("name") == "MainThread":
                    frames = mappings_of(thread.get("frames"))
                    return tuple(f"{one.get('function')} ({one.get('file')}:{one.get('line')})" for one in frames)
    return tuple(process.doing)


def request_lines(folder: Path, incident: Incident) -> Iterator[str]:
    """Yield a line for each request, the suspects first and marked, then those in flight; no prompt."""
    # The likeliest first, as the incident lists them.
    places = {rid: place for place, rid in enumerate(dict.fromkeys(one.rid for one in incident.suspects))}
    read = filter(None, map(object_of, _read(folder / _REQUESTS).splitlines()))
    requests = sorted(read, key=lambda one: places.get(str(one.get("rid")), len(places)))
    if not requests:
        return
    yield "  state       arrived (UTC)  request                           prompt, parameters"
    yield from (_request_line(one, places, incident) for one in requests[:_MAX_REQUESTS])
    mark = f"* {undecided_in_words(incident) or 'suspect'}; " if places else ""
    more = f"{len(requests) - _MAX_REQUESTS:,} more, and " if len(requests) > _MAX_REQUESTS else ""
    yield f"{mark}{more}the whole of each, with its prompt: {folder / _REQUESTS}"


def _request_line(fields: Mapping[str, Any], suspects: Mapping[str, int], incident: Incident) -> str:
    rid = str(fields.get("rid"))
    text, ids = fields.get("text"), fields.get("input_ids")
    prompt = (
        f"{len(text)} characters" if isinstance(text, str) else f"{len(ids)} tokens" if isinstance(ids, list) else ""
    )
    mark = "*" if rid in suspects else " "
    aborted = "aborted before" if was_aborted_before(fields, incident) else ""
    words = cut(", ".join(filter(None, [aborted, prompt, *_asked(fields)])), _MAX_PARAMETERS)
    return f"{mark} {fields.get('state')!s:<11} {str(fields.get('arrived'))[11:23]:<14} {rid:<33} {words}"


def _asked(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parameters of a request, without those that are SGLang's defaults, or empty."""
    for name, value in parameters_of(fields).items():
        short = name.removeprefix(_SAMPLING)
        if value is False or value in ("", [], {}) or (short != name and _DEFAULTS.get(short) == value):
            continue
        is_plain = isinstance(value, str) and value.isprintable()
        yield cut(f"{short} {value if is_plain else json.dumps(value)}", _MAX_PARAMETER)


def timeline_lines(incident: Incident) -> Iterator[str]:
    """Yield the events, with their seconds since the incident began; many that are alike are one line."""
    names, began = Names(incident), seconds_of(incident.trigger.time) or 0.0
    for run in runs_of(incident):
        who = run.who(names)
        words = f"{(run.first.seconds or 0.0) - began:+9.3f} s  {run.first.event}{f' {who}:' if who else ''}"
        yield cut(f"{words} {run.details()}".rstrip(" :"), _MAX_EVENT)


def environment_lines(folder: Path, incident: Incident) -> Iterator[str]:
    """Yield what surrounded the server: in short, then every value with its name."""
    whole = object_of(_read(folder / _ENVIRONMENT))
    short = list(environment_in_words(incident.surroundings))
    yield from short
    if whole:
        yield from [""] if short else []
        yield from _flat(whole)


def _flat(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}[{number}]")
    else:
        yield f"{name}  {value if isinstance(value, str) else json.dumps(value)}"


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MAX_BYTES)
    except (OSError, ValueError):
        # ValueError: the incident may name a file with a null character.
        return b""


_TICKS = re.compile(r"`{3,}")
#: GitHub takes 65,536 characters.
_MAX_SECTION = 12_000


def report_of(folder: Path, incident: Incident, *, messages: bool = True) -> str:
    """Return the report, which has more of the stacks and the environment than the incident; see `stack_lines`."""
    return visible("\n".join(_lines(folder, incident, messages=messages)) + "\n")


def _lines(folder: Path, incident: Incident, *, messages: bool) -> Iterator[str]:
    verdict, cause = incident.verdict, incident.cause
    yield f"### SGLang {incident.server.sglang_version}: {first_screen(incident, wraps=False)[0]}"
    yield ""
    # What to do next is for whoever runs the server.
    yield from _fenced(takewhile(lambda line: not line.startswith("next    "), first_screen(incident)))
    if verdict is not None and verdict.text:
        yield f"**Verdict** ({verdict.level})"
        yield from _fenced([verdict.text])
    if cause is not None:
        yield f"**Cause** {cause.kind} ({cause.level})"
        if cause.known_issues:
            yield f"It looks like {', '.join(f'sgl-project/sglang#{one.issue}' for one in cause.known_issues)}."
        yield ""
    yield from _folded("Environment", _environment(folder, incident))
    yield from _folded("Stacks, innermost frame first", stack_lines(folder, incident, messages=messages))
    yield from _folded("Timeline", timeline_lines(incident))


def _environment(folder: Path, incident: Incident) -> Iterator[str]:
    whole = object_of(_read(folder / _ENVIRONMENT))
    if whole.get("command_line"):
        yield str(whole["command_line"])
    versions = mapping_of(whole.get("versions")) if whole else incident.surroundings.versions
    yield from (f"{name} {version}" for name, version in versions.items())
    yield from incident.gpus.lines if incident.gpus is not None else ()


def _folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    told = list(lines)
    if told:
        yield f"<details><summary>{title}</summary>"
        yield ""
        yield from _fenced(told)
        yield "</details>"
        yield ""


def _fenced(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines that nothing in them can be Markdown or HTML: the fence is longer than any of theirs."""
    text = without_build_paths("\n".join(lines))
    text = text if len(text) <= _MAX_SECTION else text[:_MAX_SECTION] + "\n..."
    fence = "`" * (1 + max([2, *map(len, _TICKS.findall(text))]))
    yield f"{fence}text"
    yield text
    yield fence
    yield ""
