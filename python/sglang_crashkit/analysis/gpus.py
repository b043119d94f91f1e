"""The GPUs of a server: the processes on each, the changes since the server started, and a summary in lines.

The driver's data is used as read: by GPU with its PCI bus id, sizes in bytes, times in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.model.incident import GpuDevice, Gpus, GpuUser, Xid, iso_time
from sglang_crashkit.model.verdict import Level

#: Reasons for lower clocks that are normal.
_HARMLESS = {"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"}
#: Parts of the names of counters that are reported even if they did not grow.
_ALWAYS = ("uncorrected", "pending", "failure")
#: NVML's errors for features that a GPU does not have.
_NOT_THERE = {"Not Supported", "Function Not Found"}
#: A summary names at most this many.
_MAX_XIDS = 32


@dataclass(frozen=True)
class Holder:
    """A process of the server that may have a GPU."""

    pid: int  # its process id, as this process sees it
    title: str
    started: float  # when it began, in seconds since the epoch
    gpu: str | None = None  # the UUID of its GPU as it reported it; None if it reported none


def account(
    gpus: Sequence[Mapping[str, Any]],
    holders: Sequence[Holder],
    xids: Sequence[Mapping[str, Any]],
    start: Mapping[str, Any],
    problem: str,
    *,
    sees_all_pids: bool,
) -> Gpus:
    """Return what an incident keeps of its GPUs.

    Args:
        gpus: the driver's data of each GPU.
        holders: the server's processes, including dead ones.
        xids: the Xid events that were seen, in the form of `XidWatch`.
        start: the watch's data when it began; of its GPUs only names and error counters are used, which a GPU that is
            lost does not report any more.
        problem: why events were not watched, or no longer; empty while they are watched.
        sees_all_pids: whether the driver reports pids as this process sees them. In a container older drivers report
            the host's pids, and an equal pid may be a coincidence.
    """
    first, now = ({gpu["index"]: dict(gpu) for gpu in some} for some in (start.get("gpus", ()), gpus))
    names = {index: {name: value for name, value in gpu.items() if name != "counters"} for index, gpu in first.items()}
    known = [names.get(index, {}) | now.get(index, {}) for index in sorted(first.keys() | now)]
    devices = [
        _device(gpu, holders, first.get(gpu["index"], {}).get("counters"), sees_all_pids=sees_all_pids) for gpu in known
    ]
    started = {holder.pid: holder.started for holder in holders}
    told = []
    for event in sorted(xids, key=lambda event: float(event["time"]))[-_MAX_XIDS:]:
        # A process that started after the Xid is not related to it.
        users = [
            one
            for device in devices
            for one in device.processes
            if device.bus_id == event["bus_id"] and started[one.pid] <= event["time"]
        ]
        told.append(Xid(event["xid"], event["bus_id"] or "", event["time"], source="NVML", processes=users))
    # On a shared host, leave out the GPUs of others, unless it is not known which GPUs are this server's.
    is_known = any(device.processes for device in devices)
    lines, more = [], 0
    for gpu, device in zip(known, devices, strict=True):
        if is_known and not (device.processes or device.new_errors or gpu.get("errors", {}).keys() - _NOT_THERE):
            more += 1
            continue
        name = f"GPU {gpu['index']} {gpu['name']} ({device.bus_id})" if gpu.get("name") else f"GPU {gpu['index']}"
        lines.append(f"{name}: {'; '.join(_parts(gpu, device, sees_all_pids=sees_all_pids)) or 'not read'}")
    if more:
        lines.append(f"{more} more that no process of this server is known to have")
    return Gpus(devices, told, [*lines, *_xid_lines(told, devices, start, problem)])


def _device(
    gpu: Mapping[str, Any], holders: Sequence[Holder], start: Mapping[str, Any] | None, *, sees_all_pids: bool
) -> GpuDevice:
    now, new_errors = _flat(gpu.get("counters", {})), None
    if start is not None and "counters" in gpu:
        before = _flat(start)
        grown = {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}
        # A link that was up and no longer is counts as one error ``down``.
        down = {name for name, count in before.items() if name.endswith(" up") and count and not now.get(name, count)}
        new_errors = {name: more for name, more in grown.items() if not name.endswith(" up")}
        new_errors |= {f"{name[:-2]}down": 1 for name in sorted(down)}
    used = {one["pid"]: one["used"] for one in gpu.get("processes", ())}
    ours = [
        GpuUser(holder.pid, holder.title, used.get(holder.pid), level)
        for holder in holders
        if (level := _level(gpu, holder, is_listed=holder.pid in used, sees_all_pids=sees_all_pids)) is not None
    ]
    known = {one.pid for one in ours}
    return GpuDevice(
        index=gpu["index"],
        name=gpu.get("name"),
        bus_id=gpu.get("bus_id"),
        memory=gpu.get("memory"),
        processes=ours,
        others=[{"pid": pid, "used": size} for pid, size in used.items() if pid not in known],
        throttle=[reason for reason in gpu.get("throttle", ()) if reason not in _HARMLESS],
        errors={name: count for name, count in now.items() if count and any(word in name for word in _ALWAYS)},
        new_errors=new_errors,
    )


def _level(gpu: Mapping[str, Any], holder: Holder, *, is_listed: bool, sees_all_pids: bool) -> Level | None:
    """Return how certain it is that a process uses a GPU; None if nothing shows that it does."""
    # PyTorch reports UUIDs without the prefix.
    is_named = holder.gpu is not None and holder.gpu == str(gpu.get("uuid")).removeprefix("GPU-")
    if is_listed and (sees_all_pids or is_named):
        return "established"
    return "supported" if is_named or (is_listed and holder.gpu is None) else None


def _flat(counters: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    flat: dict[str, int] = {}
    for name, value in counters.items():
        flat |= _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _parts(gpu: Mapping[str, Any], device: GpuDevice, *, sees_all_pids: bool) -> Iterator[str]:
    if memory := device.memory:
        yield f"{_gib(memory['used'])} of {_gib(memory['total'])} used"
    for user in device.processes:
        yield f"{_gib(user.used) + ' by ' if user.used is not None else ''}{_name(user)}"
    whose = "not this server's" if sees_all_pids else "not known in this container"
    for other in device.others:
        used = other["used"]
        yield f"{_gib(used) + ' by ' if used is not None else ''}pid {other['pid']}, {whose}"
    state = ((gpu.get("utilisation", {}).get("gpu"), "% busy"), (gpu.get("temperature"), "C"), (gpu.get("power"), "W"))
    if words := ", ".join(f"{value:g} {unit}" for value, unit in state if value is not None):
        yield words
    if device.throttle:
        yield f"clocks held down by {', '.join(device.throttle)}"
    new = device.new_errors or {}
    if new:
        yield f"since the server started {_counted(new)}"
    if earlier := {name: count for name, count in device.errors.items() if name not in new}:
        yield ("from before the server started " if device.new_errors is not None else "") + _counted(earlier)
    for error, names in gpu.get("errors", {}).items():
        if error not in _NOT_THERE:
            yield f"not read: {', '.join(names)} ({error})"


def _counted(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counters.items())


def _name(user: GpuUser) -> str:
    return f"{user.title} (pid {user.pid}{'' if user.level == 'established' else f', {user.level}'})"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _xid_lines(
    told: Sequence[Xid], devices: Sequence[GpuDevice], start: Mapping[str, Any], problem: str
) -> Iterator[str]:
    index = {device.bus_id: device.index for device in devices}
    for event in told:
        holders = ", ".join(map(_name, event.processes)) or "no process of this server is known to have it"
        which = f"GPU {index.get(event.bus_id, '?')} ({event.bus_id})"
        yield f"Xid {event.xid} at {iso_time(event.time)} on {which}, {holders}, by {event.source}"
    if not told:
        since = [f"watched since {iso_time(start['time'])}"] if start else []
        errors = [f"{', '.join(names)}: {error}" for error, names in start.get("errors", {}).items()]
        words = "; ".join([*since, *([f"no NVML events: {problem}"] if problem else errors)])
        yield f"Xid: none seen by this process ({words})"
