"""The environment variables that control the kit.

Truth values are read as SGLang reads them. An invalid value counts as unset: a typing error must not stop a server.
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
#: The folder in the fallback folder that has all runtime folders.
RUN = "run"
SOCKET = "handler.sock"
#: A file beside the socket: the server had lost its crash handler, and ended in good order.
ENDED = "ended"
#: The longest name of a socket in the folder: a pid of 7 digits, a start time, a suffix.
_LONGEST_SOCKET = "4194304-123456789012.sock"
_MAX_SOCKET_PATH = 107
#: Variables by which incidents, or a server, are reported to other programs.
_PUBLISHING = {
    *("SGLANG_CRASHKIT_ON_INCIDENT", "SGLANG_CRASHKIT_METRICS_FILE"),
    "PROMETHEUS_MULTIPROC_DIR",
}
_PREFIX = "SGLANG_CRASHKIT_"

#: What is kept of prompts: all, token ids only, or only their lengths.
Prompts = Literal["full", "ids", "none"]
_T = TypeVar("_T")
_D = TypeVar("_D")


@dataclass(frozen=True)
class _Kind(Generic[_T]):
    """The values that a variable may have, and their meaning."""

    form: str  # a regular expression for the value in lower case
    meaning: Callable[[str], _T | None]  # of a value of that form; None if it counts as unset
    otherwise: _T | None = None  # the meaning of a value of another form; None if it counts as unset

    def read(self, environ: Mapping[str, str], name: str, default: _D) -> _T | _D:
        """Return the meaning of variable `name`; `default` if it is unset or counts as unset."""
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
# A user who sets it wants to withhold something, so a typing error withholds all.
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
    """The disk space that the user allows; sizes are in bytes, and None stands for the default."""

    #: All incidents of a host together, with the GPU cores and request dumps beside them. By default 4096 MB, and at
    #: most a tenth of the file system.
    max_use: int | None = _setting(MAX_USE, _MEGABYTES, None)
    #: The space that incidents leave free on the file system. By default 1024 MB, and at most a twentieth of it.
    keep_free: int | None = _setting(KEEP_FREE, _MEGABYTES, None)
    max_incident: int = _setting(MAX_INCIDENT, _MEGABYTES, 256 * MB)  # one incident, without files beside it
    max_core: int = _setting(MAX_CORE, _MEGABYTES, 4096 * MB)  # one GPU core
    #: The maximum number of finished incidents of a host; 0 for no limit.
    max_count: int = _setting("SGLANG_CRASHKIT_MAX_INCIDENTS", _NUMBER, 1000)
    #: Incidents older than this are removed when a new one comes; 0 for no limit.
    max_age_secs: float = _setting("SGLANG_CRASHKIT_MAX_AGE_DAYS", _DAYS, 0.0)


@dataclass(frozen=True)
class Settings:
    """The settings in the environment; times are in seconds."""

    #: The kit does nothing at all when false.
    enabled: bool = _setting("SGLANG_CRASHKIT_ENABLED", _TRUTH, True)
    #: No stacks are captured when false.
    stacks: bool = _setting("SGLANG_PYSPY_DUMP_BEFORE_CRASH", _TRUTH, True)
    #: No GPU core is requested when false.
    cores: bool = _setting("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", _TRUTH, True)
    #: The longest wait for a GPU core to appear or to grow, within `exit_secs`.
    core_wait_secs: float = _setting("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", _SECONDS, 60.0)
    #: The longest an incident may take.
    budget_secs: float = _setting("SGLANG_CRASHKIT_BUDGET_SECS", _SECONDS, 20.0)
    #: The longest that one round of capturing stacks may take.
    capture_secs: float = _setting("SGLANG_CRASHKIT_CAPTURE_SECS", _SECONDS, 1.5)
    #: The longest that the ranks may take to get ready; 0 for no limit.
    startup_timeout_secs: float = _setting("SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS", _SECONDS, 0.0)
    #: The longest that the server's end may take once the evidence of a crash is complete.
    end_secs: float = _setting("SGLANG_CRASHKIT_END_SECS", _SECONDS, 15.0)
    #: A scheduler without a heartbeat for this long counts as hanging; 0 turns the detection of hangs off.
    hang_secs: float = _setting("SGLANG_CRASHKIT_HANG_SECS", _SECONDS, 60.0)
    #: Whether native stacks are captured, which stops each process for a moment; None: only those of a server that
    #: hangs and will be ended because of it.
    native: bool | None = _setting("SGLANG_CRASHKIT_NATIVE", _TRUTH, None)
    #: No request is recorded before a crash when false.
    journal: bool = _setting("SGLANG_CRASHKIT_JOURNAL", _TRUTH, True)
    #: How much memory the journal of one process may take, in mebibytes, 1 to 1024.
    journal_mb: float = _setting("SGLANG_CRASHKIT_JOURNAL_MB", _JOURNAL_SIZE, 32.0)
    #: The schedulers keep no record of their last steps when false.
    steps: bool = _setting("SGLANG_CRASHKIT_STEPS", _TRUTH, True)
    #: How many of its last log records each process keeps for an incident; 0 for none.
    log_records: int = _setting("SGLANG_CRASHKIT_LOG_RECORDS", _NUMBER, 200)
    #: How many incidents of the same fault are kept with all stacks each day; 0 for all.
    full_per_fault: int = _setting("SGLANG_CRASHKIT_FULL_PER_FAULT", _NUMBER, 3)
    #: The disk space that incidents may take.
    disk: DiskLimits = field(default_factory=DiskLimits)
    #: The longest that one end of the server may take, including all waits.
    exit_secs: float = _setting("SGLANG_CRASHKIT_EXIT_SECS", _SECONDS, 60.0)
    #: A crash ends the server with upstream's exit status when true.
    keeps_exit_status: bool = _setting("SGLANG_CRASHKIT_EXIT_STATUS", _STATUS, False)
    #: What the journal keeps of prompts.
    prompts: Prompts = _setting("SGLANG_CRASHKIT_PROMPTS", _PROMPTS, "full")  # noqa: RUF009 - a field
    #: The GPUs' driver is not queried when false.
    gpu_facts: bool = _setting("SGLANG_CRASHKIT_GPU_FACTS", _TRUTH, True)

    @property
    def diagnostics(self) -> bool:
        """Whether any of upstream's diagnostics is on."""
        return self.stacks or self.cores

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from `environ`."""
        return cls(**_read_fields(cls, environ), disk=DiskLimits(**_read_fields(DiskLimits, environ)))


#: The variables that a user may set, each with a regular expression for its values; a launch warns of any other.
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
#: Variables that the kit sets for its own processes.
OWN_VARIABLES = {
    *(SOCKET_VARIABLE, SPOOL_VARIABLE, LAUNCH_VARIABLE, MODE_VARIABLE, FLIGHT_VARIABLE),
    *("SGLANG_CRASHKIT_MEMBERS", "SGLANG_CRASHKIT_NOT_APPLIED"),
}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of `environ` with the kit's prefix that this version does not know, sorted."""
    return sorted(name for name in environ if name.startswith(_PREFIX) and name not in VARIABLES.keys() | OWN_VARIABLES)


