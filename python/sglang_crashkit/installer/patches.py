"""The kit's patches: the patch of one file, the choice of patches for a release, and the lock with their results.

A patch file is five header lines, a blank line and one unified diff::

    Subject: Tell the kit of the exception that ends a scheduler
    Reason: only this branch runs while the failing rank can still describe itself
    Calls: sglang_crashkit.srt.managers.scheduler.on_scheduler_exception
    Forwarded: no
    Drop-when: upstream offers a callback

    --- a/srt/managers/scheduler.py
    +++ b/srt/managers/scheduler.py
    @@ -5605,1 +5606,2 @@
             logger.error(...)
    +        on_scheduler_exception()

Paths are below the ``sglang`` package; an old side of ``/dev/null`` creates the file. ``docs/design.md`` says how a
hunk applies, which patches a release gets, and what the lock has. Only final and post releases count. A local version
part (``+crashkit.1.0.0``, ``+cu126``) names a build of the same release.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version
from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from sglang_crashkit.errors import CrashkitError, RefusedError, UsageError

#: Generated file beside the folders of the baselines.
LOCK_NAME = "releases.lock.json"
_SCHEMA_VERSION = 1

_PATCH, _DROP = ".patch", ".drop"


class PatchDataError(CrashkitError):
    """The kit's own patches are missing, malformed, or contradict each other."""


class HunkConflictError(CrashkitError):
    """A patch does not fit a file; `problems`: number of each hunk that does not fit, from 1 → why."""

    def __init__(self, path: str, problems: dict[int, str]) -> None:
        details = "; ".join(f"hunk {number}: {why}" for number, why in problems.items())
        super().__init__(f"the patch of {path} does not fit: {details}")
        self.problems = problems


@dataclass(frozen=True)
class Hunk:
    """One place to change."""

    old_start: int  # line number, from 1, in the release the patch was made for; 0 creates the file
    #: For each line its tag, ``b" "``, ``b"-"`` or ``b"+"``, and the line with its newline, if it has one.
    lines: tuple[tuple[bytes, bytes], ...]

    @property
    def old(self) -> list[bytes]:
        """The lines that the file must have."""
        return [text for tag, text in self.lines if tag != b"+"]

    @property
    def new(self) -> list[bytes]:
        """The lines that replace the old ones."""
        return [text for tag, text in self.lines if tag != b"-"]

    def places(self, lines: list[bytes]) -> list[int]:
        """Return every index in `lines`, from 0, where all old lines follow each other."""
        old = self.old
        starts = range(len(lines) - len(old) + 1) if old else ()
        return [at for at in starts if lines[at] == old[0] and lines[at : at + len(old)] == old]


@dataclass(frozen=True)
class Patch:
    """One patch: what it is for, and what it changes in one file."""

    path: str  # below the ``sglang`` package, with forward slashes
    header: dict[str, str]  # field of the header → its text
    creates: bool
    hunks: tuple[Hunk, ...]

    @property
    def calls(self) -> tuple[str, ...]:
        """Dotted names of the kit's functions that the patch calls; ``Calls: none`` names none."""
        names = [name.strip() for name in self.header.get("Calls", "").split(",")]
        return tuple(name for name in names if name not in ("", "none"))

    def places(self, lines: list[bytes]) -> list[int]:
        """Return for each hunk the index in `lines`, from 0, where it applies.

        Raises HunkConflictError where a hunk fits nowhere, at several places, or not in order.
        """
        places: list[int] = []
        problems: dict[int, str] = {}
        free_from = 0
        for number, hunk in enumerate(self.hunks, start=1):
            found = hunk.places(lines)
            if len(found) != 1:
                where = f"at {len(found)} places" if found else "nowhere"
                problems[number] = f"its {len(hunk.old)} old lines stand {where}"
            elif found[0] < free_from:
                problems[number] = f"it stands at line {found[0] + 1}, before the end of the hunk ahead of it"
            else:
                places.append(found[0])
                free_from = found[0] + len(hunk.old)
        if problems:
            raise HunkConflictError(self.path, problems)
        return places


def split_lines(data: bytes) -> list[bytes]:
    """Split at line feeds only, keeping them, so that joining gives the same bytes."""
    return io.BytesIO(data).readlines()


