from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.handler.peers import link as link_module
from sglang_crashkit.handler.peers.link import Link
from unit.support.waiting import LONG, child, descriptors

#: Listens, and does with each connection what it is told to: keep, turn away at once, or close after a while.
LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
ready(listener.getsockname()[1])
kept = []
while True:
    connection, _ = listener.accept()
    connection.sendall(b"\\xff\\0\\0\\0\\0\\0\\0\\0\\1\\x7f")
    if sys.argv[1] == "turn away":
        connection.close()
    elif sys.argv[1] == "close later":
        time.sleep(0.3)
        connection.close()
    else:
        kept.append(connection)
"""


def turn(link: Link, until: float) -> None:
    """Let a link go on until that time, or until something happened on it."""
    events = dict(link._epoll.poll(max(0.0, min(until, link.due) - time.monotonic()) + 0.001))
    link.step(time.monotonic(), events.get(link.fileno(), 0))


def run(link: Link, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        turn(link, until)


def run_until(link: Link, what: str) -> None:
    until = time.monotonic() + LONG
    while not getattr(link, what):
        assert time.monotonic() < until, f"{what} not within {LONG:g} s"
        turn(link, until)


@pytest.fixture
def made() -> Iterator[list[Link]]:
    links: list[Link] = []
    yield links
    for link in links:
        link.close()


def listening(how: str, port: int = 0):
    return child(LISTEN, how, str(port))


def connect(made: list[Link], port: str | int) -> Link:
    made.append(Link(select.epoll(), "127.0.0.1", int(port)))
    return made[-1]


def test_a_killed_process_is_noticed_at_once_and_lost_later(made: list[Link]) -> None:
    with listening("keep") as peer:
        link = connect(made, peer.first_line)
        run_until(link, "is_up")
        run(link, 1.2)
        assert (link.lost, link.since) == (None, None)
        peer.kill()
        began, moment = time.monotonic(), time.time()
        run_until(link, "since")
        assert abs(link.since - moment) < LONG
        run_until(link, "lost")
        # Two pauses between three refusals; the rest is the machine's.
        assert 0.4 < time.monotonic() - began < LONG
        assert (link.lost, link.is_up) == ("refused", False)


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_one_that_was_never_there_is_lost(made: list[Link], free_port: int) -> None:
    link = connect(made, free_port)
    run_until(link, "lost")
    assert link.lost == "refused"


def test_one_that_comes_back_is_not_lost_any_more(made: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_LOST_RETRY_SECS", 0.1)
    with listening("keep") as peer:
        port = int(peer.first_line)
        link = connect(made, port)
        run_until(link, "is_up")
    run_until(link, "lost")
    with listening("keep", port):
        run_until(link, "is_up")
        assert (link.lost, link.since) == (None, None)


def test_a_stopped_peer_is_not_lost(made: list[Link]) -> None:
    with listening("keep") as peer:
        link = connect(made, peer.first_line)
        run_until(link, "is_up")
        os.kill(peer.pid, signal.SIGSTOP)
        run(link, 1.5)
        assert (link.lost, link.since) == (None, None)


def test_a_full_backlog_is_no_loss(made: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_CONNECT_SECS", 0.2)
    monkeypatch.setattr(link_module, "_RETRY_LATER_SECS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        others = [connect(made, listener.getsockname()[1]) for _ in range(4)]
        for other in others:
            run(other, 0.2)
        link = connect(made, listener.getsockname()[1])
        run(link, 1.5)
        assert not link.is_up, "the backlog is not full"
        assert link.lost is None


def test_a_listener_that_closes_silent_connections_is_not_lost(
    made: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As ZeroMQ does, only sooner.
    monkeypatch.setattr(link_module, "_TURNED_AWAY_SECS", 0.1)
    with listening("close later") as peer:
        link = connect(made, peer.first_line)
        run_until(link, "is_up")
        run(link, 2.0)
        assert link.lost is None
        run_until(link, "is_up")


def test_one_whose_connections_are_taken_and_reset_is_lost(made: list[Link]) -> None:
    # A proxy answers for a server that is not there.
    with listening("turn away") as peer:
        link = connect(made, peer.first_line)
        run_until(link, "lost")
        assert link.lost == "refused"


def test_a_host_name_is_not_looked_up() -> None:
    with pytest.raises(ValueError, match="localhost is no IP address"):
        Link(select.epoll(), "localhost", 1)


def try_once(link: Link, now: float) -> None:
    link.step(now, 0)
    if link.fileno() >= 0:
        link.step(now, select.POLLOUT)


def test_one_that_stays_away_is_tried_ever_more_rarely(
    made: list[Link], free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_JITTER", 0.0)
    link, now = connect(made, free_port), 0.0
    pauses = []
    while len(pauses) < 9:
        try_once(link, now)
        pauses.append(link.due - now)
        now = link.due
    assert pauses == pytest.approx([0.25, 0.25, 5, 10, 20, 40, 80, 120, 120])


def test_those_that_lost_one_peer_come_back_one_by_one(made: list[Link], free_port: int) -> None:
    links = [connect(made, free_port) for _ in range(10)]
    for link in links:
        try_once(link, 0.0)
    dues = {link.due for link in links}
    assert len(dues) > 5
    assert all(0.2 <= due <= 0.3 for due in dues)


def test_no_descriptor_is_left(made: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_LOST_RETRY_SECS", 0.01)
    monkeypatch.setattr(link_module, "_RETRY_SECS", 0.01)
    with listening("turn away") as peer:
        before = descriptors()
        link = connect(made, peer.first_line)
        run(link, 1.0)
        link.close()
        link.close()
        link._epoll.close()
        assert descriptors().items() <= before.items()


#: One network namespace with this program in it, another with a listener, a cable between them; then the address goes.
SILENT_HOST = """
import subprocess, sys, time
sys.path[:0] = sys.argv[1:]
from sglang_crashkit.handler.peers import link as link_module
from sglang_crashkit.handler.peers.link import Link
import unit.handler.peers.test_link as test_link

