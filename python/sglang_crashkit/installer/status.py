"""The state of an installed SGLang: each file pristine, patched or foreign by its hash; and what to run next.

The manifest in SGLang's dist-info folder holds, for each patched file, the sha256 before and after, and the patch. So a
later kit with other patches recognizes the files of this one and can restore upstream's bytes. While files are being
replaced, the manifest lists every sha256 that each file may have. RECORD lists the manifest, so that ``pip uninstall``
removes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, RefusedError
from sglang_crashkit.installer.environment import Environment
from sglang_crashkit.installer.patches import (
    HunkConflictError,
    Lock,
    LockedFile,
    LockedRelease,
    PatchTree,
    parse_patch,
    sha256_hex,
    unapply_patch,
)

#: Name of the manifest, in the dist-info folder.
MANIFEST_NAME = "sglang-crashkit.json"
APPLYING, APPLIED, REVERTING = "applying", "applied", "reverting"
#: What patched the files: the command, or the build of a patched wheel.
BY_COMMAND, BY_WHEEL = "apply", "wheel"

_SCHEMA_VERSION = 2


class State(Enum):
    """The state of a file, by its hash, or of the whole installation, by its files and the manifest."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    #: Patched by another version of the kit.
    OUTDATED = "outdated"
    #: Neither upstream's nor the kit's.
    FOREIGN = "foreign"
    MISSING = "missing"
    #: The next two are of an installation only: a change was cut off, or the release is not supported.
    INTERRUPTED = "interrupted"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class PatchedFile:
    """One file of the package."""

    pristine: str | None  # sha256 of upstream's bytes, None where upstream has no such file
    patched: dict[str, str]  # sha256 after a patch → the text of that patch, empty where it is not known


