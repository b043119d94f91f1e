"""The files of an incident as a page shows them: listed, read within bounds, and made harmless to look at.

They are not trusted: a link may lead out of the folder, a pipe may never end, a line may be as long as the
file, and a character may turn around the text beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.model.checked_json import mapping_of

#: Longer files are neither listed nor read further.
MAX_FILES = 5000
_MAX_DEPTH = 6
_MAX_JSON = 32 << 20
#: Text of a longer string, and entries of a longer list, are left out.
_MAX_TEXT, _MAX_ENTRIES, _MAX_LEVELS = 4000, 2000, 12


class IncidentFiles:
    """The regular files below an incident's folder; no other is ever opened, whatever names one.

    Attributes:
        folder: the incident's.
        listed: the size of each file in bytes, by its name relative to the folder, in order of the names.
        left_out: how many entries there were beyond `MAX_FILES`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = sorted(_walk(folder, "", 0))
        self.left_out = max(0, len(found) - MAX_FILES)
        self.listed = dict(found[:MAX_FILES])

    def read(self, name: str | None, most: int, *, from_end: bool = False) -> bytes:
        """Return at most so many bytes of a file, first or last ones; none where it is not listed or cannot be read."""
        if name is None or name not in self.listed:
            return b""
        try:
            # What was a file as it was listed may be something else by now.
            return read_regular(self.folder / name, most, from_end=from_end)
        except OSError:
            return b""

    def read_json(self, name: str | None) -> Any:
        """Return what a file holds, within bounds; see `bounded`.

        Raises:
            ValueError: it is missing, too long, or no JSON.
        """
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
        """Return the JSON object that a file holds; an empty one where it holds none."""
        try:
            return mapping_of(self.read_json(name))
        except ValueError:
            return {}


def _walk(folder: Path, lead: str, depth: int) -> Iterator[tuple[str, int]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = f"{lead}{entry.name}"
        try:
            if entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size
            elif depth < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{name}/", depth + 1)
        except OSError:
            continue


def bounded(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """Return a JSON value in which nothing is longer than a page can show; it says what was left out."""
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
    # A number of a million digits is a line as well.
    return value if not isinstance(value, int) or abs(value) < 1 << 128 else "a number too long to show"


def object_of(data: bytes) -> Mapping[str, Any]:
    """Return the JSON object in `data`; an empty one otherwise."""
    try:
        return mapping_of(json.loads(data))
    except (ValueError, RecursionError):
        return {}


def cut(text: str, most: int = _MAX_TEXT) -> str:
    """Return `text`, or what it begins with and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} ... {len(text) - most:,} more characters left out"
