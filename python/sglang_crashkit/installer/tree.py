"""Tell what an installed SGLang's files are: pristine, patched, or foreign. Reads, never writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_crashkit.installer.environment import Environment
from sglang_crashkit.installer.files import read_or_none
from sglang_crashkit.installer.hunks import HunkConflictError, unapply_patch
from sglang_crashkit.installer.lockfile import LockedFile, LockedRelease, sha256_hex
from sglang_crashkit.installer.resolver import PatchTree
from sglang_crashkit.installer.state import (
    APPLIED,
    BACKUP_FOLDER,
    BY_WHEEL,
    State,
    load_state,
)


class FileState(Enum):
    """What one file is, by its hash."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    #: Patched by another version of the kit.
    OUTDATED = "outdated"
    #: Neither upstream's nor the kit's.
    FOREIGN = "foreign"
    MISSING = "missing"


class Overall(Enum):
    """What the whole installation is."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    OUTDATED = "outdated"
    INTERRUPTED = "interrupted"
    FOREIGN = "foreign"
    MISSING = "missing"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Tree:
    """An installation, as found."""

    environment: Environment
    #: None where the release is not supported.
    locked: LockedRelease | None
    state: State | None
    #: Path below the package → its bytes, None where there is no such file.
    contents: dict[str, bytes | None]
    files: dict[str, FileState]

    @property
    def by_wheel(self) -> bool:
        """Whether it was installed from a patched wheel."""
        return self.state is not None and self.state.by == BY_WHEEL

    @property
    def interrupted(self) -> bool:
        """Whether a change was cut off."""
        return self.state is not None and self.state.phase != APPLIED

    @property
    def overall(self) -> Overall:
        """The one word for it."""
        states = set(self.files.values())
        for file_state, overall in (
            (FileState.FOREIGN, Overall.FOREIGN),
            (FileState.MISSING, Overall.MISSING),
        ):
            if file_state in states:
                return overall
        if self.interrupted:
            return Overall.INTERRUPTED
        if self.locked is None and self.state is None:
            return Overall.UNSUPPORTED
        if self.state is None:
            # Patched files without a state file: someone removed it.
            return Overall.PRISTINE if states <= {FileState.PRISTINE} else Overall.INTERRUPTED
        if self.locked is None:
            return Overall.OUTDATED
        wanted = {path: (file.pristine, file.patched) for path, file in self.locked.files.items()}
        done = {path: (file.pristine, file.patched) for path, file in self.state.files.items()}
        if FileState.PRISTINE in states and wanted.keys() <= done.keys():
            return Overall.INTERRUPTED
        if wanted != done:
            return Overall.OUTDATED
        return Overall.PATCHED

    def pristine_bytes(self, path: str, patches: PatchTree) -> bytes | None:
        """Return upstream's bytes of the file at `path`, None where upstream has none.

        They are the file itself, the copy kept beside the state file, or the patched file with the
        patch taken back, whichever has the sha256 that upstream's has.

        Raises:
            KeyError: none has.
        """
        current = self.contents[path]
        locked = self.locked.files.get(path) if self.locked else None
        known = self.state.files.get(path) if self.state else None
        expected = known.pristine if known else locked.pristine if locked else None
        candidates = [current, read_or_none(self.environment.dist_info / BACKUP_FOLDER / path)]
        if current is not None and locked is not None and sha256_hex(current) == locked.patched:
            candidates.append(_taken_back(current, locked, path, patches))
        if expected is None and (known or locked):
            return None
        for candidate in candidates:
            if candidate is not None and sha256_hex(candidate) == expected:
                return candidate
        raise KeyError(path)


def read_tree(environment: Environment, locked: LockedRelease | None) -> Tree:
    """Read and hash the files that the lock or the state file names.

    Raises:
        RefusedError: the state file does not read as one.
        OSError: a file cannot be read.
    """
    state = load_state(environment.dist_info, reinstall=environment.reinstall)
    paths = {*(locked.files if locked else ()), *(state.files if state else ())}
    contents = {path: read_or_none(environment.package / path) for path in sorted(paths)}
    files = {
        path: _classify(
            data,
            locked.files.get(path) if locked else None,
            state,
            path,
        )
        for path, data in contents.items()
    }
    return Tree(environment, locked, state, contents, files)


def _classify(data: bytes | None, locked: LockedFile | None, state: State | None, path: str) -> FileState:
    known = state.files.get(path) if state else None
    found = None if data is None else sha256_hex(data)
    pristine = {entry.pristine for entry in (locked, known) if entry is not None}
    if found in pristine:
        return FileState.PRISTINE
    if locked is not None and found == locked.patched:
        return FileState.PATCHED
    if known is not None and found is not None and found in (known.patched, known.was):
        return FileState.OUTDATED
    return FileState.MISSING if found is None else FileState.FOREIGN


def _taken_back(current: bytes, locked: LockedFile, path: str, patches: PatchTree) -> bytes | None:
    ref = next((ref for ref in patches.refs() if ref.name == locked.patch), None)
    if ref is None or ref.path != path:
        return None
    try:
        return unapply_patch(current, ref.read())
    except HunkConflictError:
        return None
