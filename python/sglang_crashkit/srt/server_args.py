"""Hook of ``sglang/srt/server_args.py``: ``--crash-dump-folder`` switches GPU core dumps and the flight recorder on.

CUDA's driver and PyTorch read their variables when a process begins to use them, so they are set while the arguments
are resolved, before the first child starts; see `srt.flight_recorder` for what differs between processes. A user's
program has them only while it launches an ``Engine``: what it starts itself inherits none.
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

#: What was set here in this process, and not by the user: what SGLang's own processes are to inherit.
set_here: dict[str, str] = {}

#: What std::stoi takes, by which PyTorch reads the size of its flight recorder.
_NUMBER = re.compile(r"\s*[+-]?\d{1,9}(?!\d)", re.ASCII)
_SKIPPED = ("nonrelocated_elf_images", "global_memory", "shared_memory", "local_memory", "constbank_memory")


@never_raises
def set_crash_dump_env(server_args: Any) -> None:
    """Set the variables of GPU cores and of the flight recorder that the user did not set.

    Nothing happens without ``--crash-dump-folder``, and nothing is done about cores where
    ``SGLANG_CUDA_COREDUMP_BEFORE_CRASH`` is switched off. The driver expands ``%h``, but creates no folder: the crash
    handler does, as the disk may not answer.
    """
    crash_folder, settings = getattr(server_args, "crash_dump_folder", None), Settings.from_environ()
    # Those of another server of this program, or of the one that started it.
    os.environ.pop(FLIGHT_VARIABLE, None)
    variables: dict[str, str] = {}
    if crash_folder and settings.enabled:
        if settings.cores:
            variables |= {
                "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
                "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
                # The GPU's part is enough. The driver aborts the process after any core, and ``skip_abort`` does not
                # help: seen on an H200 with driver 580.159.04, a kernel that failed then went unnoticed by the process.
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
            # The kit's own variable concerns no other program.
            if os.environ.get(name) != value and name != FLIGHT_VARIABLE:
                logger.info("Auto-set %s=%s (from --crash-dump-folder)", name, value)
            os.environ[name] = set_here[name] = value


def in_place_of_crash_dump_env(handle: Function) -> Function:
    """Let `set_crash_dump_env` do what `handle` does; that does it too where the kit, or its part of cores, is off."""

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
    """Take out of a user's environment what `set_crash_dump_env` put there, once SGLang's processes have it."""
    for name in set_here:
        if _is_ours(name):
            del os.environ[name]


def crash_dump_environ() -> dict[str, str]:
    """Return the environment that the last launch of this process gave to SGLang's processes, as far as it is known."""
    return set_here | dict(os.environ)


def _flight_variables(crash_folder: str) -> dict[str, str]:
    """Return what switches PyTorch's flight recorder on, for a crash handler to ask it.

    A size that is no number, an empty one too, hangs every gloo process group in its constructor. It counts as not set.
    """
    for name in (BUFFER_SIZE, OLD_BUFFER_SIZE):
        if name in os.environ and not _NUMBER.match(os.environ[name]):
            value = os.environ.pop(name)
            logger.warning(
                "crash kit: %s=%r would hang PyTorch's gloo, and counts as not set; next: unset it", name, value
            )
    folder = Path(crash_folder).absolute() / socket.gethostname() / "flight_recorder"
    # So many collectives as PyTorch keeps from 2.11 on where nothing is set; before, it keeps none then.
    size = {} if OLD_BUFFER_SIZE in os.environ else {BUFFER_SIZE: "2000"}
    return {FLIGHT_VARIABLE: str(folder)} | size


def note_changed(name: str, value: str) -> None:
    """Set a variable that was set here to what the crash handler made of it."""
    if name in set_here and _is_ours(name):
        set_here[name] = value
    os.environ[name] = value


def _is_ours(name: str) -> bool:
    return os.environ.get(name) == set_here[name]
