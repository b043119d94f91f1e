"""``sglang-crashkit steps``: the last steps of the ranks in an incident, side by side, the diverging one marked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sglang_crashkit.cli.arguments import add_incident, positive
from sglang_crashkit.cli.crash_folder import find_incident, nothing_of
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.incident.store import StoredIncident, StoredSteps

_LAST = 20
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
    """Print the steps."""
    return print_steps(find_incident(args.incident, args.folder), args.rank, args.last, as_json=args.json)


def print_steps(
    incident: StoredIncident, rank: str | None = None, last: int = _LAST, *, as_json: bool = False
) -> ExitCode:
    """Print the last steps of the ranks in an incident; see `run`."""
    from sglang_crashkit.incident.store import read_steps

    everyone = read_steps(incident.path)
    if not everyone:
        raise nothing_of("steps", incident)
    divergence = incident.incident.divergence
    if divergence is None:
        from sglang_crashkit.analysis.divergence import RankSteps, find_divergence
        from sglang_crashkit.analysis.ranks import rank_at

        divergence = find_divergence(RankSteps(rank_at(one.ranks), one.steps, one.pid) for one in everyone)
    shown = [one for one in everyone if rank is None or _is_meant(one, rank)]
    if not shown:
        first, *others = (one.title.rpartition("scheduler_")[2] for one in everyone)
        more = f"   # or {', '.join(others)}" if others else ""
        raise UsageError(f"there is no rank {rank}", next_step=f"--rank {first}{more}")
    if as_json:
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
        told = {"incident": str(incident.path), "divergence": msgspec.to_builtins(divergence), "ranks": ranks}
        say_json(told, indent=2)
        return ExitCode.DONE
    if divergence is not None:
        say(f"{divergence.statement} ({divergence.level})")
    from sglang_crashkit.view.terminal import step_lines

    say(*step_lines(shown, divergence.step if divergence is not None else None, last))
    return ExitCode.DONE


def _is_meant(one: StoredSteps, rank: str) -> bool:
    words = one.title.rpartition("scheduler_")[2].upper().split("_")
    return {*rank.upper().replace("_", " ").split()} <= {*words} or rank == str(one.pid)
