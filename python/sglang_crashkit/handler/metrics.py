"""Tell Prometheus how the server and its crash handler are: in SGLang's own ``/metrics``, and in a file.

The server's main process shows them at ``/metrics`` (see `srt.metrics`). The file, for the textfile collector of
node_exporter, is there where the server is down, too. A short-lived child counts what is on disk, which may not answer,
and imports prometheus_client, which the crash handler has no memory for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import setproctitle

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.incident.store import MAX_JSON, is_finished, parse_name
from sglang_crashkit.kernel.forked import ForkedCall, is_reaped
from sglang_crashkit.kernel.private_files import read_json
from sglang_crashkit.model.incident import Incident

logger = logging.getLogger(__name__)

FILE = "SGLANG_CRASHKIT_METRICS_FILE"
SHARED = "PROMETHEUS_MULTIPROC_DIR"
#: Prometheus asks every 15 to 60 s.
INTERVAL_SECS = 15.0
FIRST_SECS = 2.0
#: At its end the handler waits so long for the last file, in seconds.
_LAST_SECS = 3.0
#: So many incidents are read for their cause at a time; the rest follow.
_MAX_READ = 100
_MAX_KNOWN = 10_000
_UNREAD = "unread"
_PREFIX = "sglang_crashkit_"

#: A gauge: its name, what it is, and its samples, each of labels and a value.
Gauge = tuple[str, str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class Measured:
    """What the handler knows without a disk."""

    port: str  # which server it is, of those on this host
    is_up: bool  # the handler lives
    seconds: float  # when it was measured, since the epoch
    signs: Mapping[str, float] = field(default_factory=dict)  # when each rank gave its last sign, since the epoch
    pauses: Mapping[tuple[str, str], int] = field(default_factory=dict)  # how many, by rank and kind; see `Pauses`


def gauges_of(measured: Measured, causes: Mapping[str, str] | None) -> list[Gauge]:
    """Return what Prometheus is told; `causes` has the class of each incident's cause by the name of its folder.

    `causes` is None where the disk cannot be read: that is not to be taken for a host without incidents.
    """
    own = {"port": measured.port}
    names = {name: parsed for name in causes or {} if (parsed := parse_name(name)) is not None}
    counts = Counter((parsed.kind, (causes or {})[name]) for name, parsed in names.items())
    latest = max((parsed.seconds for parsed in names.values()), default=0.0)
    incidents = [(own | {"kind": kind, "cause": cause}, float(n)) for (kind, cause), n in sorted(counts.items())]
    signs = [(own | {"rank": rank}, at) for rank, at in sorted(measured.signs.items())]
    pauses = [(own | {"rank": rank, "kind": kind}, float(n)) for (rank, kind), n in sorted(measured.pauses.items())]
    told: list[Gauge] = [
        ("handler_up", "Whether the crash handler is at work.", [(own, float(measured.is_up))]),
        ("updated_timestamp_seconds", "When the crash handler said so last.", [(own, measured.seconds)]),
        ("incidents", "Incidents of this host that are kept, by kind and cause.", incidents),
        (
            "last_incident_timestamp_seconds",
            "When the latest incident began, 0 without any.",
            [] if causes is None else [(own, latest)],
        ),
        ("rank_last_sign_timestamp_seconds", "When the rank's event loop last went round.", signs),
        ("rank_pauses", "How often the rank stood still, by kind: long_collection, slow_step.", pauses),
    ]
    return [(_PREFIX + name, words, samples) for name, words, samples in told]


def _rank_of(title: str) -> str:
    return title.removeprefix("sglang::scheduler").strip("_") or "TP0"


def causes_in(incidents: Path, known: Mapping[str, str]) -> dict[str, str] | None:
    """Return the class of the cause of each incident in a folder, some of which were read before; see `gauges_of`."""
    try:
        names = sorted((path.name for path in incidents.iterdir() if is_finished(path.name)), reverse=True)[:_MAX_KNOWN]
    except OSError as error:
        return {} if isinstance(error, FileNotFoundError) and incidents.parent.is_dir() else None
    read = {name: _cause_of(incidents / name) for name in [one for one in names if one not in known][:_MAX_READ]}
    return {name: read.get(name) or known.get(name) or _UNREAD for name in names}


def _cause_of(incident: Path) -> str:
    try:
        document = read_json(incident / "incident.json", MAX_JSON)
    except (OSError, ValueError, RecursionError):
        return "unknown"
    cause = Incident.of(document).cause
    return cause.kind if cause is not None else "unknown"


def write_metrics_file(target: Path, gauges: list[Gauge], port: str) -> None:
    """Write the file for node_exporter, which runs as another user; in a folder each server of the host has its own.

    Raises:
        CrashkitError: there is something that is no file, such as a device, which is not replaced.
        OSError: it cannot be written.
        ImportError: there is no prometheus_client.
    """
    # In this child, values are not those of the server's own page.
    os.environ.pop(SHARED, None)
    # Imported here: it takes 8 MB, and this is a child of a process that has to stay small.
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client import Gauge as Metric

    path = target / f"sglang_crashkit_{port}.prom" if target.is_dir() else target
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CrashkitError(f"{path} is there and is no file")
    registry = CollectorRegistry()
    for name, words, samples in gauges:
        if samples:
            # Without any it would have the value 0.
            metric = Metric(name, words, list(samples[0][0]), registry=registry)
            for labels, value in samples:
                metric.labels(**labels).set(value)
    os.umask(0o022)
    write_to_textfile(str(path), registry)


class MetricsPublisher:
    """Measures and publishes, where anybody wants that; `notify` tells the server's main process, which shows it."""

    def __init__(self, tree: ProcessTree, received: Received, incidents: Path, notify: Callable[..., None]) -> None:
        self._tree, self._received, self._incidents, self._notify = tree, received, incidents, notify
        self._file = os.environ.get(FILE, "").strip()
        self._port = ""
        self._causes: dict[str, str] = {}
        self._call: ForkedCall | None = None
        self._problem = ""  # why the last one failed
        self.late = 0  # the pid of one that did not answer in time, until it has ended
        # The server reports its arguments, by which it is named, within this time.
        self._due = time.monotonic() + FIRST_SECS if self._file or os.environ.get(SHARED) else float("inf")

    def act_on_time(self) -> float:
        """Publish, where it is time to, and return when it is next, by the monotonic clock."""
        if time.monotonic() < self._due:
            return self._due
        self._due = time.monotonic() + INTERVAL_SECS
        self.take_answer(0.0)
        if self.late and not is_reaped(self.late):
            return self._due
        arguments = self._received.environment.arguments()
        self._port = str(arguments.get("port") or self._port or 0)
        # A server without metrics leaves the variable to other programs.
        is_shown = bool(os.environ.get(SHARED) and arguments.get("enable_metrics"))
        if is_shown or self._file:
            now, clock = time.time(), time.monotonic()
            signs: dict[str, float] = {}
            for pid, sign in self._received.heartbeats.last_signs().items():
                process = self._tree.get(pid)
                if process is not None and process.exited_at is None and not sign.is_off:
                    signs[_rank_of(process.title)] = now - clock + sign.at
            pauses = {(_rank_of(title), kind): count for (title, kind), count in self._received.pauses.counts.items()}
            measured = Measured(self._port, True, now, signs, pauses)
            self._call = ForkedCall(functools.partial(self._publish, measured, is_shown=is_shown))
        return self._due

    def close(self) -> None:
        """Say in the file that the handler is at work no more; the server itself is not asked by now."""
        self.take_answer(0.0)
        if self._file and self._port:
            gone = Measured(self._port, False, time.time())
            self._call = ForkedCall(functools.partial(self._publish, gone, is_shown=False))
            self.take_answer(_LAST_SECS)

    def _publish(self, measured: Measured, *, is_shown: bool) -> bytes:
        """Look at the disk, show the gauges and write the file, in a child; return the causes that are new."""
        setproctitle.setproctitle("crashkit_metrics")
        for _standard in range(3):
            os.open(os.devnull, os.O_RDWR)
        causes = causes_in(self._incidents, self._causes)
        gauges = gauges_of(measured, causes)
        if is_shown:
            self._notify("metrics", gauges=gauges)
        if self._file:
            write_metrics_file(Path(self._file), gauges, measured.port)
        new = {name: cause for name, cause in (causes or {}).items() if name not in self._causes and cause != _UNREAD}
        return json.dumps(new).encode()

    def take_answer(self, wait_secs: float) -> None:
        """Take in what the child said; one that did not answer by now, as its disk does not, is killed."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            causes = json.loads(call.wait(wait_secs))
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or str(error)
            if words != self._problem:
                logger.warning("metrics could not be published: %s", words)
            self._problem = words
            self.late = call.pid if isinstance(error, TimeoutError) else 0
        else:
            self.late, self._problem = 0, ""
            self._causes = dict(list((self._causes | causes).items())[-_MAX_KNOWN:])
