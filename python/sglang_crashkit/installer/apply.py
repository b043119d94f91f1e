"""`apply` and `revert`: one change with two targets, the patched and the pristine files.

Everything is checked first: each file has to be upstream's or the kit's, or nothing is changed. Then every new file is
written beside the one that it replaces, the manifest lists the bytes that each file may have, and each file is renamed
into place, after the files that it imports; a file is removed before those. So a kill at any moment leaves an SGLang
that can be imported, whose files are pristine or patched, and running the command again finishes. No file is written in
place, because a file of a virtual environment may be a hard link into a package cache.
"""

from __future__ import annotations

import errno
import fcntl
import graphlib
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, PartialError, RefusedError
from sglang_crashkit.installer.environment import Environment, require_kit
from sglang_crashkit.installer.patches import Lock, LockedRelease, PatchTree, patch_files, sha256_hex
from sglang_crashkit.installer.record import rewrite_record
from sglang_crashkit.installer.status import (
    APPLIED,
    APPLYING,
    BY_COMMAND,
    MANIFEST_NAME,
    REVERTING,
    Manifest,
    PatchedFile,
    State,
    Tree,
    hash_or_none,
    read_or_none,
    read_tree,
)

#: Seconds to wait for other processes. A change takes well under one second, but many on a disk that syncs slowly.
LOCK_WAIT = 60.0
#: The name of a new file until it is renamed into place; the pattern of such names of all versions of the kit.
_STAGED, _LEFT_OVER = ".{}.sglang-crashkit-new", ".*.sglang-crashkit-*"


@dataclass(frozen=True)
class Outcome:
    """What a command did, or would do."""

    before: State  # the installation's state before the command
    changed: tuple[str, ...]  # files that it changed, below the package; empty where there was nothing to do


@dataclass(frozen=True)
class _Change:
    path: Path
    before: bytes | None
    after: bytes | None  # None removes it


@dataclass(frozen=True)
class _Plan:
    tree: Tree
    changes: tuple[_Change, ...]  # in the order of the renames; RECORD is among them
    during: Manifest
    final: Manifest | None  # None where the manifest is removed

    @property
    def outcome(self) -> Outcome:
        package = self.tree.environment.package
        paths = [change.path for change in self.changes if change.path.is_relative_to(package)]
        return Outcome(self.tree.overall, tuple(sorted({path.relative_to(package).as_posix() for path in paths})))


def apply(environment: Environment, patches: PatchTree, lock: Lock, *, dry_run: bool = False) -> Outcome:
    """Patch the installation, from whatever state the kit left it in; a `dry_run` only checks.

    Raises:
        RefusedError: the release is not supported, a file is foreign, the kit cannot be imported there, or a folder
            is read-only; nothing was changed.
        PartialError: it failed between two files; running it again finishes.
        CrashkitError: it failed for another reason, which the message gives.
    """
    locked = lock.require(environment.version)
    require_kit(environment)
    return _bring_to(State.PATCHED, environment, patches, locked, dry_run=dry_run)


def revert(environment: Environment, patches: PatchTree, lock: Lock, *, dry_run: bool = False) -> Outcome:
    """Give upstream's bytes back, from whatever state the kit left the installation in.

    Raises what `apply` does, and RefusedError where a patched wheel is installed; it needs no kit there.
    """
    return _bring_to(State.PRISTINE, environment, patches, lock.find(environment.version), dry_run=dry_run)


def _bring_to(
    target: State, environment: Environment, patches: PatchTree, locked: LockedRelease | None, *, dry_run: bool
) -> Outcome:
    tree = read_tree(environment, locked)
    # A change that was killed before its first rename left its new files behind.
    is_done = tree.overall is target and not any(environment.dist_info.glob(_LEFT_OVER))
    if is_done or (target is State.PRISTINE and tree.overall is State.UNSUPPORTED):
        return Outcome(tree.overall, ())
    try:
        if dry_run:
            return _plan(target, tree, patches).outcome
        with exclusive(environment.dist_info):
            # Read again under the lock: another process may have been changing files during the first read.
            plan = _plan(target, read_tree(environment, locked), patches)
            _carry_out(plan)
    except OSError as error:
        raise _explain(error, environment.dist_info) from error
    return plan.outcome


