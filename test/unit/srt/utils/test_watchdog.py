from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_crashkit.srt.utils import watchdog
from unit.srt.conftest import Listener


def test_a_timeout_is_told_with_what_the_watchdog_knows(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    watchdog.on_watchdog_timeout(SimpleNamespace(debug_name="Scheduler", watchdog_timeout=300.0, soft=False))
    told = listener.heard()
    wanted = {"event": "watchdog_timeout", "name": "Scheduler", "silent_secs": 300.0, "soft": False}
    assert wanted.items() <= told.items()
    assert "incident abc" in caplog.text


def test_a_silent_handler_holds_the_watchdog_for_a_moment(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watchdog.CAPTURE_WAIT_SECS <= 2.0
    monkeypatch.setattr(watchdog, "CAPTURE_WAIT_SECS", 0.1)
    listener.kill()
    watchdog.on_watchdog_timeout(SimpleNamespace())
