"""A rank ends before the first request: the server ends soon, says who died of what, and leaves an incident."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.crashes.whole import assert_ends, assert_present, assert_told, times_of
from integration.import_hook import write_site
from integration.scenario import PATIENCE, SCHEDULER, Wreck, rank_that_starts, serving, start, wreck
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from unit.support.server_driver import piece_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: A loaded machine takes minutes to import SGLang.
TITLE_TIMEOUT_S = 400.0
#: Upstream without the kit is alive minutes later.
EXIT_TIMEOUT_S = 120.0
#: From the death to the whole incident on a busy machine; the capture of processes that import takes most of it. One
#: that is not busy needs 15 s.
INCIDENT_S = 45.0


#: What each Python of a server runs first: on SIGUSR2 a scheduler raises in its loop, where no one is to catch it.
RAISE = """
import signal
def fail(_signum, frame):
    if frame.f_code.co_name.startswith("event_loop"):
        raise RuntimeError("before the first request")
    signal.setitimer(signal.ITIMER_REAL, 0.001)
signal.signal(signal.SIGUSR2, fail)
signal.signal(signal.SIGALRM, fail)
"""
#: What asks for its health sends it no request.
NO_REQUEST = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


@dataclass(frozen=True)
class Case:
    release: str
    victim: str
    name: str
    parallel: dict[str, int]


CASES = [
    pytest.param(
        case,
        marks=[pytest.mark.matrix] if release != "0.5.23" or "dp" in case.parallel else [],
        id=f"{release}-{case.victim[-3:]}",
    )
    for release in ("0.5.9", "0.5.12.post1", "0.5.23")
    for case in (
        Case(release, "sglang::scheduler_TP1", "Rank 1 scheduler", {"tp": 2}),
        Case(release, "sglang::scheduler_DP1", "DP1 Rank 0 scheduler", {"dp": 2}),
    )
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def death(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Wreck:
    """A server whose rank was killed while it started."""
    folder = tmp_path_factory.mktemp("crash")
    with start(case.release, folder, env=PATIENCE, **case.parallel) as server:
        pid = rank_that_starts(server, case.victim, TITLE_TIMEOUT_S)
        return wreck(server, folder, lambda _server: os.kill(pid, signal.SIGKILL), requests=0)


def test_the_server_ends_and_nothing_of_it_is_left(death: Wreck) -> None:
    assert death.status == ServerExit.KILLED
    assert death.left == []


def test_the_log_names_the_rank_and_the_signal(case: Case, death: Wreck) -> None:
    assert f"{case.name} died during initialization (exit code: -9)." in death.log
    # Killed within the quarter of a second after it set its title, it is known by its number.
    pid = death.pids[case.victim]
    names = (f"{case.name} ({case.victim}, pid {pid})", f"{case.name} (pid {pid})")
    assert any(f"{name} was killed by SIGKILL" in death.log for name in names)


def test_the_incident_names_the_rank_as_the_first_failure(case: Case, death: Wreck) -> None:
    verdict = death.incident["verdict"]
    assert verdict["first_failure"]["pid"] == death.pids[case.victim]
    assert verdict["first_failure"]["title"] in (case.victim, case.name)
    assert (verdict["kind"], verdict["level"]) == ("signal", "established")


def test_the_incident_is_whole_soon_after_the_death(death: Wreck) -> None:
    times = times_of(death.incident)
    assert times["incident_finished"] - times["process_exited"] < INCIDENT_S
    assert death.incident["requests"]["reason"] == "the server had not started to serve"


def test_every_process_of_the_server_has_a_stack_or_ended(case: Case, death: Wreck) -> None:
    ends = {death.pids[case.victim]: ("signal", "SIGKILL")}
    assert death.incident["complete"] is True
    assert_present(death.incident, death.members)
    assert_told(death.incident, death.folder, ends)
    assert_ends(death.incident, ends)


@pytest.mark.matrix
def test_a_rank_that_raises_while_loading_is_named(release: str, tmp_path: Path) -> None:
    # The tiny model has no weights but those that the test's servers make up.
    with start(release, tmp_path, "--load-format", "auto") as server:
        assert server.popen.wait(timeout=TITLE_TIMEOUT_S) == ServerExit.FAILED_START
        (stored,) = find_incidents(tmp_path)
    assert stored.document["kind"] in ("exception", "failed_start")
    (text,) = exceptions_of(stored)
    assert "Cannot find any model weights" in text


def test_a_rank_that_raises_before_serving_is_named(release: str, tmp_path: Path) -> None:
    env = PATIENCE | NO_REQUEST | write_site(tmp_path / "site", RAISE)
    # One that sleeps is seldom in its loop itself.
    with serving(release, tmp_path / "crash", env=env, spins=True) as server:
        os.kill(server.pid_of(SCHEDULER), signal.SIGUSR2)
        assert server.popen.wait(timeout=EXIT_TIMEOUT_S) == ServerExit.RAISED
        (stored,) = find_incidents(tmp_path / "crash")
    (text,) = exceptions_of(stored)
    assert "before the first request" in text
    for process in stored.document["processes"]:
        if process["role"] not in ("helper", "scheduler"):
            assert piece_of(process, "stack")["status"] == "captured", process


def exceptions_of(stored: StoredIncident) -> list[str]:
    """Return what the exceptions of the scheduler say, which the verdict must name."""
    verdict, processes = stored.document["verdict"], stored.document["processes"]
    assert (verdict["first_failure"]["title"], verdict["kind"]) == (SCHEDULER, "exception")
    pieces = [piece for process in processes if process["title"] == SCHEDULER for piece in process["evidence"]]
    assert {piece["status"] for piece in pieces if piece["kind"] == "exception"} == {"captured"}
    return [(stored.path / piece["path"]).read_text() for piece in pieces if piece["kind"] == "exception"]
