"""Show the crash handler's metrics at SGLang's own ``/metrics``, in the server's main process.

In every supported release that page is made of what the server's processes keep in ``PROMETHEUS_MULTIPROC_DIR``, by
prometheus_client: any gauge that is made in one of them is on it. See "Multiprocess Mode" of that library.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_crashkit.srt.hooks import never_raises

_PREFIX = "sglang_crashkit_"
#: The library maps its files into memory: where the disk is full, the process that writes to one is ended by SIGBUS.
_LEAST_FREE = 64 << 20
#: More than the crash handler reports of a server.
_MAX_GAUGES, _MAX_SAMPLES = 16, 4096

_gauges: dict[str, Any] = {}
_shown: dict[str, set[tuple[str, ...]]] = {}


@never_raises
def show_gauges(gauges: object) -> None:
    """Show gauges, each a name, what it is, and samples of labels and a value, where SGLang has a folder with room."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder or not isinstance(gauges, list):
        return
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _LEAST_FREE:
        return
    # Here alone: SGLang imports it only where its metrics are on, and once the variable is set.
    from prometheus_client import CollectorRegistry, Gauge

    for name, words, samples in gauges[:_MAX_GAUGES]:
        if not str(name).startswith(_PREFIX):
            continue
        if name not in _gauges and samples:
            # In a registry of its own: a program's own page does not change.
            labels, registry = list(samples[0][0]), CollectorRegistry()
            _gauges[name] = Gauge(name, words, labels, registry=registry, multiprocess_mode="mostrecent")
        told = {tuple(labels.values()): float(value) for labels, value in samples[:_MAX_SAMPLES]}
        shown = _shown.setdefault(name, set())
        # Such files keep what was in them: a count is 0 from now on, and a time unknown.
        unknown = float("nan") if name.endswith("_seconds") else 0.0
        for values, value in {**dict.fromkeys(shown - told.keys(), unknown), **told}.items():
            _gauges[name].labels(*values).set(value)
        shown.update(told)
