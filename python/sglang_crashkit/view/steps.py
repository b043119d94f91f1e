"""The steps of the ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_crashkit.analysis.divergence import group_in_step
from sglang_crashkit.analysis.ranks import RankSet, rank_at
from sglang_crashkit.incident.store import StoredSteps
from sglang_crashkit.model.step import Step, StepRequest
from sglang_crashkit.view import words

#: How many of the last steps are shown.
LAST = 20
#: Of more ranks than this, those that did the same share a column.
_MAX_COLUMNS = 4
_MODES = frozenset({"extend", "decode", "mixed", "idle"})


@dataclass(frozen=True)
class Table:
    """The steps of ranks that must agree."""

    columns: list[str]  # ranks that did the same, by name
    rows: list[tuple[int, bool, list[tuple[str, str]]]]  # number, whether it is marked, and look and words by column
    about: int  # the number of the step whose requests are shown; -1 where there is no step
    requests: list[tuple[str, StepRequest]]  # each with the name of its column


def tables_of(everyone: Sequence[StoredSteps], marked: int | None, last: int = LAST) -> Iterator[Table]:
    """Yield a table for each set of ranks that must agree: the last steps, and those around step number `marked`."""
    groups: dict[object, list[StoredSteps]] = {}
    for one in everyone:
        groups.setdefault(group_in_step(rank_at(one.ranks)), []).append(one)
    for group in groups.values():
        by_number = [{step.number: step for step in one.steps} for one in group]
        numbers = sorted({number for steps in by_number for number in steps})
        around = [number for number in numbers if marked is not None and abs(number - marked) < 2]
        chosen = sorted({*around, *numbers[-last:]})
        about = marked if marked is not None and marked in chosen else chosen[-1] if chosen else -1
        columns = list(_columns_of(group, by_number, chosen))
        rows = []
        for number in chosen:
            steps = [steps.get(number) for _name, steps in columns]
            cells = [(_look_of(step, steps[0]), words.step_done(step)) for step in steps]
            rows.append((number, number == marked, cells))
        requests = [(name, one) for name, steps in columns if about in steps for one in steps[about].requests]
        yield Table([name for name, _steps in columns], rows, about, requests)


def _columns_of(
    group: Sequence[StoredSteps], by_number: Sequence[Mapping[int, Step]], chosen: Sequence[int]
) -> Iterator[tuple[str, Mapping[int, Step]]]:
    """Yield each column's name and steps; of many ranks, those that did the same share one, with the first's times."""
    alike: dict[object, list[int]] = {}
    for position, steps in enumerate(by_number):
        there = [(number, steps[number]) for number in chosen if number in steps]
        did = tuple((number, step.phase, step.mode, step.size, step.tokens, step.requests) for number, step in there)
        alike.setdefault(did if len(group) > _MAX_COLUMNS else position, []).append(position)
    for positions in alike.values():
        first = group[positions[0]]
        # The only scheduler of a server has no rank that could name it.
        alone = "" if rank_at(first.ranks).axis else first.title.removeprefix("sglang::")
        yield alone or str(RankSet(rank_at(group[one].ranks) for one in positions)), by_number[positions[0]]


def _look_of(step: Step | None, other: Step | None) -> str:
    """Return CSS classes: the step's mode, ``differs`` (from the first column's), ``open`` (it has not ended)."""
    if step is None:
        return "none" if other is None else "none differs"
    differs = other is None or (step.mode, step.size, step.tokens) != (other.mode, other.size, other.tokens)
    mode = step.mode if step.mode in _MODES else "other"
    return f"{mode}{' differs' if differs else ''}{' open' if step.ended is None else ''}"
