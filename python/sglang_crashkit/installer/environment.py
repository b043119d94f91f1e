"""Find the SGLang that a python would import, without importing it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError, UsageError
from sglang_crashkit.installer.patches import Lock, PatchTree, base_release, find_patch_root, load_lock

#: Most seconds that a python may take to start, also on a cold network file system.
_PROBE_SECS = 120.0


@dataclass(frozen=True)
class Kit:
    """The kit as the environment's python imports it."""

    version: str
    root: Path  # the folder on ``sys.path`` that it comes from
    missing: dict[str, str]  # function that the patches call → why it cannot be imported there
    only_by_python_path: bool = False  # whether the kit is found only through ``PYTHONPATH``, and SGLang without it


@dataclass(frozen=True)
class Environment:
    """One installed SGLang."""

    python: Path
    version: str  # as in the metadata, with a local part if there is one
    package: Path  # the ``sglang`` package's folder
    dist_info: Path
    kit: Kit | None  # None where that python cannot import the kit
    has_pip: bool = True  # whether that python has pip; those that uv makes have none

    @property
    def site(self) -> Path:
        """The folder that RECORD's paths are relative to."""
        return self.dist_info.parent

    @property
    def release(self) -> str:
        """The version without its local part."""
        return base_release(self.version)

    @property
    def reinstall(self) -> str:
        """The command that puts upstream's files back."""
        return (
            f"{self._install} {'--force-reinstall' if self.has_pip else '--reinstall'} --no-deps sglang=={self.release}"
        )

    @property
    def rebuild_wheel(self) -> str:
        """The steps that replace an installed wheel with other patches, which may have the same version."""
        return (
            f"sglang-crashkit wheel {self.release} --out DIR, then what that prints "
            "with pip install --force-reinstall --no-deps"
        )

    @property
    def install_kit(self) -> str:
        """The command that installs this kit where that python imports it."""
        checkout = Path(__file__).resolve().parents[3]
        is_checkout = (checkout / "pyproject.toml").is_file()
        return f"{self._install} {checkout if is_checkout else f'sglang-crashkit=={__version__}'}"

    @property
    def _install(self) -> str:
        return f"{self.python} -m pip install" if self.has_pip else f"uv pip install --python {self.python}"


def find_environment(given: str | None, *, calls: Sequence[str] = ()) -> Environment:
    """Ask a python where its SGLang is, and whether it can import `calls`.

    `given` names the interpreter, or the folder of its virtual environment; this interpreter by default.

    Raises:
        UsageError: there is no such interpreter.
        NothingToDoError: that python has no SGLang.
        RefusedError: its SGLang is an editable install, or not the one that it imports.
        CrashkitError: the python does not run.
    """
    # Not resolved: a virtual environment's python is a link, and only its own name finds it.
    python = Path(sys.executable if given is None else given).expanduser().absolute()
    if python.is_dir():
        python = python / "bin" / "python"
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise UsageError(f"{python} is not a python interpreter", next_step="--python PATH, such as .venv/bin/python")
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    finished = run_tool([str(python), "-B", "-c", text, *calls], timeout=_PROBE_SECS)
    answer = None
    with suppress(ValueError, IndexError):
        answer = json.loads(finished.stdout.splitlines()[-1])
    if finished.returncode or not isinstance(answer, dict):
        why = (finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"])[-1]
        raise CrashkitError(f"{python} did not say where its SGLang is: {why}", next_step=f"{python} -c pass")
    found = answer["sglang"]
    if not found["dist_infos"]:
        where = f", but {found['package_dirs'][0]} is importable" if found["package_dirs"] else ""
        raise NothingToDoError(
            f"{python} has no SGLang installed{where}",
            next_step="the same with --python PATH   # of the python that runs the server",
        )
    dist_info = Path(found["dist_infos"][0])
    site, version = dist_info.parent, str(found["version"])
    there = answer["kit"]
    given = answer["python_path"]
    kit = there and Kit(
        there["version"], Path(there["root"]), there["missing"], there["root"] in given and str(site) not in given
    )
    environment = Environment(python, version, site / "sglang", dist_info, kit, answer["has_pip"])
    if found["editable"] is not None:
        raise RefusedError(
            f"{python} has SGLang {version} as an editable install of {found['editable']}: the kit does not patch a "
            "source checkout",
            next_step=environment.reinstall,
        )
    if found["package_dirs"] != [str(environment.package)]:
        imported = found["package_dirs"][0] if found["package_dirs"] else "nothing"
        raise RefusedError(
            f"{dist_info} describes {environment.package}, but {python} imports {imported}",
            next_step="take the other one off PYTHONPATH and sys.path",
        )
    return environment


def open_session(python: str | None) -> tuple[Environment, PatchTree, Lock]:
    """Find the SGLang of `python`, by default of this one, and load the kit's patches and lock.

    Raises CrashkitError where the patches or the lock are missing; and what `find_environment` raises.
    """
    root = find_patch_root()
    patches = PatchTree.load(root)
    calls = sorted({name for ref in patches.refs() for name in ref.read().calls})
    lock = load_lock(root)
    return find_environment(python, calls=calls), patches, lock


def require_kit(environment: Environment) -> None:
    """Check that patched files can call the kit in `environment`; raises RefusedError where they cannot."""
    kit, python, install = environment.kit, environment.python, environment.install_kit
    if kit is None:
        why = "cannot import sglang_crashkit, which patched files call"
    elif kit.version != __version__:
        why = f"imports sglang_crashkit {kit.version}, but this is {__version__}"
        install = f"{install}, or {python} -m sglang_crashkit apply"
    elif kit.only_by_python_path:
        why = f"finds sglang_crashkit through PYTHONPATH alone ({kit.root}): without it, a server has no kit"
    elif kit.missing:
        why = "cannot import {}: {}".format(*next(iter(kit.missing.items())))
    else:
        return
    raise RefusedError(f"{python} {why}", next_step=install)


def run_tool(argv: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `argv` and return its output; it and its children are killed after `timeout` seconds.

    Raises:
        CrashkitError: it could not be started, or had to be killed.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CrashkitError(f"cannot run {argv[0]}: {error.strerror}") from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException as error:
            # Kill the group, not only the process: a child could hold the pipes open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CrashkitError(f"{argv[0]} did not end within {timeout:g} s") from error
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
