"""Order SGLang's version numbers.

Only final and post releases exist for the kit: ``0.5.9``, ``0.5.12.post1``. What follows a ``+``
(a local version such as ``+crashkit.0.1.0`` or ``+cu126``) names a build of the same release.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sglang_crashkit.errors import UsageError

_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?")


def is_release(version: str) -> bool:
    """Return whether `version` is a final or post release without a local part."""
    return _RELEASE.fullmatch(version) is not None


def release_key(release: str) -> tuple[tuple[int, ...], int]:
    """Return the sort key of `release`.

    Raises:
        UsageError: it is not a final or post release.
    """
    match = _RELEASE.fullmatch(release)
    if match is None:
        raise UsageError(
            f"{release!r} is not a release of SGLang such as 0.5.9 or 0.5.12.post1",
            next_step="sglang-crashkit status",
        )
    numbers = tuple(int(part) for part in match.group(1).split("."))
    return numbers, int(match.group(2)) if match.group(2) else -1


def sorted_releases(releases: Iterable[str]) -> list[str]:
    """Return `releases` from the oldest to the newest."""
    return sorted(releases, key=release_key)


def base_release(version: str) -> str:
    """Return `version` without its local part: ``0.5.23`` for ``0.5.23+cu126``."""
    return version.partition("+")[0]


def local_label(version: str) -> str:
    """Return the local part of `version`, empty where there is none."""
    return version.partition("+")[2]
