"""A real server in a container: as process 1, below ``tini`` or a shell, and beside another server of the same name."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.requests.test_journal import holding
from integration.scenario import SCHEDULER, start
from lanelib.lanes import Lane, ensure_lane
from lanelib.procs import tree_of
from lanelib.servers import Server, free_port, wait_all_ready
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.marker import MARKER, TOUCH_SECS
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.model.lenient import seconds_of
from unit.support.server_driver import Server as StandIn

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace"),
]

CONTAINER = ("unshare", "-pf", "--mount-proc", "--kill-child")
HOST = "test-host"
EXIT_S = 90.0
PROMPT = "A prompt that is nowhere once its server has ended"
#: Two servers in one container, the second with ports of its own; a later argument wins.
TWO = (
    'port=$1 nccl=$2; shift 2; "$@" & one=$!; "$@" --port "$port" --nccl-port "$nccl" & two=$!; '
    'trap "kill $one $two" TERM; '
    # The signal ends the first of them.
    "wait $one; wait $two; wait $one"
)


@dataclass(frozen=True)
class Host:
    """Folders that servers share: `crash` for incidents, `temporary` for what is gone with a server."""

    crash: Path
    temporary: Path

    def start(self, lane: Lane, *prefix: str) -> Server:
        """Start a server in a container, below `prefix` there."""
        environment = {"TMPDIR": str(self.temporary), "HOSTNAME": HOST}
        return start(lane, self.crash, env=environment, prefix=(*CONTAINER, *prefix))

    @property
    def left(self) -> list[str]:
        """What servers left, but for the folders that every server makes anew and the log of crash handlers.

        Nor is upstream's own dump of the latest requests counted, which older releases write at a clean stop, too.
        """
        runtime = self.temporary / f"sglang-crashkit-{os.getuid()}" / "run"
        below = list((self.crash / HOST).rglob("*"))
        found = [*below, *(runtime.iterdir() if runtime.is_dir() else [])]
        names = ("incidents", "crash_handler.log")
        return sorted(str(path) for path in found if not path.match("crash_dump_*.pkl") and path.name not in names)

    @property
    def places(self) -> list[str]:
        """What servers have while they live: each a runtime folder and a spool."""
        paths = [Path(path) for path in self.left]
        return [str(path) for path in paths if path.parent.name == "run" or path.name.startswith(".spool-")]

    @property
    def incidents(self) -> list[StoredIncident]:
        return find_incidents(self.crash)

    def next_start_reports(self) -> list[StoredIncident]:
        """Start and end another server on this host, and return the incidents that are there then."""
        StandIn(self.temporary, crash_folder=self.crash).tear_down(EXIT_S)
        return self.incidents


@pytest.fixture
def host(tmp_path: Path, temporary: Path) -> Host:
    return Host(tmp_path / "crash", temporary)


def first_process_of(server: Server) -> int:
    """Return the container's process 1, as it is called outside."""
    (pid,) = (process.pid for process in tree_of(server.pid) if process.parent == server.pid)
    return pid


def stop(server: Server) -> int:
    """Stop a container as its runtime does, and return its exit status."""
    os.kill(first_process_of(server), signal.SIGTERM)
    return server.popen.wait(EXIT_S)


@pytest.mark.matrix
def test_a_clean_stop_of_process_1_is_no_crash(lane: Lane, host: Host) -> None:
    with host.start(lane) as server:
        server.wait_ready()
        server.generate("Hello", max_new_tokens=4, timeout_s=120)
        assert len(host.places) == 2, host.left
        assert stop(server) == 0
    assert host.left == []
    assert host.next_start_reports() == []
    assert host.left == []


def test_a_killed_container_has_vanished_at_the_next_start(lane: Lane, host: Host) -> None:
    with host.start(lane) as server:
        server.wait_ready()
        before = time.time()
        # The kernel kills all that is in it, the crash handler included, as with `docker kill`.
        os.kill(first_process_of(server), signal.SIGKILL)
        server.popen.wait(EXIT_S)
    assert host.incidents == []
    (incident,) = host.next_start_reports()
    assert incident.document is not None
    document = incident.document
    assert (incident.finished, document["complete"], document["kind"]) == (True, True, "vanished")
    cause = document["cause"]
    assert (cause["class"], cause["level"]) == ("vanished", "supported")
    assert document["verdict"]["first_failure"] is None
    assert document["server"]["sglang_version"] == lane.release
    last, found = (seconds_of(document["trigger"]["time"]), seconds_of(document["timeline"][-1]["time"]))
    assert before - TOUCH_SECS - 1 <= last <= found <= time.time()
    # It is told once. What is left is a runtime folder, which goes with the container: whether a process of another
    # namespace lives cannot be seen.
    assert [each.path for each in host.next_start_reports()] == [incident.path]
    assert [path for path in host.left if MARKER in path] == []
    assert [place for place in host.places if Path(place).parent.name != "run"] == []


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("tini") is None, reason="tini is not installed: apt-get install tini")
def test_a_clean_stop_below_tini_leaves_nothing(host: Host) -> None:
    with host.start(ensure_lane("0.5.23"), "tini", "--") as server:
        server.wait_ready()
        stop(server)
    assert host.left == []
    assert host.next_start_reports() == []


@pytest.mark.matrix
def test_two_servers_of_one_container_leave_nothing(host: Host) -> None:
    port = free_port()
    with host.start(ensure_lane("0.5.23"), "sh", "-c", TWO, "sh", str(port), str(free_port())) as server:
        server.wait_ready()
        first, server.url = server.url, f"http://127.0.0.1:{port}"
        server.wait_ready()
        assert len(host.places) == 4, host.left
        server.url = first
        stop(server)
    assert host.left == []
    assert host.next_start_reports() == []


def test_the_end_of_one_process_1_takes_nothing_from_another(host: Host) -> None:
    lane = ensure_lane("0.5.23")
    with host.start(lane) as one, host.start(lane) as other:
        wait_all_ready([one, other])
        before = host.places
        assert len(before) == 4, before
        assert one.generate(PROMPT, max_new_tokens=4, timeout_s=120)["output_ids"]
        assert stop(one) == 0
        # What is left is the other's, and a clean stop is no crash of the next.
        assert len(host.places) == 2
        assert set(host.places) < set(before)
        assert [path for path in host.left if not path.startswith(tuple(host.places))] == []
        assert holding(PROMPT, host.crash, host.temporary) == []
        assert host.next_start_reports() == []
        assert other.generate("Hello", max_new_tokens=4, timeout_s=120)["output_ids"]
        os.kill(other.pid_of(SCHEDULER), signal.SIGKILL)
        assert other.popen.wait(EXIT_S) == ServerExit.KILLED
    (incident,) = host.incidents
    assert incident.finished
    assert incident.document["complete"] is True
    assert incident.document["verdict"]["first_failure"]["title"] == SCHEDULER
    assert host.places == []
    assert [found.path for found in host.next_start_reports()] == [incident.path]
