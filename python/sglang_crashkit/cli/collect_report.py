"""What ``sglang-crashkit collect`` prints of the processes of one host, for a person and for a program."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_crashkit.core.analysis.explain import Explanation
from sglang_crashkit.core.collection import Collected, Collection
from sglang_crashkit.core.discovery import Discovery
from sglang_crashkit.core.stacks import main_thread
from sglang_crashkit.errors import ExitCode


def as_text(collection: Collection, explanation: Explanation, output: Path) -> Iterator[str]:
    """Yield the lines for a person: process by process, then the verdict."""
    for one in collection.collected:
        yield f"{one.process.title} (pid {one.process.pid})"
        yield from (f"    {line}" for line in _moments(one))
        if one.debugged is not None:
            tool = one.debugged.tool
            stacks = f"{len(one.debugged.threads)} native stacks in {one.debugged.seconds:.1f} s"
            kernels = f", CUDA kernels: {', '.join(one.debugged.kernels)}" if one.debugged.kernels else ""
            yield f"    {tool}: {one.debugged.problem or stacks + kernels}"
    if collection.missing:
        yield collection.missing
    yield f"files: {output}"
    if collection.rounds:
        yield f"verdict ({explanation.level}): {explanation.statement}"


def _moments(one: Collected) -> Iterator[str]:
    """Yield a line for each run of moments in which the process was in the same state and place."""
    places = []
    for moment in one.moments:
        thread = main_thread(moment.threads, moment.pid)
        frames = thread.frames if thread is not None else ()
        places.append((moment.state or "-", str(frames[0]) if frames else moment.problem or "no Python frame"))
    start = 0
    for position, place in enumerate(places):
        if position + 1 < len(places) and places[position + 1] == place:
            continue
        numbers = f"{start + 1}" if start == position else f"{start + 1}-{position + 1}"
        used = one.moments[position].cpu_secs - one.moments[start].cpu_secs
        cpu = f", {used:.1f} s of CPU time between" if position > start else ""
        yield f"{numbers:<4}{place[0]}  {place[1]}{cpu}"
        start = position + 1


def as_json(
    collection: Collection, explanation: Explanation, output: Path, status: ExitCode, found: Discovery
) -> dict[str, Any]:
    """Return the same for a program, as JSON values."""
    processes = []
    for one in collection.collected:
        debugged = one.debugged
        processes.append(
            {
                "pid": one.process.pid,
                "title": one.process.title,
                "role": one.process.role,
                "ranks": dict(one.process.ranks),
                "server": one.process.server,
                "user": one.process.user,
                "found_by": one.process.way,
                "states": [moment.state for moment in one.moments],
                "problems": [moment.problem for moment in one.moments if moment.problem],
                "debugger": debugged and {"tool": debugged.tool, "problem": debugged.problem, "secs": debugged.seconds},
                "files": one.files,
            }
        )
    return {
        "exit_code": int(status),
        "host": collection.host,
        "output_dir": str(output.absolute()),
        "snapshots": collection.snapshot_files,
        "missing": collection.missing,
        "processes": processes,
        "verdict": explanation.to_json(),
        "other_users": {name_of(user): list(pids) for user, pids in found.others.items()},
    }


def name_of(user: int) -> str:
    """Return the name of a user, the id where it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
