from __future__ import annotations

import os
import tempfile
from dataclasses import replace

import pytest

from sglang_crashkit import settings
from sglang_crashkit.settings import DiskLimits, Settings


@pytest.mark.parametrize(
    ("variable", "value", "name", "read"),
    [
        ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0", "stacks", False),
        ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0", "cores", False),
        ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "7", "core_wait_secs", 7.0),
        ("SGLANG_CRASHKIT_ENABLED", "no", "enabled", False),
        ("SGLANG_CRASHKIT_BUDGET_SECS", "3", "budget_secs", 3.0),
        ("SGLANG_CRASHKIT_CAPTURE_SECS", "0.5", "capture_secs", 0.5),
        ("SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS", "9", "startup_timeout_secs", 9.0),
        ("SGLANG_CRASHKIT_HANG_SECS", "8.5", "hang_secs", 8.5),
        ("SGLANG_CRASHKIT_EXIT_SECS", "9", "exit_secs", 9.0),
        ("SGLANG_CRASHKIT_END_SECS", "9", "end_secs", 9.0),
        ("SGLANG_CRASHKIT_EXIT_STATUS", " Upstream", "keeps_exit_status", True),
        ("SGLANG_CRASHKIT_GPU_FACTS", "0", "gpu_facts", False),
        ("SGLANG_CRASHKIT_JOURNAL", "0", "journal", False),
        ("SGLANG_CRASHKIT_STEPS", "0", "steps", False),
        ("SGLANG_CRASHKIT_LOG_RECORDS", "7", "log_records", 7),
        ("SGLANG_CRASHKIT_FULL_PER_FAULT", "0", "full_per_fault", 0),
        # What cannot be read counts as unset.
        *(("SGLANG_CRASHKIT_ENABLED", value, "enabled", True) for value in ("", "maybe", "2", "TRUE", " y ")),
        *(("SGLANG_CRASHKIT_HANG_SECS", value, "hang_secs", 60.0) for value in ("", "x", "-1", "nan", "inf", "1s")),
        *(("SGLANG_CRASHKIT_LOG_RECORDS", value, "log_records", 200) for value in ("", "x", "-1", "²", "9" * 5000)),
        # What is wanted of native stacks may be left to the case.
        *(
            ("SGLANG_CRASHKIT_NATIVE", value, "native", read)
            for value, read in (("", None), ("x", None), ("1", True), ("true", True), ("0", False))
        ),
        *(
            ("SGLANG_CRASHKIT_JOURNAL_MB", value, "journal_mb", read)
            for value, read in (("1", 1.0), ("2.5", 2.5), ("1024", 1024.0), ("0", 32.0), ("1025", 32.0), ("much", 32.0))
        ),
        # A typing error keeps back all.
        *(
            ("SGLANG_CRASHKIT_PROMPTS", value, "prompts", read)
            for value, read in (("", "full"), ("full", "full"), (" IDS ", "ids"), ("none", "none"), ("idz", "none"))
        ),
        ("SGLANG_CRASHKIT_MAX_USE_MB", "0", "disk", DiskLimits(max_use=0)),
        ("SGLANG_CRASHKIT_KEEP_FREE_MB", "1.5", "disk", DiskLimits(keep_free=3 << 19)),
        ("SGLANG_CRASHKIT_MAX_INCIDENT_MB", "-1", "disk", DiskLimits()),
        ("SGLANG_CRASHKIT_MAX_CORE_MB", "2", "disk", DiskLimits(max_core=2 << 20)),
    ],
)
def test_a_variable_sets_its_setting_and_no_other(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str, read: object
) -> None:
    assert Settings.from_environ({}) == Settings()
    expected = replace(Settings(), **{name: read})
    assert Settings.from_environ({variable: value}) == expected
    # It is read anew each time.
    monkeypatch.setenv(variable, value)
    assert Settings.from_environ() == Settings.from_environ(dict(os.environ))


def test_a_variable_of_another_version_is_unknown() -> None:
    environ = dict.fromkeys([*settings.VARIABLES, *settings.OWN_VARIABLES, "SGLANG_OTHER", "HOME"], "1")
    assert settings.unknown_variables(environ) == []
    unknown = ["SGLANG_CRASHKIT_HANG_SEC", "SGLANG_CRASHKIT_PHOTOGRAPH_SECS"]
    assert settings.unknown_variables(environ | dict.fromkeys(reversed(unknown), "1")) == unknown


def test_a_temporary_folder_too_deep_for_sockets_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    assert str(settings.runtime_folder(1, 2)).startswith(f"/tmp/sglang-crashkit-{os.getuid()}/run/")
