"""Hooks of ``sglang/test/server_fixtures/disaggregation_fixture.py``: the setup and teardown of a pair."""

from __future__ import annotations

import logging
from typing import Any

from sglang_crashkit.settings import Settings
from sglang_crashkit.test.fail_fast import Watcher, watch

logger = logging.getLogger(__name__)

_WATCHER = "_crashkit_watcher"
_MEMBERS = (("prefill", "process_prefill"), ("decode", "process_decode"), ("lb", "process_lb"))


def on_pd_setup(fixture: Any) -> None:
    """Watch prefill, decode and router, each from its start until `on_pd_teardown`.

    The watcher reads the ``process_*`` attributes of the class `fixture` repeatedly, so it follows a restarted process.
    """
    try:
        _stop(fixture)
        if Settings.from_environ().enabled:
            setattr(fixture, _WATCHER, watch(lambda: [(name, getattr(fixture, its, None)) for name, its in _MEMBERS]))
    except Exception:
        logger.warning("crash kit: prefill, decode and router are not watched", exc_info=True)


def on_pd_teardown(fixture: Any) -> None:
    """End the watch before the fixture ends the processes on purpose."""
    try:
        _stop(fixture)
    except Exception:
        logger.warning("crash kit: the watch could not be ended", exc_info=True)


def _stop(fixture: Any) -> None:
    watcher: Watcher | None = vars(fixture).get(_WATCHER)
    if watcher is not None:
        watcher.stop()
        setattr(fixture, _WATCHER, None)
