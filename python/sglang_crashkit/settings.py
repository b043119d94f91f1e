"""The environment variables that control the kit.

Truth values are read as SGLang reads them: ``1 true yes y`` and ``0 false no n``, in any case. A value that cannot be
read counts as unset: a typing error must not stop a server.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sglang_crashkit.kernel.procfs import key_of

SOCKET_VARIABLE = "SGLANG_CRASHKIT_SOCKET"
SPOOL_VARIABLE = "SGLANG_CRASHKIT_SPOOL"
LAUNCH_VARIABLE = "SGLANG_CRASHKIT_LAUNCHED"
MODE_VARIABLE = "SGLANG_CRASHKIT_MODE"
FLIGHT_VARIABLE = "SGLANG_CRASHKIT_FLIGHT_FOLDER"

MB = 1 << 20
_LIMITS = ("MAX_USE", "KEEP_FREE", "MAX_INCIDENT", "MAX_CORE")
MAX_USE, KEEP_FREE, MAX_INCIDENT, MAX_CORE = (f"SGLANG_CRASHKIT_{name}_MB" for name in _LIMITS)
#: The folder, in the fallback folder, of all runtime folders.
RUN = "run"
SOCKET = "handler.sock"
#: The longest name of a socket in the folder: a pid of 7 digits, a start time, a suffix.
_LONGEST_SOCKET = "4194304-123456789012.sock"
_MAX_SOCKET_PATH = 107
#: What tells others of an incident, or of a server.
_PUBLISHING = {
    *("SGLANG_CRASHKIT_ON_INCIDENT", "SGLANG_CRASHKIT_METRICS_FILE", "SGLANG_CRASHKIT_HTML"),
    "PROMETHEUS_MULTIPROC_DIR",
}
_TRUE = {"1", "true", "yes", "y"}
_FALSE = {"0", "false", "no", "n"}

_PREFIX = "SGLANG_CRASHKIT_"
_TRUTH = r"(?i)1|true|yes|y|0|false|no|n"
_NUMBER = r"\d{1,9}"
_SECONDS = r"\d+(\.\d*)?|\.\d+"
_ANY = r".*"
#: The variables that a user sets, each with what it may hold; a launch warns of any other (see `unknown_variables`).
VARIABLES = {
    "SGLANG_CRASHKIT_ENABLED": _TRUTH,
    "SGLANG_CRASHKIT_EXIT_STATUS": r"(?i)kit|upstream",
    "SGLANG_CRASHKIT_LOG_RECORDS": _NUMBER,
    "SGLANG_CRASHKIT_GPU_FACTS": _TRUTH,
    "SGLANG_CRASHKIT_TERMINATION_LOG": _ANY,
    "SGLANG_CRASHKIT_HANG_SECS": _SECONDS,
    "SGLANG_CRASHKIT_NATIVE": _TRUTH,
    "SGLANG_CRASHKIT_PYSPY": _ANY,
    "SGLANG_CRASHKIT_STACK_SIGNAL": _NUMBER,
    "SGLANG_CRASHKIT_EXIT_SECS": _SECONDS,
    "SGLANG_CRASHKIT_BUDGET_SECS": _SECONDS,
    "SGLANG_CRASHKIT_CAPTURE_SECS": _SECONDS,
    "SGLANG_CRASHKIT_END_SECS": _SECONDS,
    "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS": _SECONDS,
    "SGLANG_CRASHKIT_MAX_USE_MB": _SECONDS,
    "SGLANG_CRASHKIT_KEEP_FREE_MB": _SECONDS,
    "SGLANG_CRASHKIT_MAX_INCIDENT_MB": _SECONDS,
    "SGLANG_CRASHKIT_MAX_CORE_MB": _SECONDS,
    "SGLANG_CRASHKIT_MAX_INCIDENTS": _NUMBER,
    "SGLANG_CRASHKIT_MAX_AGE_DAYS": _SECONDS,
    "SGLANG_CRASHKIT_FULL_PER_FAULT": _NUMBER,
    "SGLANG_CRASHKIT_JOURNAL": _TRUTH,
    "SGLANG_CRASHKIT_JOURNAL_MB": _SECONDS,
    "SGLANG_CRASHKIT_STEPS": _TRUTH,
    "SGLANG_CRASHKIT_PROMPTS": r"(?i)full|ids|none",
    "SGLANG_CRASHKIT_METRICS_FILE": _ANY,
    "SGLANG_CRASHKIT_ON_INCIDENT": _ANY,
    "SGLANG_CRASHKIT_ON_INCIDENT_SECS": _SECONDS,
    "SGLANG_CRASHKIT_HTML": _TRUTH,
}
#: Those that the kit sets for its own processes.
OWN_VARIABLES = {
    *(SOCKET_VARIABLE, SPOOL_VARIABLE, LAUNCH_VARIABLE, MODE_VARIABLE, FLIGHT_VARIABLE),
    *("SGLANG_CRASHKIT_MEMBERS", "SGLANG_CRASHKIT_NOT_APPLIED"),
}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of `environ` that are named as the kit's, and that this version does not know, sorted."""
    return sorted(name for name in environ if name.startswith(_PREFIX) and name not in VARIABLES.keys() | OWN_VARIABLES)


