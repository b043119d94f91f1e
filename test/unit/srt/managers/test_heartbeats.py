from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt import crash_exit, hooks
from sglang_crashkit.srt.managers import loop_heartbeat, scheduler_heartbeat
from sglang_crashkit.srt.managers.loop_heartbeat import (
    start_detokenizer_heartbeat,
    start_loop_heartbeat,
    start_router_heartbeat,
)
from sglang_crashkit.srt.managers.scheduler import on_scheduler_exception
from sglang_crashkit.srt.managers.scheduler_heartbeat import on_batch, on_iteration
from sglang_crashkit.srt.managers.tokenizer_manager import on_request_states
from unit.srt.conftest import Listener
from unit.srt.managers.stepping import DECODE, EXTEND
from unit.support.waiting import LONG, descriptors


class Scheduler:
    def __init__(self) -> None:
        self._engine_paused = False
        self.forward_ct = 0

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        on_iteration(self, recv_reqs)

    def run_batch(self, batch: Any) -> None:
        self.forward_ct += 1
        on_batch(self, batch)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    callbacks = list(gc.callbacks)
    importlib.reload(hooks)
    importlib.reload(scheduler_heartbeat)
    yield
    gc.callbacks[:] = callbacks
    importlib.reload(scheduler_heartbeat)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[HeartbeatWriter]:
    """The heartbeats that were made."""
    made: list[HeartbeatWriter] = []

    def make() -> HeartbeatWriter:
        made.append(HeartbeatWriter())
        return made[-1]

    monkeypatch.setattr(loop_heartbeat, "HeartbeatWriter", make)
    monkeypatch.setattr(loop_heartbeat, "BEAT_SECS", 0.001)
    return made


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def reader(listener: Listener, scheduler: Scheduler, written: list[HeartbeatWriter]) -> Iterator[HeartbeatReader]:
    """What reads the heartbeat of the scheduler, which has begun to beat."""
    scheduler.process_input_requests([])
    message = listener.heard()
    assert (message["event"], message["pid"], message["has_descriptor"]) == ("heartbeat", os.getpid(), True)
    reader = HeartbeatReader(written[-1].fd)
    yield reader
    reader.close()


def request_of(name: str) -> Any:
    return type(name, (), {})()


@pytest.mark.parametrize(
    ("names", "is_busy"),
    [
        ([], False),
        (["TokenizedGenerateReqInput", "AbortReq", "BatchTokenizedEmbeddingReqInput"], False),
        (["GetInternalStateReq", "OpenSessionReqInput"], False),
        (["UpdateWeightFromDiskReqInput"], True),
        (["TokenizedGenerateReqInput", "FlushCacheReqInput", "TokenizedGenerateReqInput"], True),
        (["ProfileReq"], True),
        (["SomethingNewReqInput"], True),
        (["ShutdownReq"], False),
    ],
)
def test_what_a_round_is_about_is_told(
    reader: HeartbeatReader, scheduler: Scheduler, names: list[str], is_busy: bool
) -> None:
    scheduler._engine_paused = True
    scheduler.process_input_requests([request_of(name) for name in names])
    found = reader.read()
    # It leaves its loop, and beats no more.
    is_off = names == ["ShutdownReq"]
    assert (found.is_busy, found.is_off, found.paused) == (is_busy, is_off, True)
    scheduler._engine_paused = False
    scheduler.process_input_requests([])
    found = reader.read()
    assert (found.is_busy, found.is_off, found.paused) == (False, False, False)


