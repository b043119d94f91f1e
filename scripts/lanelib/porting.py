"""Work on the patches: their canonical form, the lock, and drafts of the patches that do not fit a release."""

from __future__ import annotations

import itertools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sglang_crashkit.installer.patches import (
    Hunk,
    HunkConflictError,
    Lock,
    LockedFile,
    LockedRelease,
    Patch,
    PatchDataError,
    PatchRef,
    PatchTree,
    apply_patch,
    parse_patch,
    sha256_hex,
    split_lines,
    unapply_patch,
)

#: The fields of a patch's header, in their order.
FIELDS = ("Subject", "Reason", "Calls", "Forwarded", "Drop-when")


def read_package_file(wheel: zipfile.ZipFile, path: str) -> bytes | None:
    """Return the bytes of the file at `path` below the package, None if the wheel has none."""
    try:
        return wheel.read(f"sglang/{path}")
    except KeyError:
        return None


def render_patch(patch: Patch) -> bytes:
    """Return the canonical form of `patch`, which has no date, author or signature."""
    parts = [_head(patch)]
    shift = 1 if patch.creates else 0
    for hunk in patch.hunks:
        old, new = len(hunk.old), len(hunk.new)
        parts.append(f"@@ -{hunk.old_start},{old} +{hunk.old_start + shift},{new} @@\n".encode())
        parts.append(_body(hunk))
        shift += new - old
    return b"".join(parts)


def read_draft(ref: PatchRef) -> Patch:
    """Read a patch that was edited by hand: its hunk headers may have no numbers (a lone ``@@``) or wrong ones."""
    text = ref.read_text()
    names, *bodies = re.split(r"^@@.*\n", text, flags=re.MULTILINE)
    parts = [names]
    for body in bodies:
        tags = [line[:1] for line in body.split("\n")]
        old, new = (sum(tag in (" ", own) for tag in tags) for own in "-+")
        parts.append(f"@@ -{min(old, 1)},{old} +1,{new} @@\n{body}")
    patch = parse_patch("".join(parts), source=ref.name)
    if patch.path != ref.path or list(patch.header) != list(FIELDS) or not all(patch.header.values()):
        raise PatchDataError(f"{ref.name} is not a patch of its file with the header {', '.join(FIELDS)}")
    wanted_lines = render_patch(patch).decode().split("\n")
    for found, wanted in itertools.zip_longest(text.split("\n"), wanted_lines, fillvalue=""):
        if found != wanted and not found.startswith("@@"):
            raise PatchDataError(f"{ref.name} has {found!r} in the place of {wanted!r}")
    return patch


def normalise_patches(tree: PatchTree, wheels: Mapping[str, Path]) -> list[str]:
    """Rewrite each patch in its canonical form, with its baseline's line numbers; return the names of those changed.

    A patch whose baseline is not among `wheels` stays as it is.
    """
    changed: list[str] = []
    for baseline, wheel in wheels.items():
        refs = [ref for ref in tree.baselines.get(baseline, {}).values() if ref is not None]
        with zipfile.ZipFile(wheel) as archive:
            for ref in refs:
                text = render_patch(_relocate(read_draft(ref), read_package_file(archive, ref.path)))
                if text != ref.file.read_bytes():
                    ref.file.write_bytes(text)
                    changed.append(ref.name)
    return changed


def generate_lock(tree: PatchTree, wheels: Mapping[str, Path]) -> Lock:
    """Return the lock of the releases in `wheels`."""
    releases: dict[str, LockedRelease] = {}
    conflicts: dict[str, str] = {}
    for release, wheel in wheels.items():
        files: dict[str, LockedFile] = {}
        try:
            with zipfile.ZipFile(wheel) as archive:
                for path, ref in tree.resolve(release).items():
                    pristine, patch = read_package_file(archive, path), ref.read()
                    patched = apply_patch(pristine, patch)
                    unapply_patch(patched, patch)
                    before = None if pristine is None else sha256_hex(pristine)
                    files[path] = LockedFile(before, ref.name, sha256_hex(patched))
            releases[release] = LockedRelease({wheel.name: sha256_hex(wheel.read_bytes())}, files)
        except HunkConflictError as error:
            conflicts[release] = error.message
    if conflicts:
        lines = "".join(f"\n  {release}: {message}" for release, message in conflicts.items())
        raise PatchDataError(
            f"{len(conflicts)} of {len(wheels)} releases do not take their patches:{lines}",
            next_step=f"scripts/port_release {next(iter(conflicts))}",
        )
    return Lock(releases)


def write_drafts(tree: PatchTree, release: str, wheel: Path) -> dict[PatchRef, tuple[HunkConflictError, Path]]:
    """Write a draft of each patch that `release` would get and that does not fit `wheel`, to the baseline `release`.

    Returns:
        Patch that does not fit → why, and the path of its draft.
    """
    written: dict[PatchRef, tuple[HunkConflictError, Path]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path, ref in tree.resolve(release).items():
            pristine, patch = read_package_file(archive, path), ref.read()
            try:
                apply_patch(pristine, patch)
            except HunkConflictError as error:
                file = tree.root / release / f"{path}.patch"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_draft(patch, error, pristine))
                written[ref] = (error, file)
    return written


def _head(patch: Patch) -> bytes:
    header = "".join(f"{field}: {patch.header[field]}\n" for field in FIELDS)
    old_name = "/dev/null" if patch.creates else f"a/{patch.path}"
    return f"{header}\n--- {old_name}\n+++ b/{patch.path}\n".encode()


def _body(hunk: Hunk) -> bytes:
    lines = (tag + text for tag, text in hunk.lines)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _relocate(patch: Patch, pristine: bytes | None) -> Patch:
    """Return `patch` with the line numbers that its hunks have in `pristine`."""
    apply_patch(pristine, patch)
    places = [-1] if pristine is None else patch.places(split_lines(pristine))
    hunks = [replace(hunk, old_start=at + 1) for hunk, at in zip(patch.hunks, places, strict=True)]
    return replace(patch, hunks=tuple(hunks))


def _draft(patch: Patch, error: HunkConflictError, pristine: bytes | None) -> bytes:
    """Return the patch with a note at each hunk that fails; a patch with such notes cannot be parsed."""
    lines = split_lines(pristine or b"")
    parts = [_head(patch)]
    for number, hunk in enumerate(patch.hunks, start=1):
        notes = [error.problems[number], *_hints(lines, hunk)] if number in error.problems else []
        parts += [b"@@\n", *(f"# PORT: {note}\n".encode() for note in notes), _body(hunk)]
    return b"".join(parts)


def _hints(lines: list[bytes], hunk: Hunk) -> list[str]:
    """Say where each old line of `hunk` stands now, exactly or with other indentation."""
    hints: list[str] = []
    for old in filter(bytes.strip, hunk.old):
        text = old.decode("utf-8", "replace").strip()
        exact = [at + 1 for at, line in enumerate(lines) if line == old]
        loose = [at + 1 for at, line in enumerate(lines) if line.strip() == old.strip()]
        indented = f"line {_few(loose)} with other indentation: {text}" if loose else f"gone: {text}"
        hints.append(f"line {_few(exact)}: {text}" if exact else indented)
    if len(places := hunk.places(lines)) > 1:
        hints.append(f"the whole hunk stands at lines {_few([at + 1 for at in places])}")
    return hints


def _few(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"