def runtime_folder(server_pid: int, start_ticks: int) -> Path:
    """Return the folder with the socket of a server's crash handler, and with the hooks of the server's processes.

    The path follows from the kernel's data about the server, so that a program outside it, even in another PID
    namespace, finds the handler of the server that it is about to end. It is in the temporary folder because a socket's
    path is limited to 107 bytes.
    """
    name = Path(RUN) / procfs.key_of(server_pid, start_ticks)
    folder = fallback_folder() / name
    if len(str(folder / _LONGEST_SOCKET)) > _MAX_SOCKET_PATH:
        folder = Path("/tmp") / fallback_folder().name / name  # noqa: S108 - a folder of our own with mode 0700
    return folder


def socket_of(server_pid: int) -> Path | None:
    """Return the path for the socket of a process's crash handler, which may be absent; None if the process is gone."""
    stat = procfs.read_stat(server_pid)
    return runtime_folder(server_pid, stat.start_ticks) / SOCKET if stat is not None else None


#: The values that this process published to its children, by variable, each with this process's pid.
_published: dict[str, tuple[int, str]] = {}


def publish(name: str, value: str) -> None:
    """Publish a value to this process and its children by an environment variable."""
    os.environ[name] = value
    _published[name] = os.getpid(), value


def published(name: str) -> str:
    """Return the value that this process, or the one that started it, published; empty if absent.

    A program may remove the variables that a launch set in its environment; this process still has its own values.
    """
    pid, value = _published.get(name, (0, ""))
    return value if pid == os.getpid() else os.environ.get(name, "")


def withdraw(name: str) -> None:
    """Remove a published value."""
    os.environ.pop(name, None)
    _published.pop(name, None)


def unpublished(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a server with provoked incidents, which must not be reported to other programs."""
    kept = {name: value for name, value in environ.items() if name not in _PUBLISHING}
    return kept | {"SGLANG_CRASHKIT_TERMINATION_LOG": "0"}


def fallback_folder() -> Path:
    """Return the folder for incidents if no crash folder is set, or if that cannot be written to."""
    return Path(tempfile.gettempdir()) / f"sglang-crashkit-{os.getuid()}"