def test_a_long_collection_is_told_and_no_other(reader: HeartbeatReader, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reader.read()
    now = 5000.0
    monkeypatch.setattr(scheduler_heartbeat, "monotonic", lambda: now)

    class Garbage:
        def __init__(self, secs: float) -> None:
            self.itself, self.secs = self, secs

        def __del__(self) -> None:
            nonlocal now
            assert reader.read().collecting_since == now
            # What collects is no sign of life.
            assert reader.read() == before
            now += self.secs

    for secs, count in ((0.9, 0), (1.5, 1), (0.5, 1), (12.0, 2)):
        Garbage(secs)
        gc.collect()
        assert (reader.read().collecting_since, reader.read().long_collections) == (0.0, count)
    found = reader.read()
    assert (found.collection_secs, found.collection_ended) == (12.0, now)


def test_a_forked_child_collects_without_the_memory(reader: HeartbeatReader) -> None:
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    seen: list[float] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            seen.append(reader.read().collecting_since)

    Garbage()
    gc.collect()
    # The parent goes on to tell.
    assert seen
    assert seen[0] > 0


def test_attributes_that_are_gone_are_told_once_and_the_rest_is_as_before(
    reader: HeartbeatReader, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    del scheduler._engine_paused
    del scheduler.forward_ct
    for number in (1, 2, 3):
        scheduler.process_input_requests([])
        on_batch(scheduler, SimpleNamespace(reqs=["a"], forward_mode=1, extend_num_tokens=0))
        found = reader.read()
        assert (found.batches, found.in_batch, found.paused, found.is_off) == (number, True, False, False)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"crash kit: the scheduler of this SGLang has no {name}, and the kit does without it"
        for name in ("_engine_paused", "forward_ct")
    ]


def test_the_forward_mode_and_an_extends_tokens_are_told(
    listener: Listener, scheduler: Scheduler, written: list[HeartbeatWriter]
) -> None:
    scheduler.process_input_requests([])
    reader = HeartbeatReader(written[-1].fd, {1: "extend", 2: "decode"})
    batch = SimpleNamespace(reqs=["a"], forward_mode=EXTEND, extend_num_tokens=40_000)
    scheduler.run_batch(batch)
    found = reader.read()
    assert (found.mode, found.tokens, found.doing) == (
        "extend",
        40_000,
        "batch 1, of 1 request (extend of 40,000 tokens)",
    )
    assert found.at == found.batch_at > found.loop_at
    # The batch goes on as another kind, and keeps the number.
    batch.forward_mode = DECODE
    scheduler.run_batch(batch)
    found = reader.read()
    reader.close()
    assert (found.mode, found.tokens, found.doing) == ("decode", 0, "batch 2, of 1 request (decode)")


@pytest.mark.parametrize(("name", "value"), [("SGLANG_CRASHKIT_HANG_SECS", "0"), ("SGLANG_CRASHKIT_ENABLED", "0")])
@pytest.mark.usefixtures("listener")
def test_it_can_be_switched_off(
    scheduler: Scheduler, written: list[HeartbeatWriter], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    scheduler.process_input_requests([])
    scheduler.run_batch(SimpleNamespace(reqs=[]))
    assert written == []


def test_a_missing_handler_leaves_a_warning_and_no_descriptor(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "sock"))
    before = descriptors()
    for _round in range(3):
        scheduler.process_input_requests([])
        scheduler.run_batch(SimpleNamespace(reqs=[]))
    assert descriptors() == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("broken", ["round", "batch"])
def test_an_unknown_schedulers_silence_is_no_hang(
    reader: HeartbeatReader, scheduler: Scheduler, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    if broken == "round":
        scheduler.process_input_requests(object())  # type: ignore[arg-type]
    else:
        scheduler.run_batch(object())
    scheduler.process_input_requests([])
    scheduler.run_batch(object())
    assert reader.read().is_off
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("cuda", "gpu"),
    [
        (None, None),
        (SimpleNamespace(is_initialized=lambda: False), None),
        (SimpleNamespace(is_initialized=lambda: True), None),
        (
            SimpleNamespace(
                is_initialized=lambda: True,
                current_device=lambda: 3,
                get_device_properties=lambda device: SimpleNamespace(uuid=f"uuid-{device}"),
            ),
            "uuid-3",
        ),
    ],
)
def test_the_handler_is_told_which_gpu_the_scheduler_has(
    listener: Listener, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, cuda: Any, gpu: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    scheduler.process_input_requests([])
    try:
        raise ValueError
    except ValueError:
        on_scheduler_exception()
    heard = [listener.heard(), listener.heard()]
    assert [(one["event"], one.get("gpu")) for one in heard] == [("heartbeat", gpu), ("exception", gpu)]


# -- the loops of the processes beside the schedulers


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
    module = ModuleType("detokenizer_manager")
    module.DetokenizerManager = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.detokenizer_manager", module)
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
