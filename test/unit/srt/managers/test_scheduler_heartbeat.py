from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.memory.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt import hooks
from sglang_crashkit.srt.managers import scheduler_heartbeat
from sglang_crashkit.srt.managers.loop_heartbeat import open_heartbeat
from sglang_crashkit.srt.managers.scheduler import on_scheduler_exception
from sglang_crashkit.srt.managers.scheduler_heartbeat import on_batch, on_iteration
from unit.srt.conftest import Listener
from unit.support.waiting import descriptors


class Scheduler:
    def __init__(self) -> None:
        self._engine_paused = False
        self.forward_ct = 0

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        on_iteration(self, recv_reqs)

    def run_batch(self, batch: Any) -> None:
        self.forward_ct += 1
        on_batch(self, batch)


#: The heartbeats that were opened in the test.
OPENED: list[HeartbeatWriter] = []


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def open_and_keep(*args: Any) -> HeartbeatWriter | None:
        writer = open_heartbeat(*args)
        OPENED.extend([writer] if writer is not None else [])
        return writer

    callbacks = list(gc.callbacks)
    importlib.reload(hooks)
    importlib.reload(scheduler_heartbeat)
    monkeypatch.setattr(scheduler_heartbeat, "open_heartbeat", open_and_keep)
    yield
    gc.callbacks[:] = callbacks
    importlib.reload(scheduler_heartbeat)
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def heard_beat(listener: Listener) -> HeartbeatReader:
    message = listener.heard()
    assert (message["event"], message["pid"], message["has_descriptor"]) == ("heartbeat", os.getpid(), True)
    return HeartbeatReader(OPENED[-1].fd)


def beating(listener: Listener, scheduler: Scheduler) -> HeartbeatReader:
    scheduler.process_input_requests([])
    return heard_beat(listener)


def read(reader: HeartbeatReader) -> Heartbeat:
    found = reader.read()
    reader.close()
    return found


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
    listener: Listener, scheduler: Scheduler, names: list[str], is_busy: bool
) -> None:
    reader = beating(listener, scheduler)
    scheduler._engine_paused = True
    scheduler.process_input_requests([request_of(name) for name in names])
    found = reader.read()
    # It leaves its loop, and beats no more.
    is_off = names == ["ShutdownReq"]
    assert (found.is_busy, found.is_off, found.paused) == (is_busy, is_off, True)
    scheduler._engine_paused = False
    scheduler.process_input_requests([])
    found = read(reader)
    assert (found.is_busy, found.is_off, found.paused) == (False, False, False)


def test_a_long_collection_is_told_and_no_other(
    listener: Listener, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = beating(listener, scheduler)
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
    found = read(reader)
    assert (found.collection_secs, found.collection_ended) == (12.0, now)


def test_a_forked_child_collects_without_the_memory(listener: Listener, scheduler: Scheduler) -> None:
    reader = beating(listener, scheduler)
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
    reader.close()


def test_attributes_that_are_gone_are_told_once_and_the_rest_is_as_before(
    listener: Listener, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    del scheduler._engine_paused
    reader = beating(listener, scheduler)
    del scheduler.forward_ct
    for number in (1, 2, 3):
        scheduler.process_input_requests([])
        on_batch(scheduler, SimpleNamespace(reqs=["a"], forward_mode=1, extend_num_tokens=0))
        found = reader.read()
        assert (found.batches, found.in_batch, found.paused, found.is_off) == (number, True, False, False)
    reader.close()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"crash kit: the scheduler of this SGLang has no {name}, and the kit does without it"
        for name in ("_engine_paused", "forward_ct")
    ]


class Mode(IntEnum):
    """Stands for ``ForwardMode``."""

    EXTEND = 1
    DECODE = 2


def test_the_forward_mode_and_an_extends_tokens_are_told(listener: Listener, scheduler: Scheduler) -> None:
    beating(listener, scheduler).close()
    reader = HeartbeatReader(OPENED[-1].fd, {1: "extend", 2: "decode"})
    batch = SimpleNamespace(reqs=["a"], forward_mode=Mode.EXTEND, extend_num_tokens=40_000)
    scheduler.run_batch(batch)
    found = reader.read()
    assert (found.mode, found.tokens, found.doing) == (
        "extend",
        40_000,
        "batch 1, of 1 request (extend of 40,000 tokens)",
    )
    # The batch goes on as another kind, and keeps the number.
    batch.forward_mode = Mode.DECODE
    scheduler.run_batch(batch)
    found = read(reader)
    assert (found.mode, found.tokens, found.doing) == ("decode", 0, "batch 2, of 1 request (decode)")


@pytest.mark.parametrize(("name", "value"), [("SGLANG_CRASHKIT_HANG_SECS", "0"), ("SGLANG_CRASHKIT_ENABLED", "0")])
def test_it_can_be_switched_off(
    listener: Listener, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    scheduler.process_input_requests([])
    scheduler.run_batch(SimpleNamespace(reqs=[]))
    assert OPENED == []


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
    listener: Listener, scheduler: Scheduler, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    reader = beating(listener, scheduler)
    if broken == "round":
        scheduler.process_input_requests(object())  # type: ignore[arg-type]
    else:
        scheduler.run_batch(object())
    scheduler.process_input_requests([])
    scheduler.run_batch(object())
    assert read(reader).is_off
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
