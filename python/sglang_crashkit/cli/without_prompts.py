"""Find what texts share with prompts, however long these are.

Every twelfth character of a prompt begins a block of twelve. What shares 24 characters in a row with a prompt has one
of its blocks whole, and the rest within twelve characters on either side of it. So the prompts are walked once, and
each text once.

What cannot be searched `PromptSearch` refuses: a file that is too large or no text, a page of ``show --html``, and,
where not all prompts are known, what the server said in its own words.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.summary import mapping_of
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.model.incident import NOT_SERVING
from sglang_crashkit.redact import redact_spans

#: As many characters in a row that a text shares with a prompt are taken for the prompt's.
RUN = 24
_BLOCK = RUN // 2
#: A block with more than so many surroundings, such as of blanks, is taken for a prompt's wherever it stands.
_MAX_PLACES = 16
#: So many comparisons are kept in mind.
_MAX_KEPT = 4096
#: Parts the prompts; no text that is read has it.
_EDGE = "\ud800"


class PromptIndex:
    """The blocks of prompts, for about fifteen bytes a character; one shorter than `RUN` is looked for as a whole."""

    def __init__(self, prompts: Iterable[str]) -> None:
        prompts = list(dict.fromkeys(prompts))
        self._short = [prompt for prompt in prompts if len(prompt) < RUN]
        long = [prompt for prompt in prompts if len(prompt) >= RUN]
        self._all = _EDGE + _EDGE.join(long) + _EDGE
        self._places: dict[str, int | list[int]] = {}
        # What is much repeated, such as blanks, is compared once.
        self._shared = functools.lru_cache(_MAX_KEPT)(self._find_shared)
        begin = len(_EDGE)
        for prompt in long:
            self._add(begin, begin + len(prompt))
            begin += len(prompt) + len(_EDGE)

    def _add(self, begin: int, end: int) -> None:
        for place in range(begin, end - _BLOCK + 1, _BLOCK):
            block = self._all[place : place + _BLOCK]
            known = self._places.setdefault(block, place)
            if known == place:
                continue
            if isinstance(known, int):
                known = self._places[block] = [known]
            # Many requests begin with the same words.
            if len(known) < _MAX_PLACES and self._around(place) not in map(self._around, known):
                known.append(place)

    def _around(self, place: int) -> str:
        return self._all[max(0, place - _BLOCK) : place + RUN]

    def spans_in(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield each place in `text` that has `RUN` characters in a row of a prompt, or a shorter one."""
        for prompt in self._short:
            yield from (match.span() for match in re.finditer(re.escape(prompt), text))
        for start in range(len(text) - _BLOCK + 1):
            places = self._places.get(text[start : start + _BLOCK])
            if places is None:
                continue
            if not isinstance(places, int) and len(places) == _MAX_PLACES:
                yield start, start + _BLOCK
            before, behind = text[max(0, start - _BLOCK) : start], text[start + _BLOCK : start + RUN]
            for left, right in self._shared(before, text[start : start + _BLOCK], behind):
                yield start - left, start + _BLOCK + right

    def _find_shared(self, before: str, block: str, behind: str) -> tuple[tuple[int, int], ...]:
        """Return how many characters before a block, and behind it, make it a run of a prompt, for each that does."""
        places = self._places[block]
        found = []
        for place in [places] if isinstance(places, int) else places:
            left = _count_shared(before[::-1], self._all[max(0, place - _BLOCK) : place][::-1])
            right = _count_shared(behind, self._all[place + _BLOCK : place + RUN])
            if left + _BLOCK + right >= RUN:
                found.append((left, right))
        return tuple(found)


def _count_shared(one: str, other: str) -> int:
    """Return with how many of the same characters two texts begin."""
    return sum(1 for _ in takewhile(bool, map(operator.eq, one, other)))


