from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.entrypoints import grpc_server
from sglang_crashkit.srt.entrypoints.grpc_server import on_grpc_program
from sglang_crashkit.srt.stack_hooks import on_configure_logger
from unit.srt.conftest import CONTEXT, Listener
from unit.support.waiting import LONG

ARGUMENTS = SimpleNamespace(crash_dump_folder="/crash")


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of each launch, which starts no handler and no watcher here; signals and classes are given back."""
    seen: list[Any] = []
    for name in ("terminate", "kill"):
        monkeypatch.setattr(BaseProcess, name, getattr(BaseProcess, name))
    monkeypatch.setattr(grpc_server, "on_engine_launch", lambda args: seen.append(args) or crash_exit.note_launch(args))
    monkeypatch.setattr(supervisor, "listen", lambda: SimpleNamespace())
    signals = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)}
    yield seen
    for number, handler in signals.items():
        signal.signal(number, handler)


@on_configure_logger
def configure_logger(server_args: Any, prefix: str = "") -> None:
    """What each of SGLang's launchers calls."""


def test_the_launcher_stays_a_coroutine_and_launches_where_the_logger_is_configured(launches: list[Any]) -> None:
    @on_grpc_program
    async def serve_grpc(server_args: Any) -> tuple[bool, list[Any]]:
        before = list(launches)
        configure_logger(server_args)
        configure_logger(server_args)
        return crash_exit.state.is_program, before

    assert inspect.iscoroutinefunction(serve_grpc)
    assert asyncio.run(serve_grpc(ARGUMENTS)) == (True, [])
    assert launches == [ARGUMENTS]


def test_what_the_launcher_ends_on_sigterm_is_announced(listener: Listener) -> None:
    @on_grpc_program
    async def serve_grpc(server_args: Any) -> int:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        configure_logger(server_args)
        rank = CONTEXT.Process(target=time.sleep, args=(LONG,), daemon=True)
        rank.start()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), LONG)
        rank.terminate()
        # It was forked with the handler of the loop, and goes on.
        os.kill(rank.pid or 0, signal.SIGKILL)
        rank.join(LONG)
        return rank.pid or 0

    pid = asyncio.run(serve_grpc(ARGUMENTS))
    heard = listener.heard(), listener.heard()
    assert [message["event"] for message in heard] == ["draining", "teardown"]
    assert (heard[1]["pid"], heard[1]["whole"]) == (pid, True)


def test_a_failing_rank_ends_it_by_the_launchers_own_handler_and_before_there_is_one(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(grpc_server, "end_after_crash", lambda: ends.append("kit"))

    @on_grpc_program
    async def serve_grpc(server_args: Any) -> None:
        configure_logger(server_args)
        os.kill(os.getpid(), signal.SIGQUIT)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, ends.append, "launcher")
        crash_exit.note_started()
        os.kill(os.getpid(), signal.SIGQUIT)
        while len(ends) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(serve_grpc(ARGUMENTS))
    assert ends == ["kit", "launcher"]
    assert [listener.heard()["event"] for _ in ends] == ["launch_failed", "child_failed"]
    assert crash_exit.has_begun()


def test_the_requests_of_its_manager_are_journaled(
    launches: list[Any], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GrpcRequestManager:
        def __init__(self, server_args: Any) -> None:
            self.launched_before = list(launches)
            self.server_args = server_args
            self.rid_to_state: dict[str, Any] = {}
            self.event_loop = None

        def auto_create_handle_loop(self) -> None:
            self.event_loop = asyncio.get_running_loop()

    for name in ("smg_grpc_servicer", "smg_grpc_servicer.sglang", "smg_grpc_servicer.sglang.request_manager"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].GrpcRequestManager = GrpcRequestManager

    @on_grpc_program
    async def serve_grpc(server_args: Any) -> Any:
        return GrpcRequestManager(server_args=server_args)

    manager = asyncio.run(serve_grpc(ARGUMENTS))
    assert manager.launched_before == [ARGUMENTS]
    heard = listener.heard()
    assert (heard["event"], heard["has_descriptor"]) == ("journal", True)