def parse_patch(text: str, *, source: str) -> Patch:
    """Parse the text of a patch file; raises PatchDataError, which names `source`, where it is malformed."""
    head, _blank, diff = text.partition("\n\n")
    try:
        (file,) = PatchSet.from_string(diff)
    except (UnidiffParseError, ValueError) as error:
        raise PatchDataError(f"{source} does not read as the patch of one file: {str(error).strip()}") from error
    hunks = []
    for found in file:
        lines: list[tuple[bytes, bytes]] = []
        for line in found:
            if line.line_type == "\\" and lines:  # "No newline at end of file"
                lines[-1] = (lines[-1][0], lines[-1][1].removesuffix(b"\n"))
            else:
                lines.append((line.line_type.encode(), line.value.encode()))
        hunks.append(Hunk(found.source_start, tuple(lines)))
    header = dict(line.partition(": ")[::2] for line in head.split("\n"))
    path = file.target_file.removeprefix("b/")
    return Patch(path, header, file.source_file == "/dev/null", tuple(hunks))


def apply_patch(pristine: bytes | None, patch: Patch) -> bytes:
    """Return the patched bytes of a file; `pristine` is None where there is no such file; raises HunkConflictError."""
    if patch.creates and pristine is None:
        return b"".join(patch.hunks[0].new)
    if patch.creates or pristine is None:
        why = "there is no such file" if pristine is None else "the file it creates is already there"
        raise HunkConflictError(patch.path, {1: why})
    lines = split_lines(pristine)
    result: list[bytes] = []
    done = 0
    for hunk, at in zip(patch.hunks, patch.places(lines), strict=True):
        result += [*lines[done:at], *hunk.new]
        done = at + len(hunk.old)
    return b"".join(result + lines[done:])


def unapply_patch(patched: bytes, patch: Patch) -> bytes | None:
    """Return the bytes that `patch` was applied to, None if there was no file.

    Raises HunkConflictError where `patched` is not a result of the patch.
    """
    if patch.creates:
        if patched != b"".join(patch.hunks[0].new):
            raise HunkConflictError(patch.path, {1: "the file differs from the one it creates"})
        return None
    swap = {b"+": b"-", b"-": b"+", b" ": b" "}
    hunks = (replace(hunk, lines=tuple((swap[tag], text) for tag, text in hunk.lines)) for hunk in patch.hunks)
    return apply_patch(patched, replace(patch, hunks=tuple(hunks)))


@dataclass(frozen=True)
class PatchRef:
    """One patch file of one baseline."""

    baseline: str
    path: str  # the file it patches, below the package
    file: Path

    @property
    def name(self) -> str:
        """The path below the patch folder, such as ``0.5.9/srt/managers/scheduler.py.patch``."""
        return f"{self.baseline}/{self.path}{_PATCH}"

    def read_text(self) -> str:
        """Return the patch file's text."""
        return self.file.read_bytes().decode()

    def read(self) -> Patch:
        """Parse the patch file; raises PatchDataError where it is malformed or patches another file."""
        patch = parse_patch(self.read_text(), source=self.name)
        if patch.path != self.path:
            raise PatchDataError(f"{self.name} patches {patch.path}, not the file it is named for")
        return patch