def _plan(target: State, tree: Tree, patches: PatchTree) -> _Plan:
    """Check everything and decide the new content of each file."""
    _refuse(target, tree)
    environment, is_apply = tree.environment, target is State.PATCHED
    pristine = {path: tree.pristine_bytes(path, patches) for path in tree.files}
    wanted = dict(pristine)
    if is_apply and tree.locked is not None:
        wanted.update(patch_files(environment.release, tree.locked, patches, pristine))

    def manifest(phase: str, paths: Iterable[str], *contents: dict[str, bytes | None]) -> Manifest:
        files = {}
        for path in paths:
            found = {sha256_hex(data) for each in contents if (data := each[path]) not in (None, pristine[path])}
            texts = {each: tree.patch_text(path, each, patches) for each in sorted(found)}
            files[path] = PatchedFile(hash_or_none(pristine[path]), texts)
        return Manifest(phase, BY_COMMAND, __version__, environment.release, files)

    changes = _in_order(environment.package, tree.contents, pristine, wanted)
    record = _record_change(tree, pristine, wanted, with_manifest=is_apply)
    plan = _Plan(
        tree,
        # RECORD lists the kit's files as long as they exist: it changes first in `apply`, and last in `revert`.
        (*record, *changes) if is_apply else (*changes, *record),
        manifest(APPLYING if is_apply else REVERTING, tree.files, tree.contents, wanted),
        manifest(APPLIED, tree.locked.files, wanted) if is_apply and tree.locked else None,
    )
    folders = {environment.dist_info, *(_staging_folder(change.path) for change in plan.changes)}
    folders |= {file.parent for change in plan.changes for file in _bytecode_of(change.path)}
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _read_only(folder)
    return plan


def _in_order(
    package: Path,
    found: Mapping[str, bytes | None],
    pristine: Mapping[str, bytes | None],
    wanted: Mapping[str, bytes | None],
) -> list[_Change]:
    """Return the changes from `found` to `wanted`, in an order in which no file ever imports a name that is missing.

    Where a file of the kit's own is removed or replaced, which may drop names that patched files import, all patched
    files first get upstream's bytes back, which import nothing of the kit's.
    """
    own = [path for path, data in pristine.items() if data is None]
    modules = {path: f"sglang.{path.removesuffix('.py').replace('/', '.')}".encode() for path in own}
    imports = {
        path: [each for each in own if each != path and modules[each] in (wanted[path] or b"") + (found[path] or b"")]
        for path in found
    }
    order = list(graphlib.TopologicalSorter(imports).static_order())
    steps: list[tuple[Iterable[str], Mapping[str, bytes | None]]] = [(order, wanted)]
    if any(found[path] not in (None, wanted[path]) for path in own):
        steps.insert(0, (reversed(order), pristine))
    now, changes = dict(found), []
    for paths, contents in steps:
        for path in paths:
            if now[path] != contents[path]:
                changes.append(_Change(package / path, now[path], contents[path]))
                now[path] = contents[path]
    return changes


def _refuse(target: State, tree: Tree) -> None:
    environment = tree.environment
    wrong = {path: state for path, state in tree.files.items() if state in (State.FOREIGN, State.MISSING)}
    if wrong:
        named = ", ".join(f"{path} ({state.value})" for path, state in wrong.items())
        raise RefusedError(
            f"neither upstream's nor the kit's in {environment.package}: {named}",
            next_step=f"keep your edit elsewhere, then {environment.reinstall}",
        )
    if tree.by_wheel and target is State.PRISTINE:
        raise RefusedError(
            f"SGLang {environment.version} came patched, from a wheel that the kit built: there is nothing of "
            "upstream's to go back to here",
            next_step=environment.reinstall,
        )
    if tree.by_wheel:
        raise RefusedError(
            f"SGLang {environment.version} came patched, from a wheel that another kit built",
            next_step=f"{environment.rebuild_wheel}, or {environment.reinstall} and sglang-crashkit apply",
        )


def _record_change(
    tree: Tree, pristine: dict[str, bytes | None], wanted: dict[str, bytes | None], *, with_manifest: bool
) -> list[_Change]:
    file = tree.environment.dist_info / "RECORD"
    record = read_or_none(file)
    if record is None:
        return []
    manifest = f"{tree.environment.dist_info.name}/{MANIFEST_NAME}"
    contents = {f"sglang/{path}": data for path, data in wanted.items() if data is not None}
    own = [*(f"sglang/{path}" for path, data in pristine.items() if data is None), manifest]
    rewritten = rewrite_record(record, contents | ({manifest: None} if with_manifest else {}), own, source=str(file))
    return [] if rewritten == record else [_Change(file, record, rewritten)]


