"""A test run on a real pair that loses one of its processes; `test_pair` runs it and looks at its report."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanelib.lanes import ensure_lane
from lanelib.pd import PDServers

KILL_AFTER_S = 1.5
TIMEOUT_S = 120.0


@pytest.fixture(scope="class")
def pair(crashkit_watch) -> Iterator[PDServers]:
    lane = ensure_lane(os.environ["CRASHKIT_PD_RELEASE"])
    options = ["--crash-dump-folder", os.environ["CRASHKIT_PD_CRASH_FOLDER"]]
    with PDServers.start(lane, device=os.environ["CRASHKIT_PD_DEVICE"], extra_args=options) as servers:
        members = {"prefill": servers.prefill, "decode": servers.decode, "router": servers.router}
        with crashkit_watch(lambda: [(name, member.popen) for name, member in members.items()]):
            servers.wait_ready()
            yield servers


class TestPair:
    def test_answers_come_through_the_router(self, pair: PDServers) -> None:
        for prompt in ("Hello", "The quick brown fox"):
            assert len(pair.generate(prompt, max_new_tokens=8, timeout_s=TIMEOUT_S)["output_ids"]) == 8

    def test_that_is_cut_short(self, pair: PDServers) -> None:
        name, _, title = os.environ["CRASHKIT_PD_VICTIM"].partition("/")
        member = {"prefill": pair.prefill, "decode": pair.decode, "router": pair.router}[name]
        pid = member.pid_of(title) if title else member.pid

        def kill() -> None:
            Path(os.environ["CRASHKIT_PD_KILLED"]).write_text(str(time.time()))
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(KILL_AFTER_S, kill)
        timer.start()
        # As an evaluation does: it tries again for a while.
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                pair.generate("Once upon a time", max_new_tokens=4000, timeout_s=TIMEOUT_S)
            except Exception:  # noqa: BLE001 - as one that is meant to survive everything does
                time.sleep(1)

    def test_that_would_come_next(self, pair: PDServers) -> None:
        pair.generate("Hello", timeout_s=TIMEOUT_S)


def test_that_needs_no_pair() -> None:
    pass