@dataclass(frozen=True)
class PatchTree:
    """The patches of every baseline."""

    root: Path
    #: Baseline → patched file → its patch, or None where the baseline drops the patch. Oldest baseline first.
    baselines: dict[str, dict[str, PatchRef | None]]

    @classmethod
    def load(cls, root: Path) -> PatchTree:
        """List the patches below `root` without reading them.

        Raises UsageError where a folder is not named for a release, PatchDataError for a file that is no patch or drop.
        """
        folders = [entry.name for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
        baselines: dict[str, dict[str, PatchRef | None]] = {}
        for baseline in sorted(folders, key=release_key):
            found = baselines[baseline] = {}
            for file in sorted(entry for entry in (root / baseline).rglob("*") if not entry.is_dir()):
                if file.suffix not in (_PATCH, _DROP):
                    raise PatchDataError(f"{file} is neither a patch nor a drop")
                path = file.with_suffix("").relative_to(root / baseline).as_posix()
                found[path] = PatchRef(baseline, path, file) if file.suffix == _PATCH else None
        return cls(root, baselines)

    def resolve(self, release: str) -> dict[str, PatchRef]:
        """Return path → patch for each file that is patched in `release`, in the order of the paths."""
        chosen: dict[str, PatchRef | None] = {}
        for baseline, patches in self.baselines.items():
            if release_key(baseline) <= release_key(release):
                chosen |= patches
        return {path: ref for path, ref in sorted(chosen.items()) if ref is not None}

    def refs(self) -> list[PatchRef]:
        """Return every patch of every baseline."""
        return [ref for patches in self.baselines.values() for ref in patches.values() if ref]


def find_patch_root() -> Path:
    """Return the folder of the kit's patches: in the package, or at the checkout's top level; raises PatchDataError."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package, *package.parents[:2]):
        if (folder / "patches" / LOCK_NAME).is_file():
            return folder / "patches"
    raise PatchDataError(
        f"the kit at {package} has no patches/{LOCK_NAME}",
        next_step="pip install --force-reinstall --no-deps sglang-crashkit",
    )


def is_release(version: str) -> bool:
    """Say whether `version` is a final or post release without a local part."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return str(parsed) == version and not parsed.is_prerelease and parsed.local is None


def release_key(release: str) -> Version:
    """Return the sort key of `release`; raises UsageError where it is not a final or post release."""
    if not is_release(release):
        raise UsageError(
            f"{release!r} is not a release of SGLang such as 0.5.9 or 0.5.12.post1", next_step="sglang-crashkit status"
        )
    return Version(release)


def base_release(version: str) -> str:
    """Return `version` without its local part: ``0.5.23`` for ``0.5.23+cu126``."""
    return version.partition("+")[0]


@dataclass(frozen=True)
class LockedFile:
    """A patched file of one release."""

    pristine: str | None  # sha256 of upstream's bytes, None where upstream has no such file
    patch: str  # name of the patch, below the patch folder
    patched: str  # sha256 of the patched bytes


@dataclass(frozen=True)
class LockedRelease:
    """One supported release."""

    wheels: dict[str, str]  # file name of an upstream wheel → its sha256
    files: dict[str, LockedFile]  # path below the package → its hashes and patch


@dataclass(frozen=True)
class Lock:
    """Every supported release, oldest first."""

    releases: dict[str, LockedRelease]

    def find(self, version: str) -> LockedRelease | None:
        """Return the entry of the release that `version` is a build of; None where it is not supported."""
        return self.releases.get(base_release(version))

    def require(self, version: str) -> LockedRelease:
        """Return the entry of the release that `version` is a build of; raises RefusedError where it has none."""
        locked = self.find(version)
        if locked is None:
            raise RefusedError(
                f"SGLang {version} is not supported; supported are {self.supported_range()}",
                next_step=f"scripts/port_release {base_release(version)} (in a checkout of the kit)",
            )
        return locked

    def supported_range(self) -> str:
        """Return the supported releases as a text such as ``19 releases, 0.5.9 to 0.5.23``."""
        names = list(self.releases)
        return f"{len(names)} releases, {names[0]} to {names[-1]}" if names else "no releases"

    def dump(self) -> bytes:
        """Return the bytes of the lock's file; equal locks have equal bytes."""
        releases = {release: asdict(self.releases[release]) for release in sorted(self.releases, key=release_key)}
        return (json.dumps({"schema_version": _SCHEMA_VERSION, "releases": releases}, indent=1) + "\n").encode()


def sha256_hex(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def load_lock(root: Path | None = None) -> Lock:
    """Read the lock below the patch folder `root`, by default the kit's own; raises PatchDataError."""
    file = (root or find_patch_root()) / LOCK_NAME
    try:
        document = json.loads(file.read_bytes())
        if document["schema_version"] != _SCHEMA_VERSION:
            raise PatchDataError(f"{file} has schema version {document['schema_version']}")
        releases = {
            release: LockedRelease(
                dict(entry["wheels"]), {path: LockedFile(**fields) for path, fields in entry["files"].items()}
            )
            for release, entry in document["releases"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchDataError(f"{file} does not read as a lock: {error!r}") from error
    return Lock({release: releases[release] for release in sorted(releases, key=release_key)})


def patch_files(
    release: str, locked: LockedRelease, patches: PatchTree, pristine: Mapping[str, bytes | None]
) -> dict[str, bytes]:
    """Return the patched bytes of each patched file of a release; like `pristine`, by path below the package.

    Raises PatchDataError where a patch does not give what the lock says.
    """
    refs = patches.resolve(release)
    patched: dict[str, bytes] = {}
    for path, entry in locked.files.items():
        if path not in refs or refs[path].name != entry.patch:
            raise PatchDataError(f"the lock names {entry.patch} for {path}, the patches do not")
        patched[path] = apply_patch(pristine.get(path), refs[path].read())
        if sha256_hex(patched[path]) != entry.patched:
            raise PatchDataError(f"{entry.patch} does not give {path} the sha256 in the lock")
    return patched