#: More of a file, and of the requests' file, is not read.
_MAX_BYTES = 64 << 20
#: By so much of it a file is known to be no text.
_HEAD = 256 << 10
#: So many characters of prompts, in all forms, are looked for; they take 300 MB of memory.
_MAX_CHARACTERS = 16 << 20
#: A shorter prompt is too likely part of an ordinary word or name.
_LEAST = 12
#: What of a request tells which one it is; whatever else is long may be a user's words.
_HARMLESS = frozenset({"rid", "state", "arrived", "ended", "aborted", "kind", "omitted", "truncated"})
#: What is a user's words however short it is.
_PROMPTS = frozenset({"text", "content", "prompt", "input_ids"})
#: What of a request is noted as left out that may have been its prompt.
_OMITTED = frozenset({"text", "input_ids", "request"})
#: Of what is no text, a flight recorder has calls and sizes. A core may have anything that was in memory.
_FLIGHT_RECORDER = "flight_recorder"
#: What the kit makes of facts, where messages of the server are a small part.
_FACTS = ("incident.json", "summary.md", "report.md", "environment.json", "gpu/facts.json", "stacks/")
_STEPS = ".steps.jsonl"
#: Parts two texts that are searched at a time.
_BETWEEN = "\0"


class MayHoldPromptError(Exception):
    """A file cannot be said to be without prompts."""


