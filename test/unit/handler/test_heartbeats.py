from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.handler.heartbeats import Heartbeats
from sglang_crashkit.memory.heartbeat import BATCH_TIME, BATCHES, FLAGS, LOOP_TIME, OFF, WAITING, HeartbeatWriter


class World:
    """Two schedulers with heartbeats, and their clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.writers = {10: HeartbeatWriter(), 11: HeartbeatWriter()}
        self.processes = {pid: self.process(pid) for pid in self.writers}
        self.titled: Any = lambda _process: None
        tree: Any = SimpleNamespace(reread_title=lambda process: self.titled(process))
        self.heartbeats = Heartbeats(tree, clock=lambda: self.now)
        self.beat(10, 11)

    def process(self, pid: int, role: str = "scheduler") -> Any:
        return SimpleNamespace(pid=pid, role=role, title=f"sglang::{role}", exited_at=None)

    def beat(self, *pids: int) -> None:
        for pid in pids:
            self.writers[pid].words[LOOP_TIME] = self.now

    def batch(self, pid: int, number: int) -> None:
        self.writers[pid].words[BATCHES], self.writers[pid].words[BATCH_TIME] = number, self.now

    def follow(self, modes: Any = None) -> World:
        for pid, process in self.processes.items():
            self.heartbeats.follow(process, self.writers[pid].fd, modes)
        return self

    def silent(self, secs: float) -> list[tuple[int, float]]:
        return [(one.process.pid, one.silent_secs) for one in self.heartbeats.silent(secs)]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for heartbeat in world.heartbeats.followed.values():
        heartbeat.close()
    for writer in world.writers.values():
        writer.close()


def test_the_silent_are_named_by_their_last_signs(world: World) -> None:
    world.follow().now += 0.5
    world.beat(10)
    world.now += 2.0
    assert world.silent(2.0) == [(11, 2.5), (10, 2.0)]
    assert world.silent(2.1) == [(11, 2.5)]
    world.writers[11].words[FLAGS] = OFF
    world.now += 10
    assert world.silent(2.1) == [(10, 12.0)]


def test_a_scheduler_with_a_new_title_is_followed(world: World) -> None:
    for process in world.processes.values():
        process.role = "starting"
    world.follow()
    assert not world.heartbeats.followed
    world.titled = lambda process: setattr(process, "role", "scheduler")
    assert world.follow().heartbeats.followed.keys() == {10, 11}


def test_only_schedulers_with_a_heartbeat_are_followed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.heartbeats.follow(world.process(12, "helper"), world.writers[10].fd)
    world.heartbeats.follow(world.processes[10], None)
    assert caplog.records == []
    with Path("/dev/null").open() as no_heartbeat:
        world.heartbeats.follow(world.processes[10], no_heartbeat.fileno())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert (world.heartbeats.followed, world.heartbeats.unfollowed) == ({}, {10})


@pytest.mark.parametrize("role", ["server", "detokenizer", "tokenizer_worker"])
def test_another_process_that_the_server_needs_is_no_scheduler(world: World, role: str) -> None:
    process, writer = world.process(12, role), world.writers[10]
    assert world.heartbeats.said_by(process) is None
    writer.words[FLAGS] = WAITING
    for _again in range(2):
        world.heartbeats.follow(process, writer.fd)
    said = world.heartbeats.said_by(process)
    assert said is not None
    assert (said.is_waiting, said.loop_at) == (True, world.now)
    assert (world.heartbeats.followed, world.heartbeats.last_signs()) == ({}, {})
    world.heartbeats.forget_all_but([])
    assert world.heartbeats.said_by(process) is None


def test_what_a_heartbeat_said_last_outlives_its_process(world: World) -> None:
    def batches() -> dict[int, int]:
        return {pid: heartbeat.batches for pid, heartbeat in world.heartbeats.last_signs().items()}

    world.follow().batch(10, 7)
    assert batches() == {10: 7, 11: 0}
    world.batch(10, 8)
    for process in world.processes.values():
        process.exited_at = 1.0
    world.heartbeats.look(1.0)
    assert (world.heartbeats.followed, batches()) == ({}, {10: 8, 11: 0})


@pytest.mark.parametrize("modes", [None, 7, ["extend"], {"x": "a", "": "b", "-1": "c"}, {1: "extend"}])
def test_names_of_modes_that_are_none_are_passed_over(world: World, modes: Any) -> None:
    assert world.follow(modes).heartbeats.followed.keys() == {10, 11}
