"""The events of an incident on disk, so that it is judged as plain evidence is, alone or beside a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.model.checked_json import mapping_of, seconds_of
from sglang_crashkit.model.event import AnyEvent, Arguments, Error, Exit, Kernel, Raised, Stack, Stage, Stop
from sglang_crashkit.model.sample import Frame, Sample, Thread

DOCUMENT = "incident.json"
#: Of each file that is read here; an incident of 512 ranks has 2 MB.
_MAX_BYTES = 64 << 20
_FRAME = re.compile(r"(?P<function>[^()]{1,300}) \((?P<file>[^()]{1,600}?):(?P<line>\d{1,9})\)")
#: How SGLang names the ranks in front of its log lines, in that order.
_RANKS = ("dp", "pp", "attn_cp", "moe_dp", "tp", "ep")


def is_incident(path: Path) -> bool:
    """Return whether a path is the folder of an incident."""
    return (path / DOCUMENT).is_file()


def read_incident(folder: Path) -> Iterator[AnyEvent]:
    """Yield what an incident holds of its processes, their ends, exceptions and stacks, and of its host.

    Raises:
        CrashkitError: ``incident.json`` cannot be read.
    """
    document = _read_json(folder / DOCUMENT, is_needed=True)
    environment = _read_json(folder / "environment.json")
    orders = count(1)
    source = folder.name
    told = map(mapping_of, document.get("processes") or [])
    processes = {pid: one for one in told if isinstance(pid := one.get("pid"), int)}
    names = {pid: _name(one) for pid, one in processes.items()}
    server = mapping_of(document.get("server"))
    about = mapping_of(document.get("environment"))
    parallel = {f"{name}_size": size for name, size in mapping_of(about.get("parallel")).items()}
    values = {**parallel, "model_path": about.get("model"), **mapping_of(environment.get("arguments"))}
    yield Arguments(
        order=next(orders),
        at=seconds_of(about.get("started")) or 0.0,
        values={name.replace("-", "_"): value for name, value in values.items() if value is not None},
        release=str(server.get("sglang_version") or ""),
        source=source,
    )
    if ready := seconds_of(about.get("ready_since")):
        yield Stage(order=next(orders), at=ready, name="ready", is_done=True, source=source)
    for entry in map(mapping_of, document.get("timeline") or []):
        kind, pid, at = entry.get("event"), entry.get("pid"), seconds_of(entry.get("time")) or 0.0
        if kind == "teardown":
            # SGLang's own end: what dies from here on was killed by it.
            break
        who = names.get(pid, "") if isinstance(pid, int) else ""
        if kind == "process_exited" and who:
            code, signal = entry.get("code"), entry.get("signal")
            yield Exit(order=next(orders), at=at, who=who, code=code, signal=signal or "", source=source)
        elif kind == "exception":
            error = _exception(
                folder, processes.get(pid, {}) if isinstance(pid, int) else {}, str(entry.get("message") or "")
            )
            yield Raised(order=next(orders), at=at, who=who, chain=(error,), source=source)
        elif kind == "asked_to_end":
            yield Stop(order=next(orders), at=at, by="signal", text="it was asked to end", source=source)
    memory = mapping_of(mapping_of(about.get("memory")).get("events"))
    trigger = seconds_of(mapping_of(document.get("trigger")).get("time")) or 0.0
    if isinstance(killed := memory.get("oom_kill"), int) and killed > 0:
        text = f"the memory cgroup of the server counts {killed} OOM kills"
        yield Kernel(order=next(orders), at=trigger, kind="oom_kill", text=text, source=source)
    for entry in map(mapping_of, mapping_of(document.get("gpus")).get("xids") or []):
        if isinstance(number := entry.get("xid"), int):
            text = str(entry.get("text") or f"Xid {number} on {entry.get('bus_id')}")
            yield Kernel(order=next(orders), at=trigger, kind="xid", number=number, text=text, source=source)
    for pid, one in processes.items():
        if one.get("role") == "helper":
            continue
        for sample in _samples(pid, one):
            at = sample.time or trigger
            yield Stack(order=next(orders), at=at, who=names[pid], sample=sample, by="crash handler", source=source)


def logs_of(folder: Path) -> list[Path]:
    """Return the log files in an incident, for the reader of text."""
    return sorted((folder / "logs").glob("*.log"))


def _read_json(path: Path, *, is_needed: bool = False) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return mapping_of(json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        if is_needed:
            raise CrashkitError(f"{path} cannot be read: {error}", next_step="sglang-crashkit show INCIDENT") from error
        return {}


def _name(process: Mapping[str, Any]) -> str:
    ranks = mapping_of(process.get("rank"))
    named = [f"{name.upper()}{ranks[name]}" for name in _RANKS if name in ranks]
    return " ".join(named) or str(process.get("role") or "")


def _samples(pid: int, process: Mapping[str, Any]) -> Iterator[Sample]:
    ranks = {name: rank for name, rank in mapping_of(process.get("rank")).items() if isinstance(rank, int)}
    title, role = str(process.get("title") or ""), str(process.get("role") or "")
    state = str(mapping_of(process.get("state")).get("State") or "")[:1]
    looks = [mapping_of(look) for look in process.get("looks") or []]
    if not looks and (state or process.get("doing")):
        looks = [{"state": state, "doing": process.get("doing")}]
    for look in looks:
        frames = _frames(look.get("doing") or [])
        cpu = look.get("cpu_secs")
        yield Sample(
            pid=pid,
            title=title,
            role=role,
            ranks=ranks,
            time=seconds_of(look.get("time")) or 0.0,
            state=str(look.get("state") or ""),
            cpu_secs=float(cpu) if isinstance(cpu, int | float) else 0.0,
            threads=(Thread("MainThread", pid, active=False, owns_gil=False, frames=frames),) if frames else (),
        )


def _exception(folder: Path, process: Mapping[str, Any], message: str) -> Error:
    evidence = (mapping_of(one) for one in process.get("evidence") or [])
    path = next((one.get("path") for one in evidence if one.get("kind") == "exception" and one.get("path")), None)
    # The path is the document's word: a name in the folder, or nothing.
    record = _read_json(folder / "ranks" / Path(str(path)).name) if path else {}
    kind, _, text = str(record.get("message") or message).partition(": ")
    frames = _frames(record.get("traceback") or process.get("doing") or [])
    return Error(type=kind, text=text, frames=frames[::-1] if record.get("traceback") else frames)


def _frames(lines: Sequence[object]) -> tuple[Frame, ...]:
    found = (_FRAME.fullmatch(str(line)) for line in lines)
    return tuple(Frame(one["function"], one["file"], int(one["line"])) for one in found if one)
