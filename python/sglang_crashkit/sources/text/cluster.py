"""Parses tables and descriptions of Kubernetes, Docker and the tools of GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from sglang_crashkit.model.event import Container, Event, Gpu

_POD_NAME = re.compile(r"Name: +(\S{1,200})$")
#: A field of a whole pod, such as the reason why its node evicted it.
_OF_POD = re.compile(r"(Reason|Message): +(.{1,600})$")
_FIELD = re.compile(r" +(State|Last State|Reason|Exit Code|Restart Count): +(.{1,200})$")
#: An event in the form of ``kubectl describe`` or ``kubectl get events``.
_EVENT = re.compile(
    r" *(?:\S+(?P<age> \(x\d+ over \S+\))? +)?(?:Warning|Normal) +(?P<reason>\S{1,60}) +(?:(?P<object>\S+/\S+)"
    r"|\S+(?P<seen> \(x\d+ over \S+\))? +\S+) +(?P<text>\S.{0,600})$"
)
_EVENTS = re.compile(r" *(?:LAST SEEN +TYPE +REASON|Type +Reason +Age)\b")
PODS = re.compile(r"NAME +READY +STATUS")
_ROW = re.compile(r"(\S{1,200}) +\d+/\d+ +(\S{1,60}) +(\d{1,9})(?: \([^)]*\))? +\S+")
_WHOLE, _SIZE = re.compile(r"-?\d{1,9}", re.ASCII), re.compile(r"\d{1,9}(?:\.\d{1,4})?")
_GPU_HEAD = re.compile(
    r"\| {1,8}(\d{1,3}) {1,8}(\S.{1,40}?) {1,40}(?:On|Off|N/A) {0,12}\|"
    r"(?: {0,8}(?:0000)?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}))?"
)
_GPU_USE = re.compile(
    r"\|(?:.{0,40}? (?P<watts>\d{1,4})W / *(?P<most>\d{1,4})W|.{0,80}?) *\| *(\d+)MiB / *(\d+)MiB *\| *(\d+|N/A|ERR!)"
)
_INSPECTED = re.compile(rb'\s*(?:\[\s*\{\s*"Id"|\{\s*"Status")')
#: The head of ``nvidia-smi --query-gpu --format=csv``, which names its columns.
QUERY = re.compile(
    r"(?=.{0,400}\b(?:index|memory\.used|utilization\.gpu)\b)[a-z_.]{4,40}(?: \[\S{1,5}\])?"
    r"(?:, ?[a-z_.]{2,60}(?: \[\S{1,5}\])?){1,40}$"
)
#: Headings and cells that identify a file of these kinds.
_KUBECTL, SMI = ("Containers:", "Last State:", "Restart Count:"), "NVIDIA-SMI"


def is_description(lines: Sequence[str]) -> bool:
    """Return whether lines are output of ``kubectl describe pod`` or ``kubectl get events``."""
    known = sum(any(line.lstrip().startswith(word) for word in _KUBECTL) for line in lines)
    return known >= 2 or any(_EVENTS.match(line) for line in lines)


def containers_of(lines: Sequence[str]) -> Iterator[Event]:
    """Yield each pod in the output of ``kubectl describe pod``: its last exit, the number of restarts, its events."""
    told, section = Container(), ""
    for line in lines:
        if match := _POD_NAME.match(line):
            if told.name:
                yield told
            told, section = Container(name=match[1]), ""
        elif match := _OF_POD.match(line):
            told = _noted(told, f"{match[1]}: {match[2].strip()}")
            told = replace(told, reason=match[2].strip()) if match[1] == "Reason" else told
        elif match := _FIELD.match(line):
            field, value = match[1], match[2].strip()
            section = field if field in ("State", "Last State") else section
            if field == "State" or (field == "Reason" and section == "State" and value != "Error"):
                told = replace(told, state=value)
            if field == "Reason" and (section == "Last State" or value in ("OOMKilled", "Error")):
                told = replace(told, reason=value if told.reason != "Evicted" else told.reason)
            elif field in ("Exit Code", "Restart Count") and _WHOLE.fullmatch(value):
                told = replace(told, **{"code" if field == "Exit Code" else "restarts": int(value)})
        elif match := _EVENT.match(line):
            told = replace(told, name=told.name or match["object"] or "a pod")
            told = _noted(told, f"{match['reason']}: {match['text'].rstrip()}{match['age'] or match['seen'] or ''}")
    if told.name:
        yield told


def _noted(told: Container, note: str) -> Container:
    return replace(told, notes=(*told.notes, note)[:50])


def pods_of(lines: Sequence[str]) -> Iterator[Event]:
    """Yield the rows of ``kubectl get pods``."""
    for line in lines:
        if match := _ROW.match(line):
            yield Container(name=match[1], state=match[2], reason=match[2], restarts=int(match[3]))


def is_inspection(head: bytes) -> bool:
    """Return whether a file begins like ``docker inspect``'s output for a container, or only for its state."""
    return _INSPECTED.match(head) is not None and b'"OOMKilled"' in head


