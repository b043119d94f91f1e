from __future__ import annotations

import pytest

from sglang_crashkit.errors import (
    CrashkitError,
    ExitCode,
    NothingToDoError,
    PartialError,
    RefusedError,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "status"),
    [(CrashkitError, 1), (UsageError, 2), (NothingToDoError, 3), (RefusedError, 4), (PartialError, 5)],
)
def test_each_error_has_the_exit_status_that_is_documented(error: type[CrashkitError], status: int) -> None:
    assert error("x").exit_code == status


def test_the_statuses_of_signals_are_a_shells() -> None:
    assert (ExitCode.INTERRUPTED, ExitCode.TERMINATED) == (128 + 2, 128 + 15)


def test_the_next_step_is_a_line_of_its_own() -> None:
    assert str(CrashkitError("no such pid")) == "no such pid"
    assert str(CrashkitError("no such pid", next_step="ps -e")) == "no such pid\n  next: ps -e"
