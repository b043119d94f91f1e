r"""Read and write one patch file: five header lines, a blank line, one unified diff.

::

    Subject: Tell the kit of the exception that ends a scheduler
    Reason: only this branch runs while the failing rank can still describe itself
    Calls: sglang_crashkit.srt.managers.scheduler.on_scheduler_exception
    Forwarded: no
    Drop-when: upstream offers a callback

    --- a/srt/managers/scheduler.py
    +++ b/srt/managers/scheduler.py
    @@ -5605,2 +5606,3 @@
             logger.error(...)
    +        on_scheduler_exception()

Paths are below the ``sglang`` package. An old side of ``/dev/null`` creates the file. There is one
spelling for a patch: `render_patch` writes it and carries no date, no author and no signature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn

from sglang_crashkit.errors import CrashkitError

#: The header's fields, in their order.
FIELDS = ("Subject", "Reason", "Calls", "Forwarded", "Drop-when")

_HUNK_HEADER = re.compile(rb"@@(?: -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@)?")
_NO_NEWLINE = b"\\ No newline at end of file"
_CONTEXT, _REMOVED, _ADDED = b" ", b"-", b"+"


class PatchFormatError(CrashkitError):
    """A patch file does not read as one."""


@dataclass(frozen=True)
class HunkLine:
    """One line of a hunk."""

    #: ``b" "``, ``b"-"`` or ``b"+"``.
    tag: bytes
    #: The line with its newline, where it has one.
    text: bytes


@dataclass(frozen=True)
class Hunk:
    """One place to change."""

    #: Line number, from 1, in the release the patch was made for; 0 creates the file.
    old_start: int
    lines: tuple[HunkLine, ...]

    @property
    def old(self) -> tuple[bytes, ...]:
        """The lines that must be there."""
        return tuple(line.text for line in self.lines if line.tag != _ADDED)

    @property
    def new(self) -> tuple[bytes, ...]:
        """The lines that take their place."""
        return tuple(line.text for line in self.lines if line.tag != _REMOVED)

    def reversed(self) -> Hunk:
        """Return the hunk that takes this one back."""
        swap = {_ADDED: _REMOVED, _REMOVED: _ADDED, _CONTEXT: _CONTEXT}
        lines = tuple(HunkLine(swap[line.tag], line.text) for line in self.lines)
        return Hunk(self.old_start, lines)


@dataclass(frozen=True)
class Patch:
    """One patch: what it is for, and what it changes in one file."""

    #: Below the ``sglang`` package, with forward slashes.
    path: str
    #: Field of the header → its text.
    header: dict[str, str]
    creates: bool
    hunks: tuple[Hunk, ...]

    @property
    def calls(self) -> tuple[str, ...]:
        """Dotted names of the kit's functions that the patch calls; ``Calls: none`` names none."""
        text = self.header["Calls"]
        return () if text == "none" else tuple(name.strip() for name in text.split(",") if name.strip())


