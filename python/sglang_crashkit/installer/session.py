"""What each command opens first: the kit's patches, the lock, and the environment."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_crashkit.installer.environment import Environment, find_environment
from sglang_crashkit.installer.lockfile import Lock, load_lock
from sglang_crashkit.installer.resolver import PatchTree, find_patch_root


@dataclass(frozen=True)
class Session:
    """The kit's data and one environment."""

    patches: PatchTree
    lock: Lock
    environment: Environment


def open_session(python: str | None) -> Session:
    """Load the kit's data and find the SGLang of `python`, by default of this one.

    Raises:
        CrashkitError: the data is not there, or the environment is not one to work on.
    """
    root = find_patch_root()
    patches = PatchTree.load(root)
    calls = sorted({name for ref in patches.refs() for name in ref.read().calls})
    return Session(patches, load_lock(root), find_environment(python, calls=calls))
