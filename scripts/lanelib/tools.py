"""The project's own tools: uv, ruff, mypy, pytest and the kit, in one locked environment."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from lanelib.commands import run_command, say
from lanelib.errors import LaneError
from lanelib.locking import exclusive
from lanelib.machine import find_python, require_disk
from lanelib.paths import LANES, PYPROJECT, RECIPES, ROOT, hash_files

LOCK = RECIPES / "tools.lock"
TOOLS = LANES / "tools"
STAMP = "crashkit-stamp"
#: The tools, unpacked.
TOOLS_BYTES = 500 * 10**6


def ensure_tools() -> Path:
    """Make, or find, the environment of the tools.

    Returns:
        The folder of the environment; its programs are in ``bin``.

    Raises:
        LaneError: a python or disk space is missing, or an installation failed.
    """
    if _is_current():
        return TOOLS
    with exclusive(LANES / ".tools.lock"):
        if not _is_current():  # another process may just have made it
            _make()
    return TOOLS


def tool(name: str) -> Path:
    """Return the path of the program `name` in the tools environment, which is made if needed."""
    return ensure_tools() / "bin" / name


def _wanted_stamp() -> str:
    return hash_files([LOCK, PYPROJECT])


def _is_current() -> bool:
    stamp = TOOLS / STAMP
    return stamp.is_file() and stamp.read_text() == _wanted_stamp()


def _make() -> None:
    stamp = _wanted_stamp()
    python = TOOLS / "bin" / "python"
    uv = TOOLS / "bin" / "uv"
    (TOOLS / STAMP).unlink(missing_ok=True)
    # A whole one is brought up to date in place: another process may be running from it.
    if not (python.exists() and uv.exists()):
        _bootstrap(python)
    say("tools: installing the locked versions")
    target = ["--python", python]
    run_command([uv, "pip", "install", *target, "--no-deps", "-r", LOCK], timeout_s=900, quiet=False)
    # hatchling is in the lock, so the kit is built without fetching a second one.
    editable = ["--no-deps", "--no-build-isolation", "-e", ROOT]
    run_command([uv, "pip", "install", *target, *editable], timeout_s=300, quiet=False)
    (TOOLS / STAMP).write_text(stamp)


def _bootstrap(python: Path) -> None:
    """Make the environment anew, with nothing in it but uv."""
    require_disk(TOOLS, TOOLS_BYTES)
    if TOOLS.exists():
        shutil.rmtree(TOOLS)
    base = _base_python()
    say(f"tools: making {TOOLS} with {base}")
    run_command([base, "-m", "venv", TOOLS], timeout_s=120)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run_command([*install, _pinned("uv")], timeout_s=600)


def _base_python() -> Path:
    """Return Python 3.11 where there is one, and else the running python."""
    try:
        return find_python()
    except LaneError:
        return Path(sys.executable)


def _pinned(name: str) -> str:
    """Return the lock's line for the package `name`."""
    match = re.search(rf"^{re.escape(name)}==\S+", LOCK.read_text(), re.MULTILINE)
    if match is None:
        raise LaneError(f"{LOCK} does not pin {name}", next_step=f"git checkout {LOCK}")
    return match.group()
