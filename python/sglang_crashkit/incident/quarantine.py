"""The requests that kill a server, or may: by what they are recognised, and the file that lists them.

An entry names the parameters that it takes, with a hash where their value is long, and what of the prompt, which is
never in it: nothing, its length class, or a hash of it. It counts for the model and the release that it comes from.
``quarantine.json`` lies in the crash folder, so that the hosts that share the folder share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sglang_crashkit.errors import WHOSE_IT_IS, CrashkitError
from sglang_crashkit.incident.request_fingerprint import digest_of, fingerprint_of, prompt_of, sample_of
from sglang_crashkit.kernel.private_files import FolderLock, encode_json, write_private
from sglang_crashkit.model.checked_json import mapping_of, mappings_of

FILE = "quarantine.json"
MAX_ENTRIES = 1000
#: How long an entry counts, in seconds.
EXPIRY_SECS = 86400.0

_SCHEMA_VERSION = 1
_MAX_BYTES = 4 << 20
#: Who changes the file locks this one beside it, which a network file system can for all hosts.
_LOCK = ".quarantine.lock"
_LOCK_SECS = 5.0
_SCALARS = (str, int, float)
_LEVELS = ("proven", "suspected")
#: Characters of a reason, so that a full file is no huge one; characters of a hash.
_MAX_REASON = 400
_HASH = 64
#: A longer text is known by its hash, as are these.
_MAX_TEXT = 200
_KINDS = {str: "text", list: "list", dict: "mapping"}
#: What an incident has where JSON has no number.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_in_order = json.JSONEncoder(sort_keys=True, check_circular=False).encode

Prompt = Literal["any", "length", "content"]
#: ``proven`` is refused; ``suspected`` is sent alone, so that a second crash proves it.
Level = Literal["proven", "suspected"]
#: Returns a field of a request by its name, None where it has none.
Getter = Callable[[str], Any]


class Digest(NamedTuple):
    """Stands for the value of a parameter that is long, or has parts."""

    kind: str  # what it is, in a word
    length: int  # how many characters or entries it has
    digest: str  # a hash of it


Value = str | int | float | Digest


@dataclass(frozen=True)
class Origin:
    """Where an entry comes from."""

    reason: str  # why it is here
    incident: str  # the id of the incident that it comes from
    model: str  # as the server was given it
    release: str  # of SGLang
    fault: str = ""  # the key of the fault, see `fingerprint.Fault`; empty where that is not known


def origin_of(document: Mapping[str, Any], reason: str, fault: str = "") -> Origin:
    """Return what an incident, given as its document, tells of an entry's origin; see there."""
    server, around = mapping_of(document.get("server")), mapping_of(document.get("environment"))
    release = public_release(str(server.get("sglang_version") or ""))
    return Origin(reason[:_MAX_REASON], str(document.get("id")), str(around.get("model") or ""), release, fault)


def public_release(version: str) -> str:
    """Return a version of SGLang without what a patched wheel adds to it."""
    return version.partition("+")[0]


@dataclass(frozen=True)
class Entry:
    """One kind of request."""

    #: Names and values of the parameters that it takes, sorted; those in ``sampling_params`` with a dot.
    parameters: tuple[tuple[str, Value], ...]
    prompt: Prompt  # what of its prompt counts
    #: Of the prompt, in token ids or characters: its binary digits where its length counts, all of it where its content
    #: does; else 0.
    length: int
    digest: str  # a hash of the prompt where its content counts; else empty
    origin: Origin
    first: float  # when it was put here first, in seconds since the epoch
    last: float  # when it was put here last, or a request came that it recognises and that is proven to kill
    #: A hash of all parameters, where exactly these count beside the prompt (`request_fingerprint`); else empty.
    rest: str = ""
    level: Level = "proven"  # what is known of it
    #: Of the prompt where its content counts (`request_fingerprint.sample_of`); None where an earlier release noted it.
    sample: int | None = None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        """Set `key`, a short name for what it recognises."""
        told = [self.parameters, self.prompt, self.length, self.digest, self.rest]
        told += [self.origin.model, self.origin.release]
        object.__setattr__(self, "key", hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12])

    @property
    def words(self) -> str:
        """What it recognises, in words without a prompt."""
        if self.rest:
            return "one prompt with the same parameters"
        named = ", ".join(map(_named, self.parameters)) or "any parameters"
        return named if self.prompt == "any" else f"{named}; a prompt of one {self.prompt}"

    def counts_for(self, model: str, release: str) -> bool:
        """Say whether it counts for a server with this model and this SGLang."""
        return (self.origin.model, self.origin.release) == (model, public_release(release))


