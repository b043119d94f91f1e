from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_crashkit.judge.activity import activity_of, front_work, of_frames
from sglang_crashkit.model.sample import Thread
from unit.judge.stack_events import LOOP, RECV_REQUESTS, RESULT, SRT, frames, stack

ROWS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "activities.yaml").read_text())
BATCH = (f"run_batch ({SRT}/managers/scheduler.py:2100)", *LOOP)


def kind_of(*texts: str, native: tuple[str, ...] = ()) -> tuple[str, str]:
    activity = of_frames(frames(*texts), frames(*native))
    return activity.kind, activity.operation


@pytest.mark.parametrize(("texts", "kind", "operation"), ROWS["python"])
def test_what_frames_of_python_say(texts: list[str], kind: str, operation: str) -> None:
    assert kind_of(*texts, *BATCH) == (kind, operation)


@pytest.mark.parametrize(("native", "python", "expected"), ROWS["native"])
def test_native_frames_come_before_python_s(native: str, python: str, expected: str) -> None:
    assert kind_of(python, *BATCH, native=(native, python, *BATCH))[0] == expected
    # As gdb has it: C functions of the interpreter follow, and no frame of Python's.
    activity = of_frames(frames(python, *BATCH), frames(native, "_PyEval_EvalFrameDefault (python3.12)", "main (x)"))
    assert activity.kind == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (RECV_REQUESTS, "idle"),
        (("poll (zmq/sugar/poll.py:106)", f"maybe_sleep ({SRT}/managers/scheduler.py:300)", *LOOP), "idle"),
        ((f"event_loop_normal ({SRT}/managers/scheduler.py:1500)", *LOOP[1:]), "idle"),
        (("recv (zmq/sugar/socket.py:7)", f"event_loop ({SRT}/managers/detokenizer_manager.py:140)"), "idle"),
        (
            ("select (selectors.py:468)", "_run_once (asyncio/base_events.py:1898)", "run (uvicorn/server.py:67)"),
            "idle",
        ),
        ((f"LRUList.get_prev_no_lock ({SRT}/mem_cache/mamba_radix_cache.py:291)", *BATCH), "own"),
        (("encode (transformers/tokenization_utils_base.py:2714)", f"x ({SRT}/entrypoints/openai/a.py:1)"), "own"),
    ],
)
def test_idle_and_own_work(texts: tuple[str, ...], expected: str) -> None:
    assert kind_of(*texts)[0] == expected


def test_a_layer_that_runs_without_the_gil_waits_for_the_gpu() -> None:
    leaf = (f"_apply ({SRT}/layers/penaltylib/min_new_tokens.py:78)", *BATCH)
    assert activity_of(stack("TP0", *leaf, active=True, gil=False).sample).kind == "gpu_sync"
    assert activity_of(stack("TP0", *leaf, active=True, gil=True).sample).kind == "own"
    assert activity_of(stack("TP0", *leaf).sample).kind == "gpu_sync"
    scheduling = (f"match_prefix ({SRT}/mem_cache/radix_cache.py:78)", *BATCH)
    assert activity_of(stack("TP0", *scheduling, active=True).sample).kind == "own"


def test_the_thread_that_runs_the_batch_counts_where_the_main_thread_waits_for_it() -> None:
    main = (
        "wait (threading.py:355)",
        f"resolve_last_batch_result ({SRT}/managers/tp_worker_overlap_thread.py:170)",
        *LOOP,
    )
    sample = stack("TP0", *main).sample
    batch = frames(
        *RESULT[:1], f"forward_thread_func_ ({SRT}/managers/tp_worker_overlap_thread.py:120)", "run (threading.py:1)"
    )
    sample = replace(
        sample, threads=(*sample.threads, Thread("Thread-2 (forward_thread_func)", 77, False, False, batch))
    )
    assert activity_of(sample).kind == "gpu_sync"


def test_words_name_the_wait_its_reason_and_the_place() -> None:
    words = of_frames(frames(*RESULT)).words
    assert words.startswith("waits for its GPU (synchronize) for a batch in process_batch_result_decode (")
    dp_sync = (
        "all_gather_into_tensor (torch/distributed/distributed_c10d.py:3898)",
        f"prepare_mlp_sync_batch_raw ({SRT}/managers/scheduler.py:2121)",
    )
    assert "all_gather for the data-parallel synchronisation" in of_frames(frames(*dp_sync)).words


def test_a_process_without_a_stack_is_in_an_unknown_place() -> None:
    assert activity_of(stack("TP0").sample).kind == "unknown"


def test_kernels_of_nccl_make_a_wait_for_the_gpu_a_collective() -> None:
    sample = stack("TP0", *RESULT, kernels=("ncclDevKernel_AllReduce_Sum_bf16_RING_LL",)).sample
    assert activity_of(sample).kind == "collective"
    other = stack("TP0", *RESULT, kernels=("flash_fwd_kernel",)).sample
    assert activity_of(other).kind == "gpu_sync"


@pytest.mark.parametrize(
    ("text", "component"),
    [
        ("_batch_encode_plus (transformers/tokenization_utils_fast.py:540)", "tokenizer"),
        ("render (jinja2/environment.py:1300)", "chat_template"),
        ("resize (PIL/Image.py:2200)", "multimodal"),
        ("_compile_json_schema (xgrammar/compiler.py:30)", "grammar"),
        ("f (x.py:1)", ""),
    ],
)
def test_what_a_front_end_does_on_its_event_loop(text: str, component: str) -> None:
    assert front_work(frames(text))[1] == component


@pytest.mark.parametrize(("handler", "is_for_requests"), [((), True), (("hold (sitecustomize.py:22)",), False)])
def test_a_handler_of_signals_below_the_wait_for_requests_is_no_wait_for_them(
    handler: tuple[str, ...], is_for_requests: bool
) -> None:
    passing = f"_broadcast_reqs_across_ranks ({SRT}/managers/scheduler_components/request_receiver.py:206)"
    found = of_frames(frames(*handler, passing))
    assert (found.kind, found.is_for_requests) == ("own", is_for_requests)
