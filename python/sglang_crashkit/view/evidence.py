"""The files of an incident: listed, read within bounds, cut to a length that can be shown, and as rows.

The files are not trusted: a link may lead out of the folder, a pipe may never end, a line may be as long as the
file, and a control character may reverse the text beside it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.requests import parameters_of, was_aborted_before
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.model.incident import Incident, ProcessReport
from sglang_crashkit.model.lenient import mapping_of, mappings_of, texts_of
from sglang_crashkit.model.sample import Frame
from sglang_crashkit.view import words

ENVIRONMENT, REQUESTS = "environment.json", "requests/requests.jsonl"
_MAX_FRAMES, _MAX_THREADS = 400, 2000
_MAX_BYTES, _MAX_LINE = 64 << 20, 4 << 20
#: Most characters of a request's id (and of its state and times), of one of its parameters, and of a text.
_MAX_HEAD, _MAX_PARAMETER, _MAX_TEXT = 150, 60, 20_000
#: Kinds of evidence with stacks, in the order of preference: the first one says more of a process that failed.
_STACK_KINDS = ("fault_stack", "stack")
_KIT = "sglang_crashkit/"
_SAMPLING = "sampling_params."
#: SGLang's default parameters, which are not shown: its OpenAI API writes them into every request.
_DEFAULTS: Mapping[str, object] = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "n": 1},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
}
#: Most files that are listed, most levels of folders, and most bytes of a JSON file.
_MAX_FILES = 5000
_MAX_DEPTH = 6
_MAX_JSON = 32 << 20
#: Most characters of a string, entries of a list or object, and levels of a JSON value; the rest is left out.
_MAX_STRING, _MAX_ENTRIES, _MAX_LEVELS = 4000, 2000, 12


class IncidentFiles:
    """The regular files below an incident's folder; no other file is opened, even where the incident names it.

    `listed` maps each name, relative to the folder, to its size in bytes; `left_out` is the number of further files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = sorted(_walk(folder))
        self.left_out = max(0, len(found) - _MAX_FILES)
        self.listed = dict(found[:_MAX_FILES])

    def read(self, name: str | None, most: int, *, from_end: bool = False) -> bytes:
        """Return the first `most` bytes of a file, or the last; empty where it is not listed or cannot be read."""
        if name is None or name not in self.listed:
            return b""
        try:
            # A link, a pipe or a device may have replaced the file since it was listed.
            return read_regular(self.folder / name, most, from_end=from_end)
        except OSError:
            return b""

    def read_json(self, name: str | None) -> Any:
        """Return the JSON value in a file, `bounded`; ValueError where the file is missing, too long, or no JSON."""
        data = self.read(name, _MAX_JSON + 1)
        if not data:
            raise ValueError(f"{name} cannot be read")
        if len(data) > _MAX_JSON:
            raise ValueError(f"{name} is longer than {_MAX_JSON >> 20} MiB")
        try:
            return bounded(json.loads(data))
        except RecursionError:
            raise ValueError(f"{name} is nested too deeply") from None

    def read_object(self, name: str | None) -> Mapping[str, Any]:
        """Return the JSON object in a file; an empty one where the file has no object or cannot be read."""
        try:
            return mapping_of(self.read_json(name))
        except ValueError:
            return {}


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    for path, folders, names in os.walk(folder):
        if len(Path(path).relative_to(folder).parts) >= _MAX_DEPTH:
            folders.clear()
        for file in (Path(path, name) for name in names):
            with contextlib.suppress(OSError):
                if stat.S_ISREG((status := file.lstat()).st_mode):
                    yield str(file.relative_to(folder)), status.st_size


def bounded(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """Return a JSON value cut to what a page can show; its strings and lists say how much was left out."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, (list, dict)) and levels == 0:
        return "... nested too deeply"
    if isinstance(value, list):
        kept = [bounded(one, levels - 1) for one in value[:_MAX_ENTRIES]]
        return kept + [f"{len(value) - _MAX_ENTRIES:,} more left out"] * (len(value) > _MAX_ENTRIES)
    if isinstance(value, dict):
        names = list(value)[:_MAX_ENTRIES]
        return {cut(name, 200): bounded(value[name], levels - 1) for name in names}
    # An integer may have a million digits.
    return value if not isinstance(value, int) or abs(value) < 1 << 128 else "a number too long to show"


def cut(text: str, most: int = _MAX_STRING) -> str:
    """Return `text`, or its first `most` characters and the number of those left out."""
    return text if len(text) <= most else f"{text[:most]} ... {len(text) - most:,} more characters left out"


# -- rows


def stacks_of(process: ProcessReport, files: IncidentFiles) -> Iterator[tuple[bool, tuple[Frame, ...]]]:
    """Yield (is it the main thread's, Python stack with the innermost frame first) for each thread of a process.

    A process that raised was in the kit's own hook when it was sampled: its main stack is the exception's.
    """
    paths = {one.kind: one.path for one in reversed(process.evidence) if one.path}
    record = files.read_object(paths.get("exception"))
    raised = tuple(map(_frame_of, reversed(texts_of(record.get("traceback"))[-_MAX_FRAMES:])))
    path = next((paths[kind] for kind in _STACK_KINDS if kind in paths), "")
    threads = mappings_of(files.read_object(f"{path.removesuffix('.txt')}.json").get("threads"))[:_MAX_THREADS]
    doing = tuple(map(_frame_of, process.doing[:_MAX_FRAMES])) if process.has("exception") or not threads else ()
    if told := raised or doing:
        yield True, told
    for thread in threads:
        main = thread.get("native_id") == process.pid or thread.get("name") == "MainThread"
        frames = [
            Frame(str(one.get("function")), str(one.get("file")), line if type(line := one.get("line")) is int else 0)
            for one in mappings_of(thread.get("frames"))[:_MAX_FRAMES]
        ]
        own = [place for place, frame in enumerate(frames) if _KIT in frame.file]
        taken = tuple(frames[own[-1] + 1 if own else 0 :])
        if taken and not (main and told):
            yield main, taken


def _frame_of(text: str) -> Frame:
    return Frame.read(text) or Frame(text, "", 0)


@dataclass(frozen=True)
class Request:
    """A request as it is shown; only `texts` may hold a part of its prompt."""

    rid: str
    state: str
    arrived: str
    ended: str
    kind: str
    known: list[str]  # whether it was aborted before, the length of its prompt, its parameters
    texts: list[tuple[str, str]]  # name and value of each field that a user wrote, where prompts were asked for
    is_suspect: bool


def requests_of(
    incident: Incident, files: IncidentFiles, most: int, *, shortens: bool = False, prompts: bool = False
) -> tuple[list[Request], int]:
    """Return at most `most` requests, the suspects first, and the number of further ones.

    A parameter that is a text or a list is cut off with `shortens`; without, only its length is shown. With `prompts`
    the requests have what users of the server wrote.
    """
    # The likeliest first, as the incident lists them.
    places = {rid: place for place, rid in enumerate(dict.fromkeys(one.rid for one in incident.suspects))}
    journal, number = incident.requests.journal, 0

    def read() -> Iterator[Mapping[str, Any]]:
        nonlocal number
        path = journal.path if journal is not None and journal.path else REQUESTS
        for line in files.read(path, _MAX_BYTES).split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                if fields := mapping_of(json.loads(line[:_MAX_LINE])):
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
            # A user may have written this value, whatever the parameter is called.
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
    """Yield (dotted name, value as text) for each value below a JSON value."""
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
