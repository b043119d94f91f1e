"""The command line as a user sees it: what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    out: str
    err: str
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.out)


#: Runs a command, which is to end with a `status`, 0 by default, any if None; see the fixture ``cli``.
Cli = Callable[..., Said]
