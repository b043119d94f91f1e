"""The last steps of the ranks as they lie in an incident's folder: ``ranks/<rank>.steps.jsonl``, a step a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel import titles
from sglang_crashkit.model.step import Step

SUFFIX = ".steps.jsonl"


@dataclass(frozen=True)
class StoredSteps:
    """The steps of one rank.

    Attributes:
        title: of its process.
        pid: of its process, 0 where the file's name does not tell.
        ranks: its ranks by lower-case name, as `titles.rank_of` has them.
        steps: in the order of their numbers.
        unread: how many lines are no step, as the last one of a handler that was killed.
    """

    title: str
    pid: int
    ranks: dict[str, int]
    steps: tuple[Step, ...]
    unread: int = 0


def read_steps(incident: Path) -> list[StoredSteps]:
    """Return the steps in an incident's folder, in the order of the ranks' titles.

    Raises:
        CrashkitError: a file cannot be read.
    """
    try:
        return [_read(path) for path in sorted(incident.glob(f"ranks/*{SUFFIX}"))]
    except OSError as error:
        raise CrashkitError(f"{incident} cannot be read: {error}", next_step="read it as the server's user") from error


def _read(path: Path) -> StoredSteps:
    found, unread = {}, 0
    for line in path.read_bytes().splitlines():
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
