from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.test.evidence import Death
from sglang_crashkit.test.fail_fast import Watcher
from unit.support.waiting import LONG, spawned

SLEEP = [sys.executable, "-c", "import time\nprint('ready', flush=True)\ntime.sleep(120)"]
QUIET_SECS = 0.4


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:
        yield lambda argv=SLEEP: stack.enter_context(spawned(argv))


class Watch:
    """A watcher whose deaths are kept."""

    def __init__(self, source, folder: Path, **options) -> None:
        self.deaths: list[Death] = []
        self.called = threading.Event()
        self.ended = threading.Event()
        self.watcher = Watcher(
            source, self._on_death, at_the_end=lambda _: self.ended.set(), folder=folder, **options
        ).start()

    def _on_death(self, death: Death) -> None:
        self.deaths.append(death)
        self.called.set()

    def death(self) -> Death:
        assert self.called.wait(LONG)
        assert len(self.deaths) == 1
        return self.deaths[0]
