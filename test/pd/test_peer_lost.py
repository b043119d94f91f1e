"""A real pair loses its prefill or its decode server: SGLang, on the other one, notices, and the kit says who waits.

A decode server notices by its heartbeat, a prefill server by its next transfer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.crashes.whole import assert_ends, assert_present, assert_requests, assert_told, journaled, times_of
from integration.scenario import IN_FLIGHT_S, Member, Sent, journaled_rids, members_of, whole_incidents
from lanelib.lanes import ensure_lane
from lanelib.pd import PDServers
from lanelib.procs import tree_of
from lanelib.servers import Server, greedy
from pd.pairs import NEEDED, serving
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.model.lenient import seconds_of
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), NEEDED]

#: SGLang's heartbeat asks every 5 s, and gives a server up after 2 failures; the rest is the machine's load.
MAX_S = {"prefill": 10.0 + 10.0, "decode": 15.0}
SIGNS = {"prefill": "heartbeat", "decode": "failed_transfer"}
#: What comes after the loss is no second one.
AFTER_S = 12.0
#: So long a decode server takes to ask for a request that it has, in seconds.
ASK_S = 2.0
COLLECT_S = 120.0
RIDS = ["waits-1", "waits-2", "waits-3"]
PROMPT = "Once upon a time"


@dataclass(frozen=True)
class Parting:
    """What a lost server left of a pair."""

    victim: str  # which server was killed
    lost: StoredIncident  # the only incident in which the other one tells of it
    other: StoredIncident  # the only other incident
    #: each process that the lost server had, and each that the other one had, before
    members: tuple[list[Member], list[Member]]
    killed: float  # when it was killed, in seconds since the epoch
    dead_pid: int
    dead_rank: int  # the scheduler of the lost server
    survivor_pid: int
    addresses: set[str]  # where the lost server was reached
    serves: bool  # whether the other server still answered after it
    stopped: dict[str, Any]  # what ``collect`` said of both while the lost server's scheduler was stopped
    gone: dict[str, Any]  # what it said where the server was killed between its looks


def addresses_of(server: Server) -> set[str]:
    """Return where its schedulers listen."""
    schedulers = [pid for pid, title in server.processes() if title.startswith("sglang::scheduler")]
    found = [connection for pid in schedulers for connection in psutil.Process(pid).net_connections("tcp")]
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN}


def kill(victim: str, pair: PDServers) -> float:
    """Kill prefill as a whole, and of decode the stopped scheduler; return when."""
    if victim == "prefill":
        pids = [process.pid for process in tree_of(pair.prefill.pid)]
        moment = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return moment
    # It is gone when it has asked for its requests, and before prefill sends: else no one would send to it.
    sender, receiver = (server.pid_of("sglang::scheduler") for server in (pair.prefill, pair.decode))
    os.kill(sender, signal.SIGSTOP)
    os.kill(receiver, signal.SIGCONT)
    time.sleep(ASK_S)
    moment = time.time()
    os.kill(receiver, signal.SIGKILL)
    os.kill(sender, signal.SIGCONT)
    return moment


def start_collect(folder: Path) -> subprocess.Popen[bytes]:
    """Collect from the servers below this process."""
    argv = [sys.executable, "-m", "sglang_crashkit", "collect", "--json", f"--pid={os.getpid()}"]
    argv += ["--snapshots=2", "--interval=8", f"--output-dir={folder}"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE)


def verdict_of(collector: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _none = collector.communicate(timeout=COLLECT_S)
    verdict: dict[str, Any] = json.loads(output)["verdict"]
    return verdict


def part(victim: str, pair: PDServers, folder: Path, collected: Path) -> Parting:
    dead, survivor = (pair.prefill, pair.decode) if victim == "prefill" else (pair.decode, pair.prefill)
    argv = pair.prefill.popen.args
    port = int(argv[argv.index("--disaggregation-bootstrap-port") + 1])
    addresses = {f"127.0.0.1:{port}"} if victim == "prefill" else addresses_of(dead)
    assert whole_incidents(folder) == []
    members = members_of(dead), members_of(survivor)
    # The other side waits for what a stopped scheduler does not do.
    dead_rank = dead.pid_of("sglang::scheduler")
    os.kill(dead_rank, signal.SIGSTOP)
    for room, rid in enumerate(RIDS, 1000):
        # As the router does, which would leave both servers when one of them is gone.
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        for server in (pair.prefill, pair.decode):
            server.ask_later("generate", greedy(PROMPT, 8, rid=rid, **where), 120.0)
    waiting = "the requests wait in the other server"
    wait_until(lambda: set(RIDS) <= journaled_rids(survivor.pid), waiting, IN_FLIGHT_S)
    time.sleep(2.0)
    stopped = verdict_of(start_collect(collected / "stopped"))
    with start_collect(collected / "gone") as collector:
        wait_until(lambda: list((collected / "gone").glob("snapshot_*_1.json")), "there is a first look", COLLECT_S)
        killed = kill(victim, pair)
        gone = verdict_of(collector)

    def told() -> list[StoredIncident]:
        return [found for found in whole_incidents(folder) if found.document["kind"] == "peer_lost"]

    wait_until(told, "the survivor tells of it", timeout_secs=60)
    time.sleep(max(0.0, killed + AFTER_S - time.time()))
    serves = survivor.poll_ready()
    dead.popen.wait(timeout=60)
    wait_until(
        lambda: any(found.document["server"]["pid"] == dead.pid for found in whole_incidents(folder)),
        "the dead one's incident",
    )
    (lost,) = told()
    (other,) = [found for found in whole_incidents(folder) if found.document["kind"] != "peer_lost"]
    return Parting(
        victim,
        lost,
        other,
        members,
        killed,
        dead.pid,
        dead_rank,
        survivor.pid,
        addresses,
        serves,
        stopped=stopped,
        gone=gone,
    )


@pytest.fixture(scope="module", params=["prefill", "decode"])
def parting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pd_release, pd_device
) -> Iterator[Parting]:
    folder = tmp_path_factory.mktemp("crash")
    with serving(ensure_lane(pd_release), pd_device, folder) as pair:
        yield part(request.param, pair, folder, tmp_path_factory.mktemp("collected"))


def test_the_survivor_says_who_is_gone_once_sglang_knows(parting: Parting, capsys: pytest.CaptureFixture[str]) -> None:
    document = parting.lost.document
    assert document["server"]["pid"] == parting.survivor_pid
    (peer,) = document["peers"]
    assert (peer["role"], peer["sign"]) == (parting.victim, SIGNS[parting.victim])
    assert peer["reason"]
    assert peer["address"] in parting.addresses
    began, finished = seconds_of(document["trigger"]["time"]), times_of(document)["incident_finished"]
    with capsys.disabled():
        seconds, whole = began - parting.killed, finished - parting.killed
        print(f"\n{parting.victim}: noticed after {seconds:.2f} s, incident whole after {whole:.2f} s")  # noqa: T201
    assert seconds < MAX_S[parting.victim]


def test_it_names_the_requests_that_wait(parting: Parting) -> None:
    document = parting.lost.document
    (peer,) = document["peers"]
    named = [request["rid"] for request in peer["requests"]]
    # Those of the batch that runs as the first transfer fails are in none of prefill's queues.
    assert sorted(named) == RIDS if parting.victim == "prefill" else named and set(named) <= set(RIDS)
    assert all(isinstance(request["room"], int) and request["since"] for request in peer["requests"])
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["level"]) == ("peer_lost", "supported")
    assert f"{parting.victim} server {peer['address']} " in verdict["text"]
    assert all(rid in verdict["text"] for rid in named)
    cause = {"prefill": "peer_lost", "decode": "transfer_failed"}[parting.victim]
    assert (document["cause"]["class"], document["cause"]["level"]) == (cause, "supported")


def test_every_process_of_the_survivor_is_listed_and_goes_on(parting: Parting) -> None:
    document = parting.lost.document
    titles = [process["title"] for process in document["processes"] if process["role"] == "scheduler"]
    assert len(titles) == 1
    for process in document["processes"]:
        if process["role"] != "helper":
            kinds = {piece["kind"]: piece["status"] for piece in process["evidence"]}
            # A process that has logged nothing has no log.
            assert kinds.pop("log") in ("captured", "skipped"), process
            own = {"scheduler": {"steps": "captured"}, "server": {"environment": "captured"}}.get(process["role"], {})
            assert kinds == {"proc_state": "captured", "stack": "skipped"} | own, process
    assert not (parting.lost.path / "stacks").exists()
    assert document["complete"] is True
    assert_present(document, parting.members[1])
    assert_ends(document, {})
    assert document["requests"]["reason"] == "the server went on"
    # Decode has given up by then what it waited for in vain.
    in_journal = journaled(document, parting.lost.path, "unfinished", "finished", "dropped")
    assert {rid: in_journal.get(rid) for rid in RIDS} == dict.fromkeys(RIDS, PROMPT)
    assert parting.serves


def test_nobody_of_the_survivor_failed_first(parting: Parting) -> None:
    assert parting.lost.document["verdict"]["first_failure"] is None


def test_the_dead_server_has_an_incident_of_its_own(parting: Parting) -> None:
    document = parting.other.document
    assert (document["server"]["pid"], document["complete"]) == (parting.dead_pid, True)
    assert document["kind"] == "killed"
    assert document["verdict"]["kind"] == "signal"
    # Of processes that are killed at once any may be gone first.
    struck = {parting.dead_rank} if parting.victim == "decode" else {member.pid for member in parting.members[0]}
    assert document["verdict"]["first_failure"]["pid"] in struck
    assert_requests(document, parting.other.path, [Sent(rid, PROMPT) for rid in RIDS])


def test_every_process_of_the_dead_server_is_accounted_for(parting: Parting) -> None:
    document = parting.other.document
    if parting.victim == "decode":
        assert_present(document, parting.members[0])
        assert_told(document, parting.other.path, [parting.dead_rank])
        assert_ends(document, {parting.dead_rank: ("signal", "SIGKILL")})
        return
    # All of it was killed, helpers too, which do not matter where they are gone first.
    own = [member for member in parting.members[0] if "multiprocessing." not in member.title]
    assert_present(document, own)
    ends = {process["title"]: process["exit"] for process in document["processes"]}
    assert {end and end["signal"] for end in ends.values()} == {"SIGKILL"}, ends
    assert {end["cause"] for end in ends.values()} <= {"signal", "parent_ended"}, ends


def test_what_the_other_server_waits_for_is_seen_from_outside(parting: Parting) -> None:
    for kind, words, verdict in (
        ("stopped_process", "is stopped (state T", parting.stopped),
        ("exited", "has ended", parting.gone),
    ):
        assert (verdict["class"], verdict["level"]) == (kind, "established")
        assert verdict["first"] == f"scheduler of {parting.victim}"
        assert verdict["headline"].startswith(f"{verdict['first']} {words}")
