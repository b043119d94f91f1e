"""Tell Prometheus how the server and its crash handler are: in SGLang's own ``/metrics``, and in a file.

SGLang's ``/metrics`` shows what the processes of the server keep in a folder (``PROMETHEUS_MULTIPROC_DIR``), which the
crash handler inherits; so it needs no hook. See "Multiprocess Mode" of prometheus_client, and its ``mmap_dict.py``. The
files are written here because that library, which maps its files, ends its process by SIGBUS on a full disk, and takes
memory that the crash handler has not. The other file, for the textfile collector of node_exporter, is text; see
"Text-based format" in Prometheus' documentation.

What is counted on disk is counted by a short-lived child, as that disk may not answer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import stat
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import setproctitle

from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.folders import start_alone
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.session import Session
from sglang_crashkit.incident.retention import limits_on, use_of
from sglang_crashkit.incident.store import is_finished, parse_name
from sglang_crashkit.incident.summary import mapping_of
from sglang_crashkit.kernel.private_files import write_private
from sglang_crashkit.settings import DiskLimits

logger = logging.getLogger(__name__)

FILE, SHARED = "SGLANG_CRASHKIT_METRICS_FILE", "PROMETHEUS_MULTIPROC_DIR"
#: Prometheus asks every 15 to 60 s.
INTERVAL_SECS = 15.0
_FIRST_SECS = 2.0
#: At its end the handler waits so long for the last file, in seconds.
_LAST_SECS = 1.0
#: So many incidents are read for their cause at a time; the rest follow.
_MAX_READ = 100
_MAX_KNOWN = 10_000
_MAX_BYTES = 1 << 20
_UNREAD = "unread"
_PREFIX = "sglang_crashkit_"
_READABLE = 0o644
_CHECK_SECS = 10.0
#: Has the library that is installed read a folder, and print what ``/metrics`` would say.
_CHECK = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry, path=sys.argv[1])
sys.stdout.write(generate_latest(registry).decode())
"""

Type = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Metric:
    """A metric with its samples, each of labels and a value; the name of a counter ends with ``_total``."""

    name: str
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]
    type: Type = "gauge"


def format_text(metrics: Iterable[Metric]) -> str:
    """Return metrics as text; one without samples is left out."""
    lines = []
    for metric in metrics:
        if metric.samples:
            lines += [f"# HELP {metric.name} {_escape(metric.help)}", f"# TYPE {metric.name} {metric.type}"]
        lines += [f"{metric.name}{_format_labels(labels)} {value!r}" for labels, value in metric.samples]
    return "".join(f"{line}\n" for line in lines)


def shared_files(metrics: Iterable[Metric], owner: int, seconds: float) -> dict[str, bytes]:
    """Return the files of prometheus_client's multiprocess mode by name.

    Args:
        metrics: all of them.
        owner: the pid in the names; what one process writes replaces what it wrote before.
        seconds: when they were measured, since the epoch.
    """
    entries: dict[Type, list[bytes]] = {"gauge": [], "counter": []}
    for metric in metrics:
        # The library adds the ending to a counter's name itself.
        family = metric.name.removesuffix("_total")
        for labels, value in metric.samples:
            key = json.dumps([family, metric.name, dict(labels), metric.help], sort_keys=True).encode()
            padded = key + b" " * (8 - (len(key) + 4) % 8)
            entries[metric.type].append(struct.pack(f"=i{len(padded)}sdd", len(key), padded, value, seconds))
    files = {type_: b"".join(its) for type_, its in entries.items()}
    files = {type_: struct.pack("=ii", 8 + len(body), 0) + body for type_, body in files.items()}
    # Live: a reader that lists a file which is gone when it opens it passes over it.
    return {f"gauge_livemostrecent_{owner}.db": files["gauge"], f"counter_{owner}.db": files["counter"]}


