"""What failed, who failed first, and in which part: exceptions, ends and kernel lines, several of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_crashkit.judge.components import component_of, is_switched_on, way_out
from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.model.case import case_of
from sglang_crashkit.model.event import (
    Arguments,
    Container,
    Error,
    Event,
    Exit,
    Kernel,
    Line,
    Progress,
    Raised,
    Stage,
    Stop,
    Watched,
)
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.sources.incident import frames_in

RAISED = yaml.safe_load((Path(__file__).parent / "raised.yaml").read_text())
READY = Stage(order=1, at=1.0, name="ready", is_done=True)
FORWARD = ("forward (sglang/srt/models/llama.py:10)", "run_batch (sglang/srt/managers/scheduler.py:2000)")


def raised(text: str, *frames: str, who: str = "TP0", order: int = 5, **fields: Any) -> Raised:
    kind, _, words = text.partition(": ")
    chain = (Error(type=kind, text=words, frames=frames_in(frames)),)
    return Raised(order=order, at=float(order), who=who, chain=chain, **fields)


def verdict_of(*events: Event) -> Verdict:
    return judge(case_of(events))


@pytest.mark.parametrize(
    ("classes", "frames", "error"),
    [pytest.param(row["classes"], row["frames"], error, id=error[:60]) for row in RAISED for error in row["errors"]],
)
def test_an_exception_has_its_class(classes: list[str], frames: list[str], error: str) -> None:
    verdict = verdict_of(raised(error, *frames))
    assert verdict.kind in classes
    # An exception's own class says so; its words are at most a hint.
    assert verdict.level != "established" or error.startswith(("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"))
    assert verdict.next


@pytest.mark.parametrize("who", ["TP3", "DP1 TP3", "PP1 TP0", "ATTN_CP2 TP2"])
@pytest.mark.parametrize(
    "consequence",
    [
        "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:41022",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError: ",
    ],
)
def test_the_first_failure_is_named_and_not_what_followed(who: str, consequence: str) -> None:
    first = raised("ValueError: a bug", *FORWARD, who=who, order=9)
    verdict = verdict_of(READY, raised(consequence, *FORWARD, who="TP7", order=8), first)
    assert verdict.first == who
    assert verdict.kind == "exception_in_sglang"


def kernel(kind: str, **fields: Any) -> Kernel:
    return Kernel(order=5, at=5.0, kind=kind, **fields)


@pytest.mark.parametrize(
    ("event", "kind", "level"),
    [
        (kernel("xid", number=79, text="NVRM: Xid 79", facts={"gpu": "1b"}), "gpu_hardware", "supported"),
        (kernel("xid", number=31, text="NVRM: Xid 31", facts={"gpu": "1b"}), "cuda_fault", "supported"),
        (kernel("oom_kill", pid=7, name="sglang::schedul", text="Out of memory"), "host_oom", "established"),
        (kernel("segfault", pid=7, name="python3", text="segfault at 0"), "segfault", "established"),
        (kernel("amdgpu", text="amdgpu: GPU reset begin"), "gpu_hardware", "supported"),
        (Container(order=5, name="sglang", reason="OOMKilled", code=137), "host_oom", "supported"),
        (Container(order=5, name="sglang", reason="Error", code=137), "killed", "supported"),
        (Exit(order=5, at=5.0, who="TP1", signal="SIGKILL", text="Killed"), "killed", "supported"),
        (Exit(order=5, at=5.0, who="detokenizer", code=1, text="exit code 1"), "detokenizer_lost", "supported"),
        (Line(order=5, at=5.0, level="critical", text="Found rank divergence at 7"), "consensus_check", "supported"),
        (Stop(order=5, at=5.0, by="systemd", text="Stopping sglang.service"), "asked_to_stop", "supported"),
        (raised("KeyboardInterrupt: ", *FORWARD), "asked_to_stop", "supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_fact_has_its_class_and_no_more_than_its_level(event: Event, kind: str, level: str) -> None:
    verdict = verdict_of(READY, event)
    assert (verdict.kind, verdict.level) == (kind, level)


ILLEGAL = "CUDA error: an illegal memory access was encountered"
WORK = Progress(order=2, at=2.0, kind="decode", who="TP0", count=50, last_at=90.0, last_order=60)
ANSWERED = Progress(order=20, at=20.0, kind="answer", count=9, last_at=300.0, last_order=40)
TOO_LONG = raised("ValueError: The input is longer than the context", "handle (sglang/srt/entrypoints/x.py:1)", who="")
NEVER_RETRIEVED = Line(order=5, at=5.0, level="error", text="Task exception was never retrieved")
WHAT = Line(order=5, at=5.0, level="error", text=f"what():  {ILLEGAL}")
WATCHED = Watched(order=6, at=6.0, kind="signal", level="established", who="TP1", pid=29)
WATCHDOG = Line(order=5, at=5.0, who="TP0", text=f"watchdog thread terminated with exception: {ILLEGAL}", level="error")
MOE = "forward (sglang/srt/layers/moe/fused_moe_triton/layer.py:10)"
BEGUN = raised("ConnectionError: refused", "send (requests/adapters.py:729)", who="", source="server.log:9")
KILLED = Exit(order=7, at=7.0, who="TP0", signal="SIGKILL", source="incident")
VOCABULARY = ("OSError: no such vocabulary", "run_detokenizer_process (sglang/srt/x.py:442)")


def ready_in(source: str) -> Stage:
    return Stage(order=6, at=6.0, name="ready", is_done=True, source=f"{source}:30")


#: By class, who failed first and the part, where these are asked for: facts.
FACTS: dict[tuple[str, str, str], list[list[Event]]] = {
    ("no_incident", "", ""): [
        # What the server outlives is nothing.
        [READY, WORK, TOO_LONG],
        [READY, WORK, NEVER_RETRIEVED],
        [READY, WORK, kernel("oom_kill", pid=99, name="python3", text="Memory cgroup out of memory")],
        [READY, ANSWERED, raised(*VOCABULARY, who="tokenizer")],
        [READY, ANSWERED, Line(order=5, at=5.0, who="detokenizer", text=ILLEGAL, level="error")],
    ],
    # An answer of the web server does not outlive the detokenizer.
    ("detokenizer_lost", "detokenizer", ""): [[READY, ANSWERED, raised(*VOCABULARY, who="detokenizer")]],
    # What fails after the server was asked to stop is no failure.
    ("asked_to_stop", "", ""): [
        [READY, Stop(order=4, at=4.0, by="kubernetes", text="Stopping container"), raised("KeyError: x", *FORWARD)]
    ],
    # The words of an abort are those of the process that the crash handler named.
    ("cuda_fault", "", ""): [[READY, WHAT]],
    ("cuda_fault", "TP1", ""): [[READY, WHAT, WATCHED]],
    ("cuda_fault", "TP0", "moe"): [[READY, WATCHDOG, raised(f"RuntimeError: {ILLEGAL}", MOE, *FORWARD, order=6)]],
    # What a program failed with before it was ready, as in a warm-up, it has outlived; another one has not.
    ("killed", "TP0", ""): [[BEGUN, ready_in("server.log"), KILLED]],
    ("exception", "TP0", ""): [[BEGUN, ready_in("prefill.log"), KILLED]],
}


@pytest.mark.parametrize(
    ("events", "expected"), [(events, expected) for expected, some in FACTS.items() for events in some]
)
def test_facts_have_one_verdict(events: list[Event], expected: tuple[str, str, str]) -> None:
    found = verdict_of(*events)
    kind, first, part = expected
    assert (found.kind, found.first or "", part and found.component) == (kind, first, part)


def test_a_part_is_taken_out_only_where_it_is_on() -> None:
    fault = raised("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", *FORWARD)
    off = verdict_of(Arguments(values={"tp_size": 1}), READY, fault)
    on = verdict_of(Arguments(values={"enable_hierarchical_cache": True}), READY, fault)
    assert on.component == "hicache"
    assert any("--enable-hierarchical-cache" in step for step in on.next)
    assert not any("--enable-hierarchical-cache" in step for step in off.next)
    assert is_switched_on("pipeline_parallel", {"pp_size": 4})
    assert not is_switched_on("pipeline_parallel", {"pp_size": 1})


def test_the_steps_name_what_the_vendor_calls_it() -> None:
    fault = raised("RuntimeError: HIP error: an illegal memory access was encountered", *FORWARD)
    steps = " ".join(verdict_of(READY, fault).next)
    assert "AMD_SERIALIZE_KERNEL" in steps
    assert "CUDA_LAUNCH_BLOCKING" not in steps


def test_a_warning_that_lists_vendors_names_none() -> None:
    words = ("Only CUDA, HIP and XPU support AWQ currently.", "Only CUDA, MUSA and NPU support GGUF quantization")
    lists = [Line(order=0, level="warning", text=text) for text in words]
    fault = raised("RuntimeError: CUDA error: an illegal memory access was encountered", *FORWARD)
    assert "CUDA_LAUNCH_BLOCKING=1" in " ".join(verdict_of(*lists, READY, fault).next)


def test_the_option_of_a_message_is_named_first() -> None:
    verdict = verdict_of(raised("ValueError: --page-size must be 64 with --attention-backend flashmla", "x (y.py:1)"))
    assert verdict.kind == "unsupported_configuration"
    assert "--page-size" in verdict.next[0]


LOOP_FRAME = "event_loop_overlap (sglang/srt/managers/scheduler.py:7)"


@pytest.mark.parametrize(
    ("frame", "part"),
    [
        ("write_backup (sglang/srt/mem_cache/hiradix_cache.py:1)", "hicache"),
        ("write (sglang/srt/mem_cache/storage/aibrix/x.py:1)", "hicache"),
        ("verify (sglang/srt/speculative/eagle_worker_v2.py:1)", "speculative"),
        ("accept_token (sglang/srt/constrained/xgrammar_backend.py:1)", "grammar"),
        ("dispatch (sglang/srt/layers/moe/token_dispatcher/deepep.py:1)", "expert_parallel"),
        ("send_kvcache (sglang/srt/disaggregation/nixl/conn.py:1)", "nixl"),
        ("transfer_worker (sglang/srt/disaggregation/mooncake/conn.py:1)", "mooncake"),
        ("pop_transferred (sglang/srt/disaggregation/decode.py:1)", "pd_transfer"),
        ("load_lora_adapter (sglang/srt/lora/lora_manager.py:1)", "lora"),
        ("apply (sglang/srt/layers/quantization/fp8.py:1)", "quantization"),
        ("forward (sglang/srt/layers/attention/mamba/mamba.py:1)", "mamba"),
        ("all_reduce (sglang/srt/distributed/device_communicators/custom_all_reduce.py:1)", "custom_all_reduce"),
        ("launch_router (sglang_router/launch_router.py:1)", "router"),
        ("serve_grpc (sglang/srt/entrypoints/grpc_server.py:1)", "grpc"),
    ],
)
def test_the_frame_nearest_the_error_tells_the_part(frame: str, part: str) -> None:
    # Torch in between tells nothing.
    frames = frames_in(["_call_impl (torch/nn/modules/module.py:1)", frame, LOOP_FRAME])
    assert component_of(frames) == part
    assert way_out(part, {}, is_seen=False) == ""


def test_words_tell_a_part_where_no_frame_does() -> None:
    assert component_of(frames_in(["x (y.py:1)"]), "the mamba cache has no free slot") == "mamba"
    assert component_of(words="the gRPC servicer does not match") == "grpc"
    assert component_of(frames_in(["x (y.py:1)"]), "nothing of any part") is None


def test_what_a_healthy_server_says_most_is_told_and_what_python_warns_of_is_not() -> None:
    lines = [("an image is broken", 7), ("a retry", 2), ("UserWarning: slow", 90)]
    events = [
        Line(order=number, at=float(number), text=text, level="warning", count=count)
        for number, (text, count) in enumerate(lines, 5)
    ]
    end = Progress(order=20, at=20.0, who="TP0", kind="decode", count=9, last_at=300.0, last_order=40)
    verdict = verdict_of(READY, *events, end)
    assert verdict.kind == "no_incident"
    assert [step for step in verdict.next if "goes on after" in step] == [
        "it goes on after what it says 7 times: an image is broken",
        "it goes on after what it says 2 times: a retry",
    ]


def test_of_what_no_rule_knows_the_loudest_line_is_told() -> None:
    line = Line(order=9, at=9.0, text="lease lost by the broker", level="warning", count=4)
    verdict = verdict_of(line)
    assert verdict.kind == "unknown"
    assert "what it says worst, 4 times, is not known: lease lost by the broker" in verdict.next


def test_an_option_whose_words_the_failing_functions_have_is_named() -> None:
    values = {"mamba_radix_cache_strategy": "extra_buffer", "enable_metrics": True, "disable_radix_cache": False}
    frames = "_mamba_radix_cache_v2_req_prepare (sglang/srt/managers/schedule_batch.py:9)"
    verdict = verdict_of(Arguments(order=1, at=1.0, values=values), raised("TypeError: no subscript", frames))
    told = [step for step in verdict.next if "it failed where" in step]
    assert [step.partition(":")[0] for step in told] == ["--mamba-radix-cache-strategy extra_buffer"]


def test_an_argument_is_named_as_the_option_that_sets_it_with_its_value() -> None:
    told = Arguments(order=1, at=1.0, values={"page_size": 16, "attention_backend": "flashmla", "tp_size": 2})
    frames = ("__init__ (sglang/srt/layers/attention/flashmla_backend.py:9)", "__init__ (sglang/srt/model_runner.py:3)")
    verdict = verdict_of(told, raised("ValueError: page_size must be 64, and no_such_name is not told", *frames))
    assert verdict.next[0] == "the message names --page-size (16 here): change that first"