def ip(*words, inside=()):
    subprocess.run([*inside, "ip", *words], check=True, timeout=10)

listen = "import socket, time; s = socket.create_server(('10.9.9.2', 7)); print('ready', flush=True); time.sleep(60)"
wait = "import sys; print('there', flush=True); sys.stdin.readline(); "
other = subprocess.Popen(["unshare", "-n", sys.executable, "-c", wait + listen], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
try:
    assert other.stdout.readline() == "there\\n"
    inside = ("nsenter", "-t", str(other.pid), "-n")
    ip("link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(other.pid))
    ip("addr", "add", "10.9.9.1/24", "dev", "v0")
    ip("link", "set", "v0", "up")
    ip("addr", "add", "10.9.9.2/24", "dev", "v1", inside=inside)
    ip("link", "set", "v1", "up", inside=inside)
    other.stdin.write("\\n")
    other.stdin.flush()
    assert other.stdout.readline() == "ready\\n"
    import select, socket
    link_module._KEEPALIVE = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2))
    link_module._CONNECT_SECS = 1.0
    link_module._RETRY_LATER_SECS = 0.1
    link = Link(select.epoll(), "10.9.9.2", 7)
    test_link.run_until(link, "is_up")
    test_link.run(link, 4.0)
    assert link.lost is None and link.is_up, "keepalives are answered"
    ip("addr", "del", "10.9.9.2/24", "dev", "v1", inside=inside)
    test_link.run_until(link, "lost")
    print(link.lost)
finally:
    other.kill()
    other.wait(10)
"""


def can_have_networks() -> bool:
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    command = ["unshare", "-n", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.mark.wide
@pytest.mark.skipif(not can_have_networks(), reason="needs root, iproute2 and network namespaces")
def test_a_host_that_is_silent_is_lost_although_nothing_refuses() -> None:
    roots = [str(Path(__file__).parents[3]), str(Path(__file__).parents[4] / "python")]
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", SILENT_HOST, *roots],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "unreachable\n", done.stderr
