"""The requests that are known to kill a server: by what they are recognised, and the file that lists them.

An entry names the parameters that it takes and what of the prompt, which is never in it: nothing, its length class, or
a hash of it. ``quarantine.json`` lies in the crash folder, so that the hosts that share the folder share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.summary import mapping_of, mappings_of
from sglang_crashkit.kernel.folder_lock import FolderLock
from sglang_crashkit.kernel.private_files import write_json

FILE = "quarantine.json"
MAX_ENTRIES = 1000
#: How long an entry counts, in seconds.
EXPIRY_SECS = 86400.0

_SCHEMA_VERSION = 1
_MAX_BYTES = 4 << 20
_LOCK_SECS = 5.0
_SCALARS = (str, int, float)

Prompt = Literal["any", "length", "content"]
#: Returns the value of a request's field by its name, None where it has none.
Getter = Callable[[str], Any]


@dataclass(frozen=True)
class Entry:
    """One kind of request.

    Attributes:
        parameters: names and values of the parameters that it takes, sorted; those in ``sampling_params`` with a dot.
        prompt: what of its prompt counts.
        length: of the prompt, in token ids or characters: its binary digits where its length counts, all of it where
            its content does; else 0.
        digest: a hash of the prompt where its content counts; else empty.
        reason: why it is here.
        incident: the id of the incident that it comes from.
        first: when it was put here first, in seconds since the epoch; `last`: when it was last.
    """

    parameters: tuple[tuple[str, str | int | float], ...]
    prompt: Prompt
    length: int
    digest: str
    reason: str
    incident: str
    first: float
    last: float

    @property
    def key(self) -> str:
        """A short name for what it recognises."""
        told = [self.parameters, self.prompt, self.length, self.digest]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]

    @property
    def words(self) -> str:
        """What it recognises, in words without a prompt."""
        named = ", ".join(f"{name}={value}" for name, value in self.parameters) or "any parameters"
        return named if self.prompt == "any" else f"{named}; a prompt of one {self.prompt}"


def entry_of(
    body: Mapping[str, Any], parameters: Iterable[str], prompt: Prompt, reason: str, incident: str, now: float
) -> Entry:
    """Return the entry that recognises a request.

    Args:
        body: the request, as it is sent to ``/generate``.
        parameters: the names of those that count.
        prompt: what of its prompt counts.
        reason: see `Entry`, as for `incident`.
        incident: see above.
        now: the time, in seconds since the epoch.

    Raises:
        CrashkitError: it would recognise every request, or a parameter has a value that cannot be compared.
    """
    get = _getter_of(body)
    named = tuple(sorted((name, get(name)) for name in parameters))
    for name, value in named:
        if not isinstance(value, _SCALARS):
            raise CrashkitError(f"the value of {name} is neither a number nor a text, so it recognises no request")
    if not named and prompt != "content":
        raise CrashkitError("no parameter counts and not what the prompt says, so it would refuse others' requests")
    text = _prompt_of(get)
    if prompt != "any" and text is None:
        raise CrashkitError("its prompt counts and is neither a text nor token ids, so it recognises no request")
    length = 0 if prompt == "any" or text is None else len(text).bit_length() if prompt == "length" else len(text)
    digest = _digest(text) if prompt == "content" and text is not None else ""
    return Entry(named, prompt, length, digest, reason, incident, now, now)


#: What a request is told by beside itself, in an incident and to the server.
_ABOUT = frozenset({"rid", "state", "arrived", "ended", "pid", "stream", "session_id", "bootstrap_room", "routing_key"})


def signature_of(fields: Mapping[str, Any]) -> str:
    """Return what tells a request again that is sent once more under another id.

    Args:
        fields: a line of ``requests/requests.jsonl``.
    """
    told = {name: value for name, value in fields.items() if name not in _ABOUT and value is not None}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _getter_of(body: Mapping[str, Any]) -> Getter:
    def get(name: str) -> Any:
        parent, _, child = name.partition(".")
        value = body.get(parent)
        return mapping_of(value).get(child) if child else value

    return get


def _prompt_of(get: Getter) -> str | list[int] | None:
    text = get("text")
    ids = get("input_ids") if text is None else None
    return text if isinstance(text, str) else ids if isinstance(ids, list) else None


def _digest(prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()
    try:
        return hashlib.sha256(array("q", prompt).tobytes()).hexdigest()
    except (TypeError, OverflowError):
        # No token ids.
        return ""


class Index:
    """Finds the entry that recognises a request, in a time that does not grow with their number.

    Args:
        entries: all of them.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        #: By the names of the parameters, then by their values; then by what counts of the prompt and its length; then
        #: by its digest.
        self._by_names: dict[tuple[str, ...], dict[tuple[object, ...], _ByPrompt]] = {}
        for entry in entries:
            names = tuple(name for name, _value in entry.parameters)
            values = tuple(value for _name, value in entry.parameters)
            by_prompt = self._by_names.setdefault(names, {}).setdefault(values, {})
            by_prompt.setdefault((entry.prompt, entry.length), {})[entry.digest] = entry

    def __bool__(self) -> bool:
        return bool(self._by_names)

    def find(self, get: Getter) -> Entry | None:
        """Return the entry that recognises the request whose fields `get` gives, None where none does."""
        for names, by_values in self._by_names.items():
            try:
                by_prompt = by_values.get(tuple(map(get, names)))
            except TypeError:
                # A value that has no hash is none of an entry's.
                continue
            if by_prompt is not None and (found := _find_prompt(by_prompt, get)) is not None:
                return found
        return None


