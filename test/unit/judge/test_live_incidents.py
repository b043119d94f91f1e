"""The causes of incidents that the crash handler watched: by class and level, incidents that have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from sglang_crashkit.model import ALONE, ONLY
from sglang_crashkit.model.incident import Exit
from unit.judge.live_incidents import PEOPLE, TP0, TP1, died, hung, incident, killed, raised, verdict_of
from unit.judge.stack_events import BROADCAST, MODEL_ALL_REDUCE, TORCH_WRAPPER

OOM = killed(detail="memory.events counts 1 OOM kill(s) more than before", cause="oom_kill")
REAPED = Exit(None, None, "unknown", "reaped", "t")
STATUS = Exit(3, None, "exit_status", "no Python exception was reported", "t")
ASYNC = "\nCUDA kernel errors might be asynchronously reported at some other API call"
SCHEDULER = "run_scheduler_process (sglang/srt/managers/scheduler.py:5000)"
LOADING = (
    "__init__ (sglang/srt/managers/tp_worker.py:100)",
    "__init__ (sglang/srt/managers/scheduler.py:300)",
    SCHEDULER,
)
TAKES_IN = "handle_generate_request (sglang/srt/managers/scheduler.py:1)"
FORWARD = ("forward (sglang/srt/models/llama.py:10)", "run_batch (sglang/srt/managers/scheduler.py:2000)", SCHEDULER)
GLOO = "RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation"
WAITS, WORKS = "all_reduce (torch/distributed/distributed_c10d.py:3000)", "spin (x.py:1)"
GATHERS = "all_gather_into_tensor (torch/distributed/distributed_c10d.py:4000)"
RECEIVES = [*BROADCAST[:5]]
CALLED = ["barrier (torch/distributed/distributed_c10d.py:1)", "act (x.py:1)", *RECEIVES[1:]]
BOTH_WAIT = {TP0: [WAITS], TP1: [WAITS]}
TIME_LIMIT = {"event": "exception", "pid": PEOPLE[TP0][0], "message": GLOO}
TWO_PLACES = {TP0: [WAITS, WORKS], TP1: [WAITS, "f (y.py:1)"]}
NODES = {"environment": {"arguments": {"nnodes": 2}}}
#: A GPU that another program has, while each rank is known to have another one.
OTHERS = {
    "gpus": {
        "devices": [
            {"bus_id": "0000:3b:00", "processes": [], "others": [{"pid": 99, "used": 1}]},
            {"bus_id": "0000:5e:00", "processes": [{"pid": PEOPLE[title][0]} for title in (TP0, TP1)], "others": []},
        ],
        "xids": [{"xid": 94, "bus_id": "0000:3b:00", "processes": []}],
    }
}
UPDATE = {
    "server": ["acquire (threading.py:1)", "update_weights_from_disk (sglang/srt/managers/tokenizer_manager.py:1)"]
}
UPDATES = "WeightUpdater.update_weights_from_distributed (sglang/srt/x.py:1)"
PYNCCL = [
    "NCCLLibrary.ncclAllReduce (sglang/srt/distributed/device_communicators/pynccl_wrapper.py:1)",
    "PyNcclCommunicator.all_reduce (sglang/srt/distributed/device_communicators/pynccl.py:1)",
]
DIVERGED = {"kind": "mode", "step": 18204, "statement": "TP1 ran extend where TP0 ran decode.", "level": "established"}
ABORTED = killed("SIGABRT", "x")
BUS = killed("SIGBUS", "no Python exception was reported")
FULL_SHM = {"environment": {"shared_memory": {"used_bytes": 990, "total_bytes": 1000}}}
ONLY_ONE = {"suspects": [{"rid": "r1", "level": "supported", "reasons": [ALONE]}]}
WAITING = {"suspects": [{"rid": "r1", "level": "supported", "reasons": [ONLY]}]}
OF_THREE = {"requests": {"unfinished": 3}}
SUSPECTED = {"suspects": [{"rid": "r1", "level": "supported", "reasons": ["it was alone"]}]}
AGAIN = {"suspects": [{"rid": "r1"}], "fault": {"count": 2, "seen": {"r1": 1}}}


def finding(kind: str, level: str = "established", waiting: Sequence[int] = ()) -> dict[str, Any]:
    one = {"group": "tp", "kind": kind, "level": level, "statement": "so they are", "evidence": [], "pids": [11]}
    one["waiting_pids"] = list(waiting)
    return {"collectives": {"findings": [one], "missing": []}}


def but(document: dict[str, Any], title: str, **fields: Any) -> dict[str, Any]:
    """Return the document with other fields of one process."""
    next(one for one in document["processes"] if one["title"] == title).update(fields)
    return document


def in_step(title: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with a rank in the middle of a step."""
    step = {"number": 7, "mode": "extend", "phase": "forward_begun"}
    return but(document, title, steps={"last": [], "in_step": step})


