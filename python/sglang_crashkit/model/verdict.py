"""What a judge says of a case: what happened, to whom, where, how sure that is, and what to do next."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["established", "supported", "unknown"]
Helps = Literal["yes", "no", "unknown"]


class KnownIssue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An issue or pull request of sgl-project/sglang that the case looks like."""

    issue: int
    title: str
    fixed_in: str | None = None
    workaround: str | None = None


class Verdict(msgspec.Struct, kw_only=True):
    """The answer of the judge; the form of ``explain --json`` and of ``incident.json``."""

    #: The class; stable, alerts route on it. ``class`` in JSON.
    kind: str = msgspec.field(name="class", default="unknown")
    level: Level = "unknown"
    first: str | None = None  # who failed first or is to be looked at first, None if unknown
    component: str | None = None  # the part of SGLang, or around it; a name of ``components.yaml``
    restart_helps: Helps = "unknown"
    headline: str = ""  # what happened, and where everybody stands
    cause: str = ""  # the class in words
    because: list[str] = []  # what the answer rests on, most telling first, with its source
    next: list[str] = []  # what to do, first things first
    known_issues: list[KnownIssue] = []
