"""Read a server's environment: versions, its cgroup, the host's pressure, shared memory, open files and limits.

A value that cannot be read is left out. Each file is read by `guarded_read`, so that a process or a file system that
blocks a read delays the caller for a short time only. Sources of the formats: proc(5), and cgroup-v1, cgroup-v2 and PSI
in the kernel's admin guide.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_crashkit.kernel.cgroup import PROC, find_group
from sglang_crashkit.kernel.guarded_read import read_guarded
from sglang_crashkit.kernel.shared_memory import FOLDER

_DISTRIBUTIONS = (
    *("sglang", "sglang-crashkit", "torch", "transformers", "triton", "sgl-kernel", "sglang-kernel"),
    *("flashinfer-python", "mooncake-transfer-engine", "xgrammar"),
)
_TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", re.MULTILINE)
_DRIVER = re.compile(r"Kernel Module(?: +for \S+)? +(\d\S*)")
#: For each controller, the reported values with their files in v1 and v2. A cgroup's folder is found by the first file.
_CONTROLLERS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "memory": {
        "used_bytes": ("memory.usage_in_bytes", "memory.current"),
        "peak_bytes": ("memory.max_usage_in_bytes", "memory.peak"),
        "limit_hits": ("memory.failcnt", ""),
        "high_bytes": ("", "memory.high"),
        "swap_used_bytes": ("", "memory.swap.current"),
        "swap_limit_bytes": ("", "memory.swap.max"),
        "events": ("memory.oom_control", "memory.events"),
        "pressure": ("", "memory.pressure"),
    },
    "cpu": {"events": ("cpu.stat", "cpu.stat"), "pressure": ("", "cpu.pressure")},
    "pids": {
        "used": ("pids.current", "pids.current"),
        "limit": ("pids.max", "pids.max"),
        "events": ("pids.events", "pids.events"),
    },
}
_MEMORY_LIMIT = ("memory.limit_in_bytes", "memory.max")
#: In v1, a number of about this size or more means that there is no limit.
_UNLIMITED = 1 << 60
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
    "core_file_bytes": resource.RLIMIT_CORE,
    "stack_bytes": resource.RLIMIT_STACK,
}
#: Ids of containers of Docker and containerd, and of pods of Kubernetes, in paths.
_CONTAINER = re.compile(r"(?:docker|containers|cri-containerd|crio|libpod)[-/:]([0-9a-f]{64})")
_POD = re.compile(r"pod(?:s/)?([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_KUBERNETES = ("POD_NAME", "POD_NAMESPACE", "POD_UID", "POD_IP", "NODE_NAME", "KUBERNETES_SERVICE_HOST")
_SLURM = ("JOB_ID", "JOB_NAME", "STEP_ID", "PROCID", "NODEID", "JOB_PARTITION", "CLUSTER_NAME", "RESTART_COUNT")


def read_versions() -> dict[str, str]:
    """Return the versions of Python, the kernel and the installed packages of a server, without importing them."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            found |= dict(_TORCH_BUILD.findall(Path(spec.origin).with_name("version.py").read_text()))
    return found


def read_driver() -> str | None:
    """Return the version of NVIDIA's driver, None if absent."""
    match = _DRIVER.search(_text_of(PROC / "driver/nvidia/version"))
    return match[1] if match else None


def read_host() -> dict[str, Any]:
    """Return the host's number of processors, load, memory in bytes, and pressure."""
    memory = dict(re.findall(r"^(\w+): +(\d+) kB$", _text_of(PROC / "meminfo"), re.MULTILINE))
    named = {"total_bytes": "MemTotal", "available_bytes": "MemAvailable", "swap_free_bytes": "SwapFree"}
    texts = {name: _text_of(PROC / "pressure" / name) for name in ("cpu", "memory", "io")}
    return _without_gaps(
        {
            "processors": os.cpu_count(),
            "load": [float(number) for number in _text_of(PROC / "loadavg").split()[:3]],
            "memory": {name: int(memory[field]) << 10 for name, field in named.items() if field in memory},
            "pressure": _without_gaps({name: _parse_pressure(text) for name, text in texts.items()}),
        }
    )


