"""Apply hunks: the context matches exactly, at exactly one place. Offsets yes, fuzz never."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.installer.patchfile import Hunk, Patch, split_lines


@dataclass(frozen=True)
class HunkProblem:
    """Why one hunk cannot be applied."""

    #: From 1.
    number: int
    #: At how many places of the file its old lines are.
    places: int
    reason: str


class HunkConflictError(CrashkitError):
    """A patch does not fit a file.

    Args:
        path: the file, below the package.
        problems: at least one.
    """

    def __init__(self, path: str, problems: tuple[HunkProblem, ...]) -> None:
        details = "; ".join(f"hunk {problem.number}: {problem.reason}" for problem in problems)
        super().__init__(f"the patch of {path} does not fit: {details}")
        self.path = path
        self.problems = problems


def find_places(lines: list[bytes], hunk: Hunk) -> list[int]:
    """Return every index of `lines`, from 0, at which all old lines of `hunk` stand."""
    old = list(hunk.old)
    if not old:
        return []
    last = len(lines) - len(old)
    return [at for at in range(last + 1) if lines[at] == old[0] and lines[at : at + len(old)] == old]


def apply_patch(pristine: bytes | None, patch: Patch) -> bytes:
    """Return the patched bytes.

    Args:
        pristine: the file's bytes, None if there is no such file.
        patch: what to change.

    Raises:
        HunkConflictError: a hunk fits nowhere, at several places, or not in order.
    """
    if patch.creates:
        if pristine is not None:
            raise _whole_file_conflict(patch, 1, "the file it creates is already there")
        return b"".join(patch.hunks[0].new)
    if pristine is None:
        raise _whole_file_conflict(patch, 0, "there is no such file")
    lines = split_lines(pristine)
    result: list[bytes] = []
    done = 0
    for hunk, at in zip(patch.hunks, _places_in_order(lines, patch), strict=True):
        result += lines[done:at]
        result += hunk.new
        done = at + len(hunk.old)
    return b"".join(result + lines[done:])


def unapply_patch(patched: bytes, patch: Patch) -> bytes | None:
    """Return the bytes that `patch` was applied to, None if there was no file.

    Raises:
        HunkConflictError: `patched` is not what applying the patch gives.
    """
    if patch.creates:
        if patched != b"".join(patch.hunks[0].new):
            raise _whole_file_conflict(patch, 0, "the file differs from the one it creates")
        return None
    hunks = tuple(hunk.reversed() for hunk in patch.hunks)
    return apply_patch(patched, replace(patch, hunks=hunks))


def relocate_patch(pristine: bytes | None, patch: Patch) -> Patch:
    """Return `patch` with the line numbers that its hunks have in `pristine`.

    Raises:
        HunkConflictError: it does not fit.
    """
    apply_patch(pristine, patch)
    if pristine is None:
        return replace(patch, hunks=(replace(patch.hunks[0], old_start=0),))
    places = _places_in_order(split_lines(pristine), patch)
    hunks = tuple(replace(hunk, old_start=at + 1) for hunk, at in zip(patch.hunks, places, strict=True))
    return replace(patch, hunks=hunks)


def _places_in_order(lines: list[bytes], patch: Patch) -> list[int]:
    places: list[int] = []
    problems: list[HunkProblem] = []
    free_from = 0
    for number, hunk in enumerate(patch.hunks, start=1):
        found = find_places(lines, hunk)
        if len(found) != 1:
            where = "nowhere" if not found else f"at {len(found)} places"
            reason = f"its {len(hunk.old)} old lines stand {where}"
            problems.append(HunkProblem(number, len(found), reason))
            continue
        if found[0] < free_from:
            reason = f"it stands at line {found[0] + 1}, before the end of the hunk ahead of it"
            problems.append(HunkProblem(number, 1, reason))
            continue
        places.append(found[0])
        free_from = found[0] + len(hunk.old)
    if problems:
        raise HunkConflictError(patch.path, tuple(problems))
    return places


def _whole_file_conflict(patch: Patch, places: int, reason: str) -> HunkConflictError:
    return HunkConflictError(patch.path, (HunkProblem(1, places, reason),))
