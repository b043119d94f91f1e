"""Hook of ``sglang/srt/server_args.py``: ``--crash-dump-folder`` switches GPU core dumps and the flight recorder on.

The driver reads its variables when a process initialises CUDA, and PyTorch those of its flight recorder when it makes
its first process group, so they are set while the arguments are resolved, before the first child process starts. What
differs between the processes is set in each of them; see `srt.flight_recorder`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang_crashkit.core.flight_request import BUFFER_SIZE, OTHER_BUFFER_SIZE
from sglang_crashkit.core.private_files import make_private_folder
from sglang_crashkit.core.settings import FLIGHT_VARIABLE, Settings, fallback_folder
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.srt.hooks import never_raises

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_SKIPPED = ("nonrelocated_elf_images", "global_memory", "shared_memory", "local_memory", "constbank_memory")


@never_raises
def set_crash_dump_env(server_args: Any) -> None:
    """Set the variables of GPU cores and of the flight recorder that the user did not set; create the folder of cores.

    Nothing happens without ``--crash-dump-folder``. ``%h`` stays in the values, as upstream has them: the driver
    expands it, by gethostname(2), in each process that uses CUDA. The folder created is therefore named by
    gethostname(2) too and not by ``$HOSTNAME``, after which SGLang names the folder of its request dumps: the two
    differ where somebody set the variable, and the driver creates no folder.

    Args:
        server_args: SGLang's ``ServerArgs``.
    """
    crash_folder = server_args.crash_dump_folder
    # That of another server of this program, or of the one that started it.
    os.environ.pop(FLIGHT_VARIABLE, None)
    if not crash_folder or not Settings.from_environ().enabled:
        return
    _set_defaults(_core_dump_variables(crash_folder))
    _make_core_folder(os.environ["CUDA_COREDUMP_FILE"])
    _set_flight_variables(crash_folder)


def in_place_of_crash_dump_env(handle: Function) -> Function:
    """Let `set_crash_dump_env` do what `handle` does; `handle` itself does it when the kit is switched off."""

    @functools.wraps(handle)
    def wrapper(server_args: Any) -> Any:
        if Settings.from_environ().enabled:
            return set_crash_dump_env(server_args)
        return handle(server_args)

    return wrapper  # type: ignore[return-value]


def _core_dump_variables(crash_folder: str) -> dict[str, str]:
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(f"skip_{part}" for part in _SKIPPED),
        "CUDA_COREDUMP_FILE": f"{_core_base(crash_folder)}/%h/core.cuda.%t.%p",
        "CUDA_COREDUMP_PIPE": "/tmp/corepipe.cuda.%h.%p",  # noqa: S108 - upstream's name for it
    }


@never_raises
def _set_flight_variables(crash_folder: str) -> None:
    """Switch PyTorch's flight recorder on where there will be a crash handler to ask it."""
    if not Settings.from_environ().diagnostics:
        return
    if OTHER_BUFFER_SIZE not in os.environ:
        # So many collectives as PyTorch keeps from 2.11 on where nothing is set; before, it keeps none then.
        _set_defaults({BUFFER_SIZE: "2000"})
    folder = Path(_core_base(crash_folder)).absolute() / socket.gethostname() / "flight_recorder"
    os.environ[FLIGHT_VARIABLE] = str(folder)


def _set_defaults(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if name not in os.environ:
            os.environ[name] = value
            logger.info("Auto-set %s=%s (from --crash-dump-folder)", name, value)


def _core_base(crash_folder: str) -> str:
    """Return the crash folder, or the fallback folder where somebody else prepared this host's folder in it.

    The driver follows links, and a core holds the memory of a GPU.
    """
    folder = Path(crash_folder) / socket.gethostname()
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            logger.error("%s is not a folder of this user: GPU cores go to %s", folder, fallback_folder())
            return str(fallback_folder())
    return crash_folder


def _make_core_folder(template: str) -> None:
    """Create the folder in which the driver will write, for its owner alone; say so where that cannot be."""
    if template.startswith("|") or _is_fifo(template):
        return
    folder = Path(os.path.dirname(template).replace("%h", socket.gethostname()))  # noqa: PTH120 - may be empty
    if "%" in str(folder):
        logger.error(
            "CUDA_COREDUMP_FILE=%s: its folder has another specifier than %%h and cannot be created ahead; "
            "GPU cores are lost unless it is there",
            template,
        )
        return
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return
    try:
        make_private_folder(folder)
    except (OSError, CrashkitError) as error:
        logger.error(
            "The folder %s cannot be created (%s): GPU cores are lost; next: check --crash-dump-folder", folder, error
        )


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return False