def problem_of_shared(files: Mapping[str, bytes], metrics: Iterable[Metric]) -> str:
    """Return why the prometheus_client that is installed would not read these files; empty where it reads them right.

    What it cannot read would take all of a server's ``/metrics`` with it.
    """
    with tempfile.TemporaryDirectory(prefix="crashkit-metrics-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        argv = [sys.executable, "-c", _CHECK, folder]
        done = run_tool(argv, _CHECK_SECS, apart=True)
    if done.status is None:
        return f"prometheus_client could not be asked: {done.reason}"
    if done.status:
        return f"prometheus_client cannot read what is shared: {done.errors.strip().splitlines()[-1:]}"
    read = {line.partition(" ")[0].partition("{")[0] for line in done.text.splitlines() if line[:1] != "#"}
    missing = sorted({metric.name for metric in metrics if metric.samples} - read)
    return f"prometheus_client reads no {', '.join(missing)}" if missing else ""


def _format_labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{_escape(value, quoted=True)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escape(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


@dataclass(frozen=True)
class Measured:
    """What the handler knows without a disk.

    Attributes:
        port: which server it is, of those on this host.
        is_up: the handler lives.
        seconds: when it was measured, since the epoch.
        signs: when each rank gave its last sign, and `steps` when it began its last batch, since the epoch.
        steps: see above.
        journal_bytes: what the request journals take of memory.
    """

    port: str
    is_up: bool
    seconds: float
    signs: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    journal_bytes: int = 0


@dataclass(frozen=True)
class OnDisk:
    """What is known of the incidents of this host.

    Attributes:
        causes: the class of the cause of each, by the name of its folder.
        is_known: the folder could be read, or there is none yet.
        bytes: what they take; None where that cannot be told, as `limit`, what they may take.
        limit: see above.
    """

    causes: Mapping[str, str]
    bytes: int | None = None
    limit: int | None = None
    is_known: bool = True


def metrics_of(measured: Measured, disk: OnDisk) -> list[Metric]:
    """Return what Prometheus is told."""
    own = {"port": measured.port}

    def one(name: str, words: str, value: float | None) -> Metric:
        return Metric(_PREFIX + name, words, () if value is None else ((own, float(value)),))

    def by_rank(name: str, words: str, values: Mapping[str, float]) -> Metric:
        return Metric(_PREFIX + name, words, tuple((own | {"rank": rank}, at) for rank, at in sorted(values.items())))

    names = {name: parsed for name in disk.causes if (parsed := parse_name(name)) is not None}
    counts = Counter((parsed.kind, disk.causes[name]) for name, parsed in names.items())
    latest = max((parsed.seconds for parsed in names.values()), default=0.0)
    incidents = tuple((own | {"kind": kind, "cause": cause}, float(n)) for (kind, cause), n in sorted(counts.items()))
    return [
        one("handler_up", "Whether the crash handler is at work.", measured.is_up),
        one("updated_timestamp_seconds", "When the crash handler said so last.", measured.seconds),
        Metric(f"{_PREFIX}incidents", "Incidents of this host that are kept, by kind and cause.", incidents),
        one(
            "last_incident_timestamp_seconds",
            "When the latest incident began, 0 without any.",
            latest if disk.is_known else None,
        ),
        by_rank("rank_last_sign_timestamp_seconds", "When the rank's event loop last went round.", measured.signs),
        by_rank("rank_last_step_timestamp_seconds", "When the rank began its last batch.", measured.steps),
        one("journal_bytes", "Memory that the request journals take.", measured.journal_bytes),
        one("disk_bytes", "What incidents, cores and request dumps take of the disk.", disk.bytes),
        one("disk_limit_bytes", "What they may take before the oldest go.", disk.limit),
    ]


def look_at_disk(incidents: Path, known: Mapping[str, str], limits: DiskLimits) -> OnDisk:
    """Return what there is in a folder of incidents, some of whose causes were read before, by their folders' names."""
    try:
        names = sorted((path.name for path in incidents.iterdir() if is_finished(path.name)), reverse=True)[:_MAX_KNOWN]
        new = [name for name in names if name not in known][:_MAX_READ]
        read = {name: _cause_of(incidents / name) for name in new}
        causes = {name: read.get(name) or known.get(name) or _UNREAD for name in names}
        return OnDisk(causes, use_of(incidents), limits_on(incidents, limits)[0])
    except OSError as error:
        # Of a disk that is gone nobody may take it that nothing happened.
        return OnDisk({}, is_known=isinstance(error, FileNotFoundError) and incidents.parent.is_dir())


def _cause_of(incident: Path) -> str:
    try:
        document = json.loads((incident / "incident.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return "unknown"
    return str(mapping_of(mapping_of(document).get("cause")).get("class") or "unknown")


def write_metrics_file(target: Path, metrics: list[Metric], port: str) -> None:
    """Write the file for node_exporter, which runs as another user; in a folder each server of the host has its own.

    Raises:
        CrashkitError: there is something that is no file, such as a device, which is not replaced.
        OSError: it cannot be written.
    """
    path = target / f"sglang_crashkit_{port}.prom" if target.is_dir() else target
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CrashkitError(f"{path} is there and is no file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write_private(temporary, format_text(metrics).encode())
        temporary.chmod(_READABLE)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class MetricsPublisher:
    """Measures and publishes every `INTERVAL_SECS`, where anybody wants that; `incidents` is this host's folder."""

    def __init__(self, tree: ProcessTree, session: Session, incidents: Path, limits: DiskLimits) -> None:
        self._tree, self._session, self._incidents, self._limits = tree, session, incidents, limits
        self._file = os.environ.get(FILE, "").strip()
        self._shared = os.environ.get(SHARED, "").strip()
        self._port = ""
        # Nobody else's: the server's processes have files of their own pids in the same folder.
        self._owner = os.getpid()
        self._causes: dict[str, str] = {}
        self._child: tuple[int, int] | None = None  # pid, and the descriptor of what it says
        self._is_checked = False
        # The server tells of its arguments, by which it is named, within this time.
        self._due = time.monotonic() + _FIRST_SECS if self._file or self._shared else float("inf")

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        return self._due

    def act_on_time(self) -> None:
        """Publish, where it is time to."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + INTERVAL_SECS
        if not self._reap():
            return
        arguments = self._session.received.environment.arguments()
        self._port = str(arguments.get("port") or self._port or 0)
        # Whoever has set the variable for other programs does not want this.
        shared = Path(self._shared) if self._shared and arguments.get("enable_metrics") else None
        if shared is not None or self._file:
            self._publish(self._measure(), shared)

    def close(self) -> None:
        """Say in the file that the handler is at work no more; nobody asks the server itself by now."""
        self._reap(kill=True)
        if self._file and self._port:
            self._publish(Measured(self._port, False, time.time()), None)
            self._reap(_LAST_SECS, kill=True)

    def _measure(self) -> Measured:
        now, clock = time.time(), time.monotonic()
        signs: dict[str, float] = {}
        steps: dict[str, float] = {}
        for pid, sign in self._session.received.heartbeats.last_signs().items():
            process = self._tree.get(pid)
            if process is not None and process.exited_at is None and not sign.is_off:
                rank = process.title.removeprefix("sglang::scheduler").strip("_") or "TP0"
                signs[rank] = now - clock + sign.at
                steps |= {rank: now - clock + sign.batch_at} if sign.batch_at else {}
        journals = self._session.received.journal_bytes()
        return Measured(self._port, True, now, signs, steps, journals)

    def _publish(self, measured: Measured, shared: Path | None) -> None:
        """Have a child look at the disk and write."""
        self._child = start_alone(functools.partial(self._say, measured, shared))
        os.set_blocking(self._child[1], False)

    def _say(self, measured: Measured, shared: Path | None) -> bytes:
        try:
            setproctitle.setproctitle("crashkit_metrics")
            for _standard in range(3):
                os.open(os.devnull, os.O_RDWR)
            said = self._work(measured, shared)
        except BaseException as error:  # noqa: BLE001 - of this process nothing else is left
            said = {"problem": f"{type(error).__name__}: {error}"[:500]}
        return json.dumps(said).encode()

    def _work(self, measured: Measured, shared: Path | None) -> dict[str, Any]:
        disk = look_at_disk(self._incidents, self._causes, self._limits)
        metrics = metrics_of(measured, disk)
        problem, is_checked = "", False
        if shared is not None and shared.is_dir():
            files = shared_files(metrics, self._owner, measured.seconds)
            problem = "" if self._is_checked else problem_of_shared(files, metrics)
            is_checked = not problem
            for name, data in files.items() if is_checked else ():
                write_private(shared / name, data)
        file_problem = ""
        if self._file:
            try:
                write_metrics_file(Path(self._file), metrics, measured.port)
            except CrashkitError as error:
                file_problem = str(error)
        new = {name: cause for name, cause in disk.causes.items() if name not in self._causes and cause != _UNREAD}
        return {"causes": new, "shared_problem": problem, "file_problem": file_problem, "checked": is_checked}

    def _reap(self, wait_secs: float = 0.0, *, kill: bool = False) -> bool:
        """Take in what the child said, and say whether there is none any more."""
        if self._child is None:
            return True
        pid, pipe = self._child
        deadline = time.monotonic() + wait_secs
        while not (has_ended := _has_ended(pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not has_ended:
            # The disk does not answer.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if not kill:
                return False
        self._child = None
        try:
            said = json.loads(os.read(pipe, _MAX_BYTES) or b"{}")
        except (OSError, ValueError):
            said = {}
        finally:
            os.close(pipe)
        self._take(said)
        return True

    def _take(self, said: Mapping[str, Any]) -> None:
        if said.get("problem"):
            logger.warning("metrics could not be published: %s", said["problem"])
        if said.get("file_problem"):
            logger.warning("%s names no file for metrics: %s", FILE, said["file_problem"])
            self._file = ""
        if said.get("shared_problem"):
            logger.warning("nothing is added to /metrics: %s", said["shared_problem"])
            self._shared = ""
        elif said.get("checked"):
            self._is_checked = True
        if isinstance(said.get("causes"), dict):
            self._causes = dict(list((self._causes | said["causes"]).items())[-_MAX_KNOWN:])


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        # Whoever started the server ignores SIGCHLD, so that the kernel reaps.
        return True