def split_lines(data: bytes) -> list[bytes]:
    """Split at line feeds only, keeping them, so that joining gives the same bytes."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def parse_patch(data: bytes, *, source: str, draft: bool = False) -> Patch:
    """Read a patch file.

    Args:
        data: its bytes.
        source: its name, for errors.
        draft: accept hunk headers whose numbers are absent (a lone ``@@``) or wrong, as a hand
            leaves them; `render_patch` writes the right ones.

    Raises:
        PatchFormatError: it does not read as a patch; the message names the line.
    """
    lines = split_lines(data)
    header, number = _parse_header(lines, source)
    path, creates, number = _parse_names(lines, number, source)
    hunks: list[Hunk] = []
    while number < len(lines):
        hunk, number = _parse_hunk(lines, number, source, draft=draft)
        hunks.append(hunk)
    if not hunks:
        _fail(source, number, "the diff has no hunk")
    if creates and (len(hunks) != 1 or hunks[0].old):
        _fail(source, number, "a patch that creates a file has one hunk of added lines")
    return Patch(path, header, creates, tuple(hunks))


def render_patch(patch: Patch) -> bytes:
    """Return the one spelling of `patch`."""
    head = "".join(f"{field}: {patch.header[field]}\n" for field in FIELDS)
    old_name = "/dev/null" if patch.creates else f"a/{patch.path}"
    parts = [f"{head}\n--- {old_name}\n+++ b/{patch.path}\n".encode()]
    shift = 0
    for hunk in patch.hunks:
        old_count, new_count = len(hunk.old), len(hunk.new)
        new_start = hunk.old_start + shift + (1 if patch.creates else 0)
        numbers = f"@@ -{hunk.old_start},{old_count} +{new_start},{new_count} @@\n"
        parts.append(numbers.encode())
        for line in hunk.lines:
            ended = line.text.endswith(b"\n")
            parts.append(line.tag + line.text + (b"" if ended else b"\n" + _NO_NEWLINE + b"\n"))
        shift += new_count - old_count
    return b"".join(parts)


def _parse_header(lines: list[bytes], source: str) -> tuple[dict[str, str], int]:
    header: dict[str, str] = {}
    for number, field in enumerate(FIELDS):
        line = lines[number].decode("utf-8", "replace") if number < len(lines) else ""
        name, separator, text = line.partition(":")
        if name != field or not separator or not text.strip():
            _fail(source, number, f"expected '{field}: ...'")
        header[field] = text.strip()
    if len(lines) <= len(FIELDS) or lines[len(FIELDS)] != b"\n":
        _fail(source, len(FIELDS), "expected a blank line after the header")
    return header, len(FIELDS) + 1


def _parse_names(lines: list[bytes], number: int, source: str) -> tuple[str, bool, int]:
    names = []
    for offset, prefix in enumerate((b"--- ", b"+++ ")):
        at = number + offset
        if at >= len(lines) or not lines[at].startswith(prefix):
            _fail(source, at, f"expected '{prefix.decode()}'")
        names.append(lines[at][len(prefix) :].rstrip(b"\n").decode("utf-8", "replace"))
    old_name, new_name = names
    creates = old_name == "/dev/null"
    if not new_name.startswith("b/") or (not creates and old_name[2:] != new_name[2:]):
        _fail(source, number, "expected '--- a/PATH' and '+++ b/PATH' with the same PATH")
    path = new_name[2:]
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path:
        _fail(source, number, f"{path!r} does not name a file below the package")
    return path, creates, number + 2


def _parse_hunk(lines: list[bytes], number: int, source: str, *, draft: bool) -> tuple[Hunk, int]:
    head = number
    match = _HUNK_HEADER.fullmatch(lines[number].rstrip(b"\n"))
    if match is None or (match.group(1) is None and not draft):
        _fail(source, number, "expected '@@ -OLD,COUNT +NEW,COUNT @@'")
    number += 1
    body: list[HunkLine] = []
    while number < len(lines) and not lines[number].startswith(b"@@"):
        line = lines[number]
        if line.rstrip(b"\n") == _NO_NEWLINE and body:
            body[-1] = HunkLine(body[-1].tag, body[-1].text.removesuffix(b"\n"))
        elif line[:1] in (_CONTEXT, _REMOVED, _ADDED):
            body.append(HunkLine(line[:1], line[1:]))
        else:
            _fail(source, number, "expected a line that begins with ' ', '-' or '+'")
        number += 1
    hunk = Hunk(int(match.group(1) or 0), tuple(body))
    if all(line.tag == _CONTEXT for line in body):
        _fail(source, head, "the hunk changes nothing")
    if not draft:
        counts = tuple(int(match.group(group) or 1) for group in (2, 4))
        if counts != (len(hunk.old), len(hunk.new)):
            _fail(source, head, "the hunk's line counts do not match its lines")
    return hunk, number


def _fail(source: str, number: int, why: str) -> NoReturn:
    raise PatchFormatError(f"{source}, line {number + 1}: {why}")
