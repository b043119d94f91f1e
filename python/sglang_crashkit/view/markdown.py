"""An incident as Markdown, and the short text for a pod's status; `IncidentFolder.save` writes ``summary.md``.

The crash handler's child renders it, so it is plain Python: importing Jinja2 alone takes 80 ms of CPU.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_crashkit.model.incident import Incident
from sglang_crashkit.redact import redact_text
from sglang_crashkit.view import model, words
from sglang_crashkit.view.first_screen import first_screen
from sglang_crashkit.visible import visible

_TICKS = re.compile(r"`{3,}")
#: Most characters within one fence: GitHub takes 65,536 characters in all.
_MAX_FOLDED = 12_000


def format_summary(incident: Incident, folder: Path | None = None) -> str:
    """Return ``summary.md`` of an incident as `Incident.shown` returns it: the first screen, then each text in full.

    Its commands name the incident by its finished `folder`: the id alone is found only where the server runs.
    """
    where = shlex.quote(str(folder.absolute())) if folder is not None else ""
    # The fence keeps the columns aligned where the Markdown is rendered.
    told = [f"# {model.headline(incident)}", "", "```text", *first_screen(incident, where=where), "```", ""]
    if (verdict := incident.verdict) is not None:
        told += [f"**{words.without_build_paths(verdict.text or 'no verdict')}** ({verdict.level})", ""]
    told += (f"- {label}: {text}" for label, text in model.facts(incident))
    for section in model.sections(incident):
        told += ["", *section_lines(section, "##")]
    return visible(redact_text("\n".join(told) + "\n"))


def format_termination_message(incident: Incident, path: str) -> str:
    """Return the text that a pod's status shows for an ended container: verdict, incident path, time, requests."""
    verdict = incident.verdict
    told = f"{verdict.text} ({verdict.level})" if verdict is not None else model.headline(incident)
    where = f"incident {path}, {incident.trigger.time}, requests: {words.requests(incident.requests)}"
    return visible(redact_text(f"{words.one_line(told)}\n{where}\n"))


def section_lines(section: model.Section, level: str = "#") -> Iterator[str]:
    """Yield a section, and those below it, as Markdown."""
    yield f"{level} {section.title}"
    if section.lead:
        yield from ("", section.lead)
    if section.lines and (section.parts or len(level) < 3):
        yield ""
    yield from (f"- {line}" for line in section.lines)
    if section.code:
        yield from ("", *fenced(section.code))
    for part in section.parts:
        yield from ("", *section_lines(part, f"{level}#"))


def fenced(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines in a fence longer than any run of backticks in them: no line is read as Markdown or HTML."""
    text = words.without_build_paths("\n".join(lines))
    text = text if len(text) <= _MAX_FOLDED else text[:_MAX_FOLDED] + "\n..."
    fence = "`" * (1 + max([2, *map(len, _TICKS.findall(text))]))
    yield from (f"{fence}text", *text.split("\n"), fence)
