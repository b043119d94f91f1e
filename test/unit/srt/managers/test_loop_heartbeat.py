from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.managers import loop_heartbeat
from sglang_crashkit.srt.managers.loop_heartbeat import (
    start_detokenizer_heartbeat,
    start_loop_heartbeat,
    start_router_heartbeat,
)
from sglang_crashkit.srt.managers.tokenizer_manager import on_request_states
from unit.srt.conftest import Listener
from unit.support.waiting import LONG

MODULE = "sglang.srt.managers.detokenizer_manager"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[HeartbeatWriter]:
    """The heartbeats that were made."""
    made: list[HeartbeatWriter] = []

    def make() -> HeartbeatWriter:
        made.append(HeartbeatWriter())
        return made[-1]

    monkeypatch.setattr(loop_heartbeat, "HeartbeatWriter", make)
    monkeypatch.setattr(loop_heartbeat, "BEAT_SECS", 0.001)
    return made


def said(written: list[HeartbeatWriter]) -> Heartbeat:
    (writer,) = written
    reader = HeartbeatReader(writer.fd)
    found = reader.read()
    reader.close()
    return found


class Tokenizer:
    """What is used of a ``TokenizerManager``."""

    def __init__(self) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.created = 0
        self.rid_to_state: dict[str, Any] = {}

    def auto_create_handle_loop(self) -> None:
        self.created += 1
        self.event_loop = asyncio.get_running_loop()


def count_tasks() -> int:
    gc.collect()
    return sum(isinstance(one, asyncio.Task) for one in gc.get_objects())


def test_a_loop_beats_from_its_first_request_until_it_ends(listener: Listener, written: list[HeartbeatWriter]) -> None:
    manager = Tokenizer()
    start_loop_heartbeat(manager)
    assert written == []
    tasks = count_tasks()

    async def serve() -> None:
        for _request in range(3):
            manager.auto_create_handle_loop()
        beats = set()
        deadline = time.monotonic() + LONG
        while len(beats) < 4 and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
            beats.add(said(written).loop_at if written else 0.0)
        assert len(beats) == 4
        assert not said(written).is_off

    asyncio.run(serve())
    assert said(written).is_off
    assert manager.created == 3
    # Its memory is given back, and nothing of it is on the way of a request.
    assert count_tasks() == tasks
    assert "auto_create_handle_loop" not in vars(manager)
    message = listener.heard()
    assert (message["event"], message["pid"], message["has_descriptor"]) == ("heartbeat", os.getpid(), True)


def test_a_routers_loop_beats_which_a_thread_runs(listener: Listener, written: list[HeartbeatWriter]) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    start_router_heartbeat(SimpleNamespace(_loop=loop))
    assert listener.heard()["event"] == "heartbeat"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG)
    assert said(written).loop_at > 0
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert said(written).is_off
    start_router_heartbeat(object())


@pytest.mark.parametrize(("is_program", "beats"), [(True, 1), (False, 0)])
def test_a_library_is_no_program_that_serves(
    listener: Listener, written: list[HeartbeatWriter], monkeypatch: pytest.MonkeyPatch, is_program: bool, beats: int
) -> None:
    monkeypatch.setattr(crash_exit.state, "is_program", is_program)
    manager = Tokenizer()
    on_request_states(manager)

    async def serve() -> None:
        manager.auto_create_handle_loop()
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert (len(written), manager.created) == (beats, 1)
    assert listener is not None


def test_without_a_handler_a_loop_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, written: list[HeartbeatWriter], caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        manager = Tokenizer()
        start_loop_heartbeat(manager)

        async def call() -> None:
            manager.auto_create_handle_loop()
            await asyncio.sleep(0.01)

        asyncio.run(call())
        assert manager.created == 1

    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    serve()
    assert (written, caplog.messages) == ([], [])
    monkeypatch.setenv(SOCKET_VARIABLE, "/nowhere/socket")
    serve()
    (warning,) = caplog.messages
    assert warning.startswith("crash kit: hangs of this tokenizer manager are not noticed: ")


# -- the detokenizer


class Detokenizer:
    """What is used of a ``DetokenizerManager``: it works at the messages given to it, and ends."""

    def __init__(self, messages: list[Callable[[], Any]]) -> None:
        self.messages = messages
        self.answers: list[Any] = []
        self._request_dispatcher: Callable[[Any], Any] = lambda message: message()

    def event_loop(self) -> None:
        for message in self.messages:
            self.answers.append(self._request_dispatcher(message))

    multi_http_worker_event_loop = event_loop


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Detokenizer]:
    """The class as it is where the detokenizer's process has begun to beat."""
    made = type("DetokenizerManager", (Detokenizer,), {})
    module = ModuleType(MODULE)
    module.DetokenizerManager = made  # type: ignore[attr-defined]
    monkeypatch.setitem(loop_heartbeat.sys.modules, MODULE, module)
    start_detokenizer_heartbeat()
    return made


@pytest.mark.parametrize("loop", ["event_loop", "multi_http_worker_event_loop"])
def test_the_detokenizer_tells_when_it_works_and_when_it_waits(
    listener: Listener, written: list[HeartbeatWriter], kind: type[Detokenizer], loop: str
) -> None:
    seen: list[Heartbeat] = []
    manager = kind([lambda: seen.append(said(written)), lambda: seen.append(said(written)) or "text"])
    getattr(manager, loop)()
    seen.append(said(written))
    assert manager.answers == [None, "text"]
    assert [one.is_waiting for one in seen] == [False, False, True]
    assert seen[0].loop_at < seen[1].loop_at < seen[2].loop_at
    assert listener.heard()["event"] == "heartbeat"
