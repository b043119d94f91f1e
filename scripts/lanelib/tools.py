"""The project's own tools: uv, ruff, mypy, pytest and the kit, in one locked environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from lanelib.commands import LaneError, exclusive, run_command, say
from lanelib.paths import KIT_VERSION_FILE, LANES, PYPROJECT, RECIPES, ROOT, hash_files

LOCK = RECIPES / "tools.lock"
TOOLS = LANES / "tools"
STAMP = TOOLS / "crashkit-stamp"


def tool(name: str) -> Path:
    """Return the path of the program `name` in the tools environment, which is made if needed."""
    if not _is_current():
        with exclusive(LANES / ".tools.lock"):
            if not _is_current():  # another process may just have made it
                _make()
    return TOOLS / "bin" / name


def run_in_tools() -> None:
    """Run this script again in the tools environment, which has the kit and pytest, unless it runs there already."""
    python = tool("python")
    if Path(sys.prefix).resolve() != TOOLS.resolve():
        os.execv(python, [str(python), *sys.argv])  # noqa: S606


def _is_current() -> bool:
    return STAMP.is_file() and STAMP.read_text() == hash_files([LOCK, PYPROJECT, KIT_VERSION_FILE])


def _make() -> None:
    # The stamp includes the kit's version: the installed metadata has it, too.
    stamp = hash_files([LOCK, PYPROJECT, KIT_VERSION_FILE])
    python, uv = TOOLS / "bin" / "python", TOOLS / "bin" / "uv"
    STAMP.unlink(missing_ok=True)
    # A complete environment is updated in place: another process may be running from it.
    if not (python.exists() and uv.exists()):
        _bootstrap(python)
    say("tools: installing the locked versions")
    install = [uv, "pip", "install", "--python", python, "--no-deps"]
    run_command([*install, "-r", LOCK], timeout_s=900, quiet=False)
    # hatchling is in the lock, so the kit is built without fetching a second one.
    run_command([*install, "--no-build-isolation", "-e", ROOT], timeout_s=300, quiet=False)
    STAMP.write_text(stamp)


def _bootstrap(python: Path) -> None:
    """Make a new environment that has only uv."""
    shutil.rmtree(TOOLS, ignore_errors=True)
    say(f"tools: making {TOOLS}")
    try:
        # Prefer the python of the lanes; python3.11 on PATH may be missing, or a shim that fails.
        run_command([shutil.which("python3.11") or sys.executable, "-m", "venv", TOOLS], timeout_s=120)
    except LaneError:
        run_command([sys.executable, "-m", "venv", "--clear", TOOLS], timeout_s=120)
    uv = next(line for line in LOCK.read_text().splitlines() if line.startswith("uv=="))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", uv]
    run_command(pip, timeout_s=600)
