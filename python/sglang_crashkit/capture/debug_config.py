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
from typing import Any

from sglang_crashkit.errors import UsageError

DEFAULT_WAIT_SECS = 600
DEFAULT_OUTPUT = "{log_dir}/backtraces"
_KEYS = ("enabled", "wait_seconds", "output_dir")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class DebugConfig:
    """The ``debug`` section.

    Attributes:
        enabled: whether anything is to be collected.
        wait_seconds: how long to wait before, in seconds.
        output_dir: where the files go, with ``{log_dir}`` in it or not.
    """

    enabled: bool = False
    wait_seconds: int = DEFAULT_WAIT_SECS
    output_dir: str = DEFAULT_OUTPUT


def read_debug_config(path: Path) -> DebugConfig:
    """Return the ``debug`` section of the file; the defaults, with `enabled` false, where it has none.

    Raises:
        UsageError: there is no such file, it is not YAML, or the section holds what it must not.
    """
    # Imported here: without a file it is not needed.
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next_step="name the job's YAML file") from error
    if len(text) > _MOST_BYTES:
        raise UsageError(f"{path} is longer than {_MOST_BYTES >> 20} MiB", next_step="name the job's YAML file")
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split())[:300]
        raise UsageError(f"{path} is not YAML: {problem}") from error
    if document is None:
        return DebugConfig()
    if not isinstance(document, dict):
        raise UsageError(f"{path} must hold sections such as debug:, not {_kind_of(document)}")
    if "debug" not in document:
        return DebugConfig()
    return _parse(path, document["debug"])


def expand_output(template: str, log_dir: Path) -> Path:
    """Return the folder that `template` names, with ``{log_dir}`` replaced.

    Raises:
        UsageError: there is another placeholder in it.
    """
    for name in _PLACEHOLDER.findall(template):
        if name != "log_dir":
            raise UsageError(f"output_dir {template}: {{{name}}} is unknown", next_step="use {log_dir} only")
    return Path(template.replace("{log_dir}", str(log_dir))).expanduser()


def _parse(path: Path, section: Any) -> DebugConfig:
    if not isinstance(section, Mapping):
        raise UsageError(f"{path}: debug must hold {', '.join(_KEYS)}, not {_kind_of(section)}")
    unknown = [str(key) for key in section if key not in _KEYS]
    if unknown:
        raise UsageError(f"{path}: debug.{unknown[0]} is unknown", next_step=f"use {', '.join(_KEYS)}")
    config = DebugConfig(**section)
    if not isinstance(config.enabled, bool):
        raise UsageError(f"{path}: debug.enabled must be true or false, not {_kind_of(config.enabled)}")
    seconds = config.wait_seconds
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 0:
        raise UsageError(
            f"{path}: debug.wait_seconds must be a whole number of seconds, 0 or more, not {_kind_of(seconds)}"
        )
    if not isinstance(config.output_dir, str) or not config.output_dir.strip():
        raise UsageError(f"{path}: debug.output_dir must be the path of a folder, not {_kind_of(config.output_dir)}")
    return config


def _kind_of(value: object) -> str:
    """Return a value as an error message shows it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a section"
    return "a list" if isinstance(value, list) else repr(value)[:80]
