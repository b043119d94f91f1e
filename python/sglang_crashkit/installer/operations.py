"""Apply and revert, as the commands do them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_crashkit.errors import CrashkitError, RefusedError
from sglang_crashkit.installer.environment import Environment, require_kit
from sglang_crashkit.installer.exclusive import LOCK_FILE, exclusive
from sglang_crashkit.installer.files import FileOps
from sglang_crashkit.installer.lockfile import Lock, LockedRelease
from sglang_crashkit.installer.planning import plan_apply, plan_revert, refuse_foreign
from sglang_crashkit.installer.resolver import PatchTree
from sglang_crashkit.installer.transaction import Plan, Transaction, check_writable, explain
from sglang_crashkit.installer.tree import Overall, Tree, read_tree


@dataclass(frozen=True)
class Outcome:
    """What a command did, or would do."""

    environment: Environment
    #: The installation before it.
    before: Overall
    #: Files that it changed, below the package; none where nothing was to do.
    changed: tuple[str, ...]


def apply(
    environment: Environment,
    patches: PatchTree,
    lock: Lock,
    *,
    ops: FileOps | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Patch the installation, from whatever state the kit left it in.

    Args:
        environment: where SGLang is.
        patches: the kit's patches.
        lock: what they give.
        ops: the steps on the file system.
        dry_run: check everything and change nothing.

    Raises:
        RefusedError: the release is not supported, a file is foreign, the kit cannot be imported
            there, or the folder is read-only.
        CrashkitError: it failed, and everything is as before.
    """
    locked = lock.require(environment.version)
    require_kit(environment)
    tree = _read(environment, locked)
    if _nothing_left_to_do(tree, Overall.PATCHED):
        return Outcome(environment, tree.overall, ())
    _refuse_wheel(tree, "apply")
    return _change(tree, lambda found: plan_apply(found, locked, patches), ops, dry_run=dry_run)


def revert(
    environment: Environment,
    patches: PatchTree,
    lock: Lock,
    *,
    ops: FileOps | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Give upstream's bytes back, from whatever state the kit left the installation in.

    Args:
        environment: where SGLang is.
        patches: the kit's patches.
        lock: what they give.
        ops: the steps on the file system.
        dry_run: check everything and change nothing.

    Raises:
        RefusedError: a file is foreign, the folder is read-only, or a patched wheel is installed.
        CrashkitError: it failed, and everything is as before.
    """
    tree = _read(environment, lock.find(environment.version))
    if _nothing_left_to_do(tree, Overall.PRISTINE) or tree.overall is Overall.UNSUPPORTED:
        return Outcome(environment, tree.overall, ())
    _refuse_wheel(tree, "revert")
    return _change(tree, lambda found: plan_revert(found, patches), ops, dry_run=dry_run)


def _change(tree: Tree, planner: Callable[[Tree], Plan], ops: FileOps | None, *, dry_run: bool) -> Outcome:
    environment, locked = tree.environment, tree.locked
    if dry_run:
        plan = planner(tree)
        check_writable(plan)
        return Outcome(environment, tree.overall, _changed(tree, plan))
    try:
        with exclusive(environment.dist_info):
            # Read again: what another process did meanwhile counts.
            tree = read_tree(environment, locked)
            plan = planner(tree)
            Transaction(plan, ops or FileOps()).run()
    except OSError as error:
        raise explain(error, environment.dist_info) from error
    return Outcome(environment, tree.overall, _changed(tree, plan))


def _changed(tree: Tree, plan: Plan) -> tuple[str, ...]:
    package = tree.environment.package
    paths = [change.path for change in plan.changes if change.path.is_relative_to(package)]
    return tuple(path.relative_to(package).as_posix() for path in paths)


def _read(environment: Environment, locked: LockedRelease | None) -> Tree:
    try:
        return read_tree(environment, locked)
    except OSError as error:
        raise CrashkitError(f"cannot read the installation: {error}") from error


def _nothing_left_to_do(tree: Tree, wanted: Overall) -> bool:
    """Return whether `tree` is as wanted, without the lock file of a process that was killed."""
    return tree.overall is wanted and not (tree.environment.dist_info / LOCK_FILE).exists()


def _refuse_wheel(tree: Tree, command: str) -> None:
    if not tree.by_wheel:
        return
    refuse_foreign(tree)
    environment = tree.environment
    if command == "revert":
        raise RefusedError(
            f"SGLang {environment.version} came patched, from a wheel that the kit built: there "
            "is nothing of upstream's to go back to here",
            next_step=environment.reinstall,
        )
    raise RefusedError(
        f"SGLang {environment.version} came patched, from a wheel that another kit built",
        next_step=f"{environment.rebuild_wheel}, or {environment.reinstall} and sglang-crashkit apply",
    )
