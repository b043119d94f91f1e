from __future__ import annotations

import importlib.util
import logging
from importlib.metadata import distribution

import pytest

from sglang_crashkit.srt.plugin import say_if_not_applied

SAID = "SGLANG_CRASHKIT_NOT_APPLIED"


@pytest.fixture(autouse=True)
def is_patched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether SGLang has the file that every patch calls."""
    answer = [False]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if answer[0] else None)
    monkeypatch.setenv(SAID, "")
    monkeypatch.delenv(SAID)
    return answer


def test_a_kit_that_is_not_applied_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    say_if_not_applied()
    say_if_not_applied()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "this SGLang is not patched" in record.getMessage()
    assert record.getMessage().endswith("next: sglang-crashkit apply")


def test_a_kit_that_is_applied_or_switched_off_says_nothing(
    is_patched: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_patched[0] = True
    say_if_not_applied()
    is_patched[0] = False
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    say_if_not_applied()
    assert caplog.records == []


def test_sglang_finds_it_among_its_plugins() -> None:
    found = [point for point in distribution("sglang-crashkit").entry_points if point.group == "sglang.srt.plugins"]
    assert [point.load() for point in found] == [say_if_not_applied]
