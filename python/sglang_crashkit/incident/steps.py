"""The last steps of the ranks as they lie in an incident's folder: ``ranks/<rank>.steps.jsonl``, a step a line."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import WHOSE_IT_IS, CrashkitError
from sglang_crashkit.kernel import titles
from sglang_crashkit.model.step import Step

SUFFIX = ".steps.jsonl"


@dataclass(frozen=True)
class StoredSteps:
    """The steps of one rank."""

    title: str  # of its process
    pid: int  # of its process, 0 where the file's name does not tell
    ranks: dict[str, int]  # its ranks by lower-case name, as `titles.rank_of` has them
    steps: tuple[Step, ...]  # in the order of their numbers
    unread: int = 0  # how many lines are no step, as the last one of a handler that was killed


def read_steps(incident: Path, number: int | None = None) -> list[StoredSteps]:
    """Return the steps in an incident's folder, in the order of the ranks' titles.

    Args:
        incident: the folder.
        number: of the only step that is wanted; all when None.

    Raises:
        CrashkitError: a file cannot be read.
    """
    try:
        return [_read(path, number) for path in sorted(incident.glob(f"ranks/*{SUFFIX}"))]
    except OSError as error:
        raise CrashkitError(
            f"{incident} cannot be read: {error}", next_step=f"ls -l {shlex.quote(str(incident))}{WHOSE_IT_IS}"
        ) from error


def _read(path: Path, number: int | None) -> StoredSteps:
    found, unread = {}, 0
    wanted = b"" if number is None else f'{{"number": {number},'.encode()
    # A line at a time: those of a thousand steps of hundreds of requests take tens of megabytes.
    with path.open("rb") as lines:
        for line in lines:
            if not line.startswith(wanted):
                continue
            try:
                step = Step.from_json(json.loads(line))
            except (ValueError, RecursionError):
                unread += 1
            else:
                found[step.number] = step
    label, _, pid = path.name.removesuffix(SUFFIX).rpartition("-")
    title = f"sglang::{label or pid}"
    ordered = tuple(found[number] for number in sorted(found))
    return StoredSteps(title, int(pid) if pid.isdecimal() else 0, titles.rank_of(title), ordered, unread)
