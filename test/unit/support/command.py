"""The command line as a user sees it: what is printed, and the exit status."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    out: str
    err: str
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli(Protocol):
    """Runs a command, which is to end with a status, any if None; see the fixture ``cli``."""

    def __call__(self, *arguments: object, status: int | None = 0) -> Said: ...
