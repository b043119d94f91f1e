"""Diagnostics of the schedulers before a crash: py-spy stacks, and GPU cores on demand.

Releases from 0.5.13 on have a module of this name. In earlier ones this module replaces it under upstream's name, with
the same functions, behavior and log messages. The names that a caller may replace (`collect_scheduler_processes`,
`subprocess`, `os`, `time`, `psutil`) are looked up in this module at each call.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from sglang_crashkit.capture.cuda_core.trigger import TRIGGER
from sglang_crashkit.capture.pyspy import find_pyspy
from sglang_crashkit.kernel import procfs
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt.hooks import CAPTURE_WAIT_SECS, Function, in_place_of, never_raises, request
from sglang_crashkit.srt.server_args import crash_dump_environ

_NAME = "sglang.srt.utils.cudacore_pyspy_dump_utils"
# The logger of later releases, for filters of SGLang's log by module.
logger = logging.getLogger(_NAME)

_SCHEDULER = "sglang::scheduler"
#: Time limits of py-spy with native stacks, which stop the process, and without, in seconds.
_NATIVE_SECS = 5.0
_SNAPSHOT_SECS = 2.0
#: States in which a process does not answer ptrace: stopped, traced, in uninterruptible sleep.
_DEAF_STATES = frozenset("TtD")


def stand_in_for(name: str) -> None:
    """Make ``import name`` return this module itself, so that a name replaced in one is replaced in the other."""
    sys.modules[name] = sys.modules[__name__]


def on_pyspy_dump(dump: Function) -> Function:
    """Wrap upstream's ``pyspy_dump_schedulers``: it runs only if no crash handler captures the stacks."""

    def instead(dump: Function, *args: Any, **kwargs: Any) -> Any:
        return None if _captured_by_handler() else dump(*args, **kwargs)

    return in_place_of(dump, instead)


def in_place_of_pyspy_dump(dump: Function) -> Function:
    """Replace ``pyspy_dump_schedulers`` of ``utils/common.py``, where it is before 0.5.13, by this module's."""

    def instead(dump: Function, scheduler_only: bool = False) -> Any:
        if not Settings.from_environ().enabled and not scheduler_only:
            return dump()
        return never_raises(pyspy_dump_schedulers)(scheduler_only=scheduler_only)

    return in_place_of(dump, instead)


def collect_scheduler_processes() -> list[psutil.Process]:
    """Return the schedulers among the descendants of this process."""
    descendants = psutil.Process().children(recursive=True)
    return [process for process in descendants if _is_sglang_scheduler_process(process)]


def pyspy_dump_schedulers(scheduler_only: bool = False) -> None:
    """Write this process's Python stacks, or those of all schedulers below it, to an incident, else to the log."""
    if _captured_by_handler():
        return
    pids = [process.pid for process in _targets(scheduler_only, "No sglang scheduler processes found for py-spy dump.")]
    deadline = time.monotonic() + max(Settings.from_environ().budget_secs, _SNAPSHOT_SECS)
    for pid in pids:
        _dump_stack(pid, deadline)


def trigger_cuda_user_coredump(scheduler_only: bool = False) -> int:
    """Ask the CUDA driver for a GPU core of this process, or of all schedulers below it; return how many were asked."""
    if crash_dump_environ().get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        logger.error(
            "CUDA user-triggered coredump is not enabled. Set CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 before CUDA "
            "initialization. next: start the server with --crash-dump-folder"
        )
    processes = _targets(scheduler_only, "No sglang scheduler processes found for CUDA coredump.")
    return sum(_trigger(process) for process in processes)


