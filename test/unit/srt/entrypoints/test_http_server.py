from __future__ import annotations

import asyncio
import inspect

import pytest

from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.entrypoints.http_server import on_server_program


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> crash_exit._Crash:
    fresh = crash_exit._Crash()
    monkeypatch.setattr(crash_exit, "_crash", fresh)
    return fresh


def test_a_launcher_makes_its_process_a_server_program(
    crash: crash_exit._Crash,
) -> None:
    @on_server_program
    def launch_server(server_args: str, *, callback: str) -> tuple[str, str, bool]:
        return server_args, callback, crash.is_program

    assert not crash.is_program
    assert launch_server("args", callback="callback") == ("args", "callback", True)


def test_a_launcher_that_is_a_coroutine_stays_one(crash: crash_exit._Crash) -> None:
    @on_server_program
    async def serve_grpc(server_args: str) -> tuple[str, bool]:
        return server_args, crash.is_program

    assert inspect.iscoroutinefunction(serve_grpc)
    assert asyncio.run(serve_grpc("args")) == ("args", True)


def test_what_the_launcher_raises_is_raised(crash: crash_exit._Crash) -> None:
    @on_server_program
    def launch_server() -> None:
        raise RuntimeError("no port")

    with pytest.raises(RuntimeError, match="no port"):
        launch_server()
    assert crash.is_program


def test_a_kit_that_breaks_does_not_stop_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_exit, "note_server_program", lambda: 1 / 0)
    assert on_server_program(lambda: "served")() == "served"
