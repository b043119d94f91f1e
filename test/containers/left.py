"""What a server in a container left on its volume, and what the next one there makes of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from containers.docker_host import Container
from incident_schema import assert_fits
from integration.faults import TP0, TP1
from integration.scenario import Sent, ask_in_flight
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from unit.support.server_driver import Server as StandIn
from unit.support.waiting import LONG

REQUEST = Sent("in-flight", "Once upon a time")


def begin(server: Container, tokens: int = 4000) -> None:
    """Have the server work on a request."""
    server.wait_ready()
    ask_in_flight(server, REQUEST, tokens=tokens)


def incidents_of(volume: Path) -> list[StoredIncident]:
    """Return the incidents on a volume, each of them whole."""
    found = find_incidents(volume)
    for stored in found:
        assert stored.finished, stored.path
        assert_fits(stored.document)
    return found


def the_incident(volume: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the document of the only incident, which is whole."""
    (stored,) = incidents_of(volume)
    assert stored.document is not None
    return stored.path, stored.document


def kill_a_rank(server: Container, volume: Path) -> tuple[Path, dict[str, Any]]:
    """Kill a rank, and expect all that a server with the kit leaves; return the incident with its folder."""
    begin(server)
    os.kill(server.pid_of(TP1), signal.SIGKILL)
    assert server.popen.wait(LONG) == ServerExit.KILLED
    folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert stack_of(document, TP0)["status"] == "captured"
    return folder, document


def after_the_next_start(volume: Path, temporary: Path) -> list[StoredIncident]:
    """Start and end another server with that crash folder and host name, and return the incidents that are whole."""
    StandIn(temporary, crash_folder=volume).tear_down()
    return [stored for stored in find_incidents(volume) if stored.finished]


def report_of(document: dict[str, Any], title: str) -> dict[str, Any]:
    """Return the report on the only process of that title."""
    (report,) = [one for one in document["processes"] if one["title"].split(" ")[0] == title]
    return report


def stack_of(document: dict[str, Any], title: str) -> dict[str, Any]:
    """Return the piece of evidence that is the stack of that process."""
    return next(piece for piece in report_of(document, title)["evidence"] if piece["kind"] == "stack")
