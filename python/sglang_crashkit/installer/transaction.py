"""Change several files so that all of it holds or none of it.

Order: the state file says that a change begins; copies of the pristine files and all new files are
written under other names; each takes its place by a rename; the results are compared with what was
meant; the state file comes last. A failure puts everything back, with renames alone. A kill leaves
the state file's phase, from which the next `apply` or `revert` goes on.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from sglang_crashkit.errors import CrashkitError, PartialError, RefusedError
from sglang_crashkit.installer.files import FileOps, read_or_none, staged_name, undo_name


@dataclass(frozen=True)
class Change:
    """One file."""

    path: Path
    before: bytes | None
    #: None removes it.
    after: bytes | None


@dataclass(frozen=True)
class Plan:
    """Everything that a change does."""

    changes: tuple[Change, ...]
    #: Every file that this or an earlier change may have touched: what such a change left under
    #: other names goes, and so does bytecode.
    touched: tuple[Path, ...]
    state_file: Path
    #: Content of the state file while the change runs.
    during: bytes
    #: Its content at the end, None to remove it.
    final: bytes | None
    #: Copies of pristine files to write.
    backups: dict[Path, bytes] = field(default_factory=dict)
    #: Files that go once everything holds.
    obsolete: tuple[Path, ...] = ()
    #: Folders that go once everything holds, if they are empty; innermost first.
    obsolete_folders: tuple[Path, ...] = ()

    @property
    def targets(self) -> list[Path]:
        """Every file that a rename puts in its place."""
        return [*(change.path for change in self.changes), self.state_file]


class Transaction:
    """Runs one plan.

    Args:
        plan: what to do.
        ops: the steps on the file system.
    """

    def __init__(self, plan: Plan, ops: FileOps) -> None:
        self._plan = plan
        self._ops = ops
        self._made_folders: list[Path] = []
        self._written_backups: list[Path] = []
        self._had_state = plan.state_file.exists()

    def run(self) -> None:
        """Do it.

        Raises:
            CrashkitError: it failed; everything is as before, or the message says what is not.
        """
        check_writable(self._plan)
        try:
            self._clean()
            try:
                self._prepare()
                self._swap()
                self._verify()
            except BaseException:
                self._roll_back()
                raise
        except OSError as error:
            raise explain(error, self._plan.state_file.parent) from error
        try:
            self._finish()
        except OSError as error:
            raise PartialError(
                f"every file is in place, but clearing up failed: {error}", next_step="run the same command again"
            ) from error

    def _clean(self) -> None:
        """Remove what an earlier change that was cut off left under other names."""
        for target in [*self._plan.touched, self._plan.state_file]:
            self._ops.unlink(staged_name(target))
            self._ops.unlink(undo_name(target))

    def _prepare(self) -> None:
        ops, plan = self._ops, self._plan
        if self._had_state:
            ops.keep_old(plan.state_file)
        ops.write_new(staged_name(plan.state_file), plan.during)
        ops.replace(staged_name(plan.state_file), plan.state_file)
        ops.sync_folders([plan.state_file.parent])
        for path, data in plan.backups.items():
            ops.make_folders(path.parent, self._made_folders)
            self._written_backups.append(path)
            ops.write_new(path, data)
        for change in plan.changes:
            if change.before is not None:
                ops.keep_old(change.path)
            if change.after is not None:
                ops.make_folders(change.path.parent, self._made_folders)
                like = change.path if change.before is not None else None
                ops.write_new(staged_name(change.path), change.after, like=like)
        if plan.final is not None:
            # Written now, so that a full disk shows before any file has changed.
            ops.write_new(staged_name(plan.state_file), plan.final)
        ops.sync_folders(path.parent for path in [*plan.targets, *plan.backups])

    def _swap(self) -> None:
        for change in self._plan.changes:
            if change.after is None:
                self._ops.unlink(change.path)
            else:
                self._ops.replace(staged_name(change.path), change.path)
        for path in self._plan.touched:
            self._ops.remove_bytecode(path)
        self._ops.sync_folders(change.path.parent for change in self._plan.changes)

    def _verify(self) -> None:
        for change in self._plan.changes:
            if read_or_none(change.path) != change.after:
                raise CrashkitError(
                    f"{change.path} did not keep what was written to it; nothing was changed",
                    next_step="see what else writes there, then run this again",
                )

    def _finish(self) -> None:
        """Do what can no longer fail for want of space; a kill here leaves the phase as it is."""
        ops, plan = self._ops, self._plan
        for target in plan.targets:
            ops.unlink(undo_name(target))
        for path in plan.obsolete:
            ops.unlink(path)
        for folder in plan.obsolete_folders:
            ops.remove_empty(folder)
        ops.sync_folders([plan.state_file.parent])
        if plan.final is None:
            ops.unlink(plan.state_file)
        else:
            ops.replace(staged_name(plan.state_file), plan.state_file)
        ops.sync_folders([plan.state_file.parent])

    def _roll_back(self) -> None:
        ops, plan = self._ops, self._plan
        try:
            for change in reversed(plan.changes):
                self._put_back(change.path, existed=change.before is not None)
                ops.remove_bytecode(change.path)
            for path in self._written_backups:
                ops.unlink(path)
            for folder in reversed(self._made_folders):
                ops.remove_empty(folder)
            self._put_back(plan.state_file, existed=self._had_state)
        except OSError as error:
            raise PartialError(
                f"the change failed, and so did undoing it: {error}",
                next_step="sglang-crashkit status, then apply or revert again",
            ) from error

    def _put_back(self, path: Path, *, existed: bool) -> None:
        undo = undo_name(path)
        if undo.exists():
            self._ops.replace(undo, path)
            # Renaming one link of a file over another of its links leaves both.
            self._ops.unlink(undo)
        elif not existed:
            self._ops.unlink(path)
        self._ops.unlink(staged_name(path))


def check_writable(plan: Plan) -> None:
    """Check that files can be made in every folder that `plan` touches.

    Raises:
        RefusedError: a folder is read-only for this user.
    """
    for folder in sorted({target.parent for target in plan.targets if target.parent.is_dir()}):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _read_only(folder)


def explain(error: OSError, folder: Path) -> CrashkitError:
    """Return what `error`, met below `folder`, means to a person."""
    where = Path(error.filename).parent if isinstance(error.filename, str | Path) else folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CrashkitError(
            f"no space left for new files in {where}; nothing was changed",
            next_step=f"df -h {where}",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return _read_only(where)
    return CrashkitError(f"{error}", next_step="sglang-crashkit status")


def _read_only(folder: Path) -> RefusedError:
    return RefusedError(
        f"cannot make files in {folder}: it is read-only for this user; nothing was changed",
        next_step="run this as the owner of that folder, or make it writable",
    )
