"""A thread of a real rank raises and is gone, and the rank goes on; later the rank waits for such a thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.import_hook import write_site
from integration.scenario import PATIENCE, SCHEDULER, serving, whole_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

HANG_SECS, LONG = 5.0, 120.0
RAISE_SIGNAL, WAIT_SIGNAL = signal.SIGRTMIN + 13, signal.SIGRTMIN + 14
CODE = """
import queue
import signal
import threading

chunks = queue.Queue()


def feed():
    raise RuntimeError("no more chunks")


def let_a_thread_die(*_):
    threading.Thread(target=feed, daemon=True).start()


def wait_for_a_dead_thread(*_):
    let_a_thread_die()
    chunks.get()


signal.signal(signal.SIGRTMIN + 13, let_a_thread_die)
signal.signal(signal.SIGRTMIN + 14, wait_for_a_dead_thread)
"""


@dataclass(frozen=True)
class Told:
    """The incidents of a thread that died, and of a rank that waits for one; how many tokens came after the first."""

    rank: int
    died: dict[str, Any]
    record: str
    hang: dict[str, Any]
    answered: int


@pytest.fixture(scope="module")
def told(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp("crash")
    environ = {"SGLANG_CRASHKIT_HANG_SECS": f"{HANG_SECS:g}"} | PATIENCE
    environ |= write_site(tmp_path_factory.mktemp("site"), CODE)

    def whole(kind: str) -> list[tuple[Path, dict[str, Any]]]:
        found = [(one.path, one.document or {}) for one in whole_incidents(folder)]
        return [(path, document) for path, document in found if document["kind"] == kind]

    with serving(release, folder, env=environ) as server:
        for _ in range(10):
            # The first batches have a longer limit.
            server.generate("Hello", max_new_tokens=4, timeout_s=LONG)
        rank = server.pid_of(SCHEDULER)
        os.kill(rank, RAISE_SIGNAL)
        ((path, died),) = wait_until(lambda: whole("thread_died"), "the death of a thread", LONG)
        answered = len(server.generate("Hello", max_new_tokens=4, timeout_s=LONG)["output_ids"])
        os.kill(rank, WAIT_SIGNAL)
        ((_, hang),) = wait_until(lambda: whole("hang"), "the hang", LONG)
        record = next((path / "ranks").glob("*thread_exception.txt")).read_text()
        yield Told(rank, died, record, hang, answered)


def test_a_thread_that_dies_is_an_incident_of_a_server_that_goes_on(told: Told) -> None:
    verdict = told.died["verdict"]
    assert (verdict["kind"], verdict["level"]) == ("thread_died", "established")
    assert verdict["first_failure"]["pid"] == told.rank
    for words in ("(feed)", "RuntimeError: no more chunks", "goes on without"):
        assert words in verdict["text"]
    assert told.died["cause"]["class"] == "thread_died"
    assert 'raise RuntimeError("no more chunks")' in told.record or "in feed" in told.record
    assert told.died["suspects"] == []
    assert "sigquit_sent" not in [one["event"] for one in told.died["timeline"]]
    assert told.answered == 4


def test_a_rank_that_waits_for_it_hangs_by_its_exception(told: Told) -> None:
    verdict = told.hang["verdict"]
    assert verdict["first_failure"]["pid"] == told.rank
    assert "RuntimeError: no more chunks" in verdict["basis"][0]
    assert any("made no progress" in one for one in verdict["basis"])
    assert told.hang["cause"]["class"] == "thread_died"
    assert told.hang["suspects"] == []
