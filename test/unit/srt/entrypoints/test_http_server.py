from __future__ import annotations

import asyncio
import inspect

from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.entrypoints.http_server import on_server_program


def test_a_launcher_that_is_a_coroutine_stays_one() -> None:
    @on_server_program
    async def serve_grpc(server_args: str) -> tuple[str, bool]:
        return server_args, crash_exit.state.is_program

    assert inspect.iscoroutinefunction(serve_grpc)
    assert asyncio.run(serve_grpc("args")) == ("args", True)
