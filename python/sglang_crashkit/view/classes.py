"""What each class of verdicts means, for a person: ``docs/classes.md`` is `page`, from ``classes.yaml``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_crashkit.view.markdown import section_lines
from sglang_crashkit.view.model import Section

_HEAD = """\
# Classes of verdicts

What a verdict of `sglang-crashkit explain`, and the cause of an incident, may say has happened. The names are stable:
alerts route on them.
`sglang-crashkit explain --class CLASS` prints one; this page is what `--class all` prints.
"""


def page(classes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page: all classes by name, as Markdown."""
    yield from _HEAD.splitlines()
    for kind in sorted(classes):
        yield from ("", *section(kind, classes[kind]))


def section(kind: str, row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one class: what it is, how it is known, what to do."""
    lines = [f"known by: {row['known_by']}", f"a restart helps: {row['restart']}"]
    lines += [f"next: {step}" for step in row["next"]]
    yield from section_lines(Section(kind, lines, f"{row['words'][0].upper()}{row['words'][1:]}."), "##")
