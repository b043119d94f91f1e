"""Search the files of an incident for the prompts that its requests' file has, before they are handed on.

What a server writes of an incident was searched as it was written, within the little time that a crash leaves. This is
the second look, which takes its time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.redact import redact_shared

_MAX_BYTES = 64 << 20
#: So many characters of each prompt, and of all, are looked for.
_MAX_PROMPT, _MAX_PROMPTS = 16 << 10, 1 << 20
#: So much of a file is searched at a time.
_AT_A_TIME = 256 << 10
#: What of a request tells which one it is; whatever else is long may be a user's words.
_HARMLESS = frozenset({"rid", "state", "arrived", "ended", "kind"})
_LEAST = 24
#: Of what is no text, a flight recorder has calls and sizes. A core may have anything that was in memory.
_HARMLESS_FILE = "flight_recorder"


class PromptSearch:
    """Takes prompts out of texts.

    Args:
        folder: an incident's.
    """

    def __init__(self, folder: Path) -> None:
        self._forms: list[str] = []
        left = _MAX_PROMPTS
        for prompt in dict.fromkeys(_prompts_in(folder)):
            told = prompt[: min(left, _MAX_PROMPT)]
            left -= len(told)
            # As it is, as Python writes it, and as JSON does.
            self._forms += dict.fromkeys((told, repr(told)[1:-1], json.dumps(told)[1:-1]))

    def clean(self, name: str, data: bytes) -> bytes | None:
        """Return a file without prompts; None where it cannot be said to be without.

        Args:
            name: the file's.
            data: what is in it.
        """
        if b"\0" in data:
            return data if _HARMLESS_FILE in name else None
        text = data.decode(errors="surrogateescape")
        cleaned = "".join(redact_shared(chunk, self._forms) for chunk in _chunks(text))
        if cleaned == text:
            return data
        if name.endswith(".json"):
            try:
                json.loads(cleaned)
            except ValueError:
                return None
        return cleaned.encode(errors="surrogateescape")


def _chunks(text: str) -> Iterator[str]:
    """Yield a text in parts that end with a line, where no line is longer than a part."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + _AT_A_TIME) + 1 if len(text) - start > _AT_A_TIME else 0
        end = end or start + _AT_A_TIME
        yield text[start:end]
        start = end


def _prompts_in(folder: Path) -> Iterator[str]:
    try:
        lines = read_regular(folder / REQUESTS, _MAX_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(request, dict):
            yield from _texts({name: value for name, value in request.items() if name not in _HARMLESS}, "")


def _texts(value: Any, name: str) -> Iterator[str]:
    """Yield the texts in what a user sent, and lists of tokens as they are written."""
    if isinstance(value, str):
        if name == "text" or len(value) >= _LEAST:
            yield value
    elif isinstance(value, dict):
        for inner, one in value.items():
            yield from _texts(one, inner)
    elif isinstance(value, list) and value and all(type(one) is int for one in value):
        written = ", ".join(map(str, value))
        yield from (form for form in (written, written.replace(" ", "")) if len(form) >= _LEAST)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, name)
