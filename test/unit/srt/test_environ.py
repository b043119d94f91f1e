from __future__ import annotations

from sglang_crashkit.settings import Settings
from sglang_crashkit.srt.environ import crash_dump_flags


def test_the_flags_have_upstreams_types_and_defaults() -> None:
    flags = crash_dump_flags(lambda value: ("bool", value), lambda value: ("float", value))
    assert flags == {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": ("bool", True),
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": ("bool", True),
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": ("float", 60.0),
        "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": ("bool", False),
    }
    # The kit itself has the same.
    settings = Settings.from_environ({})
    assert (settings.stacks, settings.cores, settings.core_wait_secs) == (True, True, 60.0)
