"""Hook of ``sglang/srt/environ.py``: the flags of the crash diagnostics, where a release lacks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def crash_dump_flags(env_bool: Callable[[bool], Any], env_float: Callable[[float], Any]) -> dict[str, Any]:
    """Return the fields of ``Envs`` that later releases have, with their defaults, by name."""
    return {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": env_bool(True),
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": env_bool(True),
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": env_float(60.0),
        "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": env_bool(False),
    }
