from __future__ import annotations

import asyncio
import inspect

import pytest

from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.entrypoints.http_server import on_server_program


def test_a_launcher_makes_its_process_a_server_program() -> None:
    @on_server_program
    def launch_server(server_args: str, *, callback: str) -> tuple[str, str, bool]:
        return server_args, callback, crash_exit.state.is_program

    assert not crash_exit.state.is_program
    assert launch_server("args", callback="callback") == ("args", "callback", True)


def test_a_launcher_that_is_a_coroutine_stays_one() -> None:
    @on_server_program
    async def serve_grpc(server_args: str) -> tuple[str, bool]:
        return server_args, crash_exit.state.is_program

    assert inspect.iscoroutinefunction(serve_grpc)
    assert asyncio.run(serve_grpc("args")) == ("args", True)


def test_a_kit_that_breaks_does_not_stop_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_exit, "state", object())
    assert on_server_program(lambda: "served")() == "served"
