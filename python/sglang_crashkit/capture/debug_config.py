"""Read the ``debug`` section of a job's configuration file, which is YAML.

::

    debug:
      enabled: true
      wait_seconds: 1800                  # default 600
      output_dir: "{log_dir}/backtraces"  # the default

What else the file holds is other programs' and is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.errors import UsageError

DEFAULT_WAIT_SECS = 600
DEFAULT_OUTPUT = "{log_dir}/backtraces"
#: Of each option its type, and what it must be in words.
_OPTIONS: dict[object, tuple[type, str]] = {
    "enabled": (bool, "true or false"),
    "wait_seconds": (int, "a whole number of seconds, 0 or more"),
    "output_dir": (str, "the path of a folder"),
}
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class DebugConfig:
    """The ``debug`` section."""

    enabled: bool = False  # whether anything is to be collected
    wait_seconds: int = DEFAULT_WAIT_SECS  # how long to wait before, in seconds
    output_dir: str = DEFAULT_OUTPUT  # where the files go, with ``{log_dir}`` in it or not


def read_debug_config(path: Path) -> DebugConfig:
    """Return the ``debug`` section of the file; the defaults, with `enabled` false, where it has none.

    Raises:
        UsageError: there is no such file, it is not YAML, or the section holds what it must not.
    """
    # Imported here: without a file it is not needed.
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next_step="name the job's YAML file") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split())[:300]
        raise UsageError(f"{path} is not YAML: {problem}") from error
    if not isinstance(document, dict | None):
        raise UsageError(f"{path} must hold sections such as debug:, not {_kind_of(document)}")
    section = (document or {}).get("debug", {})
    if not isinstance(section, Mapping):
        raise UsageError(f"{path}: debug must hold {', '.join(map(str, _OPTIONS))}, not {_kind_of(section)}")
    for key, value in section.items():
        kind, words = _OPTIONS.get(key, (None, ""))
        if kind is None:
            raise UsageError(f"{path}: debug.{key} is unknown", next_step=f"use {', '.join(map(str, _OPTIONS))}")
        # Empty text names no folder, and true is a number to Python.
        is_empty = (isinstance(value, int) and value < 0) or (isinstance(value, str) and not value.strip())
        if type(value) is not kind or is_empty:
            raise UsageError(f"{path}: debug.{key} must be {words}, not {_kind_of(value)}")
    return DebugConfig(**section)


def expand_output(template: str, log_dir: Path) -> Path:
    """Return the folder that `template` names, with ``{log_dir}`` replaced.

    Raises:
        UsageError: there is another placeholder in it.
    """
    for name in _PLACEHOLDER.findall(template):
        if name != "log_dir":
            raise UsageError(f"output_dir {template}: {{{name}}} is unknown", next_step="use {log_dir} only")
    return Path(template.replace("{log_dir}", str(log_dir))).expanduser()


def _kind_of(value: object) -> str:
    """Return a value as an error message shows it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a section"
    return "a list" if isinstance(value, list) else repr(value)[:80]
