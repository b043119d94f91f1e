"""Every ordinary way to die or hang, on a real server with requests in flight: no one is left without evidence."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.crashes.whole import assert_whole, times_of
from integration.faults import FAULTS, HANG_S, HOARD_SIGNAL, TP1, Fault, wait, write_site
from integration.memory_group import MemoryGroup, NoMemoryGroupError, memory_group
from integration.scenario import PATIENCE, Wreck, break_one, start, states_until_gone, wreck
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import OUT_OF_MEMORY

#: What is known of a server that hangs is on disk this soon after SIGTERM, in seconds.
EVIDENCE_S = 5.0
NEWEST, OLDER = "0.5.23", ("0.5.9", "0.5.12.post1")

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("release", "fault"),
    [
        # Older releases and rare faults belong to the full matrix.
        pytest.param(
            release,
            fault,
            id=f"{release}-{fault}",
            marks=[pytest.mark.matrix] if fault.is_rare or release != NEWEST else [],
        )
        for release in (NEWEST, *OLDER)
        for fault in FAULTS
    ],
)
def test_every_process_has_evidence_and_nothing_is_left(release: str, fault: Fault, tmp_path: Path) -> None:
    env = PATIENCE | write_site(tmp_path / "site") | dict(fault.env)
    tp = fault.tp if fault.dp == 1 else 1
    watched: list[Future[str]] = []
    struck = [0.0]
    how: dict[str, Any] = {"requests": fault.requests, "breaks_by_itself": fault.strike is wait}
    with ThreadPoolExecutor() as pool:

        def strike(server: Server) -> None:
            watched.extend(pool.submit(states_until_gone, server.pid_of(title)) for title in fault.stopped)
            fault.strike(server)
            struck[0] = time.time()

        left = break_one(release, tmp_path / "crash", strike, *fault.args, **how, tp=tp, dp=fault.dp, env=env)
    assert (left.status, left.left) == (fault.status, []), left.incidents
    assert_whole(left, {fault.first: fault.end} if fault.first and fault.end else {})
    assert_in_time(left, struck[0], fault.most_s)
    assert left.incident["kind"] in fault.kinds
    for states in watched:
        # Somebody else stopped it: it is looked at, and killed at last, but not continued. It runs until the signal
        # takes effect, and for a moment when it is killed.
        assert set(states.result().strip("RSD")) == {"T"}, states.result()
    if fault.first is not None:
        first = left.incident["verdict"]["first_failure"]
        assert first["title"].startswith(fault.first), left.incident["verdict"]
        (report,) = [process for process in left.incident["processes"] if process["pid"] == first["pid"]]
        if fault.kinds == ("exception",):
            assert [piece["status"] for piece in report["evidence"] if piece["kind"] == "exception"] == ["captured"]


def assert_in_time(left: Wreck, struck: float, most_s: float) -> None:
    """The server has ended, and before it did, its incident was on disk."""
    times = times_of(left.incident)
    assert times["server_exited"] - struck < most_s
    if most_s <= HANG_S:
        # An orchestrator kills 30 s after SIGTERM, some sooner.
        assert times["stacks_captured"] - struck < EVIDENCE_S
        assert times["incident_finished"] <= times["server_exited"]


def test_a_rank_that_the_oom_killer_ended_is_named_so(release: str, tmp_path: Path) -> None:
    try:
        with memory_group("sglang-crashkit-test") as group:
            left = _starve(release, group, tmp_path)
    except NoMemoryGroupError as error:
        pytest.skip(f"a real OOM kill needs a memory cgroup: {error}")
    assert (left.status, left.left) == (OUT_OF_MEMORY, [])
    assert_whole(left, {TP1: ("oom_kill", "SIGKILL")})
    verdict = left.incident["verdict"]
    assert (verdict["kind"], verdict["first_failure"]["title"]) == ("oom_kill", TP1)


def _starve(release: str, group: MemoryGroup, folder: Path) -> Wreck:
    env = PATIENCE | write_site(folder / "site")
    with start(release, folder / "crash", tp=2, env=env) as server:
        # Before it imports anything, so that what its processes take is charged here.
        group.add(server.pid)
        server.wait_ready()

        def strike(server: Server) -> None:
            rank = server.pid_of(TP1)
            # The kernel takes the largest by itself, which may be any of them when it comes.
            Path(f"/proc/{rank}/oom_score_adj").write_text("1000")
            group.leave_room(64 << 20)
            os.kill(rank, HOARD_SIGNAL)

        return wreck(server, folder / "crash", strike)
