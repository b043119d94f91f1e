"""The steps of the ranks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sglang_crashkit.analysis.divergence import group_in_step
from sglang_crashkit.analysis.ranks import RankSet, rank_at
from sglang_crashkit.incident.store import StoredSteps
from sglang_crashkit.model.step import Step
from sglang_crashkit.view import words

#: How many of the last steps are shown.
LAST = 20
#: More ranks than these stand in a column with those that did the same.
_MAX_COLUMNS = 4


def table_lines(shown: Sequence[StoredSteps], marked: int | None, last: int) -> Iterator[str]:
    """Yield a table for each set of ranks that must agree, a line a step."""
    for group in groups_of(shown):
        yield ""
        columns, chosen, about = side_by_side(group, marked, last)
        rows = [["step", *(name for name, _steps in columns)]]
        for number in chosen:
            mark = "> " if number == marked else "  "
            rows.append([f"{mark}{number:,}", *(words.step_done(steps.get(number)) for _name, steps in columns)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for name, steps in columns:
            step = steps.get(about)
            for request in step.requests if step is not None else ():
                told = f"request {request.rid}: {request.tokens:,} of {request.length:,} tokens"
                yield f"step {about:,} of {name}: {told}"


def groups_of(everyone: Iterable[StoredSteps]) -> list[list[StoredSteps]]:
    """Return the sets of ranks that must agree."""
    groups: dict[object, list[StoredSteps]] = {}
    for one in everyone:
        groups.setdefault(group_in_step(rank_at(one.ranks)), []).append(one)
    return list(groups.values())


def side_by_side(
    group: Sequence[StoredSteps], marked: int | None, last: int = LAST
) -> tuple[list[tuple[str, Mapping[int, Step]]], list[int], int]:
    """Return the columns of a table, the steps in it (the last and those around the marked one), and whose requests.

    Where there is no step, they are of step -1.
    """
    by_number = [{step.number: step for step in one.steps} for one in group]
    numbers = sorted({number for steps in by_number for number in steps})
    around = [number for number in numbers if marked is not None and abs(number - marked) < 2]
    chosen = sorted({*around, *numbers[-last:]})
    about = marked if marked is not None and marked in chosen else chosen[-1] if chosen else -1
    return list(_columns_of(group, by_number, chosen)), chosen, about


def _columns_of(
    group: Sequence[StoredSteps], by_number: Sequence[Mapping[int, Step]], chosen: Sequence[int]
) -> Iterator[tuple[str, Mapping[int, Step]]]:
    """Yield each column with its name; of many ranks those that did the same are one, with the times of the first."""
    alike: dict[object, list[int]] = {}
    for position, steps in enumerate(by_number):
        there = [(number, steps[number]) for number in chosen if number in steps]
        did = tuple((number, step.phase, step.mode, step.size, step.tokens, step.requests) for number, step in there)
        alike.setdefault(did if len(group) > _MAX_COLUMNS else position, []).append(position)
    for positions in alike.values():
        first = group[positions[0]]
        # A server's only scheduler has no place among others.
        alone = "" if rank_at(first.ranks).axis else first.title.removeprefix("sglang::")
        yield (
            alone or RankSet(rank_at(group[position].ranks) for position in positions).format(),
            by_number[positions[0]],
        )
