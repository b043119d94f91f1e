"""What the hosts of a fleet have in common, as text and as a page of HTML."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from sglang_crashkit.analysis.fleet import Group
from sglang_crashkit.doctor.findings import printable

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


def format_groups(groups: Sequence[Group], hosts: int) -> Iterator[str]:
    """Yield the lines of a table, with what the hosts of each fault have in common below it.

    Args:
        groups: the faults.
        hosts: how many hosts there are in all.
    """
    yield f"{'fault':8}  {'hosts':>5}  {'times':>5}  {'first':10}  {'last':10}  what"
    for one in groups:
        what = printable(" ".join([one.kind, *one.fault[:3]]))
        yield f"{one.key:8}  {len(one.hosts):>5}  {one.count:>5}  {day(one.first)}  {day(one.last)}  {what}"
        for line in one.lines(hosts):
            yield f"{'':10}{printable(line)}"
        causes = ", ".join(f"{cause} ({number})" for cause, number in list(one.causes.items())[:_MAX_VALUES])
        yield f"{'':10}{printable(f'cause: {causes}; latest: {one.path}')}"


def format_page(groups: Sequence[Group], hosts: int) -> str:
    """Return a page of HTML that loads nothing; all that is in it is text.

    Args:
        groups: the faults.
        hosts: how many hosts there are in all.
    """
    # Imported here: nothing else needs it.
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters |= {"day": day, "values": _format_values}
    count = sum(one.count for one in groups)
    return environment.from_string(_PAGE).render(groups=groups, hosts=hosts, count=count)


def day(seconds: float) -> str:
    """Return the day of a time since the epoch, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _format_values(values: Mapping[str, int]) -> str:
    told = [f"{value} ({number})" for value, number in list(values.items())[:_MAX_VALUES]]
    return ", ".join(told) + (f" and {len(values) - len(told)} more" if len(values) > len(told) else "")
