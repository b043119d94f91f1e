"""The environment variables that control the kit.

Truth values are read as SGLang reads them. A value that cannot be read counts as unset: a typing error must not stop a
server.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from sglang_crashkit.kernel import procfs

SOCKET_VARIABLE = "SGLANG_CRASHKIT_SOCKET"
SPOOL_VARIABLE = "SGLANG_CRASHKIT_SPOOL"
LAUNCH_VARIABLE = "SGLANG_CRASHKIT_LAUNCHED"
MODE_VARIABLE = "SGLANG_CRASHKIT_MODE"
FLIGHT_VARIABLE = "SGLANG_CRASHKIT_FLIGHT_FOLDER"

MB = 1 << 20
MAX_USE, KEEP_FREE = "SGLANG_CRASHKIT_MAX_USE_MB", "SGLANG_CRASHKIT_KEEP_FREE_MB"
MAX_INCIDENT, MAX_CORE = "SGLANG_CRASHKIT_MAX_INCIDENT_MB", "SGLANG_CRASHKIT_MAX_CORE_MB"
#: The folder, in the fallback folder, of all runtime folders.
RUN = "run"
SOCKET = "handler.sock"
#: Beside it: a server that had lost its crash handler ended in good order.
ENDED = "ended"
#: The longest name of a socket in the folder: a pid of 7 digits, a start time, a suffix.
_LONGEST_SOCKET = "4194304-123456789012.sock"
_MAX_SOCKET_PATH = 107
#: What tells others of an incident, or of a server.
_PUBLISHING = {
    *("SGLANG_CRASHKIT_ON_INCIDENT", "SGLANG_CRASHKIT_METRICS_FILE"),
    "PROMETHEUS_MULTIPROC_DIR",
}
_PREFIX = "SGLANG_CRASHKIT_"

#: What is kept of prompts: all, token ids only, or nothing but how long they are.
Prompts = Literal["full", "ids", "none"]
_T = TypeVar("_T")
_D = TypeVar("_D")


@dataclass(frozen=True)
class _Kind(Generic[_T]):
    """What a variable may hold."""

    form: str  # a regular expression, for lower case
    meaning: Callable[[str], _T | None]  # of a value of that form; None where it counts as unset
    otherwise: _T | None = None  # what a value of another form means; None where it counts as unset

    def read(self, environ: Mapping[str, str], name: str, default: _D) -> _T | _D:
        """Return what variable `name` says, `default` where it is unset or counts as unset."""
        value = environ.get(name, "").strip().lower()
        if not value:
            return default
        found = self.meaning(value) if re.fullmatch(self.form, value) else self.otherwise
        return default if found is None else found


_TRUTH = _Kind("1|true|yes|y|0|false|no|n", lambda word: word[0] in "1ty")
_NUMBER = _Kind(r"\d{1,9}", int)
_SECONDS = _Kind(r"\d{1,18}(\.\d*)?|\.\d+", float)
_DAYS = _Kind(_SECONDS.form, lambda days: 86400 * float(days))
_MEGABYTES = _Kind(_SECONDS.form, lambda size: int(float(size) * MB))
_JOURNAL_SIZE = _Kind(_SECONDS.form, lambda size: float(size) if 1 <= float(size) <= 1024 else None)
_STATUS = _Kind("kit|upstream", lambda word: word == "upstream")
# Who sets it wants to keep something back, so a typing error keeps back all.
_PROMPTS = _Kind[Prompts]("full|ids|none", lambda word: cast("Prompts", word), otherwise="none")

read_bool, read_number, read_seconds = _TRUTH.read, _NUMBER.read, _SECONDS.read


def _setting(name: str, kind: _Kind[Any], default: Any) -> Any:
    return field(default=default, metadata={"name": name, "kind": kind})


def _read_fields(owner: type, environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        one.name: one.metadata["kind"].read(environ, one.metadata["name"], one.default)
        for one in fields(owner)
        if one.metadata
    }


@dataclass(frozen=True)
class DiskLimits:
    """What the user allows; sizes are in bytes, and None is the default."""

    #: All incidents of a host together, with the GPU cores and request dumps beside them. By default 4096 MB, and at
    #: most a tenth of the file system.
    max_use: int | None = _setting(MAX_USE, _MEGABYTES, None)
    #: What incidents leave free on the file system. By default 1024 MB, and at most a twentieth of it.
    keep_free: int | None = _setting(KEEP_FREE, _MEGABYTES, None)
    max_incident: int = _setting(MAX_INCIDENT, _MEGABYTES, 256 * MB)  # one incident, without what lies beside it
    max_core: int = _setting(MAX_CORE, _MEGABYTES, 4096 * MB)  # one GPU core
    #: How many finished incidents of a host stay; 0 for any number.
    max_count: int = _setting("SGLANG_CRASHKIT_MAX_INCIDENTS", _NUMBER, 1000)
    #: Older ones go when a new one comes; 0 for any age.
    max_age_secs: float = _setting("SGLANG_CRASHKIT_MAX_AGE_DAYS", _DAYS, 0.0)


@dataclass(frozen=True)
class Settings:
    """What the environment asks of the kit; times are in seconds."""

    #: The kit does nothing at all when false.
    enabled: bool = _setting("SGLANG_CRASHKIT_ENABLED", _TRUTH, True)
    #: No stacks are taken when false.
    stacks: bool = _setting("SGLANG_PYSPY_DUMP_BEFORE_CRASH", _TRUTH, True)
    #: No GPU core is asked for when false.
    cores: bool = _setting("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", _TRUTH, True)
    #: How long is waited for a GPU core to come or to grow on, within `exit_secs`.
    core_wait_secs: float = _setting("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", _SECONDS, 60.0)
    #: The longest an incident may take.
    budget_secs: float = _setting("SGLANG_CRASHKIT_BUDGET_SECS", _SECONDS, 20.0)
    #: The longest that one round of stacks may take.
    capture_secs: float = _setting("SGLANG_CRASHKIT_CAPTURE_SECS", _SECONDS, 1.5)
    #: The longest that the ranks may take to get ready; 0 for no limit.
    startup_timeout_secs: float = _setting("SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS", _SECONDS, 0.0)
    #: The longest that the server's end may take once the evidence of a crash is whole.
    end_secs: float = _setting("SGLANG_CRASHKIT_END_SECS", _SECONDS, 15.0)
    #: After how long without a sign a scheduler counts as one that hangs; 0 where hangs are not looked for.
    hang_secs: float = _setting("SGLANG_CRASHKIT_HANG_SECS", _SECONDS, 60.0)
    #: Whether native stacks are taken, which stops each process for a moment; None: of a server that hangs and will be
    #: ended for it.
    native: bool | None = _setting("SGLANG_CRASHKIT_NATIVE", _TRUTH, None)
    #: No request is noted before a crash when false.
    journal: bool = _setting("SGLANG_CRASHKIT_JOURNAL", _TRUTH, True)
    #: How much memory the journal of one process may take, in mebibytes, 1 to 1024.
    journal_mb: float = _setting("SGLANG_CRASHKIT_JOURNAL_MB", _JOURNAL_SIZE, 32.0)
    #: The schedulers keep no record of their last steps when false.
    steps: bool = _setting("SGLANG_CRASHKIT_STEPS", _TRUTH, True)
    #: How many of its last log records each process keeps for an incident; 0 for none.
    log_records: int = _setting("SGLANG_CRASHKIT_LOG_RECORDS", _NUMBER, 200)
    #: How many incidents of the same fault a day are kept with all stacks; 0 for all.
    full_per_fault: int = _setting("SGLANG_CRASHKIT_FULL_PER_FAULT", _NUMBER, 3)
    #: What incidents may take of the disk.
    disk: DiskLimits = field(default_factory=DiskLimits)
    #: The longest that one end of the server may take with all that is waited for.
    exit_secs: float = _setting("SGLANG_CRASHKIT_EXIT_SECS", _SECONDS, 60.0)
    #: A crash ends the server with upstream's exit status.
    keeps_exit_status: bool = _setting("SGLANG_CRASHKIT_EXIT_STATUS", _STATUS, False)
    #: What the journal keeps of prompts.
    prompts: Prompts = _setting("SGLANG_CRASHKIT_PROMPTS", _PROMPTS, "full")  # noqa: RUF009 - a field
    #: The GPUs' driver is not asked when false.
    gpu_facts: bool = _setting("SGLANG_CRASHKIT_GPU_FACTS", _TRUTH, True)

    @property
    def diagnostics(self) -> bool:
        """Whether any of upstream's diagnostics is wanted."""
        return self.stacks or self.cores

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from `environ`."""
        return cls(**_read_fields(cls, environ), disk=DiskLimits(**_read_fields(DiskLimits, environ)))


#: The variables that a user sets, each with what it may hold; a launch warns of any other (see `unknown_variables`).
VARIABLES: dict[str, str] = {
    one.metadata["name"]: f"(?i){one.metadata['kind'].form}"
    for one in (*fields(Settings), *fields(DiskLimits))
    if one.metadata.get("name", "").startswith(_PREFIX)
} | {
    "SGLANG_CRASHKIT_TERMINATION_LOG": ".*",
    "SGLANG_CRASHKIT_PYSPY": ".*",
    "SGLANG_CRASHKIT_METRICS_FILE": ".*",
    "SGLANG_CRASHKIT_ON_INCIDENT": ".*",
    "SGLANG_CRASHKIT_ON_INCIDENT_SECS": _SECONDS.form,
}
#: Those that the kit sets for its own processes.
OWN_VARIABLES = {
    *(SOCKET_VARIABLE, SPOOL_VARIABLE, LAUNCH_VARIABLE, MODE_VARIABLE, FLIGHT_VARIABLE),
    *("SGLANG_CRASHKIT_MEMBERS", "SGLANG_CRASHKIT_NOT_APPLIED"),
}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of `environ` that are named as the kit's, and that this version does not know, sorted."""
    return sorted(name for name in environ if name.startswith(_PREFIX) and name not in VARIABLES.keys() | OWN_VARIABLES)