def _named(parameter: tuple[str, Value]) -> str:
    name, value = parameter
    return f"{name}=(one {value.kind} of {value.length})" if isinstance(value, Digest) else f"{name}={value}"


def _shape_of(value: object) -> tuple[str, int] | None:
    """Return the first two fields of a value's `Digest`; None where it has none."""
    if isinstance(value, Digest):
        return value[:2]
    if not isinstance(value, (str, list, dict)) or (isinstance(value, str) and len(value) <= _MAX_TEXT):
        return None
    return _KINDS.get(type(value), ""), len(value)


def _known_by(value: Any) -> Any:
    """Return what stands for a value of a parameter; raises what JSON does of a value that it does not have."""
    shape = _shape_of(value)
    if shape is not None:
        return _digest(value, shape)
    # Nor is NaN equal to itself.
    return json.dumps(value) if type(value) is float and not math.isfinite(value) else value


def _digest(value: Any, shape: tuple[str, int]) -> Digest:
    return Digest(*shape, hashlib.sha256(_json_of(value).encode()).hexdigest())


def _json_of(value: Any) -> str:
    if type(value) is not list:
        return _in_order(value)
    try:
        # The same sooner, where all are texts, as those to stop at.
        return f"[{', '.join(map(encode_basestring_ascii, value))}]"
    except TypeError:
        return _in_order(value)


def entry_of(body: Mapping[str, Any], parameters: Iterable[str], prompt: Prompt, origin: Origin, now: float) -> Entry:
    """Return the entry that recognises a request.

    Args:
        body: the request, as it is sent to ``/generate``.
        parameters: the names of those that count.
        prompt: what of its prompt counts.
        origin: see `Entry`.
        now: the time, in seconds since the epoch.

    Raises:
        CrashkitError: it would recognise every request, or a parameter has a value that cannot be compared.
    """
    named = tuple((name, _known_by(_value_of(body.get, _split(name)))) for name in sorted(parameters))
    for name, value in named:
        if not isinstance(value, (*_SCALARS, Digest)):
            raise CrashkitError(f"{name} has no value that can be compared, so it recognises no request")
    if not named and prompt != "content":
        raise CrashkitError("no parameter counts and not what the prompt says, so it would refuse others' requests")
    if prompt == "any":
        return Entry(named, prompt, 0, "", origin, now, now)
    text = prompt_of(body.get)
    if text is None:
        raise CrashkitError("its prompt counts and is neither a text nor token ids, so it recognises no request")
    if prompt == "length":
        return Entry(named, prompt, len(text).bit_length(), "", origin, now, now)
    return Entry(named, prompt, len(text), digest_of(text), origin, now, now, sample=sample_of(text))


def entry_of_all(fields: Mapping[str, Any], origin: Origin, now: float, level: Level = "proven") -> Entry | None:
    """Return the entry that recognises one request, as an incident keeps it, with all that it asks for, and no other.

    None where something of it was not kept.
    """
    known, prompt = fingerprint_of(fields), prompt_of(fields.get)
    if known is None or prompt is None:
        return None
    sample = sample_of(prompt)
    return Entry((), "content", known.length, known.digest, origin, now, now, known.rest, level, sample)


