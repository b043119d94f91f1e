"""``sglang-crashkit watch`` on a real server that crashes or is stopped, patched and not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.hangs.hang_story import LONG, VICTIM, WAITING
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.model.snapshot import parse
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

HANG_SECS = 5


@dataclass(frozen=True)
class Watched:
    """One server, and what the command told of it.

    Attributes:
        events: what it told.
        status: its exit status.
        victim: pid of the rank that was killed.
        crash_folder: the server's.
    """

    events: list[dict[str, Any]]
    status: int
    victim: int
    crash_folder: Path

    def one(self, kind: str) -> dict[str, Any]:
        """Return the only event of that kind."""
        (found,) = [event for event in self.events if event["event"] == kind]
        return found

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events]


def watch(folder: Path, *, pristine: bool, is_killed: bool) -> Watched:
    """Watch a server of which one rank is killed, or which is asked to end, and end it."""
    said, crash_folder = folder / "said", folder / "crash"
    lane = ensure_lane("0.5.23", pristine=pristine)
    options = ["--crash-dump-folder", str(crash_folder)]
    with Server.start(lane, tp=2, extra_args=options, spins=True) as server:
        server.wait_ready()
        victim = server.pid_of(VICTIM)
        command = [sys.executable, "-m", "sglang_crashkit", "watch", "--json", "--pid", str(server.pid)]
        command += ["--hang-secs", str(HANG_SECS), "--output-dir", str(folder / "stacks")]
        with said.open("wb") as out:
            watcher = subprocess.Popen(command, stdout=out)
        try:
            wait_until(lambda: '"serving"' in said.read_text(), "it sees the server serve", LONG)
            if is_killed:
                os.kill(victim, signal.SIGKILL)
            else:
                server.popen.terminate()
            server.popen.wait(timeout=LONG)
            status = watcher.wait(LONG)
        finally:
            watcher.kill()
            watcher.wait(LONG)
    return Watched([json.loads(line) for line in said.read_text().splitlines()], status, victim, crash_folder)


@pytest.fixture(scope="module", params=[True, False], ids=["unpatched", "patched"])
def crashed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, bool]:
    """What was told of a crash, and whether of a patched server."""
    watched = watch(tmp_path_factory.mktemp("crashed"), pristine=request.param, is_killed=True)
    return watched, not request.param


def test_a_killed_rank_is_a_crash_and_named_first(crashed: tuple[Watched, bool]) -> None:
    watched, _is_patched = crashed
    crash = watched.one("crash")
    assert crash["text"].startswith(f"{VICTIM} (pid {watched.victim}) was killed by SIGKILL; ")
    assert (crash["level"], crash["first"]["title"], crash["first"]["signal"]) == ("established", VICTIM, "SIGKILL")
    assert "hang" not in watched.kinds
    assert watched.events[-1]["event"] == "gone"
    assert watched.status == 3


def test_what_the_others_did_is_kept_and_nobody_blamed(crashed: tuple[Watched, bool]) -> None:
    watched, is_patched = crashed
    assert "verdict" not in watched.kinds
    snapshots = watched.one("snapshots")
    if is_patched and not snapshots["files"]:
        # It had ended before the watcher looked again.
        return
    seen = [
        process.title
        for path in Path(snapshots["output_dir"]).glob("snapshot_*.json")
        for process in parse(path.read_bytes()).processes
    ]
    # A patched server ends at once.
    assert is_patched or WAITING in seen


def test_the_incident_of_a_patched_server_has_its_verdict(crashed: tuple[Watched, bool]) -> None:
    watched, is_patched = crashed
    if not is_patched:
        assert "incident" not in watched.kinds
        return
    incident = watched.one("incident")
    (stored,) = find_incidents(watched.crash_folder)
    assert stored.document is not None
    assert incident["text"] == f"{stored.document['verdict']['text']} Incident: {stored.path}"
    assert incident["headline"] == f"killed: {VICTIM} (pid {watched.victim})"
    assert (stored.path / "summary.md").read_text().startswith(f"# {incident['headline']}\n")


@pytest.mark.matrix
def test_the_shutdown_of_a_patched_server_is_no_crash(tmp_path: Path) -> None:
    watched = watch(tmp_path, pristine=False, is_killed=False)
    # On a busy machine the end may take longer than a hang, which is excused.
    assert [kind for kind in watched.kinds if kind != "excused"] == ["watching", "serving", "gone"]
    assert watched.status == 3
