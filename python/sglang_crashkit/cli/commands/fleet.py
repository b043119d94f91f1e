"""``sglang-crashkit fleet``: what the incidents of many hosts have in common."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.argument_types import duration
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import WHAT_DIR_IS, WHOSE_IT_IS, CrashkitError, ExitCode, NothingToDoError

if TYPE_CHECKING:
    from sglang_crashkit.analysis.fleet import Group

_MAX_VALUES = 3
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Incidents of {{ hosts }} hosts</title>
<style>
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 90rem; padding: 0 1rem }
.table { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .4rem .6rem; text-align: left; vertical-align: top }
.number { text-align: right }
code { overflow-wrap: anywhere }
</style>
<h1>{{ count }} incidents of {{ groups | length }} faults on {{ hosts }} hosts</h1>
<div class="table">
<table>
<tr><th>Fault<th class="number">Hosts<th class="number">Incidents<th>First and last<th>What, who, where<th>Cause
<th>What its hosts have in common<th>Latest</tr>
{% for one in groups %}
<tr><td><code>{{ one.key }}</code><td class="number">{{ one.hosts | length }}<td class="number">{{ one.count }}
<td>{{ one.first | day }}<br>{{ one.last | day }}
<td>{{ one.kind }}{% for part in one.fault %}<br><code>{{ part }}</code>{% endfor %}
<td>{% for cause, number in one.causes.items() %}{{ cause }} ({{ number }})<br>{% endfor %}
<td>{% for line in one.lines(hosts) %}{{ line }}<br>{% endfor %}
{% for name, values in one.values.items() %}{{ name }}: {{ values | values }}<br>{% endfor %}
<td><code>{{ one.path }}</code></tr>
{% endfor %}
</table>
</div>
</html>
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "examples:\n"
        "  sglang-crashkit fleet /shared/crash --since 7d      a crash folder that all hosts share\n"
        "  sglang-crashkit fleet fetched/* --html fleet.html   folders that were fetched from each host"
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="crash folder, or folder of crash folders")
    parser.add_argument("--since", type=duration, metavar="T", help="of the last T only, such as 90m, 12h or 2d")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that loads nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Print it."""
    from sglang_crashkit.analysis.fleet import group
    from sglang_crashkit.incident.fleet import read_fleet

    fleet = read_fleet(args.folders, time.time() - args.since if args.since is not None else 0.0)
    problems = [f"{path} cannot be read: {why}" for path, why in fleet.problems.items()]
    missing = [f"{path} is not a folder" for path in fleet.missing]
    if not fleet.incidents and problems:
        raise CrashkitError(
            "; ".join([*problems, *missing]), next_step=f"ls -ld {next(iter(fleet.problems))}{WHOSE_IT_IS}"
        )
    if not fleet.incidents:
        hosts_in_words = f"{len(fleet.hosts)} host{'' if len(fleet.hosts) == 1 else 's'}"
        late = "" if args.since is None else " that is new enough for --since"
        broken = f"; {len(fleet.unreadable)} cannot be read" if fleet.unreadable else ""
        raise NothingToDoError(
            "; ".join([*missing, f"no incident{late} of {hosts_in_words}{broken}"]),
            next_step=f"sglang-crashkit fleet DIR{WHAT_DIR_IS}",
        )
    say(*problems, *missing, error=True)
    unreadable = [*fleet.unreadable, *fleet.problems, *fleet.missing]
    status = ExitCode.PARTIAL if unreadable else ExitCode.DONE
    groups, hosts = group(fleet.incidents), len(fleet.hosts)
    if args.html is not None:
        try:
            args.html.write_bytes(_page(groups, hosts).encode(errors="backslashreplace"))
        except OSError as error:
            raise CrashkitError(
                f"{args.html} cannot be written: {error.strerror or error}", next_step="--html FILE, another one"
            ) from error
    if args.json:
        told = {"schema_version": 1, "hosts": hosts, "incidents": len(fleet.incidents), "unreadable": unreadable}
        say_json(told | {"faults": [one.to_json() for one in groups]}, indent=1)
        return status
    say(*_table(groups, hosts))
    if fleet.unreadable:
        say(f"{len(fleet.unreadable)} incidents could not be read, such as {fleet.unreadable[0]!r}")
    return status


def _table(groups: Sequence[Group], hosts: int) -> Iterator[str]:
    """Yield the lines of a table, with what the hosts of each fault have in common below it; of so many hosts."""
    yield f"{'fault':8}  {'hosts':>5}  {'times':>5}  {'first':10}  {'last':10}  what"
    for one in groups:
        what = " ".join([one.kind, *one.fault[:3]])
        yield f"{one.key:8}  {len(one.hosts):>5}  {one.count:>5}  {_day(one.first)}  {_day(one.last)}  {what}"
        for line in one.lines(hosts):
            yield f"{'':10}{line}"
        causes = ", ".join(f"{cause} ({number})" for cause, number in list(one.causes.items())[:_MAX_VALUES])
        yield f"{'':10}cause: {causes}; latest: {one.path}"


def _page(groups: Sequence[Group], hosts: int) -> str:
    """Return a page of HTML that loads nothing; all that is in it is text."""
    # Imported here: nothing else needs it.
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters |= {"day": _day, "values": _format_values}
    count = sum(one.count for one in groups)
    return environment.from_string(_PAGE).render(groups=groups, hosts=hosts, count=count)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _format_values(values: Mapping[str, int]) -> str:
    told = [f"{value} ({number})" for value, number in list(values.items())[:_MAX_VALUES]]
    return ", ".join(told) + (f" and {len(values) - len(told)} more" if len(values) > len(told) else "")
