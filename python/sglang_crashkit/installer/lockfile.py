"""What each supported release and each file looks like, before and after: `releases.lock.json`.

The lock is generated. It lists the supported releases, the upstream wheels they were checked
with, and for every patched file the sha256 of its pristine and its patched bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.releases import base_release, sorted_releases
from sglang_crashkit.installer.resolver import LOCK_NAME, PatchDataError, find_patch_root

_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LockedFile:
    """One file of one release."""

    #: sha256 of upstream's bytes, None where upstream has no such file.
    pristine: str | None
    #: Name of the patch, below the patch folder.
    patch: str
    #: sha256 of the patched bytes.
    patched: str


@dataclass(frozen=True)
class LockedRelease:
    """One supported release."""

    #: File name of an upstream wheel → its sha256.
    wheels: dict[str, str]
    #: Path below the package → what is known of it.
    files: dict[str, LockedFile]


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
        """Return ``0.5.9 to 0.5.23 (19 releases)``."""
        names = list(self.releases)
        if not names:
            return "no releases"
        return f"{names[0]} to {names[-1]} ({len(names)} releases)"

    def dump(self) -> bytes:
        """Return the one spelling of the lock."""
        releases = {}
        for release in sorted_releases(self.releases):
            locked = self.releases[release]
            releases[release] = {
                "wheels": dict(sorted(locked.wheels.items())),
                "files": {
                    path: {"pristine": file.pristine, "patch": file.patch, "patched": file.patched}
                    for path, file in sorted(locked.files.items())
                },
            }
        document = {"schema_version": _SCHEMA_VERSION, "releases": releases}
        return (json.dumps(document, indent=1) + "\n").encode()


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
                wheels=dict(entry["wheels"]),
                files={path: LockedFile(**fields) for path, fields in entry["files"].items()},
            )
            for release, entry in document["releases"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchDataError(f"{file} does not read as a lock: {error!r}") from error
    return Lock({release: releases[release] for release in sorted_releases(releases)})
