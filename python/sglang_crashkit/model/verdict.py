"""The judge's verdict on a case: what happened, to which process, in which component, how certain, and what to do."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["established", "supported", "unknown"]
Helps = Literal["yes", "no", "unknown"]


class KnownIssue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An issue or pull request of sgl-project/sglang that matches the case."""

    issue: int
    title: str
    fixed_in: str | None = None
    workaround: str | None = None


class Verdict(msgspec.Struct, kw_only=True):
    """The answer of the judge; the form of ``explain --json`` and of ``incident.json``."""

    #: The class; stable, alerts route on it. ``class`` in JSON.
    kind: str = msgspec.field(name="class", default="unknown")
    level: Level = "unknown"
    first: str | None = None  # the process that failed first or is to be examined first; None if unknown
    component: str | None = None  # the part of SGLang, or of its environment; a name of ``components.yaml``
    restart_helps: Helps = "unknown"
    headline: str = ""  # what happened, and what each process was doing
    cause: str = ""  # the class in words
    because: list[str] = []  # the evidence for it with its source, most telling first
    next: list[str] = []  # what to do, in order
    known_issues: list[KnownIssue] = []
