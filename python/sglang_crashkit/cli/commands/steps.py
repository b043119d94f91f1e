"""``sglang-crashkit steps``: the last steps of the ranks in an incident, side by side, the diverging one marked."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit.cli.argument_types import positive
from sglang_crashkit.cli.crash_folder import add_incident, find_incident, nothing_of
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.analysis.ranks import Rank
    from sglang_crashkit.incident.store import StoredIncident, StoredSteps
    from sglang_crashkit.model.incident import Divergence
    from sglang_crashkit.model.step import Step

_LAST = 20
#: More ranks than these stand in a column with those that did the same.
_MAX_COLUMNS = 4
_EXAMPLES = """\
examples:
  sglang-crashkit steps latest --folder /var/crash/sglang
  sglang-crashkit steps 0123abcd --folder /var/crash/sglang --rank TP1 --last 50
  sglang-crashkit steps /var/crash/sglang/node7/incidents/20260102T030405.678Z-hang-0123abcd --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    add_incident(parser)
    parser.add_argument("--rank", metavar="R", help="of this rank only, such as TP1 or, of one replica, DP0_TP1")
    parser.add_argument("--last", metavar="N", type=positive, default=_LAST, help=f"the last N steps ({_LAST})")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Print them."""
    return print_steps(find_incident(args.incident, args.folder), args.rank, args.last, as_json=args.json)


def print_steps(
    incident: StoredIncident, rank: str | None = None, last: int = _LAST, *, as_json: bool = False
) -> ExitCode:
    """Print the last steps of the ranks in an incident; see `run`."""
    from sglang_crashkit.incident.store import read_steps

    everyone = read_steps(incident.path)
    if not everyone:
        raise nothing_of("steps", incident)
    divergence = incident.incident.divergence or _divergence_of(everyone)
    shown = [one for one in everyone if rank is None or _is_meant(one, rank)]
    if not shown:
        first, *others = (one.title.rpartition("scheduler_")[2] for one in everyone)
        more = f"   # or {', '.join(others)}" if others else ""
        raise UsageError(f"there is no rank {rank}", next_step=f"--rank {first}{more}")
    if as_json:
        say_json(_as_json(incident.path, divergence, shown, last), indent=2)
        return ExitCode.DONE
    if divergence is not None:
        say(f"{divergence.statement} ({divergence.level})")
    say(*_as_text(shown, divergence.step if divergence is not None else None, last))
    return ExitCode.DONE


def _divergence_of(everyone: Sequence[StoredSteps]) -> Divergence | None:
    from sglang_crashkit.analysis.divergence import RankSteps, find_divergence

    return find_divergence(RankSteps(_rank(one), one.steps, one.pid) for one in everyone)


def _rank(one: StoredSteps) -> Rank:
    from sglang_crashkit.analysis.ranks import rank_at

    return rank_at(one.ranks)


def _is_meant(one: StoredSteps, rank: str) -> bool:
    words = one.title.rpartition("scheduler_")[2].upper().split("_")
    return {*rank.upper().replace("_", " ").split()} <= {*words} or rank == str(one.pid)


def _as_json(path: Path, divergence: Divergence | None, shown: Sequence[StoredSteps], last: int) -> dict[str, Any]:
    import msgspec

    ranks = [
        {
            "title": one.title,
            "pid": one.pid,
            "ranks": one.ranks,
            "unread_lines": one.unread,
            "steps": [step.to_json() for step in one.steps[-last:]],
        }
        for one in shown
    ]
    return {"incident": str(path), "divergence": msgspec.to_builtins(divergence), "ranks": ranks}


def _as_text(shown: Sequence[StoredSteps], marked: int | None, last: int) -> Iterator[str]:
    """Yield a table for each set of ranks that must agree, a line a step."""
    for group in groups_of(shown):
        yield ""
        columns, chosen, about = side_by_side(group, marked, last)
        rows = [["step", *(name for name, _steps in columns)]]
        for number in chosen:
            mark = "> " if number == marked else "  "
            rows.append([f"{mark}{number:,}", *(in_words(steps.get(number)) for _name, steps in columns)])
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
    from sglang_crashkit.analysis.divergence import group_in_step

    groups: dict[object, list[StoredSteps]] = {}
    for one in everyone:
        groups.setdefault(group_in_step(_rank(one)), []).append(one)
    return list(groups.values())


def side_by_side(
    group: Sequence[StoredSteps], marked: int | None, last: int = _LAST
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
    from sglang_crashkit.analysis.ranks import RankSet

    alike: dict[object, list[int]] = {}
    for position, steps in enumerate(by_number):
        there = [(number, steps[number]) for number in chosen if number in steps]
        did = tuple((number, step.phase, step.mode, step.size, step.tokens, step.requests) for number, step in there)
        alike.setdefault(did if len(group) > _MAX_COLUMNS else position, []).append(position)
    for positions in alike.values():
        first = group[positions[0]]
        # A server's only scheduler has no place among others.
        alone = "" if _rank(first).axis else first.title.removeprefix("sglang::")
        yield alone or RankSet(_rank(group[position]) for position in positions).format(), by_number[positions[0]]


def in_words(step: Step | None) -> str:
    """Return what a rank did in a step; a dash where it is not known."""
    if step is None:
        return "-"
    took = f"{(step.ended - step.began) * 1000:.1f} ms" if step.ended is not None else step.phase.replace("_", " ")
    batch = [step.mode, f"{step.size} req", f"{step.tokens:,} tok"] if step.mode else []
    # What they were about is a hash or a count, which only another rank's says something beside.
    decided = sorted(name for name, number in step.decisions.items() if number)
    return ", ".join([*batch, *decided, took])
