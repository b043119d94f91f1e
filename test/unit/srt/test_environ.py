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


def test_the_kit_itself_has_the_same_defaults() -> None:
    flags = crash_dump_flags(bool, float)
    settings = Settings.from_environ({})
    assert settings.stacks == flags["SGLANG_PYSPY_DUMP_BEFORE_CRASH"]
    assert settings.cores == flags["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"]
    assert settings.core_wait_secs == flags["SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"]


def test_a_class_body_takes_them_as_its_own() -> None:
    class Field:
        name = ""

        def __init__(self, default: object) -> None:
            self.default = default

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

    class Envs:
        vars().update(crash_dump_flags(Field, Field))

    field = vars(Envs)["SGLANG_PYSPY_DUMP_BEFORE_CRASH"]
    assert (field.name, field.default) == ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", True)