def inspected(data: bytes) -> Iterator[Event]:
    """Yield each container in the output of ``docker inspect``.

    Raises:
        ValueError: the data is cut off, or is not such output.
    """
    told = json.loads(data)
    for one in told if isinstance(told, list) else [{"State": told}]:
        state = one.get("State") if isinstance(one, dict) else None
        if not isinstance(state, dict):
            continue
        code, status = state.get("ExitCode"), str(state.get("Status", ""))
        has_ended = status in ("exited", "dead") and type(code) is int
        # Docker also sets OOMKilled for other processes of the container; status 137 shows that this one was killed.
        is_oom = has_ended and code == 137 and state.get("OOMKilled") is True
        restarts = one.get("RestartCount")
        yield Container(
            name=str(one.get("Name", "")).lstrip("/"),
            state=status,
            reason="OOMKilled" if is_oom else "",
            code=code if has_ended else None,
            restarts=restarts if type(restarts) is int else 0,
        )


def queried_gpus_of(lines: Sequence[str]) -> Iterator[Event]:
    """Yield the GPUs of ``nvidia-smi --query-gpu --format=csv``; of several samples of a GPU, the last."""
    found, names = dict[int, Gpu](), list[str]()
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if QUERY.match(line):
            names = [cell.partition(" ")[0] for cell in cells]
        elif len(cells) == len(names):
            told = dict(zip(names, cells, strict=True))
            # Without the column ``index`` each row is another GPU.
            if _WHOLE.fullmatch(index := told.get("index", str(len(found)))):
                use = told.get("utilization.gpu", "").removesuffix("%").strip()
                columns = ("memory.used", "memory.total", "power.draw", "power.limit")
                sizes = [told.get(name, "").partition(" ")[0] for name in columns]
                used, total, watts, most = (float(size) if _SIZE.fullmatch(size) else 0.0 for size in sizes)
                # The address has the form ``00000000:9C:00.0``.
                found[int(index)] = Gpu(
                    index=int(index), bus=told.get("pci.bus_id", "").lower()[-12:-2], name=told.get("name", ""),
                    used_mb=used, total_mb=total, use=float(use) if _WHOLE.fullmatch(use) else -1.0,
                    watts=watts or -1.0, most_watts=most or -1.0,
                )  # fmt: skip
    yield from found.values()


def gpus_of(lines: Sequence[str]) -> Iterator[Event]:
    """Yield the GPUs in a table of ``nvidia-smi``."""
    head = None
    for line in lines:
        if match := _GPU_HEAD.match(line):
            fault = "ERR!" if "ERR!" in line else ""
            cell = line.rstrip(" |").rpartition("|")[2].strip()
            if _WHOLE.fullmatch(cell) and int(cell) > 0:
                fault = f"{cell} uncorrectable errors"
            bus = (match[3] or "").lower()
            head = Gpu(index=int(match[1]), bus=bus, name=match[2].strip(), faults=fault)
        elif head is not None and (match := _GPU_USE.match(line)):
            yield replace(
                head, used_mb=float(match[3]), total_mb=float(match[4]), watts=float(match["watts"] or -1),
                most_watts=float(match["most"] or -1), use=float(match[5]) if _WHOLE.fullmatch(match[5]) else -1.0,
                faults=head.faults or ("ERR!" if "ERR!" in line else ""),
            )  # fmt: skip
            head = None
        elif head is not None and "ERR!" in line:
            yield replace(head, faults="ERR!")
            head = None
