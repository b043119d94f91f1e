"""The folder and the name of the file that the requests of a crashed server are saved to."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import make_private_folder
from sglang_crashkit.settings import fallback_folder

logger = logging.getLogger(__name__)

#: On a disk with less than this, in bytes, no file of requests is begun.
_LEAST_FREE_BYTES = 1 << 20


def safe_folder(folder: Path) -> Path:
    """Return `folder`, private; one of the same name below the fallback folder where that cannot be, or takes no more.

    Raises:
        OSError: neither can be created.
        CrashkitError: the fallback folder is somebody else's, too.
    """
    try:
        make_private_folder(folder)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written to", str(folder))
        if shutil.disk_usage(folder).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, "the disk is full", str(folder))
    except (OSError, CrashkitError) as error:
        safe = make_private_folder(fallback_folder()) / folder.name
        logger.error("crash kit: %s: the requests go to %s", error, safe)
        return make_private_folder(safe)
    return folder


def give_name(temporary: Path, path: Path) -> Path:
    """Give a file its name and return it: `path`, or with a number where that is taken.

    Raises:
        OSError: it cannot be renamed.
    """
    candidate, number = path, 1
    while True:
        try:
            os.link(temporary, candidate)
        except FileExistsError:
            candidate, number = path.with_name(f"{path.stem}.{number}{path.suffix}"), number + 1
        except OSError:
            # A file system without hard links, which each says in its own way (EPERM, ENOTSUP, ENOSYS). Without them a
            # second crash within a second replaces the first one's file.
            temporary.replace(candidate)
            return candidate
        else:
            return candidate
