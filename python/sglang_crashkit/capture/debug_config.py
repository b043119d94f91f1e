"""Read the ``debug`` section of a job's configuration file, which is YAML.

::

    debug:
      enabled: true
      wait_seconds: 1800                  # default 600
      output_dir: "{log_dir}/backtraces"  # the default

Other sections belong to other programs and are ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from sglang_crashkit.errors import UsageError

_PLACEHOLDER = re.compile(r"\{(\w*)\}")


class DebugConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``debug`` section."""

    enabled: bool = False  # whether to collect anything
    wait_seconds: Annotated[int, msgspec.Meta(ge=0)] = 600  # seconds to wait before that
    output_dir: Annotated[str, msgspec.Meta(min_length=1)] = "{log_dir}/backtraces"  # the folder for the files


class _Job(msgspec.Struct):
    debug: DebugConfig = DebugConfig()


def read_debug_config(path: Path) -> DebugConfig:
    """Return the ``debug`` section of the file; the defaults, with `enabled` false, if it has none.

    Raises:
        UsageError: there is no such file, it is not YAML, or the section has an unknown option or a wrong value.
    """
    try:
        job = msgspec.yaml.decode(path.read_bytes(), type=_Job | None)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next_step="name the job's YAML file") from error
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:300]
        what = "" if isinstance(error, msgspec.ValidationError) else "it is not YAML: "
        options = ", ".join(DebugConfig.__struct_fields__)
        raise UsageError(f"{path}: {what}{problem}", next_step=f"in debug: use {options}") from error
    return DebugConfig() if job is None else job.debug


def expand_output(template: str, log_dir: Path) -> Path:
    """Return the folder that `template` names, with ``{log_dir}`` replaced.

    Raises:
        UsageError: there is another placeholder in it.
    """
    for name in _PLACEHOLDER.findall(template):
        if name != "log_dir":
            raise UsageError(f"output_dir {template}: {{{name}}} is unknown", next_step="use {log_dir} only")
    return Path(template.replace("{log_dir}", str(log_dir))).expanduser()
