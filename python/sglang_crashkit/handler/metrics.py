"""Publish metrics of the server and its crash handler for Prometheus: in SGLang's own ``/metrics``, and in a file.

The server's main process shows them at ``/metrics`` (see `srt.metrics`). The file, for the textfile collector of
node_exporter, also exists while the server is down. A short-lived child counts the incidents on disk, because the disk
may not answer, and imports prometheus_client, which takes more memory than the crash handler may use.
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
#: Seconds between two measurements: Prometheus scrapes every 15 to 60 s.
INTERVAL_SECS = 15.0
FIRST_SECS = 2.0
#: The longest that the handler waits at its end for the last file to be written, in seconds.
_LAST_SECS = 3.0
#: At most this many incidents are read for their causes at a time; the next times read the rest.
_MAX_READ = 100
_MAX_KNOWN = 10_000
_UNREAD = "unread"
_PREFIX = "sglang_crashkit_"

#: A gauge: its name, its help text, and its samples, each with labels and a value.
Gauge = tuple[str, str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class Measured:
    """The values that the handler measures without reading a disk."""

    port: str  # identifies the server among those on this host
    is_up: bool  # the handler lives
    seconds: float  # when it was measured, since the epoch
    signs: Mapping[str, float] = field(default_factory=dict)  # when each rank gave its last sign, since the epoch
    pauses: Mapping[tuple[str, str], int] = field(default_factory=dict)  # the number by rank and kind; see `Pauses`


def gauges_of(measured: Measured, causes: Mapping[str, str] | None) -> list[Gauge]:
    """Return the gauges for Prometheus; `causes` has the class of each incident's cause by the name of its folder.

    `causes` is None if the disk cannot be read, which must not look like a host without incidents.
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
        ("updated_timestamp_seconds", "When the crash handler last updated these metrics.", [(own, measured.seconds)]),
        ("incidents", "Incidents of this host that are kept, by kind and cause.", incidents),
        (
            "last_incident_timestamp_seconds",
            "When the latest incident began, 0 without any.",
            [] if causes is None else [(own, latest)],
        ),
        ("rank_last_sign_timestamp_seconds", "When the rank last began a round of its event loop or a batch.", signs),
        ("rank_pauses", "How often the rank stood still, by kind: long_collection, slow_step.", pauses),
    ]
    return [(_PREFIX + name, words, samples) for name, words, samples in told]


def _rank_of(title: str) -> str:
    return title.removeprefix("sglang::scheduler").strip("_") or "TP0"


def causes_in(incidents: Path, known: Mapping[str, str]) -> dict[str, str] | None:
    """Return the class of each incident's cause in a folder; `known` has those read before. See `gauges_of`."""
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
    """Write the file for node_exporter, readable by other users; if `target` is a folder, each server has its own file.

    Raises:
        CrashkitError: the path exists and is no file, but for example a device, which is not replaced.
        OSError: the file cannot be written.
        ImportError: prometheus_client is not installed.
    """
    # The values of this child must not appear on the server's own page.
    os.environ.pop(SHARED, None)
    # Imported in the child only: it takes 8 MB, and the handler must stay small.
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client import Gauge as Metric

    path = target / f"sglang_crashkit_{port}.prom" if target.is_dir() else target
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CrashkitError(f"{path} exists and is not a regular file")
    registry = CollectorRegistry()
    for name, words, samples in gauges:
        if samples:
            # Without samples, the gauge would show the value 0.
            metric = Metric(name, words, list(samples[0][0]), registry=registry)
            for labels, value in samples:
                metric.labels(**labels).set(value)
    os.umask(0o022)
    write_to_textfile(str(path), registry)


class MetricsPublisher:
    """Measures and publishes if metrics are enabled; `notify` sends them to the main process, which shows them."""

    def __init__(self, tree: ProcessTree, received: Received, incidents: Path, notify: Callable[..., None]) -> None:
        self._tree, self._received, self._incidents, self._notify = tree, received, incidents, notify
        self._file = os.environ.get(FILE, "").strip()
        self._port = ""
        self._causes: dict[str, str] = {}
        self._call: ForkedCall | None = None
        self._problem = ""  # why the last child failed
        self.late = 0  # the pid of a child that did not answer in time, until it has ended
        # By then the server has reported its arguments; its port identifies it.
        self._due = time.monotonic() + FIRST_SECS if self._file or os.environ.get(SHARED) else float("inf")

    def act_on_time(self) -> float:
        """Publish if that is due, and return when it is due next, by the monotonic clock."""
        if time.monotonic() < self._due:
            return self._due
        self._due = time.monotonic() + INTERVAL_SECS
        self.take_answer(0.0)
        if self.late and not is_reaped(self.late):
            return self._due
        arguments = self._received.environment.arguments()
        self._port = str(arguments.get("port") or self._port or 0)
        # The variable may be set for other programs although the server has no metrics.
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
        """Report in the file that the handler has stopped; by now, the server itself is not scraped."""
        self.take_answer(0.0)
        if self._file and self._port:
            gone = Measured(self._port, False, time.time())
            self._call = ForkedCall(functools.partial(self._publish, gone, is_shown=False))
            self.take_answer(_LAST_SECS)

    def _publish(self, measured: Measured, *, is_shown: bool) -> bytes:
        """Read the disk, show the gauges and write the file, in a child; return the new causes as JSON."""
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
        """Take the child's answer; kill the child if it does not answer within `wait_secs`, as on a disk that hangs."""
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
