"""A user's program with an engine: its own end is its own matter, whatever its status is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unit.handler.driver import Server


@pytest.mark.parametrize("status", [0, 1, 7])
def test_a_program_that_ends_and_takes_its_ranks_with_it_leaves_no_incident(
    start_server: Callable[..., Server], status: int
) -> None:
    server = start_server(mode="library")
    server.settle()
    server.say(f"leave {status}")
    assert server.wait_for_the_end() is None


def test_a_program_that_is_killed_leaves_one(start_server: Callable[..., Server]) -> None:
    server = start_server(mode="library")
    server.settle()
    server.process.kill()
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    assert stored.document["verdict"]["first_failure"]["pid"] == server.process.pid
