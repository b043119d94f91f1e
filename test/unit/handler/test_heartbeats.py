from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.heartbeats import Heartbeats
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.memory.heartbeat import FLAGS, LOOP_TIME, WAITING, HeartbeatWriter
from unit.support.tracked import tracked


class World:
    """Two schedulers with heartbeats, and their clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.writers = {10: HeartbeatWriter(), 11: HeartbeatWriter()}
        self.processes = {pid: tracked(pid, "sglang::scheduler") for pid in self.writers}
        self.tree = ProcessTree(os.getpid())
        self.heartbeats = Heartbeats(self.tree, now=lambda: self.now)
        for writer in self.writers.values():
            writer.words[LOOP_TIME] = self.now

    def follow(self, modes: Any = None) -> World:
        for pid, process in self.processes.items():
            self.heartbeats.follow(process, self.writers[pid].fd, modes)
        return self


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for each in (*world.heartbeats.followed.values(), *world.writers.values(), world.tree):
        each.close()


def test_only_schedulers_with_a_heartbeat_are_followed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.heartbeats.follow(tracked(12, "nvcc"), world.writers[10].fd)
    world.heartbeats.follow(world.processes[10], None)
    assert caplog.records == []
    with Path("/dev/null").open() as no_heartbeat:
        world.heartbeats.follow(world.processes[10], no_heartbeat.fileno())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert (world.heartbeats.followed, world.heartbeats.unfollowed) == ({}, {10})


@pytest.mark.parametrize("role", ["server", "detokenizer", "tokenizer_worker"])
def test_another_process_that_the_server_needs_is_no_scheduler(world: World, role: str) -> None:
    process, writer = tracked(12, f"sglang::{role}", is_root=role == "server"), world.writers[10]
    assert world.heartbeats.said_by(process) is None
    writer.words[FLAGS] = WAITING
    for _again in range(2):
        world.heartbeats.follow(process, writer.fd)
    said = world.heartbeats.said_by(process)
    assert (said.is_waiting, said.loop_at) == (True, world.now)
    assert (world.heartbeats.followed, world.heartbeats.last_signs()) == ({}, {})
    world.heartbeats.forget_all_but([])
    assert world.heartbeats.said_by(process) is None


@pytest.mark.parametrize("modes", [None, 7, ["extend"], {"x": "a", "": "b", "-1": "c"}, {1: "extend"}])
def test_names_of_modes_that_are_none_are_passed_over(world: World, modes: Any) -> None:
    assert world.follow(modes).heartbeats.followed.keys() == {10, 11}
