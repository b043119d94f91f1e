from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_crashkit.test.server_fixtures import disaggregation_fixture as hooks


class Watcher:
    is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[[], Any], Watcher]]:
    """What is watched, and by whom."""
    begun: list[tuple[Callable[[], Any], Watcher]] = []

    def watch(members: Callable[[], Any]) -> Watcher:
        begun.append((members, Watcher()))
        return begun[-1][1]

    monkeypatch.setattr(hooks, "watch", watch)
    return begun


def test_a_pair_is_watched_until_it_is_torn_down(watched: list[tuple[Callable[[], Any], Watcher]]) -> None:
    class Fixture:
        process_prefill = None

    hooks.on_pd_setup(Fixture)
    ((members, watcher),) = watched
    assert members() == [("prefill", None), ("decode", None), ("lb", None)]
    Fixture.process_prefill = restarted = object()  # type: ignore[assignment]
    assert members()[0] == ("prefill", restarted)
    hooks.on_pd_teardown(Fixture)
    assert watcher.is_stopped


def test_nothing_is_watched_where_the_kit_is_off(
    watched: list[tuple[Callable[[], Any], Watcher]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    hooks.on_pd_setup(type("Fixture", (), {}))
    assert watched == []


def test_a_watch_that_cannot_begin_fails_no_test(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_members: object) -> None:
        raise OSError("no descriptors left")

    monkeypatch.setattr(hooks, "watch", broken)
    hooks.on_pd_setup(type("Fixture", (), {}))
    assert "are not watched" in caplog.text
