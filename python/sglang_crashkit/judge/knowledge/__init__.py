"""The judge's tables in YAML; the comment at the head of each describes its format."""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import Any

import yaml

#: PyYAML's safe loader, in C if PyYAML was built with it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def load(name: str) -> Any:
    """Return the content of ``<name>.yaml``; the file is read once."""
    text = files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - the loader is a safe one


@functools.cache
def pattern(table: str, name: str) -> re.Pattern[str]:
    """Return the compiled pattern of a name in a table; a list is a list of alternatives."""
    form = load(table)[name]
    return re.compile(form if isinstance(form, str) else "|".join(form))


@functools.cache
def rows(table: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a named list in a table, with their patterns compiled."""
    compiled = ("file", "function", "pattern", "note")
    return [
        {key: re.compile(value) if key in compiled else value for key, value in row.items()}
        for row in load(table)[name]
    ]
