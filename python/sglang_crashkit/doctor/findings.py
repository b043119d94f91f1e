"""What the doctor says: one finding for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: ``note``: to know, and nothing is wrong; ``warning``: some evidence will be missing; ``problem``: there will be no
#: incident, or not a whole one.
Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
        level: how bad it is.
        topic: what was looked at, in a word or two.
        what: what is the case, one sentence.
        why: why it matters; empty where nothing is wrong.
        next: the commands or lines that mend it, one each.
    """

    level: Level
    topic: str
    what: str
    why: str = ""
    next: tuple[str, ...] = ()


def has_problem(findings: Iterable[Finding]) -> bool:
    """Say whether one of them is a problem."""
    return any(finding.level == "problem" for finding in findings)


def printable(text: str) -> str:
    """Return a text in which nothing is a command to a terminal: paths and titles are whatever somebody made them."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def format_findings(findings: Iterable[Finding]) -> list[str]:
    """Return the lines for a person, for all that is not in order with the reason and what mends it."""
    lines = []
    found = list(findings)
    for finding in found:
        lines.append(f"{finding.level:<8} {finding.topic}: {finding.what}")
        lines += [f"{'':8}   why: {finding.why}"] if finding.why else []
        lines += [f"{'':8}   next: {step}" for step in finding.next]
    counts = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning")}
    told = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count]
    lines.append(f"result   {', '.join(told) or 'nothing is wrong'}")
    return [printable(line) for line in lines]
