from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.watch.health import Address
from sglang_crashkit.watch.server import Death, DeathWatch, WatchedServer, find_listener, is_here
from unit.support.targets import settle
from unit.support.waiting import LONG, child
from unit.watch.served import RANKS, served


def test_it_is_found_by_main_process_rank_or_address(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for pid in (server.popen.pid, *server.ranks.values()):
            watched = WatchedServer(pid)
            assert (watched.pid, watched.is_known, watched.serves_http) == (server.popen.pid, True, True)
            assert watched.address() == Address("http", "127.0.0.1", server.port)
            watched.close()
        assert find_listener(Address.parse(server.url)) == server.popen.pid
    hosts = ("127.0.0.1", "localhost", "0.0.0.0", "192.0.2.1")
    assert [is_here(Address("http", host, 30000)) for host in hosts] == [True, True, True, False]
    assert find_listener(Address("http", "192.0.2.1", 30000)) is None


def test_its_processes_are_sampled_with_stacks_when_wanted(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        watched = WatchedServer(server.popen.pid)
        samples = watched.sample(stacks=False)
        assert {one.pid for one in samples} == {server.popen.pid, *server.ranks.values()}
        assert {one.title: one.pid for one in samples if one.role == "scheduler"} == server.ranks
        assert not any(one.threads for one in samples)
        for sample in watched.sample(stacks=True):
            main = sample.main_thread
            assert main is not None
            assert sample.role != "scheduler" or "event_loop" in [frame.function for frame in main.frames]
        first, second = (server.ranks[title] for title in RANKS)
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        settle(first, "T")
        settle(second, "Z")
        states = {one.pid: one.state for one in watched.sample(stacks=True)}
        assert (states[first], states[second]) == ("T", "Z")
        watched.close()


def test_who_ends_first_after_the_watch_began_is_known(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        first, second = (server.ranks[title] for title in RANKS)
        os.kill(first, signal.SIGKILL)
        settle(first, "Z")
        watched = WatchedServer(server.popen.pid)
        watched.sample(stacks=False)
        watched.ends.wait(LONG)
        os.kill(second, signal.SIGSEGV)
        watched.ends.wait(LONG)
        assert [(death.pid, death.end.signal) for death in watched.ends.deaths] == [
            (first, "SIGKILL"),
            (second, "SIGSEGV"),
        ]
        # All that is left of the title of one that has ended.
        assert watched.ends.deaths[0].title.startswith("sglang::")
        watched.close()


def test_a_process_that_is_no_server_is_not_one() -> None:
    with child("ready(); pause()") as process:
        watched = WatchedServer(process.pid)
        assert not watched.is_known
        assert not watched.serves_http
        assert watched.address() is None
        watched.close()


def test_a_process_that_is_not_there_is_an_error() -> None:
    with child("ready()") as process:
        process.wait(LONG)
        with pytest.raises(ProcessLookupError):
            WatchedServer(process.pid)


PAUSE = "ready(); pause()"


def test_who_ends_alone_is_told_with_how_it_ended() -> None:
    with child(PAUSE) as first, child(PAUSE) as second:
        watch = DeathWatch(second.pid)
        watch.follow({first.pid: "first", second.pid: "second"})
        watch.wait(0)
        assert watch.deaths == []
        first.send_signal(signal.SIGSEGV)
        watch.wait(LONG)
        (death,) = watch.deaths
        assert (death.pid, death.title, death.end.signal, death.alone) == (first.pid, "first", "SIGSEGV", True)
        assert str(death) == f"first (pid {first.pid}) was killed by SIGSEGV"
        first.wait(LONG)
        watch.follow({first.pid: "first"})
        second.kill()
        watch.wait(LONG)
        assert [(one.title, one.alone) for one in watch.deaths] == [("first", True), ("second", False)]
        watch.close()


def test_those_that_are_killed_together_end_together() -> None:
    # GIVEN processes that are ended as upstream does it, one signal after the other
    with child(PAUSE) as first, child(PAUSE) as second, child(PAUSE) as root:
        watch = DeathWatch(root.pid)
        watch.follow({root.pid: "root", first.pid: "first", second.pid: "second"})
        for process in (first, second, root):
            process.kill()
        while len(watch.deaths) < 3:
            watch.wait(LONG)
        assert [death.alone for death in watch.deaths] == [False] * 3
        watch.close()


def test_of_several_that_ended_together_the_parent_comes_later() -> None:
    with child(PAUSE) as root, child(PAUSE) as worker, child(PAUSE):
        watch = DeathWatch(root.pid)
        watch.follow({root.pid: "root", worker.pid: "worker"})
        for process in (root, worker):
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        watch.wait(LONG)
        assert [death.title for death in watch.deaths] == ["worker", "root"]
        watch.close()


def test_an_ended_process_is_not_followed_for_ever() -> None:
    with child("ready()") as process:
        process.wait(LONG)
    watch = DeathWatch(1)
    watch.follow({process.pid: "gone"})
    began = time.monotonic()
    watch.wait(0.1)
    assert time.monotonic() - began >= 0.09
    assert watch.deaths == []
    watch.close()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ExitStatus(code=3), "ended with exit status 3"),
        (ExitStatus(), "ended by itself"),
        (ExitStatus(signal="SIGKILL"), "was killed by SIGKILL"),
    ],
)
def test_how_it_ended_in_words(end: ExitStatus, words: str) -> None:
    assert str(Death(7, "sglang::scheduler", 0.0, end)) == f"sglang::scheduler (pid 7) {words}"
