"""The tables that the judge reads, as YAML: see the comment at the head of each."""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import Any

import yaml

#: The same form, read in C where PyYAML was built with it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def load(name: str) -> Any:
    """Return the content of ``<name>.yaml``, which is read once."""
    text = files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - the loader is a safe one


@functools.cache
def pattern(table: str, name: str) -> re.Pattern[str]:
    """Return the pattern with a name in a table, compiled; a list has its alternatives."""
    form = load(table)[name]
    return re.compile(form if isinstance(form, str) else "|".join(form))


@functools.cache
def rows(table: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a list with a name in a table, their patterns compiled."""
    compiled = ("file", "function", "pattern", "note")
    return [
        {key: re.compile(value) if key in compiled else value for key, value in row.items()}
        for row in load(table)[name]
    ]
