"""Choose, for a release, the patch of each file from the sparse baselines.

``patches/0.5.9`` is the full set; a later folder holds only the files whose patch no longer
applies. For a release each file takes the patch of the highest folder at or below it, and
``PATH.drop`` there ends one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.installer.patchfile import Patch, PatchFormatError, parse_patch
from sglang_crashkit.installer.releases import is_release, release_key, sorted_releases

#: Beside the baselines, generated.
LOCK_NAME = "releases.lock.json"

_PATCH, _DROP = ".patch", ".drop"


class PatchDataError(CrashkitError):
    """The kit's own patches are not there or contradict each other."""


@dataclass(frozen=True)
class PatchRef:
    """One patch file of one baseline."""

    baseline: str
    #: The file it patches, below the package.
    path: str
    file: Path

    @property
    def name(self) -> str:
        """``0.5.9/srt/managers/scheduler.py.patch``."""
        return f"{self.baseline}/{self.path}{_PATCH}"

    def read(self, *, draft: bool = False) -> Patch:
        """Read it.

        Raises:
            PatchFormatError: it does not read as a patch of this file.
        """
        patch = parse_patch(self.file.read_bytes(), source=self.name, draft=draft)
        if patch.path != self.path:
            raise PatchFormatError(f"{self.name} patches {patch.path}, not the file it is named for")
        return patch


@dataclass(frozen=True)
class PatchTree:
    """Every baseline."""

    root: Path
    #: Baseline → file → its patch, or None where the baseline drops it. Oldest baseline first.
    baselines: dict[str, dict[str, PatchRef | None]]

    @classmethod
    def load(cls, root: Path) -> PatchTree:
        """List the patches below `root` without reading them.

        Raises:
            PatchDataError: a folder or a file there is neither a baseline, a patch nor a drop.
        """
        baselines: dict[str, dict[str, PatchRef | None]] = {}
        folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
        strays = [folder.name for folder in folders if not is_release(folder.name)]
        if strays:
            raise PatchDataError(f"{root / strays[0]} is not named for a release")
        for baseline in sorted_releases(folder.name for folder in folders):
            baselines[baseline] = _load_baseline(root / baseline)
        return cls(root, baselines)

    def resolve(self, release: str) -> dict[str, PatchRef]:
        """Return the patch of each file that `release` gets one for, by path in order."""
        chosen: dict[str, PatchRef | None] = {}
        for baseline, patches in self.baselines.items():
            if release_key(baseline) <= release_key(release):
                chosen |= patches
        return {path: ref for path, ref in sorted(chosen.items()) if ref is not None}

    def refs(self) -> list[PatchRef]:
        """Return every patch of every baseline."""
        return [ref for patches in self.baselines.values() for ref in patches.values() if ref]


def find_patch_root() -> Path:
    """Return the folder of the kit's patches: in the package, or at the checkout's top level.

    Raises:
        PatchDataError: there is none.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "patches", *(parent / "patches" for parent in package.parents[:2])]
    for candidate in candidates:
        if (candidate / LOCK_NAME).is_file():
            return candidate
    raise PatchDataError(
        f"the kit at {package} has no patches/{LOCK_NAME}",
        next_step="pip install --force-reinstall --no-deps sglang-crashkit",
    )


def _load_baseline(folder: Path) -> dict[str, PatchRef | None]:
    found: dict[str, PatchRef | None] = {}
    for file in sorted(entry for entry in folder.rglob("*") if not entry.is_dir()):
        name = file.relative_to(folder).as_posix()
        path, suffix = (name[: -len(file.suffix)], file.suffix)
        if suffix not in (_PATCH, _DROP) or not path:
            raise PatchDataError(f"{file} is neither a patch nor a drop")
        if path in found:
            raise PatchDataError(f"{folder.name} both patches and drops {path}")
        found[path] = PatchRef(folder.name, path, file) if suffix == _PATCH else None
    return found
