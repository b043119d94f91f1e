"""What a killed crash handler had written into an incident's folder and not yet listed in its ``incident.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_crashkit.model.incident import EvidenceKind, JournaledRequests

REQUESTS = "requests/requests.jsonl"

_STACKS = re.compile(r"-(?P<pid>\d+)(?P<mark>|\.\d+|\.native|\.fault)\.(?:txt|json)")
_KERNELS = re.compile(r"-(?P<pid>\d+)\.kernels\.json")
_RECORD = re.compile(r"-(?P<pid>\d+)\.exception\.json")
#: All others are stacks; of a hang, those of the later snapshots have the number of the snapshot.
_KINDS: Mapping[str, EvidenceKind] = {".native": "native_stack", ".fault": "fault_stack"}


def unlisted_pieces(folder: Path, pid: int, listed: Collection[str | None]) -> Iterator[tuple[EvidenceKind, str]]:
    """Yield kind and name of each piece of evidence of process `pid` that is in `folder` and not in `listed`.

    Args:
        folder: the incident's folder.
        pid: whose evidence.
        listed: the paths that the incident names, relative to the folder.
    """
    known = {Path(name).with_suffix("") for name in listed if name}
    # Of stacks there is a text and the same as JSON, of which an incident names the text.
    for path in sorted(folder.glob("stacks/*"), key=lambda path: (path.suffix != ".txt", path.name)):
        match, name = _STACKS.search(path.name), path.relative_to(folder)
        if match and path.name.endswith(match[0]) and int(match["pid"]) == pid and name.with_suffix("") not in known:
            known.add(name.with_suffix(""))
            yield _KINDS.get(match["mark"], "stack"), str(name)
    for path in sorted(folder.glob("ranks/*")):
        match, name = _RECORD.search(path.name), path.relative_to(folder)
        if match and int(match["pid"]) == pid and name.with_suffix("") not in known:
            yield "exception", str(name)
    for path in sorted(folder.glob("gpu/*")):
        match, name = _KERNELS.search(path.name), path.relative_to(folder)
        if match and int(match["pid"]) == pid and name.with_suffix("") not in known:
            yield "gpu_kernels", str(name)


def journal_remains(folder: Path, reason: str) -> dict[str, Any] | None:
    """Return what the file of requests in `folder` holds, in the form of `JournaledRequests`; None without one.

    Args:
        folder: the incident's folder.
        reason: why it may not be whole.

    Raises:
        OSError: the file cannot be read.
    """
    told = JournaledRequests(path=REQUESTS, reason=reason)
    try:
        with (folder / REQUESTS).open("rb") as file:
            for line in file:
                _count(line, told)
    except FileNotFoundError:
        return None
    return asdict(told)


def _count(line: bytes, told: JournaledRequests) -> None:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        # The last one, which was being written.
        told.torn += 1
        return
    state = request.get("state") if isinstance(request, dict) else None
    told.finished += state == "finished"
    told.unfinished += state == "unfinished"
