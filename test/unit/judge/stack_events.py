"""Stacks of made-up processes, as the parsers would have read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_crashkit.kernel.titles import rank_of
from sglang_crashkit.model.case import Case, case_of
from sglang_crashkit.model.event import Arguments, Event, Line, Progress, Stack
from sglang_crashkit.model.sample import Frame, Sample, Thread

SRT = "sglang/srt"
LOOP = (
    f"event_loop_overlap ({SRT}/managers/scheduler.py:1500)",
    f"run_scheduler_process ({SRT}/managers/scheduler.py:4227)",
    "_bootstrap (multiprocessing/process.py:314)",
    "<module> (<string>:1)",
)
TORCH_WRAPPER = "_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)"


def frame(text: str) -> Frame:
    """Return the frame that ``function (file:line)`` stands for; a native one has no line."""
    function, _, place = text.rpartition(" (")
    file, _, line = place.removesuffix(")").rpartition(":")
    return Frame(function, file, int(line)) if line.isdigit() else Frame(function or text, place.removesuffix(")"), 0)


def frames(*texts: str) -> tuple[Frame, ...]:
    """Return frames, innermost first."""
    return tuple(map(frame, texts))


BROADCAST = (
    "broadcast (torch/distributed/distributed_c10d.py:2830)",
    TORCH_WRAPPER,
    f"broadcast_pyobj ({SRT}/utils/common.py:2410)",
    f"_broadcast_reqs_across_ranks ({SRT}/managers/scheduler_components/request_receiver.py:210)",
    f"recv_requests ({SRT}/managers/scheduler_components/request_receiver.py:93)",
    *LOOP,
)
POLL = (
    "all_reduce (torch/distributed/distributed_c10d.py:2919)",
    TORCH_WRAPPER,
    f"poll_and_all_reduce ({SRT}/disaggregation/utils.py:223)",
    f"DecodePreallocQueue.pop_preallocated ({SRT}/disaggregation/decode.py:935)",
    f"process_decode_queue ({SRT}/disaggregation/decode.py:2363)",
    *LOOP,
)
RECV_REQUESTS = (f"recv_requests ({SRT}/managers/scheduler.py:1237)", *LOOP)
RESULT = (
    "synchronize (torch/cuda/streams.py:231)",
    f"process_batch_result_decode ({SRT}/managers/scheduler_output_processor_mixin.py:201)",
    f"process_batch_result ({SRT}/managers/scheduler.py:2011)",
    *LOOP,
)
MODEL_ALL_REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:2919)",
    TORCH_WRAPPER,
    f"all_reduce ({SRT}/distributed/parallel_state.py:541)",
    f"tensor_model_parallel_all_reduce ({SRT}/distributed/communication_op.py:14)",
    f"forward ({SRT}/layers/linear.py:1300)",
    f"forward ({SRT}/models/qwen3.py:200)",
    f"forward_batch_generation ({SRT}/managers/tp_worker.py:270)",
    f"run_batch ({SRT}/managers/scheduler.py:2100)",
    *LOOP,
)


def stack(who: str, *texts: str, native: Iterable[str] = (), **more: Any) -> Stack:
    """Return what a process did: `who` is a short name (``PP1 TP0``) or a role; of more, fields of the sample."""
    ranks = rank_of("sglang::scheduler_" + who.replace(" ", "_"))
    pid = more.pop("pid", 1000 + 64 * ranks.get("pp", 0) + ranks.get("tp", 0))
    active, gil = more.pop("active", False), more.pop("gil", False)
    at, node, side = more.pop("at", 0.0), more.pop("node", ""), more.pop("side", "")
    threads = (Thread("MainThread", pid, active, gil, frames(*texts)),) if texts else ()
    natives = (Thread("MainThread", pid, active, gil, frames(*native)),) if native else ()
    sample = Sample(pid=pid, ranks=ranks, threads=threads, native=natives, time=at, **more)
    return Stack(sample=sample, who=who, at=at, node=node, side=side)


def case(*events: Event, arguments: Mapping[str, Any] | None = None) -> Case:
    """Return the case of some events, and of a server's arguments."""
    server = [Arguments(values=dict(arguments))] if arguments else []
    return case_of([*server, *events])


def hang(at: float = 100.0) -> list[Event]:
    """Return the words of a log of a server that makes no progress any more."""
    words = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
    began = f"00:{int(at - 20) // 60:02}:{int(at - 20) % 60:02}"
    return [
        Progress(kind="decode", who="TP0", at=at - 60, last_at=at - 40, running=3),
        Line(text=f"{words} tic start time: {began}. last_heartbeat time: 00:01:00", at=at),
    ]


def alive(at: float = 100.0) -> list[Event]:
    """Return the words of a log of a server that answers to the end."""
    return [
        Progress(kind="decode", who="TP0", at=at - 60, last_at=at - 10, running=0),
        Progress(kind="health", at=at - 60, last_at=at, status=200),
    ]
