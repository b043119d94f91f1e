"""Every change that the installer makes to the file system, one step at a time.

Nothing is written in place: a file in a virtual environment may be a hard link into a package
cache, and a reader may have it open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

#: Ends the name of a new file that waits to take another's place.
STAGED = ".sglang-crashkit-new"
#: Ends the name of the old file while a new one takes its place.
UNDO = ".sglang-crashkit-old"


def staged_name(path: Path) -> Path:
    """Return where the new content of `path` waits."""
    return path.with_name(f".{path.name}{STAGED}")


def undo_name(path: Path) -> Path:
    """Return where the old file of `path` is kept until the change holds."""
    return path.with_name(f".{path.name}{UNDO}")


def read_or_none(path: Path) -> bytes | None:
    """Return the bytes of `path`, None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


class FileOps:
    """The steps.

    Args:
        before_step: called with the name of each step before it is taken; a test kills the process
            there, or raises the error of a full disk.
    """

    def __init__(self, before_step: Callable[[str], None] | None = None) -> None:
        self._before_step = before_step or (lambda _step: None)

    def write_new(self, path: Path, data: bytes, *, like: Path | None = None) -> None:
        """Write `data` to a file that does not exist yet, and sync it.

        Args:
            path: the file; a left-over of that name goes first.
            data: its bytes.
            like: a file to take the permission bits and the owner from.
        """
        self.unlink(path)
        self._before_step(f"create {path.name}")
        with path.open("xb") as file:
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            self._before_step(f"fill {path.name}")
            file.write(data[half:])
            file.flush()
            if like is not None:
                _copy_owner_and_mode(like, file.fileno())
            os.fsync(file.fileno())

    def keep_old(self, path: Path) -> None:
        """Give the file at `path` its second name, `undo_name`, by a link where links work."""
        undo = undo_name(path)
        self.unlink(undo)
        self._before_step(f"keep {path.name}")
        try:
            os.link(path, undo, follow_symlinks=False)
        except OSError:
            self.write_new(undo, path.read_bytes(), like=path)

    def replace(self, source: Path, target: Path) -> None:
        """Let `source` take the place of `target` in one step."""
        self._before_step(f"replace {target.name}")
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove the file at `path` if it is there."""
        if path.is_symlink() or path.exists():
            self._before_step(f"remove {path.name}")
            with suppress(FileNotFoundError):
                path.unlink()

    def make_folders(self, folder: Path, made: list[Path]) -> None:
        """Make `folder` and its parents; append each to `made`, outermost first, once it is there."""
        if folder.is_dir():
            return
        self.make_folders(folder.parent, made)
        self._before_step(f"make {folder.name}")
        folder.mkdir()
        made.append(folder)

    def remove_empty(self, folder: Path) -> None:
        """Remove `folder` if it is there and empty."""
        if folder.is_dir() and not any(folder.iterdir()):
            self._before_step(f"remove {folder.name}")
            folder.rmdir()

    def sync_folders(self, folders: Iterable[Path]) -> None:
        """Make the names in `folders` outlive a power cut."""
        for folder in sorted({folder for folder in folders if folder.is_dir()}):
            self._before_step(f"sync {folder.name}")
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove_bytecode(self, path: Path) -> None:
        """Remove the compiled files of the module at `path`.

        Python trusts a compiled file whose recorded time (whole seconds) and size match the
        source, so one that was compiled from the other content could be taken for this one's.
        """
        if path.suffix == ".py":
            for compiled in sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")):
                self.unlink(compiled)


def _copy_owner_and_mode(like: Path, descriptor: int) -> None:
    wanted, own = like.stat(), os.fstat(descriptor)
    if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid):
        # Without the privilege the writer owns the file, as with any installer.
        with suppress(PermissionError):
            os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(wanted.st_mode))