_ByPrompt = dict[tuple[Prompt, int], dict[str, Entry]]


def _find_prompt(by_prompt: _ByPrompt, get: Getter) -> Entry | None:
    if found := by_prompt.get(("any", 0)):
        return found[""]
    prompt = _prompt_of(get)
    if prompt is None:
        return None
    if found := by_prompt.get(("length", len(prompt).bit_length())):
        return found[""]
    same_length = by_prompt.get(("content", len(prompt)))
    # A hash of a long prompt takes a while; it is made where another one was as long.
    return same_length.get(_digest(prompt)) if same_length else None


# -- the file


def read_entries(folder: Path, now: float | None = None) -> list[Entry]:
    """Return the entries that count, of the file in a crash folder; none where there is no file.

    Args:
        folder: the crash folder.
        now: the time, in seconds since the epoch; by default that of the call.

    Raises:
        CrashkitError: the file is broken, too large, or somebody else's; nothing of it counts.
    """
    now = time.time() if now is None else now
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CrashkitError(f"{path} cannot be read: {error.strerror}") from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o022:
            raise CrashkitError(f"{path} is no file of this user that nobody else may write")
        if about.st_size > _MAX_BYTES:
            raise CrashkitError(f"{path} has {about.st_size} bytes, more than {_MAX_BYTES}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            told = json.loads(file.read(_MAX_BYTES + 1))
        if mapping_of(told).get("schema_version") != _SCHEMA_VERSION:
            raise CrashkitError(f"{path} is of another version, or no quarantine")
        entries = list(_entries(mappings_of(mapping_of(told).get("entries"))[:MAX_ENTRIES]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CrashkitError(f"{path} is broken: {type(error).__name__}: {error}") from error
    finally:
        os.close(descriptor)
    return [entry for entry in entries if entry.last <= now + EXPIRY_SECS and now < entry.last + EXPIRY_SECS]


def _entries(told: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    for fields in told:
        # One that is broken must not let the others pass.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            yield _entry(fields)


def _entry(fields: Mapping[str, Any]) -> Entry:
    """Return an entry of the file.

    Raises:
        ValueError: it is none; likewise TypeError and KeyError.
    """
    parameters = tuple((name, value) for name, value in fields["parameters"])
    if not all(isinstance(name, str) and isinstance(value, _SCALARS) for name, value in parameters):
        raise ValueError("a parameter is no name with a number or a text")
    prompt, length, digest = fields["prompt"], fields["length"], fields["digest"]
    if prompt not in ("any", "length", "content") or not isinstance(length, int) or not isinstance(digest, str):
        raise ValueError("what counts of a prompt is not known")
    # Length alone would be a class of everybody's requests.
    if (not parameters and prompt != "content") or (prompt == "content" and len(digest) != 64):
        raise ValueError("an entry would recognise requests of every kind")
    if prompt != "content":
        length, digest = length if prompt == "length" else 0, ""
    reason, incident = str(fields["reason"]), str(fields["incident"])
    first, last = float(fields["first"]), float(fields["last"])
    return Entry(parameters, prompt, length, digest, reason, incident, first, last)


def change_entries(folder: Path, change: Callable[[list[Entry]], Iterable[Entry]]) -> list[Entry]:
    """Replace the entries of a crash folder by what `change` makes of them, and return those; see `read_entries`.

    Of more than `MAX_ENTRIES` those that were last put there are kept.

    Raises:
        CrashkitError: the file cannot be read or written, or another command is at it.
    """
    lock = FolderLock(folder)
    try:
        if lock.acquire(_LOCK_SECS) == "taken":
            raise CrashkitError(f"{folder} is locked by another process", next_step="the same command again")
        entries = sorted(change(read_entries(folder)), key=lambda entry: entry.last)[-MAX_ENTRIES:]
        told = [asdict(entry) | {"key": entry.key} for entry in entries]
        write_json(folder / FILE, {"schema_version": _SCHEMA_VERSION, "entries": told})
    except OSError as error:
        raise CrashkitError(f"{folder / FILE} cannot be written: {error}") from error
    finally:
        lock.release()
    return entries


def clear_entries(folder: Path) -> None:
    """Remove the file of a crash folder, whatever is in it.

    Raises:
        CrashkitError: it cannot be removed.
    """
    try:
        (folder / FILE).unlink(missing_ok=True)
    except OSError as error:
        raise CrashkitError(f"{folder / FILE} cannot be removed: {error}") from error


def add_entry(folder: Path, entry: Entry) -> None:
    """Put an entry into the file of a crash folder, or anew where it is there; see `change_entries`."""

    def change(entries: list[Entry]) -> list[Entry]:
        before = next((one for one in entries if one.key == entry.key), entry)
        others = [one for one in entries if one.key != entry.key]
        return [*others, replace(entry, first=before.first)]

    change_entries(folder, change)
