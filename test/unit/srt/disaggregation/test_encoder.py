from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.srt.disaggregation import encoder
from sglang_crashkit.srt.disaggregation.encoder import on_encoder_launch, on_encoder_rank
from unit.srt.conftest import Listener

ARGUMENTS = SimpleNamespace(crash_dump_folder="/crash")


@on_encoder_rank
async def run_encoder(server_args: Any, schedule_path: str, dist_init_method: str, rank: int) -> None:
    raise ValueError(schedule_path)


@on_encoder_rank
async def run_dp_worker(server_args: Any, dp_rank: int, gpu_id: int) -> int:
    return gpu_id


def test_the_handler_is_there_before_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(encoder, "on_engine_launch", seen.append)

    @on_encoder_launch
    def launch_server(server_args: Any) -> list[Any]:
        return list(seen)

    @on_encoder_launch
    async def serve_grpc_encoder(server_args: Any) -> list[Any]:
        return list(seen)

    assert launch_server(ARGUMENTS) == [ARGUMENTS]
    assert asyncio.run(serve_grpc_encoder(ARGUMENTS)) == [ARGUMENTS] * 2


def test_a_rank_says_what_it_is_and_what_ends_it(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(encoder, "install_in_worker", lambda _server_args, title: joined.append(title))
    assert inspect.iscoroutinefunction(run_encoder)
    with pytest.raises(ValueError, match="path"):
        asyncio.run(run_encoder(ARGUMENTS, "path", "tcp://", 1))
    assert asyncio.run(run_dp_worker(ARGUMENTS, dp_rank=2, gpu_id=0)) == 0
    assert joined == ["sglang::encoder_TP1", "sglang::encoder_DP2"]
    heard = listener.heard()
    assert (heard["event"], heard["message"]) == ("exception", "ValueError: path")
