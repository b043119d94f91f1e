"""Which process has which GPU, what became of the GPUs since the server started, and the same in lines.

What the driver says comes as it was read: by GPU with its PCI bus id, sizes in bytes, times in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.verdict import Level

#: Of NVIDIA's list of Xid errors, those that an inference server meets.
#: https://docs.nvidia.com/deploy/xid-errors/
XIDS = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    32: "corrupted push buffer",
    43: "GPU stopped processing",
    45: "preemptive cleanup, which follows another error",
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "ECC page retirement or row remapping recorded",
    64: "ECC page retirement or row remapping failed",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP RPC timeout",
    120: "GSP error",
    137: "NVLink privilege error",
    140: "unrecovered ECC error",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    154: "GPU recovery action changed",
}
#: Of what holds the clocks down, what is no trouble.
_HARMLESS = {"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"}
#: Counters that are of interest even where they did not grow.
_ALWAYS = ("uncorrected", "pending", "failure")
#: Errors of what a GPU just does not have.
_NOT_THERE = {"Not Supported", "Function Not Found"}
#: One event that both NVML and the kernel tell of: their clocks drift apart by this much, in seconds.
_SAME_SECS = 30.0
#: A summary names at most this many.
_MAX_XIDS = 32


@dataclass(frozen=True)
class Holder:
    """A process of the server that may have a GPU."""

    pid: int  # its process id, as this process sees it
    title: str
    started: float  # when it began, in seconds since the epoch
    gpu: str | None = None  # the UUID of its GPU by its own word; None where it said none


@dataclass(frozen=True)
class XidSources:
    """Who reported Xid events."""

    events: Sequence[Mapping[str, Any]] = ()  # those of NVML, with ``xid``, ``bus_id`` and ``time``
    kernel: Sequence[Mapping[str, Any]] = ()  # those in the kernel's log, also with ``pid``
    since: float | None = None  # since when NVML's are watched for; None where they are not
    problems: Sequence[str] = field(default_factory=list)  # why one of the two tells of none, a sentence each


def account(
    gpus: Sequence[Mapping[str, Any]],
    holders: Sequence[Holder],
    xids: XidSources,
    start: Sequence[Mapping[str, Any]],
    *,
    sees_all_pids: bool,
) -> dict[str, Any]:
    """Return what an incident keeps of its GPUs: ``devices``, ``xids`` and both in ``lines``.

    Args:
        gpus: what the driver said of each.
        holders: the server's processes, dead ones too.
        xids: the Xid events.
        start: the same of when the server started, of which only names and error counters are read; a GPU that is lost
            says neither any more.
        sees_all_pids: the driver's pids are those that this process sees; not so in a container, where older drivers
            give the host's, and a pid that fits may do so by chance.
    """
    first, now = ({gpu["index"]: dict(gpu) for gpu in some} for some in (start, gpus))
    names = {index: {name: value for name, value in gpu.items() if name != "counters"} for index, gpu in first.items()}
    known = [names.get(index, {}) | now.get(index, {}) for index in sorted(first.keys() | now)]
    devices = [
        _device(gpu, holders, first.get(gpu["index"], {}).get("counters"), sees_all_pids=sees_all_pids) for gpu in known
    ]
    told = _xids(xids, devices, {holder.pid: holder.started for holder in holders})
    pairs = list(zip(known, devices, strict=True))
    # Of a host that others share, the GPUs of others do not matter, unless it is unknown whose is which.
    is_known = any(device["processes"] for device in devices)
    shown = [
        (gpu, device)
        for gpu, device in pairs
        if not is_known or device["processes"] or device["new_errors"] or gpu.get("errors", {}).keys() - _NOT_THERE
    ]
    lines = []
    for gpu, device in shown:
        name = f"GPU {gpu['index']} {gpu['name']} ({device['bus_id']})" if gpu.get("name") else f"GPU {gpu['index']}"
        lines.append(f"{name}: {'; '.join(_parts(gpu, device, sees_all_pids=sees_all_pids)) or 'not read'}")
    if more := len(pairs) - len(shown):
        lines.append(f"{more} more that no process of this server is known to have")
    return {"devices": devices, "xids": told, "lines": [*lines, *_xid_lines(told, devices, xids)]}


def _device(
    gpu: Mapping[str, Any], holders: Sequence[Holder], start: Mapping[str, Any] | None, *, sees_all_pids: bool
) -> dict[str, Any]:
    now = _flat(gpu.get("counters", {}))
    before = None if start is None or "counters" not in gpu else _flat(start)
    used = {one["pid"]: one["used"] for one in gpu.get("processes", ())}
    ours = [
        {"pid": holder.pid, "title": holder.title, "used": used.get(holder.pid), "level": level}
        for holder in holders
        if (level := _level(gpu, holder, is_listed=holder.pid in used, sees_all_pids=sees_all_pids)) is not None
    ]
    known = {one["pid"] for one in ours}
    return {
        "index": gpu["index"],
        "name": gpu.get("name"),
        "bus_id": gpu.get("bus_id"),
        "memory": gpu.get("memory"),
        "processes": ours,
        "others": [{"pid": pid, "used": size} for pid, size in used.items() if pid not in known],
        "throttle": [reason for reason in gpu.get("throttle", ()) if reason not in _HARMLESS],
        "errors": {name: count for name, count in now.items() if count and any(word in name for word in _ALWAYS)},
        "new_errors": None if before is None else _grown(before, now),
    }


def _level(gpu: Mapping[str, Any], holder: Holder, *, is_listed: bool, sees_all_pids: bool) -> Level | None:
    """Return how well it is known that a process has a GPU; None where nothing says so."""
    # PyTorch's has no prefix.
    is_named = holder.gpu is not None and holder.gpu == str(gpu.get("uuid")).removeprefix("GPU-")
    if is_listed and (sees_all_pids or is_named):
        return "established"
    return "supported" if is_named or (is_listed and holder.gpu is None) else None


def _flat(counters: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    flat: dict[str, int] = {}
    for name, value in counters.items():
        flat |= _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each counter grew; of a link that was up and is not any more, ``down``."""
    grown = {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}
    down = {name for name, count in before.items() if name.endswith(" up") and count and not now.get(name, count)}
    return {name: more for name, more in grown.items() if not name.endswith(" up")} | {
        f"{name[:-2]}down": 1 for name in sorted(down)
    }


