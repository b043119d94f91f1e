"""An incident as Markdown, to be pasted into a bug report: no prompts, and secrets masked as the incident has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from sglang_crashkit.cli.reporters.incident_parts import stack_lines, timeline_lines
from sglang_crashkit.incident.first_screen import first_screen, without_build_paths
from sglang_crashkit.model.checked_json import mapping_of, mappings_of

_TICKS = re.compile(r"`{3,}")
#: GitHub takes 65,536 characters.
_MAX_SECTION = 12_000


def report_of(folder: Path, document: Mapping[str, Any]) -> str:
    """Return the report.

    Args:
        folder: the incident's folder, of which the stacks and the environment are read.
        document: what its ``incident.json`` holds.
    """
    return "\n".join(_lines(folder, document)) + "\n"


def _lines(folder: Path, document: Mapping[str, Any]) -> Iterator[str]:
    server, verdict, cause = (mapping_of(document.get(name)) for name in ("server", "verdict", "cause"))
    head, *rest = first_screen(document)
    yield f"### SGLang {server.get('sglang_version')}: {head}"
    yield ""
    # What to do next is for whoever runs the server.
    yield from _fenced([head, *takewhile(lambda line: not line.startswith("next"), rest)])
    if verdict.get("text"):
        yield f"**Verdict** ({verdict.get('level')})"
        yield from _fenced([str(verdict["text"])])
    if cause:
        yield f"**Cause** {cause.get('class')} ({cause.get('level')})"
        issues = [f"sgl-project/sglang#{issue.get('issue')}" for issue in mappings_of(cause.get("known_issues"))]
        if issues:
            yield f"It looks like {', '.join(issues)}."
        yield ""
    yield from _folded("Environment", _environment(folder, document))
    yield from _folded("Stacks, innermost frame first", stack_lines(folder, document))
    yield from _folded("Timeline", timeline_lines(document))


def _environment(folder: Path, document: Mapping[str, Any]) -> Iterator[str]:
    try:
        environment = mapping_of(json.loads((folder / "environment.json").read_text()))
    except (OSError, ValueError, RecursionError):
        environment = mapping_of(document.get("environment"))
    if environment.get("command_line"):
        yield str(environment["command_line"])
    for name, version in mapping_of(environment.get("versions")).items():
        yield f"{name} {version}"
    yield from (str(line) for line in mapping_of(document.get("gpus")).get("lines") or ())


def _folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    told = list(lines)
    if told:
        yield f"<details><summary>{title}</summary>"
        yield ""
        yield from _fenced(told)
        yield "</details>"
        yield ""


def _fenced(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines that nothing in them can be Markdown or HTML: the fence is longer than any of theirs."""
    text = without_build_paths("\n".join(lines))
    text = text if len(text) <= _MAX_SECTION else text[:_MAX_SECTION] + "\n..."
    fence = "`" * (1 + max([2, *map(len, _TICKS.findall(text))]))
    yield f"{fence}text"
    yield text
    yield fence
    yield ""
