"""What a probe finds: whose version of a feature is there."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Owner(enum.Enum):
    """Whose version of a feature a tree has."""

    NOBODY = "no"
    UPSTREAM = "upstream"
    KIT = "kit"


@dataclass(frozen=True)
class Finding:
    """One feature of one tree.

    Attributes:
        owner: whose version it is.
        note: how this version differs from another, in a word or two.
    """

    owner: Owner
    note: str = ""


ABSENT = Finding(Owner.NOBODY)


def upstream(note: str = "") -> Finding:
    """Return that upstream's version is there."""
    return Finding(Owner.UPSTREAM, note)


def kit(note: str = "") -> Finding:
    """Return that the kit's version is there."""
    return Finding(Owner.KIT, note)