def read_cgroups(pid: int) -> dict[str, Any]:
    """Return limits, use and counts of the cgroups of a process, by controller; v1 and v2.

    ``memory`` has ``limit_bytes``, which is the lowest limit of the group and of its visible parents, ``used_bytes``,
    ``peak_bytes``, ``events`` and ``pressure``.
    """
    found: dict[str, Any] = {}
    for controller, names in _CONTROLLERS.items():
        group = find_group(pid, controller, next(iter(names.values())))
        if group is None:
            continue
        facts: dict[str, Any] = {"version": group.version, "path": str(group.folder)}
        for name, files in names.items():
            # If a version has no such file, the path is the folder, and reading it gives an empty text.
            text = _text_of(group.folder / files[group.version - 1])
            facts[name] = _PARSERS.get(name, _parse_number)(text)
        if controller == "memory":
            above = [folder for folder in group.folder.parents if folder.is_relative_to(group.mount)]
            texts = [_text_of(folder / _MEMORY_LIMIT[group.version - 1]) for folder in (group.folder, *above)]
            limits = [limit for limit in map(_parse_number, texts) if limit is not None]
            facts["limit_bytes"] = min(limits, default=None)
        found[controller] = _without_gaps(facts)
    return found


def read_process(pid: int) -> dict[str, Any]:
    """Return how many files a process has open, and its resource limits; an unlimited one is left out."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        found["open_files"] = len(os.listdir(PROC / str(pid) / "fd"))  # noqa: PTH208
    limits = {}
    for name, number in _LIMITS.items():
        with contextlib.suppress(OSError):
            values = zip(("soft", "hard"), resource.prlimit(pid, number), strict=True)
            limits[name] = {which: value for which, value in values if value != resource.RLIM_INFINITY}
    return _without_gaps(found | {"limits": _without_gaps(limits)})


def read_shared_memory() -> dict[str, int]:
    """Return the size of ``/dev/shm`` and its used space, in bytes."""
    size = os.statvfs(FOLDER)
    used = size.f_blocks - size.f_bfree
    return {"total_bytes": size.f_blocks * size.f_frsize, "used_bytes": used * size.f_frsize}


def read_place(pid: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the container, pod and Slurm job of a process with this environment, as far as they can be found."""
    paths = _text_of(PROC / str(pid) / "cgroup") + _text_of(PROC / str(pid) / "mountinfo")
    container, pod = _CONTAINER.search(paths), _POD.search(paths)
    kubernetes = {name.lower(): environ[name] for name in _KUBERNETES if environ.get(name)}
    if pod is not None:
        kubernetes.setdefault("pod_uid", pod[1].replace("_", "-"))
    slurm = {name.lower(): environ[f"SLURM_{name}"] for name in _SLURM if environ.get(f"SLURM_{name}")}
    if environ.get("SLURMD_NODENAME"):
        slurm["node"] = environ["SLURMD_NODENAME"]
    return _without_gaps(
        {"container": container[1] if container is not None else None, "kubernetes": kubernetes, "slurm": slurm}
    )


def _text_of(path: Path) -> str:
    try:
        return read_guarded(path).decode(errors="replace")
    except OSError:
        return ""


def _parse_number(text: str) -> int | None:
    """Return a number; None if it is missing, or is a word or a number that stands for no limit."""
    number = text.strip()
    return int(number) if number.isdigit() and int(number) < _UNLIMITED else None


def _parse_events(text: str) -> dict[str, int]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {event: int(count) for event, _, count in pairs if count.isdigit()}


def _parse_pressure(text: str) -> dict[str, dict[str, float]]:
    """Return ``some`` and ``full``, each with ``avg10``, ``avg60`` and ``avg300`` (percent) and ``total`` (us)."""
    found = {}
    for line in text.splitlines():
        kind, *pairs = line.split()
        found[kind] = {
            name: float(value) if "." in value else int(value)
            for name, _, value in (pair.partition("=") for pair in pairs)
        }
    return found


_PARSERS: Mapping[str, Callable[[str], object]] = {"events": _parse_events, "pressure": _parse_pressure}


def _without_gaps(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None and value not in ({}, [], "")}
