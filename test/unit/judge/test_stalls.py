"""Hangs by their stacks and by their words: who waits for whom, each kind with several siblings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.judge.finding import Finding
from sglang_crashkit.judge.stalls import find_stalls
from sglang_crashkit.model.case import Case, case_of
from sglang_crashkit.model.event import (
    Arguments,
    Collective,
    Container,
    Event,
    Exit,
    GpuKernel,
    Line,
    Progress,
    Raised,
    Stage,
)
from sglang_crashkit.model.event import Error as ErrorOf
from sglang_crashkit.sources.text.reader import read
from unit.judge.stack_events import (
    BROADCAST,
    LOOP,
    MODEL_ALL_REDUCE,
    POLL,
    RECV_REQUESTS,
    RESULT,
    SRT,
    TORCH_WRAPPER,
    alive,
    case,
    frames,
    hang,
    stack,
)

BATCH = (f"run_batch ({SRT}/managers/scheduler.py:2100)", *LOOP)
SCHEDULE = (
    f"get_new_batch_prefill ({SRT}/managers/scheduler.py:1900)",
    f"get_next_batch_to_run ({SRT}/managers/scheduler.py:1700)",
    *LOOP,
)
EVICTION = (
    f"RadixCache._delete_leaf ({SRT}/mem_cache/radix_cache.py:601)",
    f"RadixCache.evict ({SRT}/mem_cache/radix_cache.py:500)",
)
COMPILING = (f"execute ({SRT}/layers/deep_gemm_wrapper/compile_utils.py:262)", *BATCH)
TRITON = (
    "compile (triton/compiler/compiler.py:300)",
    "run (triton/runtime/jit.py:700)",
    f"forward ({SRT}/layers/moe/x.py:9)",
    *BATCH,
)
LOADING = (
    "load_file (safetensors/torch.py:300)",
    f"safetensors_weights_iterator ({SRT}/model_loader/weight_utils.py:700)",
    f"load_model ({SRT}/model_executor/model_runner.py:900)",
    *LOOP[1:],
)
UPDATE = (
    "broadcast (torch/distributed/distributed_c10d.py:2818)",
    TORCH_WRAPPER,
    f"update_weights_from_distributed ({SRT}/model_executor/model_runner.py:1369)",
    f"process_input_requests ({SRT}/managers/scheduler.py:1377)",
    *LOOP,
)
DP_SYNC = (
    "all_gather_into_tensor (torch/distributed/distributed_c10d.py:3898)",
    TORCH_WRAPPER,
    f"prepare_mlp_sync_batch_raw ({SRT}/managers/scheduler_dp_attn_mixin.py:121)",
    *LOOP,
)
SEND = (
    "send (torch/distributed/distributed_c10d.py:2487)",
    f"send_object ({SRT}/distributed/parallel_state.py:886)",
    f"event_loop_pp ({SRT}/managers/scheduler_pp_mixin.py:150)",
    *LOOP[1:],
)
RECV = (
    "recv (torch/distributed/distributed_c10d.py:2500)",
    f"recv_object ({SRT}/distributed/parallel_state.py:930)",
    f"_pp_recv_pyobj_from_prev_stage ({SRT}/managers/scheduler_pp_mixin.py:768)",
    f"event_loop_pp ({SRT}/managers/scheduler_pp_mixin.py:150)",
    *LOOP[1:],
)
STORE = (
    "_store_based_barrier (torch/distributed/distributed_c10d.py:900)",
    "init_process_group (torch/distributed/distributed_c10d.py:1700)",
    f"init_distributed_environment ({SRT}/distributed/parallel_state.py:1500)",
    f"init_torch_distributed ({SRT}/model_executor/model_runner.py:700)",
    *LOOP[1:],
)
TOKENIZING = (
    "_batch_encode_plus (transformers/tokenization_utils_fast.py:540)",
    f"_tokenize_one_request ({SRT}/managers/tokenizer_manager.py:600)",
    "run_forever (asyncio/base_events.py:641)",
    f"launch_server ({SRT}/entrypoints/http_server.py:2492)",
)
DETOKENIZING = (
    "decode (transformers/tokenization_utils_base.py:3900)",
    f"handle_batch_token_id_out ({SRT}/managers/detokenizer_manager.py:200)",
    f"event_loop ({SRT}/managers/detokenizer_manager.py:140)",
    f"run_detokenizer_process ({SRT}/managers/detokenizer_manager.py:300)",
)


def first_of(one: Case) -> Finding:
    found = find_stalls(one)
    assert found, "nothing was found"
    return min(found, key=lambda finding: -finding.weight)


def ranks(count: int, *texts: str, but: dict[int, Sequence[str]] | None = None, **more: Any) -> list[Event]:
    """Return so many ranks that are in one place, `but` some of them elsewhere."""
    return [stack(f"TP{rank}", *(but or {}).get(rank, texts), **more) for rank in range(count)]


def twice(who: str, first: Sequence[str], second: Sequence[str], **more: Any) -> list[Event]:
    return [stack(who, *first, at=90.0, **more), stack(who, *second, at=93.0, **more)]


# -- one rank is elsewhere


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("waiting", [BROADCAST, DP_SYNC, MODEL_ALL_REDUCE, RESULT, POLL])
def test_the_rank_that_is_elsewhere_is_named(count: int, waiting: Sequence[str]) -> None:
    found = first_of(case(*ranks(count, *waiting, but={1: (*EVICTION, *SCHEDULE)}), *hang()))
    assert (found.kind, found.who, found.component) == ("rank_stuck", "TP1", "radix_cache")
    assert found.level == "supported"
    assert "evict" in found.headline or "_delete_leaf" in found.headline
    assert any("py-spy dump --native --pid 1001" in step for step in found.next)


# -- all wait


@pytest.mark.parametrize("waiting", [MODEL_ALL_REDUCE, DP_SYNC, POLL, BROADCAST])
@pytest.mark.parametrize("count", [2, 8])
def test_nobody_is_named_where_all_are_in_the_same_call(waiting: Sequence[str], count: int) -> None:
    found = first_of(case(*ranks(count, *waiting), *hang()))
    assert (found.kind, found.who) == ("symmetric_stall", None)
    assert "all " in found.headline or "TP0 and TP1" in found.headline


@pytest.mark.parametrize(("nodes", "count", "who"), [(2, 8, "node 1"), (4, 4, "nodes 1, 2 and 3")])
def test_the_nodes_that_are_not_seen_are_named(nodes: int, count: int, who: str) -> None:
    arguments = {"tp_size": nodes * count, "nnodes": nodes}
    found = first_of(case(*ranks(count, *BROADCAST), *hang(), arguments=arguments))
    assert (found.kind, found.who) == ("symmetric_stall", who)
    assert any("other node" in step for step in found.next)


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (BROADCAST, POLL, "collective_mismatch"),
        (MODEL_ALL_REDUCE, BROADCAST, "rank_divergence"),
        (DP_SYNC, MODEL_ALL_REDUCE, "collective_mismatch"),
    ],
)
@pytest.mark.parametrize("count", [2, 8])
def test_ranks_in_different_calls(one: Sequence[str], other: Sequence[str], kind: str, count: int) -> None:
    half = dict.fromkeys(range(count // 2), other)
    found = first_of(case(*ranks(count, *one, but=half), *hang()))
    assert (found.kind, found.who) == (kind, None)
    assert found.restart in ("yes", None)


@pytest.mark.parametrize("update", ["update_weights_from_distributed", "init_weights_update_group"])
def test_an_update_of_weights_waits_for_the_trainer(update: str) -> None:
    texts = [text.replace("update_weights_from_distributed", update) for text in UPDATE]
    found = first_of(case(*ranks(2, *texts)))
    assert (found.kind, found.who, found.component) == ("weight_update_deadlock", "trainer", "weight_update")
    assert any("trainer" in step for step in found.next)
    assert any("src" in step for step in found.next)


# -- the GPU and its driver


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize(
    ("texts", "native"),
    [
        (RESULT, ()),
        (("replay (torch/cuda/graphs.py:140)", f"replay ({SRT}/model_executor/cuda_graph_runner.py:800)", *BATCH), ()),
        ((f"forward ({SRT}/layers/sampler.py:80)", *BATCH), ("cuStreamSynchronize (libcuda.so.580)",)),
        ((f"forward ({SRT}/layers/linear.py:80)", *BATCH), ("cuLaunchKernel (libcuda.so.580)",)),
    ],
)
def test_all_wait_for_their_gpu(count: int, texts: Sequence[str], native: Sequence[str]) -> None:
    found = first_of(case(*ranks(count, *texts, native=(*native, *texts) if native else ()), *hang()))
    assert (found.kind, found.who) == ("gpu_stall", None)
    assert any("cuda-gdb" in step for step in found.next)


@pytest.mark.parametrize(
    ("kernel", "component", "word"),
    [
        ("sglang::all_reduce_1shot_push_kernel<__nv_bfloat16, 4u>", "custom_all_reduce", "--disable-custom-all-reduce"),
        ("void cross_device_reduce_1stage<float, 8>", "custom_all_reduce", "--disable-custom-all-reduce"),
        ("deep_ep::internode::dispatch<4>", "expert_parallel", "--moe-a2a-backend"),
        ("flash::prepare_varlen_num_blocks_kernel", "attention", "--attention-backend"),
    ],
)
def test_the_kernel_that_the_gpus_run_tells_the_component(kernel: str, component: str, word: str) -> None:
    found = first_of(case(*ranks(4, *RESULT), GpuKernel(name=kernel), *hang()))
    assert (found.kind, found.component) == ("gpu_stall", component)
    assert any(word in step for step in found.next)
    assert kernel[:40] in found.headline


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuLibraryLoadData", "hipModuleLoadData", "cuMemHostRegister"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_call_of_the_driver_that_does_not_come_back(call: str, count: int) -> None:
    texts = (
        "_init_handles (triton/compiler/compiler.py:466)",
        f"forward ({SRT}/layers/attention/dsa_backend.py:9)",
        *BATCH,
    )
    found = first_of(case(*ranks(count, *texts, native=(f"{call} (libcuda.so.590)", *texts)), *hang()))
    assert found.kind == "driver_stuck"
    assert (found.who is None) == (count > 1)
    assert call in found.headline
    assert any("CUDA_MODULE_LOADING" in step for step in found.next) == ("Load" in call)


# -- pipelines


def stages(*each: Sequence[str], tp: int = 2) -> list[Event]:
    return [stack(f"PP{pp} TP{rank}", *texts) for pp, texts in enumerate(each) for rank in range(tp)]


@pytest.mark.parametrize(
    ("each", "kind", "who"),
    [
        # The stage after waits for the GPU.
        ((SEND, RESULT), "gpu_stall", "PP1"),
        ((RESULT, RECV), "gpu_stall", "PP0"),
        ((RESULT, RECV, RECV, RECV), "gpu_stall", "PP0"),
        # Each stage waits for the other, or for one in a collective of its own.
        ((RECV, RECV), "collective_mismatch", None),
        ((SEND, SEND), "collective_mismatch", None),
        ((SEND, DP_SYNC), "collective_mismatch", None),
    ],
)
def test_the_stage_that_waits_for_none(each: Sequence[Sequence[str]], kind: str, who: str | None) -> None:
    found = first_of(case(*stages(*each), *hang()))
    assert (found.kind, found.who) == (kind, who)


# -- beside the ranks


@pytest.mark.parametrize(
    "scheduler", [RECV_REQUESTS, (f"_pull_raw_reqs ({SRT}/managers/x/request_receiver.py:9)", *LOOP)]
)
def test_the_main_process_tokenizes_on_its_event_loop(scheduler: Sequence[str]) -> None:
    found = first_of(case(stack("pid 1", *TOKENIZING, pid=1), stack("scheduler", *scheduler), *hang()))
    assert (found.kind, found.who, found.component) == ("tokenizer_stuck", "tokenizer", "tokenizer")
    assert any("--tokenizer-worker-num" in step for step in found.next)
    assert any("probe" in step for step in found.next)


# -- what is no hang


@pytest.mark.parametrize("log", [alive(), []])
@pytest.mark.parametrize("count", [1, 2, 8])
# Of an idle server the first rank is often seen between two broadcasts.
@pytest.mark.parametrize("first", [RECV_REQUESTS, BROADCAST[2:]])
def test_ranks_that_wait_for_requests_do_not_hang(log: list[Event], count: int, first: Sequence[str]) -> None:
    found = first_of(case(*ranks(count, *BROADCAST, but={0: first}), *log))
    assert (found.kind, found.who) == ("no_incident", None)


@pytest.mark.parametrize(("last_at", "kind"), [(260.0, "no_progress"), (130.0, "no_incident")])
def test_ranks_that_wait_for_requests_are_not_well_where_the_health_check_fails(last_at: float, kind: str) -> None:
    failing = Progress(kind="health", status=503, count=4, at=100.0, last_at=last_at, order=9, last_order=12)
    assert first_of(case(*ranks(2, *RECV_REQUESTS), failing)).kind == kind


@pytest.mark.parametrize("texts", [RESULT, MODEL_ALL_REDUCE, BATCH])
def test_one_look_at_a_server_that_serves_is_no_hang(texts: Sequence[str]) -> None:
    assert first_of(case(*ranks(4, *texts), *alive())).kind in ("no_incident", "busy")


# -- who, in a table

FETCHING = ("readinto (socket.py:7)", "get (requests/api.py:73)", f"fetch ({SRT}/managers/mm_utils.py:30)", *BATCH)
ELSEWHERE = [
    ("acquire (threading.py:300)", f"put ({SRT}/managers/cache_controller.py:80)", *SCHEDULE),
    ("recv (zmq/sugar/socket.py:700)", f"get_load ({SRT}/managers/scheduler_metrics_mixin.py:10)", *BATCH),
    ("sleep (time.py:1)", f"wait_for_room ({SRT}/mem_cache/hiradix_cache.py:700)", *SCHEDULE),
    FETCHING,
]
STUCK_REPLICA = [stack("DP1 TP0", *BROADCAST, pid=11), stack("DP1 TP1", *EVICTION, *SCHEDULE, pid=12)]
IDLE_REPLICA = [stack("DP0 TP0", *RECV_REQUESTS, pid=13), stack("DP0 TP1", *BROADCAST, pid=14)]
ONE_PROCESS = [stack("TP0", *BROADCAST, node=node, pid=7) for node in ("a.txt", "b.txt")]
ANOTHER = [stack("TP1", *EVICTION, *SCHEDULE, node="a.txt"), stack("TP1", *SCHEDULE, node="b.txt")]
AHEAD = (*MODEL_ALL_REDUCE[:4], f"forward ({SRT}/layers/moe/fused_moe.py:300)", *MODEL_ALL_REDUCE[6:])
EVICTS = (f"evict_mamba ({SRT}/mem_cache/mamba_radix_cache.py:800)", *SCHEDULE)
LEAF = f"get_prev_no_lock ({SRT}/mem_cache/mamba_radix_cache.py:291)"
PP0, PP1 = ({rank: f"PP{pp} TP{rank}" for rank in range(2)} for pp in range(2))
SHARDS = "Loading safetensors checkpoint shards:   3% Completed | 4/141 [08:00<3:59:59, 118.20s/it]"
FRONT = stack("pid 1", *TOKENIZING, pid=1)


def starved(states: str) -> list[Event]:
    fields = [{"at": 10.0 * at, "cpu_secs": 50.0 + 0.1 * at, "state": state} for at, state in enumerate(states, 1)]
    return [stack("TP1", *BATCH, **one) for one in fields]


def held(state: str = "S", **more: Any) -> list[Event]:
    return [*ranks(3, *BROADCAST), stack("TP3", *BATCH, state=state, **more)]


#: By class, who is named, and the part where it is told: stacks, each of a server that hangs.
HANGS: dict[tuple[str, str | None, str | None], list[list[Event]]] = {
    ("rank_stuck", "TP2", None): [ranks(4, *BROADCAST, but={2: one}) for one in ELSEWHERE],
    # Its GPU does not come back, and the others are past the batch.
    ("rank_stuck", "TP3", None): [ranks(4, *BROADCAST, but={3: RESULT})],
    ("rank_stuck", "DP1 TP1", None): [[*STUCK_REPLICA, *IDLE_REPLICA]],
    ("rank_stuck", "TP1", None): [
        [*ONE_PROCESS, *ANOTHER],
        # The front end is not blamed for ranks that hang.
        [FRONT, *ranks(4, *DP_SYNC, but={1: EVICTION})],
    ],
    ("rank_stuck", "scheduler", "mamba"): [twice("scheduler", (LEAF, *EVICTS), EVICTS, gil=True, active=True)],
    ("rank_stuck", "PP0 TP1", None): [
        [stack(name, *RECV) for name in PP1.values()] + [stack(PP0[0], *BROADCAST), stack(PP0[1], *EVICTION, *SCHEDULE)]
    ],
    ("own_work", None, "radix_cache"): [ranks(4, *EVICTION, *SCHEDULE, gil=True, active=True)],
    # None waits, and each half is elsewhere.
    ("no_progress", None, None): [
        ranks(count, *EVICTION, *SCHEDULE, but=dict.fromkeys(range(count // 2), FETCHING)) for count in (2, 4)
    ],
    ("symmetric_stall", "TP3", None): [[Arguments(values={"tp_size": 4}), *ranks(3, *DP_SYNC)]],
    ("symmetric_stall", "node 0", None): [
        [Arguments(values={"tp_size": 2, "pp_size": 2, "nnodes": 2}), *(stack(name, *RECV) for name in PP1.values())]
    ],
    # Ranks of a batch may be in different layers.
    ("symmetric_stall", None, None): [ranks(4, *MODEL_ALL_REDUCE, but={0: AHEAD})],
    ("startup_timeout", "node 1", None): [[Arguments(values={"tp_size": 16, "nnodes": 2}), *ranks(8, *STORE)]],
    ("collective_mismatch", "TP5", None): [ranks(8, *BROADCAST, but={5: POLL})],
    # Some have a batch, and the first waits for requests.
    ("rank_divergence", "TP0", None): [ranks(4, *MODEL_ALL_REDUCE, but={0: RECV_REQUESTS})],
    ("detokenizer_stuck", "detokenizer", None): [
        [stack("detokenizer", *DETOKENIZING, pid=5), *ranks(2, *BROADCAST, but={0: RECV_REQUESTS})]
    ],
    ("stopped_process", "TP3", None): [held(state="T"), held(state="t", tracer=9), held(wchan="do_freezer_trap")],
    ("stuck_in_kernel", "TP3", None): [held(state="D", wchan="rpc_wait_bit_killable")],
    ("starved_process", "TP1", None): [
        [*starved(states), stack("TP0", *BROADCAST, at=10.0)] for states in ("RR", "RSR")
    ],
}
#: The same of servers without a sign of a hang.
WORKING: dict[tuple[str, str | None, str | None], list[list[Event]]] = {
    # It moves about at its batches.
    ("busy", None, None): [[*twice("scheduler", BATCH, (*EVICTION, *SCHEDULE)), *alive()]],
    # A compiler is at work, and the others wait for it.
    ("busy", None, "deep_gemm"): [ranks(4, *MODEL_ALL_REDUCE, but={0: COMPILING})],
    ("busy", None, "compiler"): [ranks(4, *MODEL_ALL_REDUCE, but={0: TRITON})],
    ("busy", None, "model_loader"): [ranks(4, *LOADING)],
    ("slow_storage", None, None): [[Line(text=SHARDS, at=5.0), *ranks(4, *LOADING)]],
}


@pytest.mark.parametrize(
    ("events", "log", "expected"),
    [(one, log, expected) for table, log in ((HANGS, hang()), (WORKING, [])) for expected, some in table.items()
     for one in some],
)  # fmt: skip
def test_stacks_tell_who(events: list[Event], log: list[Event], expected: tuple[str, str | None, str | None]) -> None:
    found = first_of(case(*events, *log))
    assert (found.kind, found.who, expected[2] and found.component) == expected


# -- words alone


def watchdog(who: str, text: str = "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)") -> Line:
    return Line(text=text, who=who, at=400.0)


def health(began: str, at: float) -> Line:
    words = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
    return Line(text=f"{words} tic start time: {began}. last_heartbeat time: {began}", at=at)


def nccl(rank: int, number: int = 77, operation: str = "ALLREDUCE", size: int = 4096) -> str:
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    group = f"[PG ID 2 PG GUID 3 Rank {rank}]"
    return f"{group} Watchdog caught collective operation timeout: {work} ran for 600034 milliseconds"


def recorded(rank: int, operation: str, number: int = 4, state: str = "scheduled") -> Collective:
    return Collective(group="tp", rank=rank, number=number, operation=operation, state=state)


def stage(who: str, name: str, at: float) -> Stage:
    return Stage(who=who, name=name, at=at)


def each(count: int, name: str) -> list[Event]:
    return [stage(f"TP{rank}", name, 100.0) for rank in range(count)]


WATCHDOGS = (
    "Watchdog timeout (self.watchdog_timeout=300)",
    "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    "self.watchdog_timeout=300: Watchdog timeout (self.watchdog_timeout=300)",
)
ROLE_WATCHDOG = "{}Manager watchdog timeout (self.watchdog_timeout=60, self.soft=True)"
BEFORE = Progress(kind="prefill", who="TP0", at=10.0, last_at=99.0, running=5)
LATER = Progress(kind="decode", who="TP0", at=150.0, last_at=200.0)
PROBE = 'Liveness probe failed: Get "http://10.0.0.1:30000/health": context deadline exceeded'
SIZES = (
    "[enforce fail at /gloo/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 1. Received data",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE, but Rank 1 …",
)
COMPILES = Line(text="Try DeepGEMM JIT Compiling for <GroupedFp8> N=7168", who="DP12 TP12 EP12", at=5.0)
EXPERTS = ErrorOf(type="RuntimeError", text="DeepEP error: timeout (dispatch CPU)")
LOST = "Losing connection with prefill instance (bootstrap_addr: 10.0.0.3:8998), 3 requests affected"


ALL_WATCHDOGS = [
    case(*(watchdog(f"TP{rank}", text) for rank in range(8)), BEFORE, arguments={"tp_size": 8}) for text in WATCHDOGS
]
DECODES, ANSWERS = Progress(kind="decode", at=10.0, last_at=100.0), Progress(kind="answer", at=10.0, last_at=40.0)
ENDED = recorded(2, "all_reduce", 8, "completed")
LOSSES = [Line(text=LOST, who="TP0", at=50.0), Line(text=LOST.replace("Losing", "Lost"), who="TP0", at=50.0)]
LOADS = [stage("TP0", "weights", 100.0), stage("TP1", "weights", 101.0), Line(text="x", at=160.0)]
#: By class, who is named, and what headline or steps say: words of logs, and facts, that have no stack.
WORDS: dict[tuple[str, str | None, str], list[Case]] = {
    ("no_progress", None, "all 8 ranks"): ALL_WATCHDOGS,
    ("no_progress", None, "prefill"): ALL_WATCHDOGS,
    ("no_progress", None, "py-spy"): ALL_WATCHDOGS,
    ("no_progress", None, ""): [case(health("00:25:10", 86400.0 + 1530.0))],
    ("no_progress", "TP0", ""): [case(stage("TP0", "kv_cache", 100.0), *each(4, "graphs")[1:], Line(text="x", at=9e3))],
    ("detokenizer_stuck", "detokenizer", ""): [
        case(watchdog("detokenizer", ROLE_WATCHDOG.format("Detokenizer"))),
        # Batches go on, and no answer comes back.
        case(*hang(at=100.0), *hang(at=199.0), LATER),
    ],
    ("tokenizer_stuck", "tokenizer", ""): [
        case(watchdog("tokenizer", ROLE_WATCHDOG.format("Tokenizer"))),
        # A health check that ends much too late tells of the event loop; so does a probe that fails beside batches.
        case(health("00:10:00", 86400.0 + 1530.0)),
        case(Container(name="sglang", notes=(PROBE,)), DECODES, ANSWERS),
    ],
    ("collective_mismatch", None, ""): [case(recorded(0, "gloo:all_reduce"), recorded(1, "gloo:broadcast"))],
    ("rank_stuck", "TP2", ""): [case(recorded(0, "all_reduce", 9), recorded(1, "all_reduce", 9), ENDED)],
    # An exchange of experts waits for a rank that compiles.
    ("rank_stuck", "DP12 TP12", "compiled"): [case(COMPILES, Raised(who="DP2 TP2 EP2", at=105.0, chain=(EXPERTS,)))],
    ("peer_lost", "prefill", ""): [case(line, *hang()) for line in LOSSES],
    ("busy", None, "loading weights"): [case(*LOADS)],
    ("startup_timeout", "node 1", "--dist-init-addr"): [
        case(*each(4, "distributed"), Line(text="x", at=900.0), arguments={"tp_size": 8, "nnodes": 2})
    ],
}


@pytest.mark.parametrize(("told", "expected"), [(one, expected) for expected, some in WORDS.items() for one in some])
def test_words_without_stacks(told: Case, expected: tuple[str, str | None, str]) -> None:
    found = first_of(told)
    assert (found.kind, found.who) == expected[:2]
    assert expected[2] in "\n".join([found.headline, *found.next])


@pytest.mark.parametrize(
    ("lines", "kind", "who"),
    [
        ([nccl(rank) for rank in range(4)], "symmetric_stall", None),
        ([nccl(0), nccl(1, 77, "ALLGATHER"), nccl(2), nccl(3)], "collective_mismatch", None),
        ([nccl(0), nccl(1, 77, size=8192), nccl(2), nccl(3)], "collective_mismatch", None),
        ([nccl(0), nccl(1, 76), nccl(2), nccl(3)], "rank_stuck", "TP1"),
        ([nccl(rank) for rank in (0, 1, 3)], "rank_stuck", "TP2"),
    ],
)
def test_time_limits_of_nccl(tmp_path: Path, lines: list[str], kind: str, who: str | None) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    found = first_of(case(*read([path]), arguments={"tp_size": 4}))
    assert (found.kind, found.who) == (kind, who)


@pytest.mark.parametrize("text", SIZES)
def test_words_of_sizes_that_differ(text: str) -> None:
    raised = Raised(who="TP2", chain=(ErrorOf(type="RuntimeError", text=text, frames=frames(*POLL)),))
    assert (first_of(case(raised)).kind, first_of(case(raised)).component) == ("collective_mismatch", "pd_transfer")
    assert first_of(case(Line(text=f"what():  {text}"))).kind == "collective_mismatch"


@pytest.mark.parametrize(
    ("told", "kinds"),
    [
        (alive(), ["no_incident"]),
        # A long batch, after which batches go on.
        ([*hang(), LATER, Progress(kind="health", at=10.0, last_at=200.0, status=200)], ["no_incident"]),
        ([stage("TP0", "weights", 100.0), Stage(name="ready", is_done=True, at=2100.0)], ["no_incident"]),
        ([], []),
        ([Line(text="hello")], []),
    ],
)
def test_what_is_healthy_or_tells_nothing(told: list[Event], kinds: list[str]) -> None:
    assert [one.kind for one in find_stalls(case(*told))] == kinds


@pytest.mark.parametrize(
    "end",
    [
        Exit(signal="SIGKILL", at=101.0),
        Raised(who="TP0", at=101.0, chain=(ErrorOf(type="ValueError", text="x"),)),
        Line(text="something broke", level="error", at=101.0),
    ],
)
def test_what_ends_badly_is_not_called_healthy(end: Event) -> None:
    assert find_stalls(case(*alive(), end)) == []


@pytest.mark.parametrize(
    ("running", "queued", "kind", "silent", "answered", "stands"),
    [
        (4, 0, "decode", 400.0, 0.0, True),
        (0, 9, "decode", 400.0, 0.0, True),
        (0, 0, "prefill", 400.0, 0.0, True),
        (0, 0, "decode", 400.0, 0.0, False),
        (4, 0, "decode", 30.0, 0.0, False),
        (4, 0, "decode", 400.0, 1000.0, False),
    ],
)
def test_requests_that_stand_still_behind_an_answered_health_check(
    running: int, queued: int, kind: str, silent: float, answered: float, stands: bool
) -> None:
    end = 1000.0 + silent
    batch = Progress(
        order=5, at=900.0, who="TP0", kind=kind, count=9, last_at=1000.0, last_order=50, running=running, queued=queued
    )
    health = Progress(order=6, at=900.0, kind="health", count=99, status=200, last_at=end, last_order=90)
    answer = Progress(order=7, at=900.0, kind="answer", count=3, status=200, last_at=answered or 950.0, last_order=40)
    kinds = {one.kind for one in find_stalls(case_of([batch, health, answer]))}
    assert ("no_progress" in kinds, "no_incident" in kinds) == (stands, not stands)


def test_the_clock_of_another_file_makes_no_request_stand_still() -> None:
    fields = {"order": 5, "at": 900.0, "count": 9, "last_order": 50, "running": 4}
    batch = Progress(who="TP0", kind="decode", last_at=1000.0, source="server.log:50", **fields)
    later = Line(order=70, at=90_000.0, text="another host's", level="warning", source="dmesg.txt:1")
    assert "no_progress" not in {one.kind for one in find_stalls(case_of([batch, later]))}