def read_bool(environ: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the truth value of variable `name`, `default` where it is unset or unreadable."""
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    return default


def read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return variable `name` as seconds of 0 or more, `default` where it is unset or unreadable."""
    try:
        seconds = float(environ[name])
    except (KeyError, ValueError):
        return default
    return seconds if 0 <= seconds < float("inf") else default


def read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return variable `name` as a whole number of 0 or more, `default` where it is unset or unreadable."""
    value = environ.get(name, "").strip()
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else default


def read_megabytes(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return variable `name` as mebibytes, 1 to 1024; `default` where it is unset, unreadable or another number."""
    megabytes = read_seconds(environ, name, default)
    return megabytes if 1 <= megabytes <= 1024 else default


#: What is kept of prompts: all, token ids only, or nothing but how long they are.
Prompts = Literal["full", "ids", "none"]


def read_prompts(environ: Mapping[str, str]) -> Prompts:
    """Return ``SGLANG_CRASHKIT_PROMPTS``: ``full`` where it is unset, ``none`` where it is set to another word.

    Whoever sets it wants to keep something back, so a typing error keeps back all.
    """
    value = environ.get("SGLANG_CRASHKIT_PROMPTS", "").strip().lower()
    return "full" if value in ("", "full") else "ids" if value == "ids" else "none"


@dataclass(frozen=True)
class DiskLimits:
    """What the user allows, in bytes; None is the default.

    Attributes:
        max_use: ``SGLANG_CRASHKIT_MAX_USE_MB``; all incidents of a host together, with the GPU cores and request dumps
            beside them. By default 4096 MB, and at most a tenth of the file system.
        keep_free: ``SGLANG_CRASHKIT_KEEP_FREE_MB``; what incidents leave free on the file system. By default 1024 MB,
            and at most a twentieth of it.
        max_incident: ``SGLANG_CRASHKIT_MAX_INCIDENT_MB``; one incident, without what lies beside it. 256 MB by default.
        max_core: ``SGLANG_CRASHKIT_MAX_CORE_MB``; one GPU core. 4096 MB by default.
        max_count: ``SGLANG_CRASHKIT_MAX_INCIDENTS``; how many finished incidents of a host stay. 1000 by default, 0 for
            any number.
        max_age_secs: ``SGLANG_CRASHKIT_MAX_AGE_DAYS``, in seconds; older ones go when a new one comes. By default 0,
            for any age.
    """

    max_use: int | None = None
    keep_free: int | None = None
    max_incident: int = 256 * MB
    max_core: int = 4096 * MB
    max_count: int = 1000
    max_age_secs: float = 0.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> DiskLimits:
        """Read them from `environ`; a value that cannot be read counts as unset."""
        sizes = {name.lower(): read_seconds(environ, f"SGLANG_CRASHKIT_{name}_MB", -1.0) for name in _LIMITS}
        return cls(
            **{name: int(megabytes * MB) for name, megabytes in sizes.items() if megabytes >= 0},
            max_count=read_number(environ, "SGLANG_CRASHKIT_MAX_INCIDENTS", cls.max_count),
            max_age_secs=86400 * read_seconds(environ, "SGLANG_CRASHKIT_MAX_AGE_DAYS", cls.max_age_secs / 86400),
        )


@dataclass(frozen=True)
class Settings:
    """What the environment asks of the kit.

    Attributes:
        enabled: ``SGLANG_CRASHKIT_ENABLED``; the kit does nothing at all when false.
        stacks: ``SGLANG_PYSPY_DUMP_BEFORE_CRASH``; no stacks are taken when false.
        cores: ``SGLANG_CUDA_COREDUMP_BEFORE_CRASH``; no GPU core is asked for when false.
        core_wait_secs: ``SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS``; how long is waited for a GPU core to come or to
            grow on, in seconds, within `exit_secs`.
        budget_secs: ``SGLANG_CRASHKIT_BUDGET_SECS``; the longest an incident may take, in seconds.
        capture_secs: ``SGLANG_CRASHKIT_CAPTURE_SECS``; the longest that one round of stacks may take, in seconds.
        startup_timeout_secs: ``SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS``; the longest that the ranks may take to get
            ready, in seconds; 0 for no limit.
        end_secs: ``SGLANG_CRASHKIT_END_SECS``; the longest that the server's end may take once the evidence of a crash
            is whole, in seconds.
        hang_secs: ``SGLANG_CRASHKIT_HANG_SECS``; how long a scheduler that makes no progress is taken to be at work, in
            seconds; 0 where hangs are not looked for.
        native: ``SGLANG_CRASHKIT_NATIVE``; whether native stacks are taken, which stops each process for a moment. None
            where it is not set: of a server that hangs and will be ended for it.
        journal: ``SGLANG_CRASHKIT_JOURNAL``; no request is noted before a crash when false.
        log_records: ``SGLANG_CRASHKIT_LOG_RECORDS``; how many of its last log records each process keeps for an
            incident; 0 for none.
        journal_mb: ``SGLANG_CRASHKIT_JOURNAL_MB``; how much memory the journal of one process may take, in mebibytes,
            1 to 1024.
        steps: ``SGLANG_CRASHKIT_STEPS``; the schedulers keep no record of their last steps when false.
        full_per_fault: ``SGLANG_CRASHKIT_FULL_PER_FAULT``; how many incidents of the same fault a day are kept with all
            stacks; 0 for all.
        disk: what incidents may take of the disk.
        exit_secs: ``SGLANG_CRASHKIT_EXIT_SECS``; the longest that one end of the server may take with all that is
            waited for, in seconds.
        keeps_exit_status: ``SGLANG_CRASHKIT_EXIT_STATUS`` is ``upstream``; a crash ends the server with upstream's
            exit status.
        prompts: ``SGLANG_CRASHKIT_PROMPTS``; what the journal keeps of prompts.
        gpu_facts: ``SGLANG_CRASHKIT_GPU_FACTS``; the GPUs' driver is not asked when false.
        html: ``SGLANG_CRASHKIT_HTML``; each incident has a page of HTML, too, when true.
    """

    enabled: bool = True
    stacks: bool = True
    cores: bool = True
    core_wait_secs: float = 60.0
    budget_secs: float = 20.0
    capture_secs: float = 1.5
    startup_timeout_secs: float = 0.0
    end_secs: float = 15.0
    hang_secs: float = 60.0
    native: bool | None = None
    journal: bool = True
    journal_mb: float = 32.0
    steps: bool = True
    log_records: int = 200
    full_per_fault: int = 3
    disk: DiskLimits = field(default_factory=DiskLimits)
    exit_secs: float = 60.0
    keeps_exit_status: bool = False
    prompts: Prompts = "full"
    gpu_facts: bool = True
    html: bool = False

    @property
    def diagnostics(self) -> bool:
        """Whether any of upstream's diagnostics is wanted."""
        return self.stacks or self.cores

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from `environ`."""
        return cls(
            enabled=read_bool(environ, "SGLANG_CRASHKIT_ENABLED", cls.enabled),
            stacks=read_bool(environ, "SGLANG_PYSPY_DUMP_BEFORE_CRASH", cls.stacks),
            cores=read_bool(environ, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH", cls.cores),
            core_wait_secs=read_seconds(environ, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", cls.core_wait_secs),
            budget_secs=read_seconds(environ, "SGLANG_CRASHKIT_BUDGET_SECS", cls.budget_secs),
            capture_secs=read_seconds(environ, "SGLANG_CRASHKIT_CAPTURE_SECS", cls.capture_secs),
            startup_timeout_secs=read_seconds(
                environ, "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS", cls.startup_timeout_secs
            ),
            end_secs=read_seconds(environ, "SGLANG_CRASHKIT_END_SECS", cls.end_secs),
            hang_secs=read_seconds(environ, "SGLANG_CRASHKIT_HANG_SECS", cls.hang_secs),
            journal=read_bool(environ, "SGLANG_CRASHKIT_JOURNAL", cls.journal),
            journal_mb=read_megabytes(environ, "SGLANG_CRASHKIT_JOURNAL_MB", cls.journal_mb),
            steps=read_bool(environ, "SGLANG_CRASHKIT_STEPS", cls.steps),
            log_records=read_number(environ, "SGLANG_CRASHKIT_LOG_RECORDS", cls.log_records),
            full_per_fault=read_number(environ, "SGLANG_CRASHKIT_FULL_PER_FAULT", cls.full_per_fault),
            exit_secs=read_seconds(environ, "SGLANG_CRASHKIT_EXIT_SECS", cls.exit_secs),
            gpu_facts=read_bool(environ, "SGLANG_CRASHKIT_GPU_FACTS", cls.gpu_facts),
            html=read_bool(environ, "SGLANG_CRASHKIT_HTML", cls.html),
            native=_read_native(environ),
            disk=DiskLimits.from_environ(environ),
            keeps_exit_status=environ.get("SGLANG_CRASHKIT_EXIT_STATUS", "").strip().lower() == "upstream",
            prompts=read_prompts(environ),
        )


def _read_native(environ: Mapping[str, str]) -> bool | None:
    wanted = read_bool(environ, "SGLANG_CRASHKIT_NATIVE", True)
    # Unset or unreadable where the answer is whatever the default is.
    return wanted if wanted == read_bool(environ, "SGLANG_CRASHKIT_NATIVE", False) else None


def runtime_folder(server_pid: int, start_ticks: int) -> Path:
    """Return where the crash handler of a server keeps its socket, and the server's processes their hooks.

    It follows from what the kernel says of the server, so that a program outside it, in another PID namespace too,
    finds the handler of the server that it is about to end. It lies in the temporary folder because a socket's path may
    have 107 bytes only.
    """
    name = Path(RUN) / key_of(server_pid, start_ticks)
    folder = fallback_folder() / name
    if len(str(folder / _LONGEST_SOCKET)) > _MAX_SOCKET_PATH:
        folder = Path("/tmp") / fallback_folder().name / name  # noqa: S108 - a folder of our own with mode 0700
    return folder


def socket_path(server_pid: int, start_ticks: int) -> Path:
    """Return the path of the socket of the crash handler of a server; see `runtime_folder`."""
    return runtime_folder(server_pid, start_ticks) / SOCKET


def socket_of(server_pid: int) -> Path | None:
    """Return where the crash handler of a process has its socket, if there is one; None where the process is gone."""
    # A command that only reads incidents starts without it.
    from sglang_crashkit.kernel import procfs

    stat = procfs.read_stat(server_pid)
    return socket_path(server_pid, stat.start_ticks) if stat is not None else None


def unpublished(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a server whose incidents nobody is to be told of, as they are provoked."""
    kept = {name: value for name, value in environ.items() if name not in _PUBLISHING}
    return kept | {"SGLANG_CRASHKIT_TERMINATION_LOG": "0"}


def fallback_folder() -> Path:
    """Return the folder for incidents where no crash folder is set or it cannot be written to."""
    return Path(tempfile.gettempdir()) / f"sglang-crashkit-{os.getuid()}"
