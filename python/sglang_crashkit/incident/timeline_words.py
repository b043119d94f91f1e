"""The events of an incident in words; those of many processes that are alike and close to one another are one.

As in `incident.summary`, what is missing or has another form is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from sglang_crashkit.incident.first_screen import consequence_in_words, cut
from sglang_crashkit.incident.names import Names, join_names, without_own_numbers
from sglang_crashkit.model.checked_json import mappings_of, seconds_of

#: So many events that are alike are told one by one.
_FEW = 8
#: Two that are further apart are of two runs.
_AT_ONCE_SECS = 1.0
_MAX_LIST, _MAX_NAMES = 8, 160

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """Events at about the same time that are alike but for their processes and numbers; often one alone."""

    events: Sequence[Event]  # in order of time

    @property
    def first(self) -> Event:
        """The first of them."""
        return self.events[0]

    def who(self, names: Names) -> str:
        """Return whom it happened to, in short; empty where it did to no process."""
        if "pid" not in self.first:
            return ""
        told = cut(join_names(map(names.short, self.events)), _MAX_NAMES)
        return told if len(self.events) == 1 else f"{told} ({len(self.events):,} processes)"

    def details(self, *, of_process: bool = False) -> str:
        """Return what is told beside the time, and how long it took until the last of them.

        `of_process` has the pid and the title of a single one with it.
        """
        words = _details(self.first, of_process=of_process and len(self.events) == 1)
        if len(self.events) == 1:
            return words
        differs = len({_details(event, of_process=False) for event in self.events}) > 1
        first, last = (seconds_of(self.events[place].get("time")) for place in (0, -1))
        took = f"within {last - first:.3f} s" if first is not None and last is not None else ""
        return ", ".join(filter(None, [took, f"{words} (the first)" if words and differs else words]))


def timeline_of(document: Mapping[str, Any]) -> list[Event]:
    """Return the events in order of time."""
    return sorted(mappings_of(document.get("timeline")), key=lambda entry: str(entry.get("time")))


def runs_of(document: Mapping[str, Any]) -> list[Run]:
    """Return the events in order of time, more than a few alike as one run where the first of them stands."""
    runs: list[list[tuple[int, Event]]] = []
    open_runs: dict[tuple[str, str], tuple[float, list[tuple[int, Event]]]] = {}
    for place, event in enumerate(timeline_of(document)):
        seconds, alike = seconds_of(event.get("time")), _likeness(event)
        before, run = open_runs.get(alike, (-inf, []))
        if seconds is None or "pid" not in event or seconds - before > _AT_ONCE_SECS:
            run = []
            runs.append(run)
        run.append((place, event))
        if seconds is not None:
            open_runs[alike] = (seconds, run)
    placed = [[run] if len(run) > _FEW else [[one] for one in run] for run in runs]
    told = sorted((run for some in placed for run in some), key=lambda run: run[0][0])
    return [Run([event for _place, event in run]) for run in told]


def _likeness(event: Event) -> tuple[str, str]:
    return str(event.get("event")), without_own_numbers(_details(event, of_process=False))


def _details(event: Event, *, of_process: bool) -> str:
    hidden = ("time", "event") if of_process else ("time", "event", "pid", "title")
    told = {name: value for name, value in event.items() if name not in hidden and value is not None}
    return ", ".join(_detail_in_words(name, value) for name, value in told.items())


def _detail_in_words(name: str, value: object) -> str:
    if name == "message":
        # The whole of it stands in the verdict, or in the process's own record.
        return consequence_in_words(str(value))
    if name == "segments" and isinstance(value, list):
        return _segments_in_words(mappings_of(value))
    if isinstance(value, list):
        more = f" and {len(value) - _MAX_LIST:,} more" if len(value) > _MAX_LIST else ""
        return f"{name} {', '.join(map(str, value[:_MAX_LIST]))}{more}"
    return f"{name} {value}"


def _segments_in_words(segments: Sequence[Mapping[str, Any]]) -> str:
    size = sum(one["bytes"] for one in segments if isinstance(one.get("bytes"), int))
    named = [f"{one.get('name')} ({one.get('why')})" for one in segments[:_MAX_LIST]]
    more = f" and {len(segments) - _MAX_LIST:,} more" if len(segments) > _MAX_LIST else ""
    count = f"{len(segments)} segment{'' if len(segments) == 1 else 's'} left, {size / 1e3:,.0f} kB"
    return f"{count}: {', '.join(named)}{more}"
