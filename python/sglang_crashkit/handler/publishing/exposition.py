"""Metrics in the two forms in which Prometheus gets them.

Text, for the textfile collector of node_exporter; see "Text-based format" in Prometheus' documentation. And the files
in which the processes of one server share their metrics, and of which SGLang's own ``/metrics`` is made: see
"Multiprocess Mode" of prometheus_client, and its ``mmap_dict.py``. These are written here because that library, which
maps its files, ends its process by SIGBUS on a full disk, and takes memory that the crash handler has not.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Type = Literal["gauge", "counter"]

_CHECK_SECS = 10.0
#: Has the library that is installed read a folder, and print what ``/metrics`` would say.
_CHECK = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry, path=sys.argv[1])
sys.stdout.write(generate_latest(registry).decode())
"""


@dataclass(frozen=True)
class Metric:
    """A metric with its samples.

    Attributes:
        name: as it is queried; that of a counter ends with ``_total``.
        help: what it is, a sentence.
        samples: labels and value of each.
        type: ``gauge`` or ``counter``.
    """

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


def encode_shared(metrics: Iterable[Metric], type_: Type, seconds: float) -> bytes:
    """Return the metrics of one type as a file of prometheus_client's multiprocess mode.

    Args:
        metrics: those of the other type are left out.
        type_: the file's.
        seconds: when they were measured, since the epoch.
    """
    entries = []
    for metric in metrics:
        if metric.type != type_:
            continue
        # The library adds the ending to a counter's name itself.
        family = metric.name.removesuffix("_total")
        for labels, value in metric.samples:
            key = json.dumps([family, metric.name, dict(labels), metric.help], sort_keys=True).encode()
            padded = key + b" " * (8 - (len(key) + 4) % 8)
            entries.append(struct.pack(f"=i{len(padded)}sdd", len(key), padded, value, seconds))
    body = b"".join(entries)
    return struct.pack("=ii", 8 + len(body), 0) + body


def shared_files(metrics: Iterable[Metric], owner: int, seconds: float) -> dict[str, bytes]:
    """Return the files of prometheus_client's multiprocess mode by name.

    Args:
        metrics: all of them.
        owner: the pid in the names; what one process writes replaces what it wrote before.
        seconds: when they were measured, since the epoch.
    """
    known = list(metrics)
    # Live: a reader that lists a file which is gone when it opens it passes over it.
    return {
        f"gauge_livemostrecent_{owner}.db": encode_shared(known, "gauge", seconds),
        f"counter_{owner}.db": encode_shared(known, "counter", seconds),
    }


def problem_of_shared(files: Mapping[str, bytes], metrics: Iterable[Metric]) -> str:
    """Return why the prometheus_client that is installed would not read these files; empty where it reads them right.

    What it cannot read would take all of a server's ``/metrics`` with it.
    """
    with tempfile.TemporaryDirectory(prefix="crashkit-metrics-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        argv = [sys.executable, "-c", _CHECK, folder]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_CHECK_SECS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"prometheus_client could not be asked: {error}"
    if done.returncode:
        return f"prometheus_client cannot read what is shared: {done.stderr.strip().splitlines()[-1:]}"
    read = {line.partition(" ")[0].partition("{")[0] for line in done.stdout.splitlines() if line[:1] != "#"}
    missing = sorted({metric.name for metric in metrics if metric.samples} - read)
    return f"prometheus_client reads no {', '.join(missing)}" if missing else ""


def _format_labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{_escape(value, quoted=True)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escape(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