class _Prompts:
    """Entries whose prompts have one length, or none that counts.

    Attributes:
        by_digest: them by the hash of the prompt, then by that of the rest, which is empty where only some parameters
            count.
        samples: of their prompts, as far as these are known.
    """

    def __init__(self) -> None:
        self.by_digest: dict[str, dict[str, Entry]] = {}
        self.samples: set[int | None] = set()

    def add(self, entry: Entry) -> None:
        self.by_digest.setdefault(entry.digest, {})[entry.rest] = entry
        self.samples.add(entry.sample)

    def find(self, prompt: str | Sequence[int], rest: Callable[[], str | None]) -> Entry | None:
        # A hash of a long prompt takes a while.
        if None not in self.samples and sample_of(prompt) not in self.samples:
            return None
        by_rest = self.by_digest.get(digest_of(prompt), {})
        return by_rest.get("") or (by_rest.get(rest() or "") if by_rest else None)


_ByPrompt = dict[tuple[Prompt, int], _Prompts]
#: A parameter's name, in two parts where it is in ``sampling_params``.
_Name = tuple[str, str]
#: By the names of parameters, then by their values.
_ByOthers = dict[tuple[_Name, ...], dict[tuple[object, ...], _ByPrompt]]


class Index:
    """Finds the entry that recognises a request, in a time that does not grow with their number."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        #: By both parts of the first parameter's name, then by its value; of most requests that is all that is looked
        #: at.
        self._by_first: dict[str, dict[str, dict[object, _ByOthers]]] = {}
        #: Of the entries without parameters.
        self._bare: _ByPrompt = {}
        #: Of the parameters that are known by a hash how long they are: to make one takes a while.
        self._shapes: dict[_Name, set[tuple[str, int] | None]] = {}
        for entry in entries:
            by_prompt = self._bare
            if entry.parameters:
                (first, value), *others = split = [(_split(name), value) for name, value in entry.parameters]
                for name, one in split:
                    if isinstance(one, Digest) or one in _NOT_FINITE:
                        self._shapes.setdefault(name, set()).add(_shape_of(one))
                by_value = self._by_first.setdefault(first[0], {}).setdefault(first[1], {})
                by_others = by_value.setdefault(value, {})
                by_values = by_others.setdefault(tuple(name for name, _value in others), {})
                by_prompt = by_values.setdefault(tuple(value for _name, value in others), {})
            by_prompt.setdefault((entry.prompt, entry.length), _Prompts()).add(entry)

    def __bool__(self) -> bool:
        return bool(self._by_first or self._bare)

    def find(self, get: Getter, rest: Callable[[], str | None] = lambda: None) -> Entry | None:
        """Return the entry that recognises a request, a proven one where there are several; None where none does.

        The hash of all its parameters is asked for, by `rest`, where a prompt is recognised.
        """
        found = _find_prompt(self._bare, get, rest) if self._bare else None
        for parent, by_child in self._by_first.items():
            whole = get(parent)
            if whole is None:
                continue
            # Of many kinds of parameters a request has a few.
            names = by_child.keys() & whole.keys() if isinstance(whole, dict) else set()
            for child in names | {""} if "" in by_child else names:
                by_others = self._first(by_child[child], (parent, child), whole[child] if child else whole)
                for by_prompt in self._matching(by_others, get) if by_others is not None else ():
                    if found is None or found.level != "proven":
                        found = _find_prompt(by_prompt, get, rest) or found
        return found

    def _first(self, by_value: dict[object, _ByOthers], name: _Name, value: Any) -> _ByOthers | None:
        try:
            return by_value.get(self._as_listed(name, value) if name in self._shapes else value)
        except (TypeError, ValueError, RecursionError):
            # A value that has no hash is none of an entry's.
            return None

    def _as_listed(self, name: _Name, value: Any) -> Any:
        """Return what stands for the value of a parameter, where an entry may have that."""
        shape = _shape_of(value)
        if shape not in self._shapes.get(name, ()):
            return value
        return _known_by(value) if shape is None else _digest(value, shape)

    def _matching(self, by_others: _ByOthers, get: Getter) -> Iterator[_ByPrompt]:
        for names, by_values in by_others.items():
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                by_prompt = by_values.get(tuple(self._as_listed(name, _value_of(get, name)) for name in names))
                if by_prompt is not None:
                    yield by_prompt


def _split(name: str) -> _Name:
    parent, _, child = name.partition(".")
    return parent, child


def _value_of(get: Getter, name: _Name) -> Any:
    value = get(name[0])
    if not name[1]:
        return value
    return value.get(name[1]) if isinstance(value, dict) else None


def _find_prompt(by_prompt: _ByPrompt, get: Getter, rest: Callable[[], str | None]) -> Entry | None:
    if found := by_prompt.get(("any", 0)):
        return found.by_digest[""][""]
    prompt = prompt_of(get)
    if prompt is None:
        return None
    if found := by_prompt.get(("length", len(prompt).bit_length())):
        return found.by_digest[""][""]
    same_length = by_prompt.get(("content", len(prompt)))
    return same_length.find(prompt, rest) if same_length else None


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
    # It forgets what is in it.
    path, clear = folder / FILE, f"sglang-crashkit quarantine clear --folder {shlex.quote(str(folder))}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CrashkitError(
            f"{path} cannot be read: {error.strerror}", next_step=f"ls -l {shlex.quote(str(path))}{WHOSE_IT_IS}"
        ) from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o022:
            raise CrashkitError(
                f"{path} is no file of this user that nobody else may write",
                next_step=f"chmod go-w {shlex.quote(str(path))}   # as its owner; ls -l says who that is",
            )
        if about.st_size > _MAX_BYTES:
            raise CrashkitError(f"{path} has {about.st_size} bytes, more than {_MAX_BYTES}", next_step=clear)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            told = json.loads(file.read(_MAX_BYTES + 1))
        if mapping_of(told).get("schema_version") != _SCHEMA_VERSION:
            raise CrashkitError(f"{path} is of another version, or no quarantine", next_step=clear)
        entries = list(_entries(mappings_of(mapping_of(told).get("entries"))[:MAX_ENTRIES]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CrashkitError(
            f"{path} is broken: {type(error).__name__}: {error}",
            next_step=clear,
        ) from error
    finally:
        os.close(descriptor)
    return [entry for entry in entries if entry.last <= now + EXPIRY_SECS and now < entry.last + EXPIRY_SECS]


def _entries(told: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    for fields in told:
        # One that is broken must not let the others pass.
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            yield read_entry(fields)


def read_entry(fields: Mapping[str, Any]) -> Entry:
    """Return an entry as a file has it (see `entry_fields`).

    Raises:
        ValueError: it is none; likewise TypeError and KeyError.
    """
    parameters = tuple((name, _read_value(value)) for name, value in fields["parameters"])
    if not all(isinstance(name, str) for name, _value in parameters):
        raise ValueError("a parameter has no name")
    prompt, length, digest, rest = fields["prompt"], fields["length"], fields["digest"], fields["rest"]
    if prompt not in ("any", "length", "content") or type(length) is not int or fields["level"] not in _LEVELS:
        raise ValueError("what counts of a prompt is not known")
    # Length alone would be a class of everybody's requests.
    if not parameters and prompt != "content":
        raise ValueError("an entry would recognise requests of every kind")
    if prompt != "content":
        length, digest, rest = length if prompt == "length" else 0, "", ""
    elif not (isinstance(digest, str) and len(digest) == _HASH and isinstance(rest, str) and len(rest) in (0, _HASH)):
        raise ValueError("a prompt is no hash")
    about = fields["origin"]
    origin = Origin(*(str(about[name]) for name in ("reason", "incident", "model", "release", "fault")))
    first, last = float(fields["first"]), float(fields["last"])
    sample = fields.get("sample")
    known = sample if type(sample) is int else None
    return Entry(parameters, prompt, length, digest, origin, first, last, rest, fields["level"], known)


def _read_value(value: Any) -> Value:
    if isinstance(value, _SCALARS):
        return value
    kind, length, digest = value
    if kind not in _KINDS.values() or type(length) is not int or not isinstance(digest, str) or len(digest) != _HASH:
        raise ValueError("a parameter has no value")
    return Digest(kind, length, digest)


def change_entries(
    folder: Path, change: Callable[[list[Entry]], Iterable[Entry]], lock_secs: float = _LOCK_SECS
) -> list[Entry]:
    """Replace the entries of a crash folder by what `change` makes of them, and return those; see `read_entries`.

    Of more than `MAX_ENTRIES`, or than a file may hold, the proven ones are kept first, and of each level those that
    were last put there.

    Args:
        folder: the crash folder.
        change: see above.
        lock_secs: how long to wait for whoever else changes them, in seconds.

    Raises:
        CrashkitError: the file cannot be read or written, or another command is at it.
    """
    # A user may have given a link to it.
    folder = folder.resolve()
    lock = FolderLock(folder, file=_LOCK)
    try:
        if lock.acquire(lock_secs) == "taken":
            raise CrashkitError(f"{folder} is locked by another process", next_step="the same command again")
        ranked = sorted(change(read_entries(folder)), key=lambda entry: (entry.level == "proven", entry.last))
        entries = ranked[-MAX_ENTRIES:]
        while len(text := _text_of(entries)) > _MAX_BYTES:
            entries = entries[len(entries) // 10 + 1 :]
        write_private(folder / FILE, text)
    except OSError as error:
        raise CrashkitError(f"{folder / FILE} cannot be written: {error}") from error
    finally:
        lock.release()
    return entries


def _text_of(entries: Sequence[Entry]) -> bytes:
    return encode_json({"schema_version": _SCHEMA_VERSION, "entries": [asdict(entry) for entry in entries]})


def clear_entries(folder: Path) -> None:
    """Remove the file of a crash folder, whatever is in it, and the one that is locked for it.

    Raises:
        CrashkitError: it cannot be removed.
    """
    try:
        for name in (FILE, _LOCK):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise CrashkitError(f"{folder / FILE} cannot be removed: {error}") from error


def add_entry(folder: Path, entry: Entry) -> None:
    """Put an entry into the file of a crash folder, or anew where it is there; see `change_entries`."""

    def change(entries: list[Entry]) -> list[Entry]:
        before = next((one for one in entries if one.key == entry.key), entry)
        others = [one for one in entries if one.key != entry.key]
        return [*others, replace(entry, first=before.first)]

    change_entries(folder, change)


def note_suspects(folder: Path, suspects: Iterable[Entry], *, is_alone: bool, lock_secs: float) -> None:
    """List what may have killed a server; see `change_entries`.

    What was suspected of the same fault before, and was alone as the server failed this time, is proven by it.

    Args:
        folder: the crash folder.
        suspects: an entry each.
        is_alone: no other request was under way.
        lock_secs: see `change_entries`.
    """

    def change(entries: list[Entry]) -> list[Entry]:
        known = {entry.key: entry for entry in entries}
        for entry in suspects:
            before = known.get(entry.key)
            if before is None:
                known[entry.key] = entry
            elif before.level == "proven":
                known[entry.key] = replace(before, last=entry.last)
            else:
                is_proven = is_alone and before.origin.fault == entry.origin.fault != ""
                reason = f"{entry.origin.reason} (alone, and suspected in incident {before.origin.incident})"
                origin = replace(entry.origin, reason=reason) if is_proven else entry.origin
                level: Level = "proven" if is_proven else "suspected"
                known[entry.key] = replace(entry, first=before.first, level=level, origin=origin)
        return list(known.values())

    change_entries(folder, change, lock_secs)


def note_seen(folder: Path, seen: Mapping[str, float]) -> None:
    """Note when requests that entries recognise came last, in seconds since the epoch, by the entry's key.

    See `change_entries`.
    """

    def change(entries: list[Entry]) -> list[Entry]:
        return [replace(one, last=max(one.last, seen.get(one.key, one.last))) for one in entries]

    change_entries(folder, change)


def clear_suspects(folder: Path, keys: Container[str]) -> None:
    """Remove suspects that were sent alone and killed nobody; see `change_entries`."""
    change_entries(folder, lambda entries: [one for one in entries if one.level == "proven" or one.key not in keys])