class PromptSearch:
    """Takes the prompts of an incident out of texts.

    Attributes:
        short: how many prompts are too short to be looked for.
    """

    def __init__(self, folder: Path, document: Mapping[str, Any]) -> None:
        self.short = 0
        self._gaps: Counter[str] = Counter()
        requests = mapping_of(document.get("requests"))
        self._had_requests = requests.get("reason") != NOT_SERVING
        journal = mapping_of(requests.get("journal"))
        if journal.get("reason") or any(journal.get(name) for name in ("lost", "torn", "left_out")):
            self._gaps["the request journal was not whole"] = 1
        self._index = PromptIndex(self._forms_in(folder))

    @property
    def gaps(self) -> tuple[str, ...]:
        """Why there may be prompts that are not known."""
        return tuple(f"{why} ({count:,} requests)" if count > 1 else why for why, count in self._gaps.items())

    def shortcomings(self) -> Iterator[str]:
        """Yield what a person is to know of what was not looked for."""
        if self._gaps:
            yield f"a message may still hold a prompt, as {'; '.join(self.gaps)}: look before you hand it on"
        if self.short:
            yield f"prompts shorter than {_LEAST} characters were not looked for: {self.short:,}"

    def clean_file(self, name: str, file: IO[bytes]) -> bytes:
        """Return what is in a file, without prompts.

        Raises:
            MayHoldPromptError: it cannot be said to be without.
            OSError: it cannot be read.
        """
        if name.endswith(".html"):
            raise MayHoldPromptError("show --html makes it anew")
        data = file.read(_HEAD)
        is_recorder = _FLIGHT_RECORDER in name
        if b"\0" in data and not is_recorder:
            raise MayHoldPromptError("no text")
        if self._gaps and not (is_recorder or name.startswith(_FACTS) or name.endswith(_STEPS)):
            raise MayHoldPromptError("not all prompts are known")
        data += file.read(_MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise MayHoldPromptError("too large to be searched")
        return self.clean(name, data)

    def clean(self, name: str, data: bytes) -> bytes:
        """Return a text without prompts; in JSON they are looked for in the values alone, so that it stays JSON.

        Raises:
            MayHoldPromptError: it cannot be said to be without.
        """
        if b"\0" in data:
            if _FLIGHT_RECORDER in name:
                return data
            raise MayHoldPromptError("no text")
        text = data.decode(errors="surrogateescape")
        try:
            cleaned = self._clean_json(name, text)
        except (ValueError, RecursionError):
            # It may be cut off, or be no JSON after all.
            cleaned = self._clean_text(text)
        return data if cleaned == text else cleaned.encode(errors="surrogateescape")

    def _clean_json(self, name: str, text: str) -> str:
        if name.endswith(".json"):
            before = json.loads(text)
            after = self._clean_values(before)
            return text if after == before else json.dumps(after, indent=2) + "\n"
        if name.endswith(".jsonl"):
            lines = [json.loads(line) for line in text.splitlines()]
            cleaned = self._clean_values(lines)
            return text if cleaned == lines else "".join(json.dumps(line) + "\n" for line in cleaned)
        return self._clean_text(text)

    def _clean_values(self, document: Any) -> Any:
        """Return a JSON value without prompts; all its texts are searched at once."""
        texts = dict[str, str]()
        _replaced(document, lambda text: texts.setdefault(text, text))
        cleaned = self._clean_text(_BETWEEN.join(texts)).split(_BETWEEN)
        if len(cleaned) != max(1, len(texts)):
            raise MayHoldPromptError("its texts cannot be told apart")
        return _replaced(document, dict(zip(texts, cleaned, strict=False)).__getitem__)

    def _clean_text(self, text: str) -> str:
        return redact_spans(text, self._index.spans_in(text))

    def _forms_in(self, folder: Path) -> Iterator[str]:
        characters = 0
        for prompt in dict.fromkeys(self._prompts_in(folder)):
            # As it is, as Python writes it, and as JSON does.
            for form in dict.fromkeys((prompt, repr(prompt)[1:-1], json.dumps(prompt)[1:-1])):
                characters += len(form)
                if characters > _MAX_CHARACTERS:
                    self._gaps["there is more of prompts than is looked for"] = 1
                    return
                yield form

    def _prompts_in(self, folder: Path) -> Iterator[str]:
        try:
            data = read_regular(folder / REQUESTS, _MAX_BYTES + 1)
        except OSError:
            if self._had_requests:
                self._gaps[f"there is no {REQUESTS}"] = 1
            return
        if len(data) > _MAX_BYTES:
            self._gaps[f"{REQUESTS} is too large"] = 1
        for line in data.splitlines():
            try:
                request = json.loads(line)
                omitted, truncated = mapping_of(request.get("omitted")), request.get("truncated")
            except (ValueError, RecursionError, AttributeError):
                self._gaps["a request cannot be read"] += 1
                continue
            if truncated or not _OMITTED.isdisjoint(omitted):
                self._gaps["a prompt was not kept whole"] += 1
            # The server may have written the text that they were made of, as of a chat's messages.
            if request.get("input_ids") and not request.get("text"):
                self._gaps["a prompt is known by its tokens only"] += 1
            fields = {name: value for name, value in request.items() if name not in _HARMLESS}
            for text, is_prompt in _words_of(fields, ""):
                if len(text) >= (_LEAST if is_prompt else RUN):
                    yield text
                elif is_prompt and text:
                    self.short += 1


def _words_of(value: Any, name: str) -> Iterator[tuple[str, bool]]:
    """Yield the texts in what a user sent, and lists of tokens as they are written; and whether it is a prompt."""
    if isinstance(value, str):
        yield value, name in _PROMPTS
    elif isinstance(value, dict):
        for inner, one in value.items():
            yield from _words_of(one, inner)
    elif _is_numbers(value):
        written = _written(value)
        yield written.replace(" ", ""), name in _PROMPTS
        # One that is too short is counted above.
        if len(written) >= _LEAST:
            yield written, name in _PROMPTS
    elif isinstance(value, list):
        for one in value:
            yield from _words_of(one, name)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """Return a JSON value with its texts replaced; a list of numbers, where that is written anew, by a text."""
    if isinstance(value, str):
        return replace(value.replace(_BETWEEN, " "))
    if isinstance(value, dict):
        return {name: _replaced(one, replace) for name, one in value.items()}
    if _is_numbers(value):
        written = _written(value)
        return value if (text := replace(written)) == written else text
    return [_replaced(one, replace) for one in value] if isinstance(value, list) else value


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _written(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
