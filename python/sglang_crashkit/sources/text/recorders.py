"""Reads dumps of PyTorch's flight recorder, in JSON or as a pickle: the last collectives of one rank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from sglang_crashkit.model.event import Collective
from sglang_crashkit.model.flight_dump import Entry, FlightDumpError, parse_document, parse_dump

#: The number of last collectives to return of each process group.
_LAST = 16
_RANK = re.compile(r"(\d{1,6})(?:\.\w{1,8})?$")


def is_dump(head: bytes) -> bool:
    """Return whether a file begins like such a dump."""
    return (head[:2] == b"\x80\x02" and b"pg_config" in head) or (
        head.lstrip()[:1] == b"{" and (b'"pg_config"' in head or b'"collective_seq_id"' in head)
    )


def collectives_of(data: bytes, path: Path) -> Iterator[Collective]:
    """Yield the last collectives of a dump; the rank is from the dump, else the number at the end of the file's name.

    Raises:
        FlightDumpError: the data is not a dump, is cut off, or is too large.
    """
    named = _RANK.search(path.name)
    rank = int(named[1]) if named else -1
    if data[:1] == b"\x80":
        dump = parse_dump(data)
    else:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FlightDumpError(f"no JSON: {error}") from None
        if not isinstance(document, dict):
            raise FlightDumpError("no dump of a flight recorder")
        for entry in document.get("entries") or ():
            if isinstance(entry, dict) and isinstance(entry.get("process_group"), list):
                # A pair in a pickle is a list in JSON.
                entry["process_group"] = tuple(entry["process_group"])
        rank = document["rank"] if isinstance(document.get("rank"), int) else rank
        dump = parse_document(document)
    by_group: dict[str, list[Entry]] = {}
    for entry in dump.entries:
        by_group.setdefault(entry.group, []).append(entry)
    for entry in (entry for entries in by_group.values() for entry in entries[-_LAST:]):
        group = dump.groups.get(entry.group)
        yield Collective(
            who=f"TP{rank}" if rank >= 0 else "",
            at=entry.created,
            group=(group.description if group else "") or entry.group,
            number=entry.sequence,
            operation=entry.operation,
            state="completed" if entry.is_done else "started",
            sizes=" ".join(str(list(shape)) for shape in entry.input_sizes[:4])[:120],
            rank=rank,
        )
