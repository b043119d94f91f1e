from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_crashkit.core.peers import WaitingRequest
from sglang_crashkit.core.settings import SOCKET_VARIABLE
from sglang_crashkit.srt.disaggregation import link, peer_watch
from sglang_crashkit.srt.disaggregation.peer_watch import PeerWatch, current_watch, replace_watch
from sglang_crashkit.srt.disaggregation.view import Look, name_of
from unit.srt.conftest import Listener
from unit.waiting import child, descriptors, wait_until

LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
ready(listener.getsockname()[1])
kept = []
while True:
    kept.append(listener.accept())
"""
ADDRESS = "prefill:8998"


class Tables:
    """SGLang's tables as a test writes them; `looked` counts how often they were read."""

    role = "prefill"

    def __init__(self, *ports: object) -> None:
        self.now: Look | None = Look({ADDRESS: frozenset(("127.0.0.1", int(str(port))) for port in ports)})
        self.looked = 0
        self.error: Exception | None = None

    def waiting(self, *names: str, for_whom: str | None = ADDRESS) -> None:
        assert self.now is not None
        others = {whom: them for whom, them in self.now.waiting.items() if whom != for_whom}
        waiting = others | {for_whom: [WaitingRequest(name, 1) for name in names]}
        self.now = Look(self.now.peers, waiting, self.now.failed)

    def look(self) -> Look | None:
        self.looked += 1
        if self.error is not None:
            raise self.error
        return self.now


def listening(port: object = 0):
    return child(LISTEN, str(port))


def connected(peer: Any) -> None:
    """Wait until somebody has connected to the listener: it holds more than its own socket."""
    wait_until(lambda: sum("socket" in name for name in descriptors(peer.pid).values()) > 1, "the peer is watched")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "_LOOK_SECS", 0.05)
    monkeypatch.setattr(link, "_RETRY_SECS", 0.02)
    monkeypatch.setattr(link, "_LOST_RETRY_SECS", 0.05)
    monkeypatch.setattr(link, "_TURNED_AWAY_SECS", 0.1)


@pytest.fixture
def watch(listener: Listener) -> Iterator[Callable[[Tables], PeerWatch]]:
    started: list[PeerWatch] = []

    def start(tables: Tables) -> PeerWatch:
        started.append(PeerWatch(tables))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()
    wait_until(lambda: not threads(), "the watch ends")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "crashkit-peers"]


def is_silent(listener: Listener) -> bool:
    """Say whether nothing was told so far: what is told now comes first."""
    from sglang_crashkit.srt.hooks import notify

    notify("marker")
    return listener.heard()["event"] == "marker"


def test_a_peer_that_is_killed_is_told_of_once_with_those_that_wait(listener: Listener, watch) -> None:
    with listening() as peer:
        tables = Tables(peer.first_line)
        tables.waiting("a", "b")
        tables.waiting("c", for_whom=None)
        watch(tables)
        connected(peer)
        killed = time.time()
        peer.kill()
        heard = listener.heard()
    assert heard["event"] == "peer_lost"
    assert (heard["address"], heard["role"], heard["sign"]) == (ADDRESS, "prefill", "refused")
    assert heard["requests"] == [{"rid": "a", "room": 1}, {"rid": "b", "room": 1}]
    assert (heard["count"], heard["unassigned_count"], heard["alone"]) == (2, 1, True)
    assert time.time() - killed < 10
    time.sleep(0.5)
    assert is_silent(listener)


