"""What the files of an incident hold, as rows: stacks, requests, environment."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.incident.requests import parameters_of, was_aborted_before
from sglang_crashkit.model.checked_json import mappings_of, texts_of
from sglang_crashkit.model.incident import Incident, ProcessReport
from sglang_crashkit.model.sample import Frame
from sglang_crashkit.view import words
from sglang_crashkit.view.files import IncidentFiles, cut, object_of

ENVIRONMENT, REQUESTS = "environment.json", "requests/requests.jsonl"
_MAX_FRAMES, _MAX_THREADS = 400, 2000
_MAX_BYTES, _MAX_LINE = 64 << 20, 4 << 20
#: The id of a request, a parameter of it, and a text are no longer than this.
_MAX_HEAD, _MAX_PARAMETER, _MAX_TEXT = 150, 60, 20_000
#: Evidence with stacks, the one that tells most of a process that failed first.
_KINDS = ("fault_stack", "stack")
_KIT = "sglang_crashkit/"
_SAMPLING = "sampling_params."
#: What SGLang takes where a request does not say; OpenAI's API writes these down.
_DEFAULTS: Mapping[str, object] = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "n": 1},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
}


@dataclass(frozen=True)
class Stack:
    """A stack of a process."""

    main: bool  # it is of the main thread, or of what stands for it
    frames: tuple[Frame, ...]  # innermost first


def stacks_of(process: ProcessReport, files: IncidentFiles) -> Iterator[Stack]:
    """Yield the Python stacks of a process; of one that raised, where it did: it was in the kit's own hook by then."""
    paths = {one.kind: one.path for one in reversed(process.evidence) if one.path}
    record = files.read_object(paths.get("exception"))
    raised = tuple(map(_frame_of, reversed(texts_of(record.get("traceback"))[-_MAX_FRAMES:])))
    path = next((paths[kind] for kind in _KINDS if kind in paths), "")
    threads = mappings_of(files.read_object(f"{path.removesuffix('.txt')}.json").get("threads"))[:_MAX_THREADS]
    doing = tuple(map(_frame_of, process.doing[:_MAX_FRAMES])) if process.has("exception") or not threads else ()
    if told := raised or doing:
        yield Stack(True, told)
    for thread in threads:
        main = thread.get("native_id") == process.pid or thread.get("name") == "MainThread"
        frames = [
            Frame(str(one.get("function")), str(one.get("file")), line if type(line := one.get("line")) is int else 0)
            for one in mappings_of(thread.get("frames"))[:_MAX_FRAMES]
        ]
        own = [place for place, frame in enumerate(frames) if _KIT in frame.file]
        taken = tuple(frames[own[-1] + 1 if own else 0 :])
        if taken and not (main and told):
            yield Stack(main, taken)


def _frame_of(text: str) -> Frame:
    return Frame.read(text) or Frame(text, "", 0)


@dataclass(frozen=True)
class Request:
    """What is told of one request; nothing in it is of its prompt but `texts`."""

    rid: str
    state: str
    arrived: str
    ended: str
    kind: str
    known: list[str]  # whether it was aborted before, how long its prompt is, what it asks for
    texts: list[tuple[str, str]]  # what a user of the server wrote, by its name, where that is asked for
    is_suspect: bool


def requests_of(
    incident: Incident, files: IncidentFiles, most: int, *, shortens: bool = False, prompts: bool = False
) -> tuple[list[Request], int]:
    """Return at most so many requests, the suspects first, and how many more there are.

    Args:
        incident: whose they are.
        files: its files.
        most: how many at most.
        shortens: show a parameter that is a text cut off; by default its length alone is shown.
        prompts: with what users of the server wrote.
    """
    # The likeliest first, as the incident lists them.
    places = {rid: place for place, rid in enumerate(dict.fromkeys(one.rid for one in incident.suspects))}
    journal, number = incident.requests.journal, 0

    def read() -> Iterator[Mapping[str, Any]]:
        nonlocal number
        path = journal.path if journal is not None and journal.path else REQUESTS
        for line in files.read(path, _MAX_BYTES).split(b"\n"):
            if fields := object_of(line[:_MAX_LINE]):
                number += 1
                yield fields

    first = heapq.nsmallest(most, read(), lambda fields: places.get(str(fields.get("rid")), len(places)))
    rows = [_request(fields, incident, str(fields.get("rid")) in places, shortens, prompts) for fields in first]
    return rows, number - len(rows)


def _request(fields: Mapping[str, Any], incident: Incident, is_suspect: bool, shortens: bool, prompts: bool) -> Request:
    known, text, ids = [], fields.get("text"), fields.get("input_ids")
    if was_aborted_before(fields, incident):
        known.append("aborted before")
    if isinstance(text, str) or isinstance(ids, list):
        known.append(f"{len(text)} characters" if isinstance(text, str) else f"{len(ids or ())} tokens")
    for name, value in parameters_of(fields).items():
        short = name.removeprefix(_SAMPLING)
        if value is False or value in ("", [], {}) or (short != name and _DEFAULTS.get(short) == value):
            continue
        if not shortens and isinstance(value, (str, list, dict)):
            # Whatever it is called, a user may have written it.
            told = f"{short}: {len(value):,} {'characters' if isinstance(value, str) else 'entries'}"
        else:
            told = f"{short} {value if isinstance(value, str) and value.isprintable() else json.dumps(value)}"
        known.append(words.cut(told, _MAX_PARAMETER))
    texts = [
        (cut(name, 80), cut(value if isinstance(value, str) else json.dumps(value), _MAX_TEXT))
        for name, value in fields.items()
        if prompts and isinstance(value, (str, list, dict)) and name not in Request.__annotations__
    ]
    head = {name: cut(str(fields.get(name) or ""), _MAX_HEAD) for name in ("rid", "state", "arrived", "ended", "kind")}
    return Request(**head, known=known, texts=texts, is_suspect=is_suspect)


def flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value below a JSON value, after its name with dots."""
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict) and value:
        inner = ((f"{name}.{key}" if name else str(key), one) for key, one in value.items())
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        inner = ((f"{name}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
    for one in inner:
        yield from flat(one[1], one[0])
