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
