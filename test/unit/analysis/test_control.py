from __future__ import annotations

import pytest

from sglang_crashkit.analysis.control import control_in, control_of
from sglang_crashkit.analysis.suspects import suspects_of
from sglang_crashkit.model.incident import ProcessReport
from unit.analysis.test_suspects import incident, step

LOOP = [
    "__call__ (sglang/utils.py:499)",
    "process_input_requests (sglang/srt/managers/scheduler.py:2257)",
    "event_loop_overlap (sglang/srt/managers/scheduler.py:1500)",
]
UPDATE = [
    "load_model (sglang/srt/model_loader/loader.py:9)",
    "update_weights_from_disk (sglang/srt/managers/weight_updater.py:80)",
    "decorate_context (torch/utils/_contextlib.py:116)",
    *LOOP,
]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (UPDATE, "update_weights_from_disk"),
        (["flush_cache (sglang/scheduler.py:3)", "handle (sglang/flush.py:7)", *LOOP], "flush_cache"),
        (["Scheduler.open_session (scheduler.py)", *(frame.split(":")[0] + ")" for frame in LOOP)], "open_session"),
        (["init_req (x.py:1)", "handle_generate_request (sglang/srt/managers/scheduler.py:1)", *LOOP], ""),
        (["compile (x.py:1)", "handle_batch_generate_request (sglang/srt/managers/scheduler.py:1)", *LOOP], ""),
        (["abort_request (sglang/srt/managers/scheduler.py:1)", *LOOP], ""),
        (LOOP, ""),
        (["send_output (ipc.py:1)", "send_control_output (sglang/srt/managers/scheduler.py:1)", LOOP[1]], ""),
        (
            ["f (x.py:1)", "send_weights_to_remote_instance (weight_exporter.py:1)", *LOOP],
            "send_weights_to_remote_instance",
        ),
        (["check_weights (weight_updater.py:1)", *LOOP], "check_weights"),
        (
            ["mkdir (pathlib.py:1)", "_stop_profile (sglang/profiler_manager.py:3)", "run_batch (scheduler.py:2)"],
            "profile",
        ),
        (["forward (model.py:1)", "run_batch (scheduler.py:2)", LOOP[-1]], ""),
        (["forward (model.py:1)", "run_batch (scheduler.py:2)", "run_scheduler_process (scheduler.py:9)"], ""),
        # They do not reach to where that shows.
        (["forward (model.py:1)", "run_batch (scheduler.py:2)"], None),
        ([], None),
    ],
)
def test_frames_tell_what_control_request_is_handled(frames: list[str], expected: str | None) -> None:
    assert control_in(frames) == expected


@pytest.mark.parametrize(
    ("raised", "doing", "noted", "expected"),
    [
        (UPDATE, [], "", "update_weights_from_disk"),
        # The exception came from elsewhere in that round.
        (["forward (model.py:1)"], [], "flush_cache", ""),
        ([], UPDATE[:2], "flush_cache", "flush_cache"),
        ([], [], "release_memory_occupation", "release_memory_occupation"),
        ([], ["init_req (x.py:1)", "handle_generate_request (scheduler.py:1)", *LOOP], "flush_cache", ""),
        # Behind it in that round, where the next batch is made.
        ([], ["match_prefix (x.py:1)", "get_next_batch_to_run (scheduler.py:1)", LOOP[-1]], "flush_cache", ""),
        ([], [], "", ""),
    ],
)
def test_the_record_tells_where_no_frames_do(raised: list[str], doing: list[str], noted: str, expected: str) -> None:
    rank = ProcessReport(7, "sglang::scheduler", "scheduler", {}, doing=doing, raised_through=raised)
    rank.control = noted
    assert control_of(rank) == expected


RECEIVED = step(9, "new", ended=False) | {"phase": "received"}


@pytest.mark.parametrize(
    ("frames", "last", "message", "expected"),
    [
        (UPDATE, [RECEIVED], "ValueError: no such weights", []),
        ([], [RECEIVED | {"requests": []}], "", []),
        # It may have been taking in the other one.
        ([], [RECEIVED], "", ["new", "waits"]),
        (UPDATE, [RECEIVED], "torch.AcceleratorError: CUDA error: an illegal memory access", ["waits", "new"]),
    ],
)
def test_at_a_control_request_no_other_is_suspected(
    frames: list[str], last: list[dict[str, object]], message: str, expected: list[str]
) -> None:
    made = incident(last=last, message=message)
    rank = made.processes[0]
    rank.control, rank.raised_through = "update_weights_from_disk", frames
    assert sorted(one.rid for one in suspects_of(made, unanswered=["waits"])[0]) == sorted(expected)
