"""SGLang catches an exception in a scheduler's event loop and serves on, as pull requests 40078 and 33340 have it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from sglang_crashkit.settings import MODE_VARIABLE
from sglang_crashkit.srt import supervisor
from sglang_crashkit.srt.managers.scheduler import watch_caught_exceptions
from unit.srt.conftest import CONTEXT, Listener
from unit.support.waiting import LONG

IO_STRUCT, LOOP, SCHEDULER = (f"sglang.srt.managers.{name}" for name in ("io_struct", "scheduler_ft", "scheduler"))


class FaultToleranceRankFaultOutput(msgspec.Struct, tag=True, kw_only=True):
    rank: int
    message: str


FaultToleranceRankFaultOutput.__module__ = IO_STRUCT
#: How 40078 reports a fault that it caught, in a module which imports the class by name.
FAULT_TOLERANT = """
def run_event_loop(dispatch, send):
    try:
        dispatch()
    except Exception as error:
        send(FaultToleranceRankFaultOutput(rank=1, message=str(error)))
"""


class Scheduler:
    """The event loop of 33340, which gives up the batch that raised."""

    def __init__(self) -> None:
        self.discarded: list[Any] = []

    def event_loop(self, batch: Any, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - as upstream does
            self._discard_failed_batch(batch, error)

    def _discard_failed_batch(self, batch: Any, error: Exception) -> None:
        self.discarded.append((batch, str(error)))


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """A release that has both, in a scheduler's process."""
    modules = {name: ModuleType(name) for name in (IO_STRUCT, LOOP, SCHEDULER)}
    for name in (IO_STRUCT, LOOP):
        setattr(modules[name], FaultToleranceRankFaultOutput.__name__, FaultToleranceRankFaultOutput)
    exec(FAULT_TOLERANT, vars(modules[LOOP]))
    setattr(modules[SCHEDULER], Scheduler.__name__, type("Scheduler", (Scheduler,), {}))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    watch_caught_exceptions()
    return modules


def fail() -> None:
    raise ValueError("no such page")


def test_a_fault_that_is_reported_is_told_with_its_record(listener: Listener, release: dict[str, ModuleType]) -> None:
    sent: list[Any] = []
    for _ in range(3):
        release[LOOP].run_event_loop(fail, sent.append)
    (told,) = listener.heard_so_far()
    assert (told["event"], told["caught"], told["message"]) == ("exception", True, "ValueError: no such page")
    assert json.loads(Path(told["record"]).read_text())["traceback"][-1].startswith("fail (")
    assert [type(one) for one in sent] == [FaultToleranceRankFaultOutput] * 3, "upstream sends what it would"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent[0]), type=FaultToleranceRankFaultOutput) == sent[0]
    release[LOOP].FaultToleranceRankFaultOutput(rank=0, message="made without an exception")
    assert not listener.heard_so_far()


def test_a_batch_that_is_given_up_is_told(listener: Listener, release: dict[str, ModuleType]) -> None:
    scheduler = release[SCHEDULER].Scheduler()
    scheduler.event_loop("batch", lambda: fail())
    assert scheduler.discarded == [("batch", "no such page")]
    assert [told["caught"] for told in listener.heard_so_far()] == [True]


def test_a_record_that_no_handler_takes_is_not_left(
    listener: Listener, short_folder: Path, release: dict[str, ModuleType]
) -> None:
    listener.kill()
    # Another exception than those above: one that comes again is not told.
    release[LOOP].run_event_loop(lambda: 1 / 0, lambda _sent: None)
    assert list((short_folder / "spool").iterdir()) == []


@pytest.mark.parametrize(("mode", "is_told"), [("elastic", True), ("server", False)])
def test_an_elastic_server_says_which_rank_it_ends(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, mode: str, is_told: bool
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, mode)
    process = CONTEXT.Process(target=sys.stdin.read, daemon=True)
    process.start()
    supervisor.register([process])
    supervisor.register([process])
    process.kill()
    process.join(LONG)
    assert [told["event"] for told in listener.heard_so_far()] == ["members"] * 2 + ["teardown"] * is_told
