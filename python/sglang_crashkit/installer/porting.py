"""Try the resolved patches on a release and write a starting point for those that fail."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.installer.hunks import HunkConflictError, apply_patch, find_places
from sglang_crashkit.installer.lockgen import read_package_file
from sglang_crashkit.installer.patchfile import FIELDS, Hunk, split_lines
from sglang_crashkit.installer.resolver import PatchRef, PatchTree


@dataclass(frozen=True)
class Conflict:
    """A patch that does not fit, and where the port of it begins."""

    ref: PatchRef
    error: HunkConflictError
    #: What to write as the new baseline's patch.
    draft: bytes


def find_conflicts(tree: PatchTree, release: str, wheel: Path) -> list[Conflict]:
    """Return the patches that `release` would get and that do not fit `wheel`."""
    conflicts: list[Conflict] = []
    with zipfile.ZipFile(wheel) as archive:
        for path, ref in tree.resolve(release).items():
            pristine = read_package_file(archive, path)
            try:
                apply_patch(pristine, ref.read())
            except HunkConflictError as error:
                conflicts.append(Conflict(ref, error, _draft(ref, error, pristine)))
    return conflicts


def write_drafts(tree: PatchTree, release: str, conflicts: list[Conflict]) -> list[Path]:
    """Write the drafts of `conflicts` into the baseline `release` and return their files."""
    written: list[Path] = []
    for conflict in conflicts:
        file = tree.root / release / f"{conflict.ref.path}.patch"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(conflict.draft)
        written.append(file)
    return written


def _draft(ref: PatchRef, error: HunkConflictError, pristine: bytes | None) -> bytes:
    """Return the patch with a note at each hunk that fails; the notes keep it from being read."""
    patch = ref.read()
    problems = {problem.number: problem for problem in error.problems}
    lines = split_lines(pristine or b"")
    parts = ["".join(f"{field}: {patch.header[field]}\n" for field in FIELDS).encode()]
    old_name = "/dev/null" if patch.creates else f"a/{patch.path}"
    parts.append(f"\n--- {old_name}\n+++ b/{patch.path}\n".encode())
    for number, hunk in enumerate(patch.hunks, start=1):
        parts.append(b"@@\n")
        problem = problems.get(number)
        if problem is not None:
            parts.append(f"# PORT: {problem.reason}\n".encode())
            parts += [f"# PORT: {hint}\n".encode() for hint in _hints(lines, hunk)]
        parts += [line.tag + line.text for line in hunk.lines]
    return b"".join(parts)


def _hints(lines: list[bytes], hunk: Hunk) -> list[str]:
    """Say where each old line of `hunk` stands now, exactly or with other indentation."""
    hints: list[str] = []
    for old in hunk.old:
        text = old.decode("utf-8", "replace").strip()
        if not text:
            continue
        exact = [at + 1 for at, line in enumerate(lines) if line == old]
        loose = [at + 1 for at, line in enumerate(lines) if line.strip() == old.strip()]
        if exact:
            hints.append(f"line {_few(exact)}: {text}")
        elif loose:
            hints.append(f"line {_few(loose)} with other indentation: {text}")
        else:
            hints.append(f"gone: {text}")
    if len(places := find_places(lines, hunk)) > 1:
        hints.append(f"the whole hunk stands at lines {_few([at + 1 for at in places])}")
    return hints


def _few(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"