def _xids(xids: XidSources, devices: Sequence[Mapping[str, Any]], started: Mapping[int, float]) -> list[dict[str, Any]]:
    told = [{**event, "source": "NVML"} for event in xids.events]
    single = list(told)
    for line in xids.kernel:
        alike = (one for one in single if (one["xid"], one["bus_id"]) == (line["xid"], line["bus_id"]))
        same = next((one for one in alike if abs(one["time"] - line["time"]) <= _SAME_SECS), None)
        if same is None:
            told.append({**line, "source": "the kernel's log"})
        else:
            single.remove(same)
            same |= {"pid": line.get("pid"), "source": "NVML and the kernel's log"}
    for event in told:
        # A process that started since has nothing to do with it.
        event["processes"] = [
            one
            for device in devices
            for one in device["processes"]
            if device["bus_id"] == event["bus_id"] and started[one["pid"]] <= event["time"]
        ]
        event["meaning"] = XIDS.get(event["xid"], "")
    return sorted(told, key=lambda event: float(event["time"]))[-_MAX_XIDS:]


def _parts(gpu: Mapping[str, Any], device: Mapping[str, Any], *, sees_all_pids: bool) -> Iterator[str]:
    memory = gpu.get("memory")
    if memory:
        yield f"{_gib(memory['used'])} of {_gib(memory['total'])} used"
    for one in device["processes"]:
        yield f"{_used(one)}{_holder(one)}"
    whose = "not this server's" if sees_all_pids else "not known in this container"
    for one in device["others"]:
        yield f"{_used(one)}pid {one['pid']}, {whose}"
    state = ((gpu.get("utilisation", {}).get("gpu"), "% busy"), (gpu.get("temperature"), "C"), (gpu.get("power"), "W"))
    if words := ", ".join(f"{value:g} {unit}" for value, unit in state if value is not None):
        yield words
    if device["throttle"]:
        yield f"clocks held down by {', '.join(device['throttle'])}"
    new = device["new_errors"] or {}
    if new:
        yield f"since the server started {_counted(new)}"
    if earlier := {name: count for name, count in device["errors"].items() if name not in new}:
        yield ("from before the server started " if device["new_errors"] is not None else "") + _counted(earlier)
    for error, names in gpu.get("errors", {}).items():
        if error not in _NOT_THERE:
            yield f"not read: {', '.join(names)} ({error})"


def _counted(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counters.items())


def _holder(one: Mapping[str, Any]) -> str:
    doubt = "" if one["level"] == "established" else f", {one['level']}"
    return f"{one['title']} (pid {one['pid']}{doubt})"


def _used(one: Mapping[str, Any]) -> str:
    return f"{_gib(one['used'])} by " if one["used"] is not None else ""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _xid_lines(
    told: Sequence[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]], xids: XidSources
) -> Iterator[str]:
    index = {device["bus_id"]: device["index"] for device in devices}
    for event in told:
        words = f" ({event['meaning']})" if event["meaning"] else ""
        which = index.get(event["bus_id"], "?")
        holders = ", ".join(map(_holder, event["processes"])) or "no process of this server is known to have it"
        yield (
            f"Xid {event['xid']}{words} at {iso_time(event['time'])} on GPU {which} ({event['bus_id']}), {holders}, "
            f"by {event['source']}"
        )
    if not told:
        since = [f"watched since {iso_time(xids.since)}"] if xids.since is not None else []
        yield f"Xid: none seen by this process ({'; '.join([*since, *xids.problems])})"
