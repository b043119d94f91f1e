"""The part that frames and words speak of, in releases and files that differ in their names."""

from __future__ import annotations

import pytest

from sglang_crashkit.judge.components import component_of, is_switched_on, way_out
from sglang_crashkit.model.sample import Frame


def _frames(*places: tuple[str, str]) -> list[Frame]:
    return [Frame(function=function, file=file, line=7) for function, file in places]


_LOOP = ("event_loop_overlap", "sglang/srt/managers/scheduler.py")


@pytest.mark.parametrize(
    ("function", "file", "part"),
    [
        ("writing_check", "sglang/srt/mem_cache/hiradix_cache.py", "hicache"),
        ("transfer_worker", "sglang/srt/disaggregation/mooncake/conn.py", "mooncake"),
        ("transfer_worker", "sglang/srt/disaggregation/nixl/conn.py", "nixl"),
        ("pop_transferred", "sglang/srt/disaggregation/decode.py", "pd_transfer"),
        ("accept_token", "sglang/srt/constrained/xgrammar_backend.py", "grammar"),
        ("load_lora_adapter", "sglang/srt/lora/lora_manager.py", "lora"),
        ("forward", "sglang/srt/layers/attention/mamba/mamba.py", "mamba"),
        ("verify", "sglang/srt/speculative/eagle_worker.py", "speculative"),
        ("dispatch_a", "sglang/srt/layers/moe/token_dispatcher/deepep.py", "expert_parallel"),
        ("all_reduce", "sglang/srt/distributed/device_communicators/custom_all_reduce.py", "custom_all_reduce"),
        ("launch_router", "sglang_router/launch_router.py", "router"),
        ("serve_grpc", "sglang/srt/entrypoints/grpc_server.py", "grpc"),
    ],
)
def test_the_frame_nearest_the_error_tells(function: str, file: str, part: str) -> None:
    assert component_of(_frames((function, file), _LOOP)) == part


def test_torch_in_between_tells_nothing() -> None:
    frames = _frames(("_call_impl", "torch/nn/modules/module.py"), ("verify", "sglang/srt/speculative/x.py"), _LOOP)
    assert component_of(frames) == "speculative"


def test_words_tell_where_no_frame_does() -> None:
    assert component_of(words="the gRPC servicer does not match") == "grpc"
    assert component_of(words="nothing of any part") is None


def test_a_step_takes_out_only_what_is_in_the_path() -> None:
    assert not way_out("hicache", {}, is_seen=False)
    assert "--enable-hierarchical-cache" in way_out("hicache", {"enable_hierarchical_cache": True}, is_seen=False)
    assert is_switched_on("pipeline_parallel", {"pp_size": 4})
    assert not is_switched_on("pipeline_parallel", {"pp_size": 1})
