"""Findings: possible explanations of a case, among which `verdict.judge` chooses.

Code decides what is found, and where; ``knowledge/findings.yaml`` has its class, weight and text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.model.verdict import Helps, Level

Place = tuple[float, int]
#: A finding below this weight says that something failed, but not what; any other finding explains more.
TELLING = 40
_MAX_HEADLINE = 290
#: An optional part of a template, or a field, each with an alternative for an empty field.
_PART = re.compile(r"\[([^][]{1,300})\]|\{(\w{1,30})(?:\|([^{}]{0,60}))?\}")
_ONLY = re.compile(r"\{(\w{1,30})\}")
_IF = re.compile(r"(!?)(\w{1,30})\? ")


class Finding(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One explanation of a case, or of a part of it."""

    kind: str  # the class, a key of ``classes.yaml``
    level: Level = "supported"
    who: str | None = None  # the process that failed or is to be examined; None if not known
    component: str | None = None
    restart: Helps | None = None  # None: the value of the class
    headline: str = ""
    cause: str = ""
    because: list[str] = []
    next: list[str] = []
    where: Place = (0.0, 0)  # the place of its event; the first failure has the smallest
    is_consequence: bool = False  # of another failure, such as a connection that another rank's end closed
    #: How conclusive it is; a finding with more weight explains one with less. 100: by the kernel, the driver or the
    #: class of an exception; 50: by a specific message; 10: it is only known that something failed.
    weight: int = 50

    @property
    def is_calm(self) -> bool:
        """Whether its class means that nothing failed."""
        return bool((load("classes").get(self.kind) or {}).get("calm"))


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    findings: dict[str, Finding]  # their texts are templates
    steps: dict[str, list[str]]


@functools.cache
def _tables() -> _Tables:
    return msgspec.convert(load("findings"), _Tables)


def finding_of(
    row: str, /, where: Place = (0.0, 0), because: Iterable[str] = (), most: int = _MAX_HEADLINE, **values: Any
) -> Finding:
    """Return the finding of a row of ``findings.yaml``, with at most `most` characters of headline.

    `values` are fields of the templates; non-empty values with the name of a column replace that column.
    """
    form = _tables().findings[row]
    given = {key: value for key, value in values.items() if value and key in Finding.__struct_fields__}
    fields = {**values, "who": form.who, "component": form.component, **given}
    given |= {"headline": fill(form.headline, fields)[0][:most], "next": [*fill_steps(form.next, fields)]}
    return msgspec.structs.replace(form, where=where, because=[*because], **given)


def steps_of(name: str, /, **values: Any) -> list[str]:
    """Return the steps of a list of ``findings.yaml``."""
    return [*fill_steps(_tables().steps[name], values)]


def fill_steps(templates: Iterable[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the steps of templates, without steps that have an empty field."""
    for template in templates:
        condition = _IF.match(template)
        if condition and bool(values.get(condition[2])) == bool(condition[1]):
            continue
        words = template[condition.end() :] if condition else template
        only = _ONLY.fullmatch(words)
        text, is_whole = fill(words, values)
        if only and isinstance(values.get(only[1]), list):
            yield from values[only[1]]
        elif is_whole:
            yield text


def fill(template: str, values: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text of a template of ``findings.yaml``, and whether each field has a value or an alternative."""
    is_whole = True

    def part(match: re.Match[str]) -> str:
        nonlocal is_whole
        if match[1]:
            words, _, other = match[1].partition("||")
            text, is_there = fill(words, values)
            return (text if is_there else other) if "{" in words else match[0]
        value = values.get(match[2])
        text = "" if value is None or value is False else str(value)
        is_whole &= bool(text) or match[3] is not None
        return text or match[3] or ""

    return _PART.sub(part, template), is_whole
