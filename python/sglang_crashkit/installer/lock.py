"""What each supported release and file looks like, before and after: ``patches/releases.lock.json``.

The lock is generated. It lists the supported releases, the upstream wheels they were checked with, and for every
patched file the sha256 of its pristine and its patched bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.patches import (
    LOCK_NAME,
    PatchDataError,
    PatchTree,
    apply_patch,
    base_release,
    find_patch_root,
    sorted_releases,
)

_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LockedFile:
    """One file of one release."""

    pristine: str | None  # sha256 of upstream's bytes, None where upstream has no such file
    patch: str  # name of the patch, below the patch folder
    patched: str  # sha256 of the patched bytes


@dataclass(frozen=True)
class LockedRelease:
    """One supported release."""

    wheels: dict[str, str]  # file name of an upstream wheel → its sha256
    files: dict[str, LockedFile]  # path below the package → what is known of it


@dataclass(frozen=True)
class Lock:
    """Every supported release, oldest first."""

    releases: dict[str, LockedRelease]

    def find(self, version: str) -> LockedRelease | None:
        """Return what is known of the release that `version` is a build of, if supported."""
        return self.releases.get(base_release(version))

    def require(self, version: str) -> LockedRelease:
        """Return what is known of the release that `version` is a build of.

        Raises:
            RefusedError: the release is not supported.
        """
        locked = self.find(version)
        if locked is None:
            raise RefusedError(
                f"SGLang {version} is not supported; supported are {self.supported_range()}",
                next_step=f"scripts/port_release {base_release(version)} (in a checkout of the kit)",
            )
        return locked

    def supported_range(self) -> str:
        """Return ``19 releases, 0.5.9 to 0.5.23``."""
        names = list(self.releases)
        return f"{len(names)} releases, {names[0]} to {names[-1]}" if names else "no releases"

    def dump(self) -> bytes:
        """Return the one spelling of the lock."""
        releases = {
            release: {
                "wheels": dict(sorted(self.releases[release].wheels.items())),
                "files": {path: asdict(file) for path, file in sorted(self.releases[release].files.items())},
            }
            for release in sorted_releases(self.releases)
        }
        return (json.dumps({"schema_version": _SCHEMA_VERSION, "releases": releases}, indent=1) + "\n").encode()


def sha256_hex(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def load_lock(root: Path | None = None) -> Lock:
    """Read the lock below the patch folder `root`, by default the kit's own.

    Raises:
        PatchDataError: there is none, or it does not read as one.
    """
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
    return Lock({release: releases[release] for release in sorted_releases(releases)})


def patch_files(
    release: str, locked: LockedRelease, patches: PatchTree, pristine: Mapping[str, bytes | None]
) -> dict[str, bytes]:
    """Return the patched bytes of each file of a release, by its path below the package, as `pristine` is.

    Raises:
        PatchDataError: a patch does not give what the lock says.
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
