"""Which versions a lane installs: from its lock, or resolved as on the release's own day."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from lanelib.commands import run_command, say
from lanelib.errors import LaneError
from lanelib.paths import LANES, PYPROJECT, RECIPES, write_whole
from lanelib.tools import tool

RELEASE = re.compile(r"\d+\.\d+\.\d+(\.post\d+|rc\d+)?")
#: The locks were resolved for this python.
LANE_PYTHON = "3.11"
#: What prefill/decode disaggregation needs beside SGLang.
EXTRAS = ("mooncake-transfer-engine-non-cuda", "sglang-router")
#: Packages of the same release go up within this time of each other.
SETTLING = timedelta(days=1)
HEADER = """\
# SGLang {release} on a CPU: every version of its lane, for Python {python} on Linux x86_64.
# Written by: scripts/lane {release} --lock
"""


def lock_path(release: str) -> Path:
    """Return where the locked versions of `release` are kept, whether or not they are."""
    return RECIPES / f"{release}.lock"


def check_release(release: str) -> None:
    """Check that `release` is written like one."""
    if not RELEASE.fullmatch(release):
        step = f"name one of: {', '.join(locked_releases())}"
        raise LaneError(f"{release!r} is not an SGLang release such as 0.5.23", next_step=step, exit_code=2)


def locked_releases() -> list[str]:
    """Return the releases that have a lock."""
    names = [path.name.removesuffix(".lock") for path in RECIPES.glob("*.lock")]
    releases = [name for name in names if RELEASE.fullmatch(name)]
    return sorted(releases, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def versions_of(release: str) -> Path:
    """Return the file of exact versions to install for `release`, resolved if it is not locked."""
    if lock_path(release).is_file():
        return lock_path(release)
    resolved = LANES / "resolved" / f"{release}.lock"
    if not resolved.is_file():
        say(f"{release}: no lock in {RECIPES}; resolving as on the day of the release")
        write_whole(resolved, resolve(release))
        say(f"{release}: once it serves, keep these versions with: scripts/lane {release} --lock")
    return resolved


def write_lock(release: str) -> Path:
    """Keep the versions of `release` as its lock."""
    path = lock_path(release)
    if path.is_file():
        raise LaneError(f"{release} is locked already", next_step=f"delete {path} to resolve anew")
    write_whole(path, versions_of(release).read_text())
    return path


def resolve(release: str) -> str:
    """Return the text of a lock: what `release` depended on when it was published.

    Later versions of its dependencies break old releases.
    """
    compile_ = [tool("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--prerelease=allow"]
    compile_ += ["--python-version", LANE_PYTHON]
    wanted = LANES / "resolved" / f"{release}.in"
    write_whole(wanted, "".join(f"{line}\n" for line in (f"sglang=={release}", *EXTRAS)))
    for option in ("constraint", "override"):
        limits = RECIPES / f"{release}.{option}s"
        compile_ += [f"--{option}", limits] if limits.is_file() else []
    try:
        facts = run_command([*compile_, "--no-deps", "--format", "pylock.toml", wanted], timeout_s=120)
    except LaneError as error:
        raise LaneError(
            f"SGLang {release} cannot be found or reached on the package registry: {error.message}",
            next_step="check the release's name and the network, and repeat",
        ) from error
    # When the registry received it, where it says so.
    entry = facts.partition('name = "sglang"')[2].partition("[[packages]]")[0]
    if match := re.search(r"upload-time = (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", entry):
        date = datetime.fromisoformat(match.group(1)).replace(tzinfo=timezone.utc) + SETTLING
        compile_ += ["--exclude-newer", date.strftime("%Y-%m-%dT%H:%M:%SZ")]
    # The kit's own dependencies are part of the lane: the kit is installed without any.
    versions = run_command([*compile_, wanted, PYPROJECT], timeout_s=600)
    return HEADER.format(release=release, python=LANE_PYTHON) + versions
