"""What one part of the judge found; `verdict.judge` chooses among these."""

from __future__ import annotations

import msgspec

from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.model.verdict import Helps, Level


class Finding(msgspec.Struct, kw_only=True):
    """One explanation of the case, or of a part of it.

    Attributes:
        kind: the class, a key of ``classes.yaml``.
        who: who failed, or is to be looked at; None where nobody is to be named.
        where: place in the evidence, as ``(at, order)`` of its event: the first failure has the smallest.
        is_consequence: it follows from another failure, such as a connection that another rank's end closed.
        weight: how telling it is; of two findings the one with more weight explains the other. 100: the kernel, the
            driver or an exception's own class says so; 50: words that have a meaning of their own; 10: it is only known
            that something failed.
    """

    kind: str
    level: Level = "supported"
    who: str | None = None
    component: str | None = None
    restart: Helps | None = None  # None: as the class has it
    headline: str = ""
    cause: str = ""
    because: list[str] = []
    next: list[str] = []
    where: tuple[float, int] = (0.0, 0)
    is_consequence: bool = False
    weight: int = 50

    @property
    def is_calm(self) -> bool:
        """Whether its class says that nothing has failed."""
        return bool((load("classes").get(self.kind) or {}).get("calm"))
