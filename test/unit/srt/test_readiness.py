"""The wait for ranks, on real processes with real pipes that do what ranks do when they start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import setproctitle

from sglang_crashkit.kernel import cgroup, procfs
from sglang_crashkit.srt.readiness import Readiness, StartupError
from sglang_crashkit.srt.startup_report import Member
from unit.waiting import LONG, descriptors, wait_until

CONTEXT = multiprocessing.get_context("fork")
READY = {"status": "ready", "max_total_num_tokens": 8192}


def rank(title: str | None, orders: Any, writer: Any) -> None:
    """Stand for a scheduler: does what it is told, until it is told to stay silent."""
    if title:
        setproctitle.setproctitle(title)
    while True:
        verb, value = orders.recv()
        if verb == "send":
            writer.send(value)
        elif verb == "write":
            os.write(writer.fileno(), value)
        elif verb == "close":
            writer.close()
        elif verb == "exit":
            os._exit(value)


class Ranks:
    """Some ranks, as the launching process has them."""

    def __init__(self, count: int, titled: bool) -> None:
        self.readers, self.processes, self._orders = [], [], []
        for number in range(count):
            reader, writer = CONTEXT.Pipe(duplex=False)
            theirs, ours = CONTEXT.Pipe(duplex=False)
            title = f"sglang::scheduler_TP{number}" if titled else None
            process = CONTEXT.Process(target=rank, args=(title, theirs, writer), daemon=True)
            process.start()
            writer.close()
            theirs.close()
            self.readers.append(reader)
            self.processes.append(process)
            self._orders.append(ours)

    def tell(self, number: int, verb: str, value: Any = None) -> None:
        self._orders[number].send((verb, value))

    def ready(self, *numbers: int) -> None:
        for number in numbers:
            self.tell(number, "send", READY | {"rank": number})

    def kill(self, number: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.processes[number].pid, signum)

    def members(self) -> list[Member]:
        pairs = enumerate(zip(self.processes, self.readers, strict=True))
        return [Member(f"Rank {number} scheduler", process, reader) for number, (process, reader) in pairs]

    def wait(self, **options: Any) -> list[Any]:
        return Readiness(self.members(), **options).wait()

    def close(self) -> None:
        for process, reader, orders in zip(self.processes, self.readers, self._orders, strict=True):
            process.kill()
            process.join(LONG)
            reader.close()
            orders.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def begin(count: int = 2, titled: bool = True) -> Ranks:
        started.append(Ranks(count, titled))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.close()


def later(action: Callable[[], object], seconds: float = 0.3) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def failure(ranks: Ranks, **options: Any) -> StartupError:
    with pytest.raises(RuntimeError) as caught:
        ranks.wait(**options)
    assert isinstance(caught.value, StartupError)
    return caught.value


def test_what_the_ranks_sent_comes_in_the_order_of_the_ranks(start):
    ranks = start(3)
    ranks.ready(2, 0)
    later(lambda: ranks.ready(1))
    assert ranks.wait() == [READY | {"rank": number} for number in range(3)]


def test_a_rank_that_dies_while_another_is_read_ends_the_wait(start):
    ranks = start()
    later(lambda: ranks.kill(1))
    error = failure(ranks)
    assert error.kind == "died"
    assert [member.process.pid for member in error.members] == [ranks.processes[1].pid]
    assert str(error).startswith("Rank 1 scheduler died during initialization (exit code: -9).")
    assert f"Rank 1 scheduler (sglang::scheduler_TP1, pid {ranks.processes[1].pid}) was killed by SIGKILL" in str(error)
    assert str(error).endswith("Ready: none; not ready: Rank 0 scheduler.")


def test_a_rank_that_was_ready_and_dies_ends_the_wait(start):
    ranks = start()
    ranks.ready(0)
    later(lambda: ranks.kill(0, signal.SIGTERM))
    error = failure(ranks)
    assert "Rank 0 scheduler died during initialization (exit code: -15)." in str(error)
    assert "was killed by SIGTERM" in str(error)
    assert str(error).endswith("not ready: Rank 1 scheduler.")


def test_a_rank_that_dies_when_all_are_ready_is_an_error_still(start):
    ranks = start()
    ranks.ready(0, 1)
    ranks.tell(1, "exit", 0)
    ranks.processes[1].join(LONG)
    assert "Rank 1 scheduler died during initialization (exit code: 0)." in str(failure(ranks))


def test_an_exit_status_is_told_and_the_zombie_is_left_for_the_crash_handler(start):
    ranks = start()
    later(lambda: ranks.tell(1, "exit", 7))
    error = failure(ranks)
    assert "(exit code: 7)" in str(error)
    assert "ended with exit status 7" in str(error)
    assert os.waitid(os.P_PID, ranks.processes[1].pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def test_a_death_that_was_reaped_before_is_told_all_the_same(start):
    ranks = start()
    ranks.kill(1)
    ranks.processes[1].join(LONG)
    assert "(exit code: -9)" in str(failure(ranks))


def test_every_rank_that_died_is_named(start):
    ranks = start(3)

    members = ranks.members()
    ranks.kill(2)
    ranks.kill(0, signal.SIGTERM)
    for number in (0, 2):
        ranks.processes[number].join(LONG)
    with pytest.raises(StartupError) as caught:
        Readiness(members).wait()
    error = caught.value
    assert {member.process.pid for member in error.members} == {ranks.processes[0].pid, ranks.processes[2].pid}
    assert str(error).startswith(
        "Rank 0 scheduler and Rank 2 scheduler died during initialization (exit code: -15, -9)"
    )
    assert str(error).count("at the same moment as the first") == 2


def test_the_one_that_was_seen_dead_first_is_said_to_be_the_first(start):
    ranks = start()
    members = ranks.members()
    readiness = Readiness(members)
    ranks.kill(1)
    wait_until(lambda: readiness._look_for_dead(members, 0.0), "the death is seen")
    ranks.kill(0)
    wait_until(lambda: readiness._look_for_dead(members[:1], 0.0), "the other death is seen")
    text = str(readiness._died([members[1]]))
    assert text.startswith("Rank 1 scheduler and Rank 0 scheduler died during initialization (exit code: -9, -9).")
    assert text.count(", first.") == 1


def test_an_oom_kill_is_told_from_any_other(start, tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 3\n")
    monkeypatch.setattr(cgroup, "find_counter", lambda pid: cgroup.OomCounter(events, 3))
    ranks = start()
    later(lambda: (events.write_text("oom_kill 4\n"), ranks.kill(1)))
    assert f"was killed by SIGKILL ({events} counts 1 OOM kill(s) since the wait began)" in str(failure(ranks))
    events.write_text("oom_kill 3\n")
    ranks = start()
    later(lambda: ranks.kill(1))
    assert "counts no OOM kill since the wait began" in str(failure(ranks))


def test_a_pipe_that_is_closed_is_told_from_a_death(start):
    ranks = start()
    later(lambda: ranks.tell(1, "close"))
    error = failure(ranks)
    assert error.kind == "closed"
    assert "closed its pipe before it was ready, and its process lives" in str(error)


@pytest.mark.parametrize(
    ("verb", "value", "said"),
    [
        ("send", "ready", "without a status, of type str"),
        ("send", {"state": "ready"}, "without a status, of type dict"),
        ("write", b"\x00\x00\x00\x04abcd", "cannot be read (UnpicklingError"),
    ],
)
def test_a_garbled_message_is_told(start, verb, value, said):
    ranks = start()
    ranks.tell(1, verb, value)
    error = failure(ranks)
    assert error.kind == "garbled"
    assert said in str(error)
    assert "Rank 1 scheduler (sglang::scheduler_TP1" in str(error)


def test_a_message_that_is_not_finished_does_not_hide_a_death(start):
    ranks = start()
    ranks.tell(0, "write", b"\x00\x10\x00\x00some")
    later(lambda: ranks.kill(1))
    assert "Rank 1 scheduler died" in str(failure(ranks))


def test_a_message_that_is_never_finished_is_garbled(start, monkeypatch):
    monkeypatch.setattr("sglang_crashkit.srt.readiness._MESSAGE_SECS", 0.2)
    ranks = start()
    ranks.tell(0, "write", b"\x00\x10\x00\x00some")
    error = failure(ranks)
    assert error.kind == "garbled"
    assert "Rank 0 scheduler" in str(error)
    assert "did not finish it" in str(error)


def test_a_rank_that_reports_failure_is_told(start):
    ranks = start()
    ranks.tell(1, "send", {"status": "error", "reason": "no memory"})
    error = failure(ranks)
    assert error.kind == "failed"
    assert str(error).startswith("Initialization failed. Please see the error messages above. Rank 1 scheduler")
    assert "reported status 'error'" in str(error)


def test_silence_is_reported_while_waiting_and_then_less_often(start):
    ranks = start()
    ranks.ready(0)
    silent = ranks.processes[1].pid
    wait_until(lambda: procfs.read_title(silent) == "sglang::scheduler_TP1", "the silent rank has its title")
    heard: list[tuple[float, str]] = []

    def note(text: str) -> None:
        heard.append((time.monotonic(), text))
        if len(heard) == 3:
            ranks.ready(1)

    ranks.wait(on_silence=note, first_report_secs=0.4)
    assert len(heard) == 3
    text = heard[0][1]
    assert "1 of 2" in text
    assert f"Rank 1 scheduler (sglang::scheduler_TP1, pid {silent}): S (sleeping)" in text
    assert text.endswith("ready: Rank 0 scheduler")
    assert heard[2][0] - heard[1][0] > heard[1][0] - heard[0][0]


def test_a_server_without_a_limit_waits_on(start):
    ranks = start()
    later(lambda: ranks.ready(0, 1), 0.5)
    assert len(ranks.wait(timeout_secs=0.0)) == 2


def test_silence_beyond_the_limit_is_an_error(start):
    ranks = start()
    ranks.ready(0)
    assert ranks.readers[0].poll(LONG)
    began = time.monotonic()
    error = failure(ranks, timeout_secs=0.4)
    assert 0.4 <= time.monotonic() - began < LONG / 2
    assert error.kind == "timeout"
    assert str(error).startswith("Rank 1 scheduler not ready within 0.4 s (SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS).")
    assert str(error).endswith("Ready: Rank 0 scheduler.")


def test_the_time_that_was_waited_before_counts(start):
    ranks = start()
    began = time.monotonic()
    error = failure(ranks, timeout_secs=600.0, waited_secs=599.8)
    assert 0.2 <= time.monotonic() - began < LONG / 2
    assert str(error).startswith("Rank 0 scheduler, Rank 1 scheduler not ready within 600 s")


def test_without_descriptors_left_the_sentinels_do(start, monkeypatch):
    def no_descriptor(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    ranks = start()
    later(lambda: ranks.kill(1))
    assert "Rank 1 scheduler died during initialization (exit code: -9)." in str(failure(ranks))


def test_a_rank_without_a_title_yet_is_named_by_its_number(start):
    ranks = start(titled=False)
    later(lambda: ranks.kill(1))
    assert f"Rank 1 scheduler (pid {ranks.processes[1].pid}) was killed" in str(failure(ranks))


def test_a_title_cut_short_by_a_death_is_not_taken_for_one(start):
    ranks = start()
    members = ranks.members()
    wait_until(
        lambda: b"scheduler_TP1" in Path(f"/proc/{ranks.processes[1].pid}/cmdline").read_bytes(), "it has its title"
    )
    ranks.kill(1)
    os.waitid(os.P_PID, ranks.processes[1].pid, os.WEXITED | os.WNOWAIT)
    members[1].look_up_title()
    assert Path(f"/proc/{ranks.processes[1].pid}/comm").read_text().startswith("sglang::")
    assert members[1].label() == f"Rank 1 scheduler (pid {ranks.processes[1].pid})"


def test_a_process_without_a_pipe_is_watched_and_not_waited_for(start):
    ranks = start(2)
    controller, scheduler = ranks.members()
    watched = Member("", scheduler.process, None)
    ranks.ready(0)
    assert Readiness([controller, watched]).wait() == [READY | {"rank": 0}]
    ranks.kill(1)
    ranks.processes[1].join(LONG)
    with pytest.raises(StartupError, match=r"^sglang::scheduler_TP1 died|^a process of the server died"):
        Readiness([controller, watched]).wait()


def test_members_that_come_later_are_waited_for(start):
    ranks = start()
    members: list[Member] = []
    everybody = ranks.members()
    ranks.ready(0, 1)
    later(lambda: members.append(everybody[0]), 0.1)
    later(lambda: members.append(everybody[1]), 0.4)
    assert Readiness(members, all_known=lambda: len(members) == 2).wait() == [
        READY | {"rank": 0},
        READY | {"rank": 1},
    ]


def test_no_descriptor_is_left_open(start):
    ranks = start()
    before = set(descriptors())
    ranks.ready(0, 1)
    ranks.wait()
    assert set(descriptors()) <= before
    later(lambda: ranks.kill(1))
    failure(ranks)
    assert set(descriptors()) <= before
