"""Find the SGLang that a python would import, without importing it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError, UsageError
from sglang_crashkit.installer.process import run_tool
from sglang_crashkit.installer.releases import base_release

#: Seconds for a python to start, on a cold network file system too.
_PROBE_TIMEOUT = 120.0


@dataclass(frozen=True)
class Kit:
    """The kit as the environment's python imports it."""

    version: str
    #: The folder on ``sys.path`` that it comes from.
    root: Path
    #: Function that the patches call → why it cannot be imported there.
    missing: dict[str, str]
    #: It is found through ``PYTHONPATH`` alone, and SGLang is not.
    only_by_python_path: bool


@dataclass(frozen=True)
class Environment:
    """One installed SGLang."""

    python: Path
    #: As in the metadata, with a local part if there is one.
    version: str
    #: The ``sglang`` package's folder.
    package: Path
    dist_info: Path
    #: None where that python cannot import the kit.
    kit: Kit | None
    #: Whether that python has pip; those that uv makes have none.
    has_pip: bool = True

    @property
    def site(self) -> Path:
        """The folder that RECORD's paths begin at."""
        return self.dist_info.parent

    @property
    def release(self) -> str:
        """The version without its local part."""
        return base_release(self.version)

    @property
    def reinstall(self) -> str:
        """The command that puts upstream's files back."""
        return _reinstall(self.python, self.release, has_pip=self.has_pip)

    @property
    def rebuild_wheel(self) -> str:
        """What to do where a wheel of other patches is installed, which may have the same version."""
        return (
            f"sglang-crashkit wheel {self.release} --out DIR, then what that prints "
            "with pip install --force-reinstall --no-deps"
        )

    @property
    def install_kit(self) -> str:
        """The command that installs this kit where that python imports it."""
        checkout = Path(__file__).resolve().parents[3]
        is_checkout = (checkout / "pyproject.toml").is_file()
        return _pip(
            self.python, str(checkout) if is_checkout else f"sglang-crashkit=={__version__}", has_pip=self.has_pip
        )

    def command(self, name: str) -> str:
        """Return the kit's command `name` for this environment."""
        return f"sglang-crashkit {name} --python {self.python}"


def find_python(given: str | None) -> Path:
    """Return the python that `given` names: an interpreter, or a virtual environment's folder.

    Raises:
        UsageError: there is no such interpreter.
    """
    if given is None:
        return Path(sys.executable)
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise UsageError(
            f"{path} is not a python interpreter",
            next_step="name one with --python PATH, for instance .venv/bin/python",
        )
    # Not resolved: a virtual environment's python is a link, and only its own name finds it.
    return path.absolute()


def find_environment(given: str | None, *, calls: Sequence[str] = ()) -> Environment:
    """Ask a python where its SGLang is.

    Args:
        given: as for `find_python`; None for the one that runs this.
        calls: dotted names of the kit's functions that the patches call.

    Raises:
        UsageError: `given` is not a python.
        NothingToDoError: that python has no SGLang.
        RefusedError: its SGLang is an editable install, or several installs overlap.
        CrashkitError: the python does not run.
    """
    python = find_python(given)
    answer = _ask(python, calls)
    found = answer["sglang"]
    if not found["dist_infos"]:
        where = f", but {found['package_dirs'][0]} is importable" if found["package_dirs"] else ""
        raise NothingToDoError(
            f"{python} has no SGLang installed{where}",
            next_step="name the python that runs the server with --python PATH",
        )
    version = str(found["version"])
    dist_info = Path(found["dist_infos"][0])
    has_pip = bool(answer["has_pip"])
    reinstall = _reinstall(python, version, has_pip=has_pip)
    _refuse_editable(found["direct_url"], python, version, reinstall)
    package = dist_info.parent / "sglang"
    beside = [other for other in found["dist_infos"][1:] if Path(other).parent == dist_info.parent]
    if beside:
        raise RefusedError(
            f"two installations overlap: {dist_info} and {beside[0]}",
            next_step=reinstall,
        )
    if found["package_dirs"] != [str(package)]:
        imported = found["package_dirs"][0] if found["package_dirs"] else "nothing"
        raise RefusedError(
            f"{dist_info} describes {package}, but {python} imports {imported}",
            next_step="take the other one off PYTHONPATH and sys.path",
        )
    return Environment(python, version, package, dist_info, _kit(answer, dist_info.parent), has_pip)


def require_kit(environment: Environment) -> None:
    """Check that patched files can call the kit in `environment`.

    Raises:
        RefusedError: they cannot; a patched SGLang would not even start.
    """
    kit, python = environment.kit, environment.python
    install = environment.install_kit
    if kit is None:
        raise RefusedError(f"{python} cannot import sglang_crashkit, which patched files call", next_step=install)
    if kit.version != __version__:
        raise RefusedError(
            f"{python} imports sglang_crashkit {kit.version}, but this is {__version__}",
            next_step=f"{install}, or {python} -m sglang_crashkit apply",
        )
    if kit.only_by_python_path:
        raise RefusedError(
            f"{python} finds sglang_crashkit through PYTHONPATH alone ({kit.root}): a server "
            "started without it would not start",
            next_step=install,
        )
    if kit.missing:
        name, why = next(iter(kit.missing.items()))
        raise RefusedError(f"{python} cannot import {name}: {why}", next_step=install)


def _ask(python: Path, calls: Sequence[str]) -> dict[str, Any]:
    """Run the probe and return its answer."""
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    finished = run_tool([str(python), "-B", "-c", text, *calls], timeout=_PROBE_TIMEOUT)
    last = (finished.stdout.splitlines() or [""])[-1]
    try:
        answer = json.loads(last)
        if finished.exit_code == 0 and isinstance(answer, dict):
            return answer
    except ValueError:
        pass
    lines = finished.stderr.strip().splitlines() or [f"exit code {finished.exit_code}"]
    raise CrashkitError(f"{python} did not say where its SGLang is: {lines[-1]}", next_step=f"{python} -c pass")


def _refuse_editable(direct_url: str | None, python: Path, version: str, reinstall: str) -> None:
    try:
        source = json.loads(direct_url or "{}")
    except ValueError:
        return
    if source.get("dir_info", {}).get("editable"):
        raise RefusedError(
            f"{python} has SGLang {version} as an editable install of {source.get('url')}: "
            "the kit does not patch a source checkout",
            next_step=reinstall,
        )


def _pip(python: Path, arguments: str, *, has_pip: bool) -> str:
    command = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return f"{command} {arguments}"


def _reinstall(python: Path, version: str, *, has_pip: bool) -> str:
    force = "--force-reinstall" if has_pip else "--reinstall"
    return _pip(python, f"{force} --no-deps sglang=={base_release(version)}", has_pip=has_pip)


def _kit(answer: dict[str, Any], site: Path) -> Kit | None:
    kit = answer["kit"]
    if "version" not in kit:
        return None
    root = Path(kit["root"])
    given = answer["python_path"]
    by_path = str(root) in given and str(site) not in given
    return Kit(str(kit["version"]), root, dict(kit["missing"]), by_path)
