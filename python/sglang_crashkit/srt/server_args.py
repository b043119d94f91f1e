"""Hook of ``sglang/srt/server_args.py``: ``--crash-dump-folder`` switches GPU core dumps and the flight recorder on.

A process reads the variables of CUDA's driver and of PyTorch when it first uses them, so they are set while the
arguments are resolved, before the first child starts; see `srt.flight_recorder` for those that differ between
processes. A user's program has them only while it launches an ``Engine``: its other children don't inherit them.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.flight_request import BUFFER_SIZE, OLD_BUFFER_SIZE
from sglang_crashkit.settings import FLIGHT_VARIABLE, Settings
from sglang_crashkit.srt.hooks import Function, in_place_of, never_raises

logger = logging.getLogger(__name__)

#: Variables that the kit, not the user, set in this process for SGLang's own processes to inherit.
set_here: dict[str, str] = {}

#: A number that std::stoi accepts, with which PyTorch reads the size of its flight recorder.
_NUMBER = re.compile(r"\s*[+-]?\d{1,9}(?!\d)", re.ASCII)
_SKIPPED = ("nonrelocated_elf_images", "global_memory", "shared_memory", "local_memory", "constbank_memory")


@never_raises
def set_crash_dump_env(server_args: Any) -> None:
    """Set the variables of GPU cores and of the flight recorder that the user did not set.

    It sets none without ``--crash-dump-folder``, and none for cores if ``SGLANG_CUDA_COREDUMP_BEFORE_CRASH`` is off.
    The driver expands ``%h``, but creates no folder. The crash handler creates it, because the disk may not answer.
    """
    crash_folder, settings = getattr(server_args, "crash_dump_folder", None), Settings.from_environ()
    # The value of another server of this program, or of the server that started this program.
    os.environ.pop(FLIGHT_VARIABLE, None)
    variables: dict[str, str] = {}
    if crash_folder and settings.enabled:
        if settings.cores:
            variables |= {
                "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
                "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
                # The GPU's part is enough. The driver aborts the process after any core. ``skip_abort`` is no solution:
                # with it, on an H200 with driver 580.159.04, the process did not notice that a kernel failed.
                "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION": "0",
                "CUDA_COREDUMP_SHOW_PROGRESS": "1",
                "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(f"skip_{part}" for part in _SKIPPED),
                "CUDA_COREDUMP_FILE": f"{Path(crash_folder).absolute()}/%h/core.cuda.%t.%p",
                "CUDA_COREDUMP_PIPE": "/tmp/corepipe.cuda.%h.%p",  # noqa: S108 - upstream's name for it
            }
        variables |= _flight_variables(crash_folder) if settings.diagnostics else {}
    # Set what the user did not; take out what an earlier server of this program left and this one has not.
    earlier = {name for name in set_here if _is_ours(name)}
    set_here.clear()
    for name in earlier - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if name not in os.environ or name in earlier:
            # The kit's own variable is of no interest in the log.
            if os.environ.get(name) != value and name != FLIGHT_VARIABLE:
                logger.info("Auto-set %s=%s (from --crash-dump-folder)", name, value)
            os.environ[name] = set_here[name] = value


def in_place_of_crash_dump_env(handle: Function) -> Function:
    """Wrap `handle`: call `set_crash_dump_env`, and `handle` only if the kit, or its setting for cores, is off."""

    def instead(handle: Function, server_args: Any) -> Any:
        settings = Settings.from_environ()
        if settings.enabled:
            set_crash_dump_env(server_args)
            if settings.cores:
                return None
        return handle(server_args)

    return in_place_of(handle, instead)


@never_raises
def withdraw_crash_dump_env() -> None:
    """Remove from a user's environment what `set_crash_dump_env` set; call it once SGLang's processes have started."""
    for name in set_here:
        if _is_ours(name):
            del os.environ[name]


def crash_dump_environ() -> dict[str, str]:
    """Return the environment that the last launch of this process gave to SGLang's processes, as far as known."""
    return set_here | dict(os.environ)


def _flight_variables(crash_folder: str) -> dict[str, str]:
    """Return the variables that switch PyTorch's flight recorder on, for the crash handler to query.

    A size that is not a number, or is empty, hangs the constructor of every gloo process group. It counts as not set.
    """
    for name in (BUFFER_SIZE, OLD_BUFFER_SIZE):
        if name in os.environ and not _NUMBER.match(os.environ[name]):
            value = os.environ.pop(name)
            logger.warning(
                "crash kit: %s=%r would hang PyTorch's gloo, and counts as not set; next: unset it", name, value
            )
    folder = Path(crash_folder).absolute() / socket.gethostname() / "flight_recorder"
    # PyTorch's own default from 2.11 on, in collectives; before, it keeps none by default.
    size = {} if OLD_BUFFER_SIZE in os.environ else {BUFFER_SIZE: "2000"}
    return {FLIGHT_VARIABLE: str(folder)} | size


def note_changed(name: str, value: str) -> None:
    """Set a variable to the value that the crash handler made of it, also in `set_here` if the kit had set it."""
    if name in set_here and _is_ours(name):
        set_here[name] = value
    os.environ[name] = value


def _is_ours(name: str) -> bool:
    return os.environ.get(name) == set_here[name]
