"""Tell Prometheus how the server and its crash handler are: in SGLang's own ``/metrics``, and in a file.

The server's main process shows them at ``/metrics`` (see `srt.metrics`). The file is for the textfile collector of
node_exporter: it is there without that page, and where the server is down.

What is counted on disk is counted by a short-lived child, as that disk may not answer. It also imports
prometheus_client, which the crash handler has no memory for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import setproctitle

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.folders import start_alone
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.session import Session
from sglang_crashkit.incident.store import is_finished, parse_name
from sglang_crashkit.model.checked_json import mapping_of

logger = logging.getLogger(__name__)

FILE = "SGLANG_CRASHKIT_METRICS_FILE"
SHARED = "PROMETHEUS_MULTIPROC_DIR"
#: Prometheus asks every 15 to 60 s.
INTERVAL_SECS = 15.0
_FIRST_SECS = 2.0
#: At its end the handler waits so long for the last file, in seconds.
_LAST_SECS = 3.0
#: So many incidents are read for their cause at a time; the rest follow.
_MAX_READ = 100
_MAX_KNOWN = 10_000
_MAX_BYTES = 1 << 20
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


def gauges_of(measured: Measured, causes: Mapping[str, str] | None) -> list[Gauge]:
    """Return what Prometheus is told; `causes` has the class of each incident's cause by the name of its folder.

    It is None where the disk cannot be read: that is not to be taken for a host without incidents.
    """
    own = {"port": measured.port}
    names = {name: parsed for name in causes or {} if (parsed := parse_name(name)) is not None}
    counts = Counter((parsed.kind, (causes or {})[name]) for name, parsed in names.items())
    latest = max((parsed.seconds for parsed in names.values()), default=0.0)
    incidents = [(own | {"kind": kind, "cause": cause}, float(n)) for (kind, cause), n in sorted(counts.items())]
    signs = [(own | {"rank": rank}, at) for rank, at in sorted(measured.signs.items())]
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
    ]
    return [(_PREFIX + name, words, samples) for name, words, samples in told]


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
        document = json.loads((incident / "incident.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return "unknown"
    return str(mapping_of(mapping_of(document).get("cause")).get("class") or "unknown")


def write_metrics_file(target: Path, gauges: list[Gauge], port: str) -> None:
    """Write the file for node_exporter, which runs as another user; in a folder each server of the host has its own.

    Raises:
        CrashkitError: there is something that is no file, such as a device, which is not replaced.
        OSError: it cannot be written.
        ImportError: there is no prometheus_client.
    """
    # Imported here: it takes 8 MB, and this is a child of a process that has to stay small.
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

    class Measurements(Collector):
        def collect(self) -> list[GaugeMetricFamily]:
            families = []
            for name, words, samples in gauges:
                families.append(GaugeMetricFamily(name, words, labels=list(samples[0][0]) if samples else None))
                for labels, value in samples:
                    families[-1].add_metric(list(labels.values()), value)
            return families

    path = target / f"sglang_crashkit_{port}.prom" if target.is_dir() else target
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CrashkitError(f"{path} is there and is no file")
    registry = CollectorRegistry()
    registry.register(Measurements())
    os.umask(0o022)
    write_to_textfile(str(path), registry)


class MetricsPublisher:
    """Measures and publishes every `INTERVAL_SECS`, where anybody wants that.

    Args:
        tree: the server's processes.
        session: what is known of them.
        incidents: this host's folder of incidents.
        show: hands gauges to the server's main process.
    """

    def __init__(
        self, tree: ProcessTree, session: Session, incidents: Path, show: Callable[[list[Gauge]], None]
    ) -> None:
        self._tree, self._session, self._incidents, self._show = tree, session, incidents, show
        self._file = os.environ.get(FILE, "").strip()
        self._port = ""
        self._causes: dict[str, str] = {}
        self._child: tuple[int, int] | None = None  # pid, and the descriptor of what it says
        # The server tells of its arguments, by which it is named, within this time.
        self._due = time.monotonic() + _FIRST_SECS if self._file or os.environ.get(SHARED) else float("inf")

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
        # A server without metrics leaves the variable to other programs.
        is_shown = bool(os.environ.get(SHARED) and arguments.get("enable_metrics"))
        if is_shown or self._file:
            self._publish(self._measure(), is_shown=is_shown)

    def close(self) -> None:
        """Say in the file that the handler is at work no more; nobody asks the server itself by now."""
        self._reap(kill=True)
        if self._file and self._port:
            self._publish(Measured(self._port, False, time.time()), is_shown=False)
            self._reap(_LAST_SECS, kill=True)

    def _measure(self) -> Measured:
        now, clock = time.time(), time.monotonic()
        signs: dict[str, float] = {}
        for pid, sign in self._session.received.heartbeats.last_signs().items():
            process = self._tree.get(pid)
            if process is not None and process.exited_at is None and not sign.is_off:
                rank = process.title.removeprefix("sglang::scheduler").strip("_") or "TP0"
                signs[rank] = now - clock + sign.at
        return Measured(self._port, True, now, signs)

    def _publish(self, measured: Measured, *, is_shown: bool) -> None:
        """Have a child look at the disk, show the gauges and write the file."""
        self._child = start_alone(functools.partial(self._say, measured, is_shown=is_shown))
        os.set_blocking(self._child[1], False)

    def _say(self, measured: Measured, *, is_shown: bool) -> bytes:
        said: dict[str, Any] = {}
        try:
            setproctitle.setproctitle("crashkit_metrics")
            for _standard in range(3):
                os.open(os.devnull, os.O_RDWR)
            causes = causes_in(self._incidents, self._causes)
            gauges = gauges_of(measured, causes)
            new = {name: cause for name, cause in (causes or {}).items() if name not in self._causes}
            said["causes"] = {name: cause for name, cause in new.items() if cause != _UNREAD}
            if is_shown:
                self._show(gauges)
            if self._file:
                write_metrics_file(Path(self._file), gauges, measured.port)
        except (CrashkitError, ImportError) as error:
            said["never"] = str(error)
        except BaseException as error:  # noqa: BLE001 - of this process nothing else is left
            said["problem"] = f"{type(error).__name__}: {error}"[:500]
        return json.dumps(said).encode()

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
        if said.get("never"):
            logger.warning("%s is not written: %s", FILE, said["never"])
            self._file = ""
        if isinstance(said.get("causes"), dict):
            self._causes = dict(list((self._causes | said["causes"]).items())[-_MAX_KNOWN:])


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        # Whoever started the server ignores SIGCHLD, so that the kernel reaps.
        return True
