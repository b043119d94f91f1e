from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sglang_crashkit.watch.health_probe import Address
from sglang_crashkit.watch.watched_server import WatchedServer, find_listener, is_here
from unit.served import RANKS, served
from unit.targets import settle
from unit.waiting import LONG, child, wait_until


def test_it_is_found_by_its_main_process_by_a_rank_and_by_its_address(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for pid in (server.popen.pid, *server.ranks.values()):
            watched = WatchedServer(pid)
            assert (watched.pid, watched.is_known, watched.serves_http) == (server.popen.pid, True, True)
            assert watched.address() == Address("http", "127.0.0.1", server.port)
            watched.close()
        assert find_listener(Address.parse(server.url)) == server.popen.pid


def test_its_ranks_are_looked_at_with_their_stacks_where_they_are_wanted(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        watched = WatchedServer(server.popen.pid)
        looks = watched.look(stacks=False)
        assert {look.title: look.pid for look in looks} == server.ranks
        assert [look.frames for look in looks] == [(), ()]
        for look in watched.look(stacks=True):
            assert "event_loop" in [frame.function for frame in look.frames]
        wait_until(
            lambda: all(
                new.switches > old.switches for new, old in zip(watched.look(stacks=False), looks, strict=True)
            ),
            "they are seen to go on",
        )
        watched.close()


def test_a_stopped_rank_and_one_that_has_ended_are_seen(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        watched = WatchedServer(server.popen.pid)
        first, second = (server.ranks[title] for title in RANKS)
        watched.look(stacks=False)
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        settle(first, "T")
        settle(second, "Z")
        assert {look.pid: look.state for look in watched.look(stacks=True)} == {first: "T", second: "Z"}
        watched.close()


def test_who_ends_first_is_known_and_one_that_had_ended_before_it_was_watched(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        first, second = (server.ranks[title] for title in RANKS)
        os.kill(first, signal.SIGKILL)
        settle(first, "Z")
        watched = WatchedServer(server.popen.pid)
        watched.look(stacks=False)
        watched.wait(LONG)
        os.kill(second, signal.SIGSEGV)
        watched.wait(LONG)
        assert [(death.pid, death.end.signal) for death in watched.deaths] == [(first, "SIGKILL"), (second, "SIGSEGV")]
        # All that is left of the title of one that has ended.
        assert watched.deaths[0].title.startswith("sglang::")
        watched.close()


def test_its_end_is_seen(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        watched = WatchedServer(server.popen.pid)
        wait_until(lambda: watched.state == "S", "it has nothing to do")
        assert not watched.is_gone
        server.end()
        assert watched.is_gone
        watched.close()


def test_a_process_that_is_no_server_is_not_taken_for_one() -> None:
    with child("ready(); pause()") as process:
        watched = WatchedServer(process.pid)
        assert not watched.is_known
        assert not watched.serves_http
        assert watched.address() is None
        watched.close()


def test_a_process_that_is_not_there_is_an_error() -> None:
    with child("ready()") as process:
        process.wait(30)
        with pytest.raises(ProcessLookupError):
            WatchedServer(process.pid)


@pytest.mark.parametrize(
    ("host", "here"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", True), ("192.0.2.1", False)]
)
def test_which_addresses_are_on_this_host(host: str, here: bool) -> None:
    assert is_here(Address("http", host, 30000)) is here


def test_nobody_is_known_to_listen_on_another_host() -> None:
    assert find_listener(Address("http", "192.0.2.1", 30000)) is None
