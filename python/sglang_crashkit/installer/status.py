"""What `status` reports: the model, and its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_crashkit import __version__
from sglang_crashkit.installer.environment import Environment, Kit
from sglang_crashkit.installer.lockfile import Lock
from sglang_crashkit.installer.tree import FileState, Overall, Tree, read_tree

_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Status:
    """One installation, for a person or a program."""

    environment: Environment
    tree: Tree
    supported_range: str

    @property
    def kit_ready(self) -> bool:
        """Whether that python imports this version of the kit."""
        return self.environment.kit is not None and self.environment.kit.version == __version__

    @property
    def next_step(self) -> str | None:
        """The command to run next, None where nothing is to do."""
        environment, overall = self.environment, self.tree.overall
        if overall in (Overall.FOREIGN, Overall.MISSING):
            return environment.reinstall
        if overall is Overall.UNSUPPORTED:
            return f"scripts/port_release {environment.release} (in a checkout of the kit)"
        if overall is Overall.OUTDATED and self.tree.by_wheel:
            return environment.rebuild_wheel
        if overall is Overall.OUTDATED and self.tree.locked is None:
            return environment.command("revert")
        if not self.kit_ready:
            return environment.install_kit
        return None if overall is Overall.PATCHED else environment.command("apply")

    def to_json(self) -> dict[str, object]:
        """Return it for ``--json``."""
        environment, tree = self.environment, self.tree
        return {
            "schema_version": _SCHEMA_VERSION,
            "python": str(environment.python),
            "sglang_version": environment.version,
            "package": str(environment.package),
            "supported": tree.locked is not None,
            "supported_range": self.supported_range,
            "state": tree.overall.value,
            "phase": tree.state.phase if tree.state else None,
            "patched_by": tree.state.by if tree.state else None,
            "patched_with_kit": tree.state.kit_version if tree.state else None,
            "kit_version": __version__,
            "kit_version_there": environment.kit.version if environment.kit else None,
            "files": {path: state.value for path, state in tree.files.items()},
            "next": self.next_step,
        }


def read_status(environment: Environment, lock: Lock) -> Status:
    """Read the state of the installation.

    Raises:
        RefusedError: the state file does not read as one.
        OSError: a file cannot be read.
    """
    tree = read_tree(environment, lock.find(environment.version))
    return Status(environment, tree, lock.supported_range())


def format_status(status: Status) -> Iterator[str]:
    """Yield the lines for a person."""
    environment, tree = status.environment, status.tree
    supported = "supported" if tree.locked else f"not supported: {status.supported_range} are"
    yield f"python   {environment.python}"
    yield f"sglang   {environment.version} in {environment.package} ({supported})"
    yield f"kit      {_format_kit(environment.kit)}"
    yield f"state    {tree.overall.value}{_explain(tree)}"
    for path, state in tree.files.items():
        yield f"  {state.value:<9}{path}"
    if status.next_step is not None:
        yield f"next     {status.next_step}"


def _format_kit(kit: Kit | None) -> str:
    if kit is None:
        return "cannot be imported there"
    return f"{kit.version} in {kit.root}" + ("" if kit.version == __version__ else ", another one")


def _explain(tree: Tree) -> str:
    if tree.overall is Overall.INTERRUPTED:
        if tree.state is None:
            return ": files are patched, but the state file is gone; apply or revert finishes it"
        if tree.interrupted:
            return f": cut off while {tree.state.phase}; apply or revert finishes it"
        return ": patched in part; apply or revert finishes it"
    if tree.overall is Overall.OUTDATED and tree.state is not None:
        return f": patched with other patches, by kit {tree.state.kit_version}"
    if tree.overall is Overall.FOREIGN:
        count = sum(state is FileState.FOREIGN for state in tree.files.values())
        return f": {count} neither upstream's nor the kit's"
    return ", by wheel" if tree.by_wheel and tree.overall is Overall.PATCHED else ""