@dataclass(frozen=True)
class Manifest:
    """The content of the manifest."""

    phase: str
    by: str
    kit_version: str
    release: str
    files: dict[str, PatchedFile]  # path below the package → the hashes that it may have

    def dump(self) -> bytes:
        """Return the bytes of the manifest's file."""
        return (json.dumps({"schema_version": _SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n").encode()


def load_manifest(dist_info: Path, *, reinstall: str) -> Manifest | None:
    """Read the manifest in `dist_info`, None if absent; raises RefusedError, with `reinstall` as the next command."""
    file = dist_info / MANIFEST_NAME
    try:
        document = json.loads(file.read_bytes())
        version = document.pop("schema_version")
        if version > _SCHEMA_VERSION:
            raise RefusedError(
                f"{file} has schema version {version}, which this kit does not know: a newer kit patched this SGLang",
                next_step="revert with that kit, or " + reinstall,
            )
        files = {path: PatchedFile(**entry) for path, entry in document.pop("files").items()}
        return Manifest(**document, files=files)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{file} does not read as the kit's manifest: {error!r}", next_step=reinstall) from error


@dataclass(frozen=True)
class Tree:
    """An installation, as found."""

    environment: Environment
    locked: LockedRelease | None  # None where the release is not supported
    manifest: Manifest | None
    contents: dict[str, bytes | None]  # path below the package → its bytes, None where there is no such file
    files: dict[str, State]

    @property
    def by_wheel(self) -> bool:
        """Whether it was installed from a patched wheel."""
        return self.manifest is not None and self.manifest.by == BY_WHEEL

    @property
    def overall(self) -> State:
        """The state of the installation as a whole."""
        states = set(self.files.values())
        if State.FOREIGN in states:
            return State.FOREIGN
        if State.MISSING in states:
            return State.MISSING
        if self.manifest is None:
            if self.locked is None:
                return State.UNSUPPORTED
            # Patched files without a manifest: someone removed it.
            return State.PRISTINE if states <= {State.PRISTINE} else State.INTERRUPTED
        if self.manifest.phase != APPLIED:
            return State.INTERRUPTED
        if self.locked is None:
            return State.OUTDATED
        wanted = {path: (file.pristine, [file.patched]) for path, file in self.locked.files.items()}
        done = {path: (file.pristine, list(file.patched)) for path, file in self.manifest.files.items()}
        if State.PRISTINE in states and wanted.keys() <= done.keys():
            return State.INTERRUPTED
        return State.PATCHED if wanted == done else State.OUTDATED

    def patch_text(self, path: str, found: str | None, patches: PatchTree) -> str:
        """Return the patch that gives the file at `path` the sha256 `found`, empty where it is not known."""
        known = self.manifest.files.get(path) if self.manifest else None
        locked = self.locked.files.get(path) if self.locked else None
        text = known.patched.get(found, "") if known and found else ""
        if not text and locked is not None and locked.patched == found:
            text = next((ref.read_text() for ref in patches.refs() if ref.name == locked.patch), "")
        return text

    def pristine_bytes(self, path: str, patches: PatchTree) -> bytes | None:
        """Return upstream's bytes of the file at `path`, None where upstream has none.

        Raises RefusedError where the bytes found, or those with the patch taken out, do not have upstream's sha256.
        """
        current = self.contents[path]
        if self.files[path] is State.PRISTINE:
            return current
        expected = {file.pristine for file in _known_files(path, self.locked, self.manifest)}
        if None in expected:
            return None
        text = self.patch_text(path, hash_or_none(current), patches)
        pristine = None
        if text and current is not None:
            with suppress(HunkConflictError):
                pristine = unapply_patch(current, parse_patch(text, source=f"the patch of {path}"))
        if hash_or_none(pristine) not in expected:
            raise RefusedError(
                f"upstream's {path} is not in {self.environment.site}: what the kit kept is gone or was changed",
                next_step=self.environment.reinstall,
            )
        return pristine

    @property
    def next_step(self) -> str | None:
        """The command to run next, None where there is nothing to do."""
        environment, overall = self.environment, self.overall
        if overall in (State.FOREIGN, State.MISSING):
            return environment.reinstall
        if overall is State.UNSUPPORTED:
            return f"scripts/port_release {environment.release} (in a checkout of the kit)"
        if overall is State.OUTDATED and self.by_wheel:
            return environment.rebuild_wheel
        if overall is State.OUTDATED and self.locked is None:
            return f"sglang-crashkit revert --python {environment.python}"
        if environment.kit is None or environment.kit.version != __version__:
            return environment.install_kit
        return None if overall is State.PATCHED else f"sglang-crashkit apply --python {environment.python}"

    def to_json(self, lock: Lock) -> dict[str, object]:
        """Return the state for ``--json``."""
        environment, manifest = self.environment, self.manifest
        return {
            "schema_version": 1,
            "python": str(environment.python),
            "sglang_version": environment.version,
            "package": str(environment.package),
            "supported": self.locked is not None,
            "supported_range": lock.supported_range(),
            "state": self.overall.value,
            "phase": manifest and manifest.phase,
            "patched_by": manifest and manifest.by,
            "patched_with_kit": manifest and manifest.kit_version,
            "kit_version": __version__,
            "kit_version_there": environment.kit and environment.kit.version,
            "files": {path: state.value for path, state in self.files.items()},
            "next": self.next_step,
        }

    def lines(self, lock: Lock) -> Iterator[str]:
        """Yield the lines of ``status`` for a person."""
        environment, kit = self.environment, self.environment.kit
        supported = "supported" if self.locked else f"not supported; supported are {lock.supported_range()}"
        other = "" if kit is None or kit.version == __version__ else ", another one"
        yield f"python   {environment.python}"
        yield f"sglang   {environment.version} in {environment.package} ({supported})"
        yield "kit      " + (f"{kit.version} in {kit.root}{other}" if kit else "cannot be imported there")
        yield f"state    {self.overall.value}{self._explain()}"
        for path, state in self.files.items():
            yield f"  {state.value:<9}{path}"
        if self.next_step is not None:
            yield f"next     {self.next_step}"

    def _explain(self) -> str:
        if self.overall is State.INTERRUPTED:
            if self.manifest is None:
                return ": files are patched, but the manifest is gone; apply or revert finishes it"
            if self.manifest.phase != APPLIED:
                return f": cut off while {self.manifest.phase}; apply or revert finishes it"
            return ": patched in part; apply or revert finishes it"
        if self.overall is State.OUTDATED and self.manifest is not None:
            return f": patched with other patches, by kit {self.manifest.kit_version}"
        if self.overall is State.FOREIGN:
            count = sum(state is State.FOREIGN for state in self.files.values())
            return f": {count} neither upstream's nor the kit's"
        return ", by wheel" if self.by_wheel and self.overall is State.PATCHED else ""


def read_tree(environment: Environment, locked: LockedRelease | None) -> Tree:
    """Read and hash the files that the lock or the manifest names.

    Raises RefusedError where the manifest is malformed, CrashkitError where a file cannot be read.
    """
    try:
        manifest = load_manifest(environment.dist_info, reinstall=environment.reinstall)
        paths = {*(locked.files if locked else ()), *(manifest.files if manifest else ())}
        contents = {path: read_or_none(environment.package / path) for path in sorted(paths)}
    except OSError as error:
        raise CrashkitError(f"cannot read the installation: {error}") from error
    files = {
        path: _classify(hash_or_none(data), *_known_files(path, locked, manifest)) for path, data in contents.items()
    }
    return Tree(environment, locked, manifest, contents, files)


def read_or_none(path: Path) -> bytes | None:
    """Return the bytes of `path`, None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def hash_or_none(data: bytes | None) -> str | None:
    """Return the sha256 of a file in hexadecimal, None for no file."""
    return None if data is None else sha256_hex(data)


def _known_files(path: str, locked: LockedRelease | None, manifest: Manifest | None) -> list[LockedFile | PatchedFile]:
    """Return what the lock and the manifest know of the file at `path`."""
    known = (locked.files.get(path) if locked else None, manifest.files.get(path) if manifest else None)
    return [file for file in known if file is not None]


def _classify(found: str | None, *known: LockedFile | PatchedFile) -> State:
    if any(file.pristine == found for file in known):
        return State.PRISTINE
    if found is None:
        return State.MISSING
    for file in known:
        if isinstance(file, LockedFile) and file.patched == found:
            return State.PATCHED
        if isinstance(file, PatchedFile) and found in file.patched:
            return State.OUTDATED
    return State.FOREIGN