def _carry_out(plan: _Plan) -> None:
    """Write every new file beside the one that it replaces, then let each take its place.

    Raises OSError where nothing was changed, PartialError where it failed between two files, and CrashkitError where
    another program wrote one of the files meanwhile; that file is left as it is.
    """
    package, dist_info = plan.tree.environment.package, plan.tree.environment.dist_info
    touched = [package / path for path in plan.tree.files]
    manifest = dist_info / MANIFEST_NAME
    during, final = (dist_info / _STAGED.format(f"{MANIFEST_NAME}.{each}") for each in ("during", "final"))
    staged = [
        _staging_folder(each.path) / _STAGED.format(f"{each.path.name}.{number}")
        for number, each in enumerate(plan.changes)
    ]
    for folder in sorted({dist_info, *itertools.chain(*(_folders(path, package) for path in touched)), package}):
        for left_over in sorted(folder.glob(_LEFT_OVER)):
            left_over.unlink()
    done = 0
    try:
        # A file that is new gets the mode and owner of a neighbouring file.
        sibling, beside = package / "__init__.py", dist_info / "METADATA"
        _write(during, plan.during.dump(), like=beside)
        if plan.final is not None:
            _write(final, plan.final.dump(), like=beside)
        for change, file in zip(plan.changes, staged, strict=True):
            if change.after is not None:
                _write(file, change.after, like=change.path if change.path.exists() else sibling)
        try:
            during.replace(manifest)
            for change, file in zip(plan.changes, staged, strict=True):
                _put_in_place(change, file)
                done += 1
            for path in touched:
                # Python takes a compiled file as fresh by the size and the whole seconds of its source.
                for compiled in _bytecode_of(path):
                    compiled.unlink()
                if not path.exists():
                    _remove_empty_folders(path, package)
            if plan.final is not None:
                final.replace(manifest)
            else:
                manifest.unlink()
        except OSError as error:
            raise PartialError(
                f"{done} of {len(plan.changes)} files are in place, then: {error}",
                next_step="run the same command again, which finishes",
            ) from error
    finally:
        # A file that cannot be removed does no harm, and is removed the next time.
        with suppress(OSError):
            for path in (*staged, final, during):
                path.unlink(missing_ok=True)


def _put_in_place(change: _Change, staged: Path) -> None:
    if read_or_none(change.path) != change.before:
        raise CrashkitError(
            f"{change.path} was written by somebody else meanwhile, and is left as it is",
            next_step="sglang-crashkit status",
        )
    if change.after is None:
        change.path.unlink()
    else:
        for folder in reversed([*itertools.takewhile(lambda each: not each.is_dir(), change.path.parents)]):
            folder.mkdir()
            folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))
        staged.replace(change.path)


def _staging_folder(path: Path) -> Path:
    """Return the folder of `path`, or its nearest parent that exists."""
    return next(folder for folder in path.parents if folder.is_dir())


def _folders(path: Path, package: Path) -> Iterable[Path]:
    """Return the folders of `path` below `package`, innermost first."""
    return itertools.takewhile(lambda folder: folder != package, path.parents)


def _write(path: Path, data: bytes, *, like: Path) -> None:
    """Write `data` to a file that does not exist yet, with the mode and owner of `like`, and sync it.

    Raises RefusedError where a user who may read `like` could not read the new file.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        # Where `like` does not exist, take its nearest folder.
        wanted, own = next(each for each in (like, *like.parents) if each.exists()).stat(), os.fstat(file.fileno())
        # Without the privilege to change owners, the writer keeps the file, as with any installer; the group may work.
        for uid in (wanted.st_uid, -1) if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid) else ():
            with suppress(PermissionError):
                os.fchown(file.fileno(), uid, wanted.st_gid)
                break
        os.fchmod(file.fileno(), stat.S_IMODE(wanted.st_mode) & (0o666 if stat.S_ISDIR(wanted.st_mode) else 0o7777))
        own = os.fstat(file.fileno())
        is_group_kept = own.st_gid == wanted.st_gid or not wanted.st_mode & stat.S_IRGRP
        if not wanted.st_mode & stat.S_IROTH and not (own.st_uid == wanted.st_uid and is_group_kept):
            raise RefusedError(
                f"{like} is of user {wanted.st_uid} and group {wanted.st_gid}, who could not read what took its place",
                next_step="run the same command as that user",
            )
        os.fsync(file.fileno())


def _bytecode_of(path: Path) -> list[Path]:
    return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")) if path.suffix == ".py" else []


def _remove_empty_folders(path: Path, package: Path) -> None:
    """Remove the folders that held only the file at `path`: upstream has no empty folders."""
    for folder in _folders(path, package):
        for each in (folder / "__pycache__", folder):
            try:
                each.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    return
                raise


@contextmanager
def exclusive(dist_info: Path, *, wait: float = LOCK_WAIT) -> Iterator[None]:
    """Lock the installation with the folder `dist_info` against other processes; wait up to `wait` seconds for one.

    Raises CrashkitError where another process still holds the lock, and OSError.
    """
    # Nothing is written to METADATA, but a network file system locks only files that are open for writing (flock(2)).
    metadata = dist_info / "METADATA"
    with metadata.open("r+b" if os.access(metadata, os.W_OK) else "rb") as file:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CrashkitError(
                        f"another sglang-crashkit is changing {dist_info.parent}",
                        next_step="wait for it to end and run this again",
                    ) from None
            time.sleep(0.05)
        yield


def _explain(error: OSError, folder: Path) -> CrashkitError:
    """Return an error for a person from `error`, which came before any file was changed."""
    where = Path(error.filename).parent if isinstance(error.filename, str | Path) else folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CrashkitError(f"no space left for new files in {where}; nothing was changed", next_step=f"df -h {where}")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return _read_only(where)
    return CrashkitError(f"{error}", next_step="sglang-crashkit status")


def _read_only(folder: Path) -> RefusedError:
    return RefusedError(
        f"cannot make files in {folder}: it is read-only for this user; nothing was changed",
        next_step="run this as the owner of that folder, or make it writable",
    )