def diagnose_schedulers() -> None:
    """Run both diagnostics on the schedulers, if their flags are set, and wait for the requested cores."""
    settings = Settings.from_environ()
    if not collect_scheduler_processes():
        logger.error("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        return
    if settings.stacks:
        pyspy_dump_schedulers(scheduler_only=True)
    # If no pipe took the request, there is no core to wait for.
    if settings.cores and trigger_cuda_user_coredump(scheduler_only=True) and settings.core_wait_secs > 0:
        logger.info("Waiting %.1f seconds for CUDA coredumps before exiting.", settings.core_wait_secs)
        time.sleep(settings.core_wait_secs)


def _is_sglang_scheduler_process(proc: psutil.Process) -> bool:
    try:
        return " ".join(proc.cmdline()).startswith(_SCHEDULER)
    except (psutil.Error, OSError):
        return False


def _resolve_cuda_coredump_pipe_path(proc: psutil.Process) -> Path:
    """Return the path of the driver's pipe of `proc`; the time in it (``%t``) is known only from its open files."""
    template = crash_dump_environ().get("CUDA_COREDUMP_PIPE", "corepipe.cuda.%h.%p")
    known = template.replace("%h", platform.node()).replace("%p", str(proc.pid))
    if "%t" in known:
        name = re.compile(re.escape(Path(known).name).replace("%t", r"\d+"))
        for _link, opened in procfs.open_files(proc.pid):
            if name.fullmatch(opened.name):
                return opened
    path = Path(known.replace("%t", str(int(time.time()))))
    if path.is_absolute():
        return path
    try:
        return Path(proc.cwd()) / path
    except (psutil.Error, OSError):
        return Path.cwd() / path


def _targets(scheduler_only: bool, if_none: str) -> list[psutil.Process]:
    # `if_none` is upstream's complete message, so that a search for it finds this code.
    if not scheduler_only:
        return [psutil.Process()]
    processes = collect_scheduler_processes()
    if not processes:
        logger.error(if_none)
    return processes


@never_raises
def _captured_by_handler() -> bool:
    answer = request("stacks_wanted", CAPTURE_WAIT_SECS)
    captured = answer.get("captured") if answer else None
    if not answer or not captured:
        return False
    logger.error("crash kit: stacks of %d processes are in incident %s", captured, answer.get("incident"))
    return True


def _dump_stack(pid: int, deadline: float) -> None:
    stat = procfs.read_stat(pid)
    attempts = [("--nonblocking", _SNAPSHOT_SECS)]
    if stat is None or stat.state not in _DEAF_STATES:
        # This stops the process, and waits forever for a process that does not answer ptrace.
        attempts.insert(0, ("--native", _NATIVE_SECS))
    for option, seconds in attempts:
        command = [find_pyspy() or "py-spy", "dump", option, "--pid", str(pid)]
        shown = " ".join(["py-spy", *command[1:]])
        remaining = min(seconds, deadline - time.monotonic())
        if remaining <= 0:
            break
        try:
            result = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=remaining
            )
        except subprocess.CalledProcessError as error:
            logger.error("Pyspy failed (%s). Error: %s", shown, error.stderr)
        except subprocess.TimeoutExpired:
            logger.error("Pyspy failed (%s). Error: killed after %.1f s", shown, remaining)
        except OSError as error:
            logger.error("Pyspy failed (%s). Error: %s; next: pip install py-spy", shown, error)
        else:
            logger.error("Pyspy dump for PID %s (%s):\n%s", pid, shown, result.stdout)
            return
    logger.error("All pyspy dump attempts failed for PID %s.", pid)


def _trigger(process: psutil.Process) -> bool:
    path = _resolve_cuda_coredump_pipe_path(process)
    try:
        # Non-blocking: opening a pipe without a reader would block forever.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, TRIGGER)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        logger.error(
            "CUDA coredump pipe not found for PID %s: %s. Ensure CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 was set before "
            "this process initialized CUDA.",
            process.pid,
            path,
        )
    except OSError as error:
        if error.errno == errno.ENXIO:
            logger.error("CUDA coredump pipe has no reader for PID %s: %s", process.pid, path)
        else:
            logger.exception("Failed to trigger CUDA user coredump for PID %s via %s", process.pid, path)
    else:
        logger.error("Triggered CUDA user coredump for PID %s via %s", process.pid, path)
        return True
    return False
