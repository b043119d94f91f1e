"""Upstream's soft watchdogs on a real server that starts slowly: the process that is stuck later is named, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.faults import DETOKENIZER as STUCK
from integration.hangs.hang_story import ask_later
from integration.scenario import serving, whole_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

#: Far less than a start takes, so that the tokenizer manager's watchdog trips before the ranks are ready.
TIMEOUT_SECS = 5
#: Upstream's own hook: the detokenizer stands still for so long at its first request.
STUCK_SECS = 25
LONG = 180.0


def timeouts(folder: Path, title: str = "") -> list[dict[str, Any]]:
    """Return the finished incidents of watchdogs, of one process where it is named, oldest first."""
    found = [stored.document or {} for stored in whole_incidents(folder)]
    tripped = [document for document in found if document["trigger"]["event"] == "watchdog_timeout"]
    return [document for document in tripped if title in document["trigger"]["title"]][::-1]


def test_a_process_stuck_after_a_slow_start_is_named(tmp_path: Path) -> None:
    option = f"--soft-watchdog-timeout={TIMEOUT_SECS}"
    environ = {"SGLANG_TEST_STUCK_DETOKENIZER": str(STUCK_SECS), "SGLANG_CRASHKIT_CAPTURE_SECS": "10"}
    with serving("0.5.23", tmp_path, option, env=environ) as server:
        before = timeouts(tmp_path)
        # The tokenizer manager tripped while the ranks got ready, which is a finished incident of its own.
        assert {document["trigger"]["pid"] for document in before} >= {server.popen.pid}
        answer = ask_later(server, 4)
        first = wait_until(lambda: timeouts(tmp_path, STUCK), "the stuck process has an incident", LONG)[0]
        assert len(answer()) == 4
        pid = server.pid_of(STUCK)
        assert server.popen.poll() is None
    assert first["trigger"]["pid"] == pid
    assert first["verdict"]["first_failure"] == {"pid": pid, "title": STUCK}
    assert f"made no progress for {TIMEOUT_SECS} s" in first["verdict"]["text"]
    (report,) = [process for process in first["processes"] if process["pid"] == pid]
    assert any(piece["kind"] == "stack" and piece["status"] == "captured" for piece in report["evidence"])
    assert any(frame.startswith("feed (") for frame in report["doing"])
    # What was finished before is as it was.
    by_id = {document["id"]: document for document in timeouts(tmp_path)}
    assert [by_id[document["id"]] for document in before] == before