def runtime_folder(server_pid: int, start_ticks: int) -> Path:
    """Return where the crash handler of a server keeps its socket, and the server's processes their hooks.

    It follows from what the kernel says of the server, so that a program outside it, in another PID namespace too,
    finds the handler of the server that it is about to end. It lies in the temporary folder because a socket's path may
    have 107 bytes only.
    """
    name = Path(RUN) / procfs.key_of(server_pid, start_ticks)
    folder = fallback_folder() / name
    if len(str(folder / _LONGEST_SOCKET)) > _MAX_SOCKET_PATH:
        folder = Path("/tmp") / fallback_folder().name / name  # noqa: S108 - a folder of our own with mode 0700
    return folder


def socket_of(server_pid: int) -> Path | None:
    """Return where the crash handler of a process has its socket, if there is one; None where the process is gone."""
    stat = procfs.read_stat(server_pid)
    return runtime_folder(server_pid, stat.start_ticks) / SOCKET if stat is not None else None


#: What this process put into its environment for its children, and its pid.
_published: dict[str, tuple[int, str]] = {}


def publish(name: str, value: str) -> None:
    """Have this process and its children find something by a variable."""
    os.environ[name] = value
    _published[name] = os.getpid(), value


def published(name: str) -> str:
    """Return what was published, here or by the process that started this one; empty without that.

    A program may take back what a launch put into its environment.
    """
    pid, value = _published.get(name, (0, ""))
    return value if pid == os.getpid() else os.environ.get(name, "")


def withdraw(name: str) -> None:
    """Take back what was published."""
    os.environ.pop(name, None)
    _published.pop(name, None)


def unpublished(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a server whose incidents are not to be reported, as they are provoked."""
    kept = {name: value for name, value in environ.items() if name not in _PUBLISHING}
    return kept | {"SGLANG_CRASHKIT_TERMINATION_LOG": "0"}


def fallback_folder() -> Path:
    """Return the folder for incidents where no crash folder is set or it cannot be written to."""
    return Path(tempfile.gettempdir()) / f"sglang-crashkit-{os.getuid()}"
