"""A server whose own end takes long, and an orchestrator that does not wait for it: the evidence is there before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from sglang_crashkit.incident.store import StoredIncident
from unit.handler.driver import Server
from unit.waiting import LONG, wait_until

Start = Callable[..., Server]
#: Longer than the test waits for anything.
ENDLESS_SECS = 10 * LONG


def stacks_of(stored: StoredIncident) -> set[str]:
    """Return the titles of the processes whose stacks are on disk."""
    assert stored.document is not None
    return {
        process["title"]
        for process in stored.document["processes"]
        for piece in process["evidence"]
        if (piece["kind"], piece["status"]) == ("stack", "captured") and (stored.path / piece["path"]).is_file()
    }


def test_of_a_server_that_hangs_they_are_on_disk_before_it_says_that_it_ends(start_server: Start) -> None:
    server = start_server()
    server.ask("draining unhealthy")
    own = {"sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer"}

    def with_stacks() -> list[StoredIncident]:
        return [one for one in server.incidents() if one.document is not None and own <= stacks_of(one)]

    (stored,) = wait_until(with_stacks, "the stacks are on disk")
    assert not stored.finished
    server.ask("dump_begun")
    server.ask("dump_ended")
    (stored,) = server.incidents()
    assert stored.finished
    assert stored.document is not None
    events = [entry["event"] for entry in stored.document["timeline"]]
    assert events.index("photographed") < events.index("crash_dump_begun")
    assert (stored.document["kind"], events.count("photographed")) == ("hang", 2)


def test_a_healthy_server_that_is_asked_to_end_is_not_photographed(start_server: Start) -> None:
    server = start_server()
    server.ask("draining healthy")
    os.kill(server.pid, signal.SIGTERM)
    server.wait_for_handler()
    assert server.incidents() == []


def test_stacks_and_exits_are_on_disk_while_the_server_still_saves_its_requests(start_server: Start) -> None:
    server = start_server(dump_secs=ENDLESS_SECS)
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    survivors = {"sglang::scheduler_TP0", "sglang::detokenizer"}

    def with_stacks() -> list[StoredIncident]:
        return [one for one in server.incidents() if one.document is not None and survivors <= stacks_of(one)]

    (stored,) = wait_until(with_stacks, "the stacks are on disk")
    assert server.process.poll() is None
    assert not stored.finished
    # WHEN the grace period is over and everything of the container is killed; the ranks go with the server
    assert server.handler is not None
    for pid in (server.handler.pid, server.pid):
        os.kill(pid, signal.SIGKILL)
    server.wait_for_handler()
    (stored,) = server.incidents()
    assert stored.document is not None
    assert survivors <= stacks_of(stored)
    (dead,) = [one for one in stored.document["processes"] if one["title"] == "sglang::scheduler_TP1"]
    assert dead["exit"]["signal"] == "SIGKILL"
    assert stored.document["complete"] is False