def alone(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without TP1, which another node has."""
    document["processes"] = [one for one in document["processes"] if one["title"] != TP1]
    return document


def crossed(late: list[int], later: list[int]) -> dict[str, Any]:
    """Return what recorders show of two groups, in each of which somebody is behind the other ranks."""
    both = [finding("behind")["collectives"]["findings"][0] | {"pids": pids} for pids in (late, later)]
    for one in both:
        one["waiting_pids"] = [pid for pid in (10, 11) if pid not in one["pids"]]
    return {"collectives": {"findings": both, "missing": []}}


def xid(number: int, pid: int | None = None) -> dict[str, Any]:
    holders = [{"pid": pid, "title": "x", "level": "established"}] if pid else []
    return {"gpus": {"devices": [], "xids": [{"xid": number, "bus_id": "0000:3b:00", "processes": holders}]}}


def looks(*points: tuple[str, float], state: str = "R") -> dict[str, Any]:
    """Return a hang in which TP1 was seen at these times with so much CPU time used."""
    seen = [{"time": f"2026-01-01T00:00:{at}00000Z", "state": state, "cpu_secs": cpu} for at, cpu in points]
    return but(hung(TP1), TP1, looks=seen)


def at(document: dict[str, Any], trigger: str, event: float) -> dict[str, Any]:
    document["trigger"]["time"] = trigger
    document["gpus"]["xids"][0]["time"] = event
    return document


#: What a rank waits in, and what that is for, as stacks have it.
ALL_REDUCE, BATCH = [*MODEL_ALL_REDUCE[:4]], [*MODEL_ALL_REDUCE[4:]]
TAKE_IN = [*BROADCAST]
#: In the handler of a signal, within whatever the rank was in.
HANDLER = ["<module> (<string>:1)", "act (/x/sitecustomize.py:12)"]
BARRIER = ["barrier (torch/distributed/distributed_c10d.py:1)", TORCH_WRAPPER, *HANDLER]
LOCK = ["wait (threading.py:300)", "wait (threading.py:600)", *HANDLER]
JOINS = [
    "_new_process_group_helper (torch/distributed/distributed_c10d.py:1)",
    "init_custom_process_group (sglang/srt/utils/common.py:1)",
    "init_weights_update_group (sglang/srt/model_executor/model_runner.py:1)",
    "process_input_requests (sglang/srt/managers/scheduler.py:1)",
]
SERVER = ["run (uvicorn/server.py:1)", "launch_server (sglang/srt/entrypoints/http_server.py:1)"]
TWO_NODES = {"environment": {"parallel": {"tp": 2, "nnodes": 2, "node_rank": 0}}}
EST, SUP, UNK = "established", "supported", "unknown"
DETOKENIZER, STARTING = "sglang::detokenizer", ("launch_failed",)
#: By class and level: incidents that have it.
TABLE: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("host_oom", EST): {
        "killed for memory": incident("oom_kill", TP1, end=OOM),
        "killed for memory while it raised": incident("oom_kill", TP1, end=OOM, events=["draining"]),
        "the detokenizer for memory": incident("oom_kill", DETOKENIZER, end=OOM),
    },
    ("host_oom", SUP): {
        "another killed for memory": but(incident("signal", TP0, end=killed()), TP1, exit=msgspec.structs.asdict(OOM))
    },
    ("killed", EST): {
        "SIGKILL, no OOM kill": incident("signal", TP1, end=killed()),
        "SIGKILL while it starts": incident("signal", TP1, end=killed(), opened="failed_start", events=STARTING),
        "the main process": incident("signal", "server", end=killed()),
        "Xid, and killed": incident("signal", TP0, end=killed(), **xid(79, 10)),
        "a kernel in a GPU core": but(incident("signal", TP0, end=killed()), TP0, gpu=["kernel gemm"]),
        "killed, another stopped": incident("signal", TP1, end=killed(), state={TP0: "T (stopped)"}),
        "killed and apart": incident("signal", TP1, end=killed(), divergence=DIVERGED, **finding("mismatch")),
        "one who is a consequence": incident(
            "signal",
            TP1,
            end=killed(),
            events=[{"event": "exception", "pid": 10, "message": "torch.OutOfMemoryError: x"}],
        ),
    },
    ("killed", SUP): {
        "SIGKILL, no one counts": incident("signal", TP1, end=killed(detail="no OOM counter could be read"))
    },
    ("segfault", EST): {
        "SIGSEGV": died("SIGSEGV"),
        "SIGSEGV, and suspected": died("SIGSEGV", **SUSPECTED),
    },
    ("aborted", EST): {
        "SIGABRT": died("SIGABRT"),
        "Xid 45 follows": died("SIGABRT", first=TP0, **xid(45, 10)),
        "aborted, and others wait for it": died("SIGABRT", **finding("behind", waiting=[10])),
    },
    ("bus_error", EST): {"SIGBUS": incident("signal", TP1, end=BUS)},
    ("fatal_signal", EST): {"SIGFPE": died("SIGFPE")},
    ("asked_to_stop", EST): {
        "SIGTERM to one": died("SIGTERM"),
        "the detokenizer asked": incident("signal", DETOKENIZER, end=killed("SIGTERM", "x")),
    },
    ("asked_to_stop", SUP): {"no one failed, asked to end": incident(events=["draining"], level=UNK)},
    ("exited", EST): {
        "ended by itself": incident("exit_status", TP1, end=STATUS),
    },
    ("exited", SUP): {
        "a shell's child killed": incident("exit_status", TP1, end=msgspec.structs.replace(STATUS, code=137)),
        "ended, maybe of another's": incident("exit_status", TP1, end=STATUS, level="supported"),
    },
    ("unknown", UNK): {
        "exit status not known": incident("unknown", TP1, end=REAPED),
        "ended with its parent": incident("parent_ended", TP1, end=killed(cause="parent_ended")),
        "ended, another stopped": incident("unknown", TP1, end=REAPED, state={TP0: "T (stopped)"}),
        "nothing": incident(level=UNK),
    },
    ("detokenizer_lost", EST): {
        "the detokenizer killed": incident("signal", DETOKENIZER, end=killed()),
        "the detokenizer raised": raised("ValueError: x", first=DETOKENIZER),
        "the detokenizer, and an Xid": raised("RuntimeError: x", first=DETOKENIZER, **xid(94, 10)),
    },
    ("tokenizer_lost", EST): {
        "a tokenizer worker": incident("signal", "sglang::tokenizer_worker:0", end=killed()),
        "the main process's tokenizer": raised(
            "_pickle.UnpicklingError: x",
            "TokenizerManager.handle_loop (sglang/srt/managers/tokenizer_manager.py:1)",
            first="server",
        ),
    },
    ("gpu_hardware", EST): {
        "Xid 79 of its GPU": died("SIGABRT", first=TP0, **xid(79, 10)),
        "a link of Blackwell's": died("SIGABRT", first=TP0, **xid(149, 10)),
        "Xid, and a CUDA error": raised("RuntimeError: CUDA error: x", *FORWARD, **xid(79, 10)),
    },
    ("gpu_hardware", SUP): {
        "Xid 79 of some GPU": raised("RuntimeError: x", *FORWARD, **xid(79)),
        "a fresh Xid": at(raised("RuntimeError: x", **xid(79)), "1970-01-01T01:00:00Z", 3590.0),
        "Xid, and words of no GPU": raised("RuntimeError: shapes differ", *FORWARD, **xid(145, 10)),
    },
    ("cuda_fault", SUP): {
        "illegal access, new": raised(
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered" + ASYNC, *FORWARD
        ),
        "Xid 31 is a program's": died("SIGABRT", first=TP0, **xid(31, 10)),
        "aborted, apart, on an Xid": incident("signal", TP0, end=ABORTED, divergence=DIVERGED, **xid(31, 10)),
    },
    ("exception", SUP): {
        "an old Xid": at(raised("RuntimeError: x", **xid(79)), "1970-01-01T01:00:00Z", 60.0),
        "new, and in no step yet": raised("RuntimeError: x", "act (<string>:1)", **WAITING),
        "somebody else's code": raised("RuntimeError: asked to raise", "fail (/site/sitecustomize.py:1)"),
    },
    ("gpu_oom_serving", EST): {
        "Xid, and memory": raised("torch.OutOfMemoryError: x", *FORWARD, **xid(94, 10)),
        "GPU memory, and suspected": raised("torch.OutOfMemoryError: x", *FORWARD, **SUSPECTED),
    },
    ("cuda_fault", EST): {
        "an exception in a GPU core": but(
            died("SIGABRT", first=TP0), TP0, gpu=["exception: CUDA_EXCEPTION_14 in kernel"]
        ),
    },
    ("gpu_oom_at_start", SUP): {"GPU memory, failed start": raised("torch.OutOfMemoryError: x", opened="failed_start")},
    ("kv_pool_exhausted", SUP): {
        "no room in the pool": raised(
            "RuntimeError: Prefill out of memory. Try to lower your batch size.",
            "alloc_for_extend (sglang/srt/mem_cache/common.py:1)",
        )
    },
    ("shm_exhausted", SUP): {
        "SIGBUS, /dev/shm full": incident("signal", TP1, end=BUS, **FULL_SHM),
        "/dev/shm, by its frames": raised(
            "OSError: [Errno 28] No space left on device", "__init__ (multiprocessing/shared_memory.py:1)"
        ),
    },
    ("startup_port", SUP): {
        "a port, the kernel's word": raised("OSError: [Errno 98] Address already in use", opened="failed_start")
    },
    ("startup_timeout", EST): {
        "too slow": incident(events=[{"event": "startup_timeout", "message": "TP1 not ready"}], opened="failed_start")
    },
    ("startup_failed", EST): {
        "a status": incident("exit_status", TP0, end=STATUS, opened="failed_start", events=STARTING)
    },
    ("stopped_process", EST): {
        "stopped": hung(TP1, state={TP1: "T (stopped)"}),
        "the detokenizer stopped": hung(DETOKENIZER, state={DETOKENIZER: "T"}),
        "both stopped": hung(state={TP0: "T (stopped)", TP1: "T (stopped)"}),
        "stopped, until another one gave up": incident("lost_peer", TP1, level=SUP, state={TP1: "T (stopped)"}),
        "frozen": but(hung(TP1), TP1, state={"State": "S (sleeping)", "wchan": "do_freezer_trap"}),
        "traced": hung(TP1, state={TP1: "t (tracing stop)"}),
        "the main process stopped": hung("server", state={"server": "T (stopped)"}),
    },
    ("no_progress", UNK): {
        "a helper stopped": hung(TP1, state={"ninja": "T (stopped)"}),
        "spins": looks(("01.0", 5.0), ("05.0", 9.0)),
        "an unsure recorder": hung(**finding("mismatch", UNK)),
        "watchdog, no stacks": hung(events=["watchdog_timeout"], level=UNK),
    },
    ("no_progress", SUP): {"waits for a lock": alone(hung(TP0, doing={TP0: LOCK + BATCH}))},
    ("starved_process", SUP): {"starved": looks(("01.0", 5.0), ("05.0", 5.1))},
    ("stuck_in_kernel", EST): {"in the kernel": looks(("01.0", 5.0), ("05.0", 5.0), state="D")},
    ("stuck_in_kernel", SUP): {"in the kernel at one look": looks(("05.0", 5.0), state="D")},
    ("rank_stuck", SUP): {
        "spins in a batch": hung(TP1, doing={TP0: ALL_REDUCE + BATCH, TP1: HANDLER + BATCH}),
        "spins within a collective": hung(TP1, doing={TP0: ALL_REDUCE + BATCH, TP1: HANDLER + ALL_REDUCE + BATCH}),
        "an update in which a rank hangs": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS, UPDATES]}),
        "both behind a third": hung(**crossed([10], [10])),
        "the only rank here is elsewhere": alone(hung(TP0, doing={TP0: [WORKS]})),
        "crossed, and one elsewhere": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}, **crossed([10], [11])),
        "all in one, and one behind": hung(TP1, doing=BOTH_WAIT, **finding("behind")),
        "waited for until a time limit": incident("lost_peer", TP1, level=SUP, events=[TIME_LIMIT]),
        "aborted after a wait": died("SIGABRT", **finding("behind", waiting=[11])),
        "an update that waits for a rank elsewhere": hung(TP1, doing=UPDATE | {TP0: [WAITS], TP1: [WORKS]}),
        "elsewhere, and suspected": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}, **SUSPECTED),
    },
    ("detokenizer_stuck", SUP): {
        "spins in its loop": hung(DETOKENIZER, doing={DETOKENIZER: HANDLER, TP0: TAKE_IN, TP1: TAKE_IN}),
        # What idle ranks are in meanwhile says nothing of it.
        "the detokenizer": hung(DETOKENIZER, doing={DETOKENIZER: [WORKS], TP1: [WAITS]}),
        "the detokenizer, unseen": hung(DETOKENIZER, doing={TP0: [GATHERS], TP1: [WAITS]}),
        "the detokenizer, while a rank is in a step": in_step(
            TP0, hung(DETOKENIZER, doing={DETOKENIZER: [WORKS], TP1: RECEIVES})
        ),
    },
    ("tokenizer_stuck", SUP): {
        "spins": hung("server", doing={"server": HANDLER + SERVER, TP0: TAKE_IN, TP1: TAKE_IN}),
        "the main process's loop": hung("server", doing={"server": [WORKS], TP1: [WAITS]}),
        "a worker's loop": hung("sglang::tokenizer_worker:0"),
    },
    ("symmetric_stall", SUP): {
        "all in one of a batch": hung(doing=dict.fromkeys((TP0, TP1), ALL_REDUCE + BATCH)),
        "of two nodes": alone(hung(TP0, doing={TP0: ALL_REDUCE + BATCH}, **TWO_NODES)),
        "asked for in two places, of several nodes": hung(doing=TWO_PLACES, **NODES),
        "of two stages": but(hung(doing={TP0: [WAITS], TP1: [GATHERS]}), TP1, rank={"pp": 1, "tp": 0}),
        "the only rank waits": alone(hung(TP0, doing={TP0: [WAITS]})),
        "all in one": hung(doing=BOTH_WAIT),
        "all in one, with its class": hung(doing={TP0: PYNCCL, TP1: PYNCCL}),
        "the only rank here waits": alone(hung(TP0, doing={TP0: [WAITS]}, **SUSPECTED, **NODES)),
        "all in one, and one of them named": hung(TP1, doing=BOTH_WAIT),
        "ended earlier": hung(doing=BOTH_WAIT, divergence=DIVERGED | {"kind": "ended_earlier"}),
        "not diverged": hung(doing=BOTH_WAIT, divergence={"kind": "none"}),
        "gloo's limit": incident("lost_peer", TP0, error=GLOO, frames=FORWARD, level=SUP),
    },
    ("collective_mismatch", SUP): {
        "in a barrier": hung(doing={TP0: ALL_REDUCE + BATCH, TP1: BARRIER + BATCH}),
        "in a barrier between batches": hung(doing={TP0: ALL_REDUCE + BATCH, TP1: BARRIER + TAKE_IN}),
        "two collectives": hung(doing={TP0: [WAITS], TP1: [GATHERS]}),
        "each behind the other": hung(**crossed([10], [11])),
        "called meanwhile": in_step(TP0, hung(doing={TP0: [WAITS], TP1: CALLED})),
        "in a step itself": in_step(TP1, hung(doing={TP0: [WAITS], TP1: RECEIVES})),
        "aborted amid a mismatch": incident("signal", TP1, end=ABORTED, **finding("mismatch")),
    },
    ("collective_mismatch", EST): {"two collectives, recorded": hung(**finding("mismatch"))},
    ("rank_divergence", EST): {"diverged": hung(doing=BOTH_WAIT, divergence=DIVERGED)},
    ("rank_divergence", SUP): {
        "one takes in requests": hung(doing={TP0: ALL_REDUCE + BATCH, TP1: TAKE_IN}),
        "aborted and apart": incident("signal", TP1, end=ABORTED, divergence=DIVERGED),
        "a batch less, each behind the other": hung(
            doing={TP0: [WAITS, *FORWARD], TP1: RECEIVES}, **crossed([10], [11])
        ),
    },
    ("weight_update_deadlock", SUP): {
        "no trainer": alone(hung(TP0, doing={TP0: JOINS})),
        "an update, with its class": hung(doing={TP0: ["f (x.py:1)", UPDATES]}),
        "a weight update": hung(doing=UPDATE),
    },
    ("busy", SUP): {"busy": incident("busy", level=SUP, opened="hang", trigger="no_progress", text="At work.")},
    ("peer_lost", SUP): {
        "a pair's": incident(
            "peer_lost", level=SUP, peers=[{"sign": "heartbeat"}], opened="peer_lost", trigger="peer_lost"
        )
    },
    ("connection_lost", SUP): {
        "a node's": incident("lost_peer", TP0, error="RuntimeError: Connection closed by peer", level=SUP),
        "a connection while several start": incident(
            "lost_peer", TP0, error="RuntimeError: Connection closed", frames=LOADING, level=SUP, **NODES
        ),
    },
    ("startup_failed", SUP): {
        "a connection while one host starts": incident(
            "lost_peer", TP0, error="RuntimeError: NCCL error: unhandled system error", frames=LOADING, level=SUP
        )
    },
    ("poison_request", SUP): {
        "taken in": raised(
            "TypeError: x", TAKES_IN, "event_loop_normal_disagg_prefill (sglang/srt/disaggregation/prefill.py:1)"
        ),
        "known": raised(
            "RuntimeError: selected index k out of range",
            "get_top_logprobs_raw (sglang/srt/layers/logprob_processor.py:94)",
        ),
        "again": raised("ValueError: x", *FORWARD, **AGAIN),
        "again, by NCCL": raised("torch.distributed.DistBackendError: NCCL error in: x", *FORWARD, **AGAIN),
        "new, and suspected": raised("IndexError: x", *FORWARD, **SUSPECTED),
        "new, and alone in its step": raised("IndexError: x", *FORWARD, **ONLY_ONE, **OF_THREE),
        "begun": raised("ValueError: x", "S.prepare_for_extend (a.py:1)", **WAITING),
        "hangs, and suspected": hung(TP1, **SUSPECTED),
    },
    ("exception_in_sglang", SUP): {
        "an Xid of somebody else's GPU": raised("RuntimeError: The size of tensor a must match", *FORWARD, **OTHERS),
        "Xid, and a socket's error": raised(
            "zmq.error.ZMQError: Resource temporarily unavailable", *FORWARD, **xid(94)
        ),
        "taken in, and a thread too many": raised(
            "RuntimeError: can't start new thread", "submit (concurrent/futures/thread.py:1)", TAKES_IN
        ),
        "for the first time": raised("ValueError: x", *FORWARD, suspects=[{"rid": "r1"}]),
        "new, and alone in a server": raised("IndexError: x", *FORWARD, **ONLY_ONE),
        "new, and alone in its replica": but(
            raised("IndexError: x", *FORWARD, **ONLY_ONE, **OF_THREE), TP0, rank={"dp": 0}
        ),
        "the host's limit, and suspected": raised("OSError: [Errno 24] x", *FORWARD, **SUSPECTED),
        "a thread too many, and suspected": raised("RuntimeError: can't start new thread", *FORWARD, **SUSPECTED),
        "a missing file while serving": raised("FileNotFoundError: [Errno 2] 'x'", "f (transformers/x.py:1)", *FORWARD),
    },
    ("transfer_failed", SUP): {
        "transfers only": incident("peer_lost", level=SUP, peers=[{"sign": "failed_transfer"}]),
        "taken in, while the other of a pair is away": raised(
            "TypeError: x",
            *["send (requests/sessions.py:1)"] * 4,
            "__init__ (sglang/srt/disaggregation/mooncake/conn.py:1)",
            TAKES_IN,
        ),
    },
}


@pytest.mark.parametrize(
    ("document", "name", "level"),
    [pytest.param(document, *cause, id=name) for cause, its in TABLE.items() for name, document in its.items()],
)
def test_an_incident_has_its_cause(document: dict[str, Any], name: str, level: str) -> None:
    found = verdict_of(document)
    assert (found.kind, found.level) == (name, level), found
    assert found.headline
    assert found.next


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("RuntimeError: Ninja build failed.", "`nvcc --version; ninja --version; c++ --version` must work"),
        ("RuntimeError: CUDA error: invalid device ordinal", "`nvidia-smi -L` and CUDA_VISIBLE_DEVICES"),
        ("zmq.error.ZMQError: Too many open files", "`ulimit -n` bounds"),
        ("RuntimeError: can't start new thread", "`cat /sys/fs/cgroup/pids.max; ulimit -u` bound"),
    ],
)
def test_what_an_exception_asks_for_is_a_step(error: str, step: str) -> None:
    assert any(one.startswith(step) for one in verdict_of(raised(error, *LOADING)).next)


def test_a_process_that_the_kernel_holds_has_its_command() -> None:
    assert verdict_of(TABLE["stopped_process", EST]["stopped"]).next[0].startswith("`kill -CONT 11`")
    assert verdict_of(TABLE["stuck_in_kernel", EST]["in the kernel"]).next[0].startswith("`cat /proc/11/stack` ")


@pytest.mark.parametrize(
    ("suspects", "step"),
    [
        ([{"rid": "r7", "level": "supported"}, {"rid": "r8"}], "find request r7 in requests/requests.jsonl, and"),
        ([{"rid": "r7", "level": "unknown"}], "find it in requests/requests.jsonl by the ids that the rank names, and"),
    ],
)
def test_the_request_that_is_to_be_blocked_is_named(suspects: list[dict[str, Any]], step: str) -> None:
    found = verdict_of(raised("TypeError: x", TAKES_IN, *FORWARD[1:], suspects=suspects))
    assert found.next[0] == f"{step} block its like at the gateway"
    assert ("request r7 is suspected most" in found.because) is ("r7" in step)
    # It would end the server again.
    assert found.restart_helps == "unknown"


def test_a_suspect_alone_makes_it_the_request_and_says_why() -> None:
    found = verdict_of(raised("IndexError: x", *FORWARD, **SUSPECTED))
    assert found.because[1] == "request r1 is suspected most: it was alone"


def test_the_step_that_it_died_in_is_told_with_its_mode() -> None:
    step = {"number": 7, "mode": "decode", "size": 2, "rids": ["a", "b"]}
    document = but(incident("signal", TP1, end=killed()), TP1, steps={"last": [], "in_step": step})
    assert verdict_of(document).because[1] == "It was in step 7 (decode, 2 requests, with a, b)."


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (raised("ValueError: no such file", "load_model (loader.py:1)"), [TP0]),
        (incident("signal", TP1, end=killed("SIGSEGV", "x")), [TP1]),
        # No one stands out: the first that was at it.
        (hung(), [TP0]),
    ],
)
def test_a_control_request_that_it_failed_at_is_a_reason(document: dict[str, Any], names: list[str]) -> None:
    for process in document["processes"]:
        process["control"] = "flush_cache" if process["role"] == "scheduler" else ""
    told = [one for one in verdict_of(document).because if "control request" in one]
    assert told == [f"{name} (pid {PEOPLE[name][0]}) worked on flush_cache, a control request." for name in names]


def test_a_rank_that_hangs_in_a_garbage_collection_says_so() -> None:
    sign = {"doing": "x", "batches": 1, "requests": 1, "mode": "", "tokens": 0, "seconds_before": 12.0}
    document = but(hung(), TP1, last_sign=sign | {"collecting_secs": 12.3})
    assert f"{TP1} (pid {PEOPLE[TP1][0]}) was in a garbage collection for 12 s." in verdict_of(document).because
    document = but(hung(), TP1, last_sign=sign)
    assert not any("garbage" in one for one in verdict_of(document).because)


def test_the_record_of_a_rank_tells_more_than_the_timeline() -> None:
    document = raised("torch.AcceleratorError: CUDA error: an illegal")
    record = {
        "message": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "traceback": [
            "run_scheduler_process (sglang/srt/managers/scheduler.py:1)",
            "forward (sglang/srt/models/x.py:2)",
        ],
    }
    assert verdict_of(document).kind == "exception"
    found = verdict_of(document, {10: record})
    assert found.kind == "cuda_fault"
    assert "in forward (sglang/srt/models/x.py:2)" in found.headline