def test_those_whose_wait_ended_meanwhile_are_named_too(
    listener: Listener, watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_RETRY_SECS", 0.5)
    with listening() as peer:
        tables = Tables(peer.first_line)
        tables.waiting("early")
        watch(tables)
        connected(peer)
        wait_until(lambda: tables.looked > 3, "the tables are read")
        peer.kill()
        peer.wait()
        looked = tables.looked
        wait_until(lambda: tables.looked > looked + 2, "the tables are read again")
        # SGLang fails the one, and another one comes.
        tables.waiting("late")
        assert [request["rid"] for request in listener.heard()["requests"]] == ["early", "late"]


def test_one_process_of_several_is_enough(listener: Listener, watch) -> None:
    with listening() as first, listening() as second:
        watch(Tables(first.first_line, second.first_line))
        connected(first)
        connected(second)
        second.kill()
        assert listener.heard()["sign"] == "refused"
        first.kill()
        time.sleep(0.3)
        assert is_silent(listener)


def test_a_stopped_peer_is_not_told_of(listener: Listener, watch) -> None:
    with listening() as peer:
        watch(Tables(peer.first_line))
        connected(peer)
        os.kill(peer.pid, signal.SIGSTOP)
        time.sleep(0.7)
        assert is_silent(listener)


def test_another_peer_that_is_there_is_told_from_none(listener: Listener, watch) -> None:
    with listening() as peer, listening() as other:
        tables = Tables(peer.first_line)
        assert tables.now is not None
        tables.now = Look({**tables.now.peers, "other:1": frozenset({("127.0.0.1", int(other.first_line))})})
        watch(tables)
        connected(peer)
        connected(other)
        peer.kill()
        assert listener.heard()["alone"] is False


def test_a_peer_that_came_back_may_be_lost_again(
    listener: Listener, watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_watch, "_BACK_SECS", 0.3)
    caplog.set_level(logging.INFO)
    with listening() as peer:
        watch(Tables(peer.first_line))
        connected(peer)
        peer.kill()
        assert listener.heard()["event"] == "peer_lost"
        with listening(peer.first_line) as again:
            wait_until(lambda: "is back" in caplog.text, "the peer is back")
            assert is_silent(listener)
            again.kill()
            assert listener.heard()["event"] == "peer_lost"


def test_a_peer_that_flaps_is_told_of_once(listener: Listener, watch, caplog: pytest.LogCaptureFixture) -> None:
    with listening() as peer:
        tables = Tables(peer.first_line)
        own = watch(tables)
        connected(peer)
        for _ in range(3):
            own.note_heartbeat(ADDRESS)
            time.sleep(0.2)
        assert listener.heard()["sign"] == "heartbeat"
        assert is_silent(listener)


def test_the_heartbeat_names_those_whose_wait_it_ends(listener: Listener, watch) -> None:
    with listening() as peer:
        tables = Tables(peer.first_line)
        own = watch(tables)
        connected(peer)
        tables.waiting("a")
        own.note_heartbeat(ADDRESS)
        tables.now = Look({})
        heard = listener.heard()
        assert (heard["sign"], [request["rid"] for request in heard["requests"]]) == ("heartbeat", ["a"])


def test_a_failed_transfer_counts_when_the_connection_says_nothing_more(
    listener: Listener, watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "_PATIENCE_SECS", 0.2)
    with listening() as peer:
        tables = Tables(peer.first_line)
        assert tables.now is not None
        watch(tables)
        connected(peer)
        tables.now = Look(tables.now.peers, {}, frozenset({ADDRESS}))
        assert listener.heard()["sign"] == "failed_transfer"


def test_a_peer_that_sglang_forgets_is_let_go_of(listener: Listener, watch) -> None:
    with listening() as peer:
        tables = Tables(peer.first_line)
        before = descriptors().keys()
        watch(tables)
        connected(peer)
        tables.now = Look({})
        wait_until(lambda: descriptors().keys() <= before, "the connection is closed")
        peer.kill()
        time.sleep(0.3)
        assert is_silent(listener)


def test_a_lost_peer_that_nobody_asks_for_is_looked_for_no_longer(
    listener: Listener, watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "_FORGET_SECS", 0.3)
    with listening() as peer:
        watch(Tables(peer.first_line))
        connected(peer)
        peer.kill()
        assert listener.heard()["event"] == "peer_lost"
        time.sleep(0.6)
        with listening(peer.first_line) as stranger:
            time.sleep(0.5)
            assert sum("socket" in name for name in descriptors(stranger.pid).values()) == 1
            assert is_silent(listener)


def test_the_watch_ends_with_sglangs_tables(listener: Listener, watch) -> None:
    tables = Tables()
    watch(tables)
    wait_until(lambda: tables.looked, "the tables are read")
    tables.now = None
    wait_until(lambda: not threads(), "the watch ends")


def test_a_watch_that_cannot_read_the_tables_ends_with_a_word(
    listener: Listener, watch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables()
    tables.error = AttributeError("SGLang calls it something else")
    watch(tables)
    wait_until(lambda: not threads(), "the watch ends")
    assert "watched no longer" in caplog.text
    assert "SGLang calls it something else" in caplog.text


def test_no_more_connections_are_made_than_there_may_be(
    listener: Listener, watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "_MOST_LINKS", 1)
    with listening() as first, listening() as second:
        watch(Tables(first.first_line, second.first_line))
        time.sleep(0.3)
        held = [sum("socket" in name for name in descriptors(peer.pid).values()) for peer in (first, second)]
        assert sorted(held) == [1, 2]


@pytest.mark.parametrize("why", ["no handler", "SGLANG_CRASHKIT_PEER_WATCH", "SGLANG_CRASHKIT_ENABLED"])
def test_nothing_is_watched_where_nobody_would_be_told(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no handler":
        monkeypatch.delenv(SOCKET_VARIABLE)
    else:
        monkeypatch.setenv(why, "false")
    replace_watch(Tables())
    assert (current_watch(), threads()) == (None, [])


def test_a_new_watch_replaces_the_old_one(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Tables(), Tables()
    replace_watch(first)
    old = current_watch()
    replace_watch(second)
    assert current_watch() not in (None, old)
    wait_until(lambda: len(threads()) == 1, "the old watch ends")
    monkeypatch.delenv(SOCKET_VARIABLE)
    replace_watch(Tables())
    wait_until(lambda: not threads(), "the new watch ends")
    assert current_watch() is None


def test_an_ipv6_address_is_named_in_brackets() -> None:
    assert (name_of(("::1", 8)), name_of(("h", 9))) == ("[::1]:8", "h:9")
