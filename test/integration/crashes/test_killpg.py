"""A real scheduler raises, with SGLang asked to kill its group: requests and incident first, nothing left after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.crashes.whole import assert_whole, times_of
from integration.faults import CRASH, wait
from integration.scenario import Wreck, break_one
from sglang_crashkit.incident.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

ENV = CRASH | {"SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": "1"}

#: How a job's script runs a server: in its own process group, with other work in it, and with something to do after it.
SCRIPT = """
sleep 900 &
neighbour=$!
"$@"
status=$?
kill -0 $neighbour && echo "server $status, neighbour alive" > "$FATE"
kill $neighbour
exit $status
"""


# The older releases have no such branch of their own, the newest has, and would kill while the requests are written.
def test_the_group_dies_after_the_dump_and_the_incident(release: str, tmp_path: Path) -> None:
    left = break_one(release, tmp_path, wait, breaks_by_itself=True, tp=2, env=ENV)
    # The main process, of the same group, is given the time to end with a status of its own.
    assert left.status == ServerExit.RAISED
    # The group is of the server's session.
    assert left.left == []
    assert_told_before_the_group_died(left)


def test_a_script_in_its_servers_group_goes_on(release: str, tmp_path: Path) -> None:
    fate = tmp_path / "fate"
    how: dict[str, Any] = {"tp": 2, "env": ENV | {"FATE": str(fate)}, "prefix": ("sh", "-c", SCRIPT, "sh")}
    left = break_one(release, tmp_path / "crash", wait, breaks_by_itself=True, **how)
    assert (left.status, left.left) == (ServerExit.RAISED, [])
    assert fate.read_text() == f"server {int(ServerExit.RAISED)}, neighbour alive\n"
    assert_told_before_the_group_died(left)


def assert_told_before_the_group_died(left: Wreck) -> None:
    """The incident misses nothing, names the rank that raised, and was on disk, with the requests, before the end."""
    assert_whole(left)
    times = times_of(left.incident)
    # Before any process of the server was ended.
    assert times["stacks_captured"] <= times["incident_finished"] <= times["process_exited"], left.incident["timeline"]
    assert times["incident_finished"] <= times["server_exited"], left.incident["timeline"]
    assert (left.incident["kind"], left.incident["verdict"]["kind"]) == ("exception", "exception")
    assert left.incident["verdict"]["first_failure"]["title"].startswith("sglang::scheduler_TP")
    assert left.incident["requests"]["path"]
