"""Generate the lock, and the line numbers of the patches, from upstream's wheels."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from sglang_crashkit.installer.hunks import HunkConflictError, apply_patch, relocate_patch
from sglang_crashkit.installer.lockfile import Lock, LockedFile, LockedRelease, sha256_hex
from sglang_crashkit.installer.patchfile import render_patch
from sglang_crashkit.installer.resolver import PatchDataError, PatchTree


def read_package_file(wheel: zipfile.ZipFile, path: str) -> bytes | None:
    """Return the bytes of the file at `path` below the package, None if the wheel has none."""
    try:
        return wheel.read(f"sglang/{path}")
    except KeyError:
        return None


def lock_release(tree: PatchTree, release: str, wheel: Path) -> LockedRelease:
    """Apply the patches that `tree` resolves for `release` to the files of `wheel`.

    Raises:
        HunkConflictError: a patch does not fit.
    """
    files: dict[str, LockedFile] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path, ref in tree.resolve(release).items():
            pristine = read_package_file(archive, path)
            patched = apply_patch(pristine, ref.read())
            before = None if pristine is None else sha256_hex(pristine)
            files[path] = LockedFile(before, ref.name, sha256_hex(patched))
    return LockedRelease({wheel.name: sha256_hex(wheel.read_bytes())}, files)


def generate_lock(tree: PatchTree, wheels: Mapping[str, Path]) -> Lock:
    """Return the lock of the releases in `wheels`.

    Raises:
        PatchDataError: a patch does not fit; the message names each release and hunk.
    """
    releases: dict[str, LockedRelease] = {}
    conflicts: dict[str, str] = {}
    for release, wheel in wheels.items():
        try:
            releases[release] = lock_release(tree, release, wheel)
        except HunkConflictError as error:
            conflicts[release] = error.message
    if conflicts:
        lines = "".join(f"\n  {release}: {message}" for release, message in conflicts.items())
        raise PatchDataError(
            f"{len(conflicts)} of {len(wheels)} releases do not take their patches:{lines}",
            next_step=f"scripts/port_release {next(iter(conflicts))}",
        )
    return Lock(releases)


def normalise_patches(tree: PatchTree, wheels: Mapping[str, Path]) -> list[str]:
    """Rewrite each patch in its one spelling, with the line numbers of its own baseline.

    Args:
        tree: the patches; their hunk headers may be a lone ``@@``.
        wheels: release → wheel; a patch whose baseline is not among them stays as it is.

    Returns:
        Names of the patches that changed.

    Raises:
        HunkConflictError: a patch does not fit its own baseline.
    """
    changed: list[str] = []
    for baseline, wheel in wheels.items():
        refs = [ref for ref in tree.baselines.get(baseline, {}).values() if ref is not None]
        with zipfile.ZipFile(wheel) as archive:
            for ref in refs:
                patch = ref.read(draft=True)
                pristine = read_package_file(archive, ref.path)
                text = render_patch(relocate_patch(pristine, patch))
                if text != ref.file.read_bytes():
                    ref.file.write_bytes(text)
                    changed.append(ref.name)
    return changed
