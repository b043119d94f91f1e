"""The order of SGLang's releases.

Only final and post releases count: ``0.5.9``, ``0.5.12.post1``. What follows a ``+`` (``+crashkit.0.1.0``, ``+cu126``)
names a build of the same release.
"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from sglang_crashkit.errors import UsageError


def is_release(version: str) -> bool:
    """Return whether `version` is a final or post release without a local part."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return str(parsed) == version and not parsed.is_prerelease and parsed.local is None


def release_key(release: str) -> Version:
    """Return the sort key of `release`.

    Raises:
        UsageError: it is not a final or post release.
    """
    if not is_release(release):
        raise UsageError(
            f"{release!r} is not a release of SGLang such as 0.5.9 or 0.5.12.post1", next_step="sglang-crashkit status"
        )
    return Version(release)


def sorted_releases(releases: Iterable[str]) -> list[str]:
    """Return `releases` from the oldest to the newest."""
    return sorted(releases, key=release_key)


def base_release(version: str) -> str:
    """Return `version` without its local part: ``0.5.23`` for ``0.5.23+cu126``."""
    return version.partition("+")[0]
