"""Show the crash handler's metrics at SGLang's own ``/metrics``, in the server's main process.

In every supported release, prometheus_client builds that page from the files of the server's processes in
``PROMETHEUS_MULTIPROC_DIR``: it shows the gauges of all of them. See "Multiprocess Mode" of that library.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_crashkit.srt.hooks import never_raises

_PREFIX = "sglang_crashkit_"
#: The least free disk space, in bytes: the library maps its files into memory, and SIGBUS ends a writer on a full disk.
_LEAST_FREE = 64 << 20
#: Limits above what the crash handler reports for a server.
_MAX_GAUGES, _MAX_SAMPLES = 16, 4096

_gauges: dict[str, Any] = {}
_shown: dict[str, set[tuple[str, ...]]] = {}


@never_raises
def show_gauges(gauges: object) -> None:
    """Show gauges, each a name, a description, and samples (labels, value), if SGLang's folder exists and has room."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder or not isinstance(gauges, list):
        return
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _LEAST_FREE:
        return
    # Imported late: SGLang imports it only if its metrics are on, and after the variable is set.
    from prometheus_client import CollectorRegistry, Gauge

    for name, words, samples in gauges[:_MAX_GAUGES]:
        if not str(name).startswith(_PREFIX):
            continue
        if name not in _gauges and samples:
            # A separate registry: a program's own metrics page does not change.
            labels, registry = list(samples[0][0]), CollectorRegistry()
            _gauges[name] = Gauge(name, words, labels, registry=registry, multiprocess_mode="mostrecent")
        told = {tuple(labels.values()): float(value) for labels, value in samples[:_MAX_SAMPLES]}
        shown = _shown.setdefault(name, set())
        # The library's files keep old samples: a sample that is no longer reported becomes 0, a time becomes NaN.
        unknown = float("nan") if name.endswith("_seconds") else 0.0
        for values, value in {**dict.fromkeys(shown - told.keys(), unknown), **told}.items():
            _gauges[name].labels(*values).set(value)
        shown.update(told)
