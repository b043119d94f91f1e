"""What the crash handler takes from the machine: nothing that grows with what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import psutil
import pytest

from unit.support.server_driver import Server, Start
from unit.support.waiting import descriptors, wait_until

EVENTS = 10_000
#: So many processes are there at a time.
CROWD = 250
#: What an allocator may keep of a moment's work, in bytes.
SLACK = 4 << 20


def held(pid: int) -> list[str]:
    """Return the kinds of what a process holds: who reads for the handler may be another one by now."""
    return sorted(name.partition(":[")[0] for name in descriptors(pid).values())


def flood(server: Server, count: int) -> None:
    """Send the handler `count` messages of all kinds that are no event of the server, each once it has room."""
    words = [
        json.dumps({"event": "teardown", "pid": -1}).encode(),
        json.dumps({"event": "crash_dump_begun", "time": 0}).encode(),
        json.dumps({"event": "stacks_wanted", "wait": True}).encode(),
        b"\x80rubbish" * 100,
        b'{"event": ' + b"[" * 20_000,
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(server.runtime / "handler.sock"))
        sender.settimeout(30)
        for number in range(count):
            sender.send(words[number % len(words)])


@contextlib.contextmanager
def leaving_nothing(server: Server) -> Iterator[None]:
    """Check that the handler has afterwards what it had before, once the server has settled."""
    handler = psutil.Process(server.handler.pid)
    server.settle()
    before, memory = held(handler.pid), handler.memory_info().rss
    yield
    server.settle()
    assert held(handler.pid) == before
    assert handler.memory_info().rss - memory < SLACK
    # The one that reads for it stays.
    assert len(handler.children()) <= 1
    assert server.incidents() == []


def test_ten_thousand_events_leave_nothing_behind(start_server: Start) -> None:
    server = start_server()
    flood(server, 500)
    with leaving_nothing(server):
        flood(server, EVENTS)
    # It is still there for what counts.
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    stored = server.wait_for_the_end()
    assert stored.document["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP1"]


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_ten_thousand_processes_that_come_and_go_leave_nothing_behind(start_server: Start) -> None:
    server = start_server()
    come_and_go(server)
    with leaving_nothing(server):
        for _ in range(EVENTS // CROWD):
            come_and_go(server)


def come_and_go(server: Server) -> None:
    """Have a crowd of helpers that the handler holds on to, and then none."""
    crowd = {int(pid) for pid in server.ask(f"crowd {CROWD}").split()}
    try:
        wait_until(lambda: crowd <= server.watched(), "the handler sees them all")
    finally:
        server.ask("disperse")
    wait_until(lambda: not (crowd | {-1}) & server.watched(), "the handler lets go of them")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_flood_of_another_users_neither_counts_nor_silences_it(start_server: Start) -> None:
    server = start_server()
    path = server.runtime / "handler.sock"
    outsider = os.fork()
    if outsider == 0:
        with contextlib.suppress(BaseException), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # The folder keeps others out. One who got hold of a connection all the same is known by who sends.
            sender.connect(str(path))
            os.setuid(65534)
            sender.settimeout(30)
            for _ in range(1000):
                sender.send(b'{"event": "teardown", "pid": %d}' % server.pid)
            with contextlib.suppress(PermissionError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as another:
                another.connect(str(path))
                os._exit(2)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(outsider, 0)[1] == 0
    server.kill("scheduler_TP0")
    stored = server.wait_for_the_end()
    assert stored.document["verdict"]["first_failure"]["pid"] == server.ranks["scheduler_TP0"]
