from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.analysis import causes
from sglang_crashkit.analysis.causes import rules
from sglang_crashkit.analysis.causes.advice import ADVICE
from sglang_crashkit.analysis.suspects import ALONE, ONLY
from sglang_crashkit.model.incident import Exit
from unit.analysis.causes.cases import PEOPLE, TP0, TP1, died, hung, incident, killed, raised

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
LOADER, TOKENIZER = "load_model (sglang/srt/model_loader/loader.py:1)", "from_pretrained (transformers/x.py:1)"
LAUNCHER = "Engine._launch_subprocesses (sglang/srt/entrypoints/engine.py:1)"
FORWARD = ("forward (sglang/srt/models/llama.py:10)", "run_batch (sglang/srt/managers/scheduler.py:2000)", SCHEDULER)
CHECK = ("raise_error_or_warn (sglang/srt/utils/common.py:4691)", *FORWARD[1:])
GLOO = "RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation"
WAITS, WORKS = "all_reduce (torch/distributed/distributed_c10d.py:3000)", "spin (x.py:1)"
GATHERS = "all_gather_into_tensor (torch/distributed/distributed_c10d.py:4000)"
RECEIVES = [
    "broadcast (torch/distributed/distributed_c10d.py:3000)",
    "broadcast_pyobj (sglang/srt/utils/common.py:1)",
    "SchedulerRequestReceiver.recv_requests (sglang/srt/managers/scheduler_components/request_receiver.py:1)",
]
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
LOADS = "safetensors_weights_iterator (sglang/srt/model_loader/weight_utils.py:1)"
PINNED = "alloc_with_pin_memory (sglang/srt/mem_cache/pool_host/common.py:364)"
UPDATE = {
    "server": ["acquire (threading.py:1)", "update_weights_from_disk (sglang/srt/managers/tokenizer_manager.py:1)"]
}
UPDATES = "WeightUpdater.update_weights_from_distributed (sglang/srt/x.py:1)"
PYNCCL = ["NCCLLibrary.ncclAllReduce (x/pynccl_wrapper.py:1)", "PyNcclCommunicator.all_reduce (x/pynccl.py:1)"]
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


EST, SUP, UNK = "established", "supported", "unknown"
PAIR = "transfer_worker (sglang/srt/disaggregation/nixl/conn.py:1153)"
DETOKENIZER, STARTING = "sglang::detokenizer", ("launch_failed",)
#: By class and level: incidents that have it.
TABLE: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("host_oom", EST): {
        "killed for memory": incident("oom_kill", TP1, end=OOM),
        "killed for memory while it raised": incident("oom_kill", TP1, end=OOM, events=["draining"]),
        "the detokenizer for memory": incident("oom_kill", DETOKENIZER, end=OOM),
    },
    ("host_oom", SUP): {"another killed for memory": but(incident("signal", TP0, end=killed()), TP1, exit=vars(OOM))},
    ("killed", EST): {
        "SIGKILL, no OOM kill": incident("signal", TP1, end=killed()),
        "SIGKILL while it starts": incident("signal", TP1, end=killed(), opened="failed_start", events=STARTING),
        "the main process": incident("signal", "server", end=killed()),
        "Xid, and killed": incident("signal", TP0, end=killed(), **xid(79, 10)),
        "no Xid seen": incident("signal", TP0, end=killed(), gpus={"devices": [{"index": 0}], "xids": []}),
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
        "SIGKILL, nobody counts": incident("signal", TP1, end=killed(detail="no OOM counter could be read"))
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
    ("shm_exhausted", SUP): {"SIGBUS, /dev/shm full": incident("signal", TP1, end=BUS, **FULL_SHM)},
    ("fatal_signal", EST): {"SIGFPE": died("SIGFPE")},
    ("asked_to_stop", EST): {
        "SIGTERM to one": died("SIGTERM"),
        "the detokenizer asked": incident("signal", DETOKENIZER, end=killed("SIGTERM", "x")),
    },
    ("asked_to_stop", SUP): {"nobody failed, asked to end": incident(events=["draining"], level=UNK)},
    ("exited", EST): {
        "ended by itself": incident("exit_status", TP1, end=STATUS),
    },
    ("exited", SUP): {
        "a shell's child killed": incident("exit_status", TP1, end=replace(STATUS, code=137)),
        "ended, maybe of another's": incident("exit_status", TP1, end=STATUS, level="supported"),
    },
    ("unknown", UNK): {
        "ended, nobody knows how": incident("unknown", TP1, end=REAPED),
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
        "illegal access, new": raised(
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered" + ASYNC, *FORWARD
        ),
    },
    ("gpu_oom_at_start", EST): {"GPU memory, failed start": raised("torch.OutOfMemoryError: x", opened="failed_start")},
    ("kv_pool_exhausted", EST): {
        "no room in the pool": raised(
            "RuntimeError: Prefill out of memory. Try to lower your batch size.",
            "alloc_for_extend (sglang/srt/mem_cache/common.py:1)",
        )
    },
    ("shm_exhausted", EST): {
        "/dev/shm, by its frames": raised(
            "OSError: [Errno 28] No space left on device", "__init__ (multiprocessing/shared_memory.py:1)"
        )
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
        "the only rank waits": alone(hung(TP0, doing={TP0: [WAITS]})),
        "the only rank here is elsewhere": alone(hung(TP0, doing={TP0: [WORKS]})),
        "of two stages": but(hung(doing={TP0: [WAITS], TP1: [GATHERS]}), TP1, rank={"pp": 1, "tp": 0}),
        "asked for in two places, of several nodes": hung(doing=TWO_PLACES, **NODES),
        "both behind a third": hung(**crossed([10], [10])),
        "an unsure recorder": hung(**finding("mismatch", UNK)),
        "watchdog, no stacks": hung(events=["watchdog_timeout"], level=UNK),
    },
    ("starved_process", SUP): {"starved": looks(("01.0", 5.0), ("05.0", 5.1))},
    ("stuck_in_kernel", SUP): {"in the kernel": looks(("01.0", 5.0), ("05.0", 5.0), state="D")},
    ("rank_stuck", SUP): {
        "one elsewhere": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}),
        "spins in another collective": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS, GATHERS]}),
        "crossed, and one elsewhere": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}, **crossed([10], [11])),
        "all in one, and one behind": hung(TP1, doing=BOTH_WAIT, **finding("behind")),
        "waited for until a time limit": incident("lost_peer", TP1, level=SUP, events=[TIME_LIMIT]),
        "aborted after a wait": died("SIGABRT", **finding("behind", waiting=[11])),
        "an update that waits for a rank elsewhere": hung(TP1, doing=UPDATE | {TP0: [WAITS], TP1: [WORKS]}),
        "elsewhere, and suspected": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}, **SUSPECTED),
    },
    ("detokenizer_stuck", SUP): {
        # What idle ranks are in meanwhile says nothing of it.
        "the detokenizer": hung(DETOKENIZER, doing={DETOKENIZER: [WORKS], TP1: [WAITS]}),
        "the detokenizer, unseen": hung(DETOKENIZER, doing={TP0: [GATHERS], TP1: [WAITS]}),
        "the detokenizer, while a rank is in a step": in_step(
            TP0, hung(DETOKENIZER, doing={DETOKENIZER: [WORKS], TP1: RECEIVES})
        ),
    },
    ("tokenizer_stuck", SUP): {
        "the main process's loop": hung("server", doing={"server": [WORKS], TP1: [WAITS]}),
        "a worker's loop": hung("sglang::tokenizer_worker:0"),
    },
    ("symmetric_stall", SUP): {
        "all in one": hung(doing=BOTH_WAIT),
        "all in one, with its class": hung(doing={TP0: PYNCCL, TP1: PYNCCL}),
        "the only rank here waits": alone(hung(TP0, doing={TP0: [WAITS]}, **SUSPECTED, **NODES)),
        "asked for by one that is not seen": hung(doing={TP0: [WAITS], TP1: [WAITS, WORKS]}),
        "all in one, and one of them named": hung(TP1, doing=BOTH_WAIT),
        "ended earlier": hung(doing=BOTH_WAIT, divergence=DIVERGED | {"kind": "ended_earlier"}),
        "not diverged": hung(doing=BOTH_WAIT, divergence={"kind": "none"}),
        "gloo's limit": incident("lost_peer", TP0, error=GLOO, frames=FORWARD, level=SUP),
    },
    ("collective_mismatch", SUP): {
        "two collectives": hung(doing={TP0: [WAITS], TP1: [GATHERS]}),
        "asked for in two places": hung(doing=TWO_PLACES),
        "each behind the other": hung(**crossed([10], [11])),
        "called meanwhile": in_step(TP0, hung(doing={TP0: [WAITS], TP1: CALLED})),
        "in a step itself": in_step(TP1, hung(doing={TP0: [WAITS], TP1: RECEIVES})),
        "aborted amid a mismatch": incident("signal", TP1, end=ABORTED, **finding("mismatch")),
    },
    ("collective_mismatch", EST): {"two collectives, recorded": hung(**finding("mismatch"))},
    ("rank_divergence", EST): {"diverged": hung(doing=BOTH_WAIT, divergence=DIVERGED)},
    ("rank_divergence", SUP): {
        "left out": in_step(TP0, hung(doing={TP0: [WAITS], TP1: RECEIVES})),
        "aborted and apart": incident("signal", TP1, end=ABORTED, divergence=DIVERGED),
    },
    ("weight_update_deadlock", SUP): {
        "an update, with its class": hung(doing={TP0: ["f (x.py:1)", UPDATES]}),
        "a weight update": hung(doing=UPDATE),
        "an update in which a rank hangs": hung(TP1, doing={TP0: [WAITS], TP1: [WORKS, UPDATES]}),
    },
    ("busy", SUP): {"busy": incident("busy", level=SUP, opened="hang", trigger="no_progress", text="At work.")},
    ("peer_lost", SUP): {
        "a pair's": incident(
            "peer_lost", level=SUP, peers=[{"sign": "heartbeat"}], opened="peer_lost", trigger="peer_lost"
        )
    },
    ("transfer_stuck", SUP): {"transfers only": incident("peer_lost", level=SUP, peers=[{"sign": "failed_transfer"}])},
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
            "TypeError: x",
            "handle_generate_request (sglang/srt/managers/scheduler.py:1)",
            "event_loop_normal_disagg_prefill (sglang/srt/disaggregation/prefill.py:1)",
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
            "RuntimeError: can't start new thread",
            "submit (concurrent/futures/thread.py:1)",
            "handle_generate_request (sglang/srt/managers/scheduler.py:1)",
        ),
        "for the first time": raised("ValueError: x", *FORWARD, suspects=[{"rid": "r1"}]),
        "new, and alone in a server": raised("IndexError: x", *FORWARD, **ONLY_ONE),
        "new, and alone in its replica": but(
            raised("IndexError: x", *FORWARD, **ONLY_ONE, **OF_THREE), TP0, rank={"dp": 0}
        ),
        "the host's limit, and suspected": raised("OSError: [Errno 24] x", *FORWARD, **SUSPECTED),
        "a thread too many, and suspected": raised("RuntimeError: can't start new thread", *FORWARD, **SUSPECTED),
        "taken in, while the other of a pair is away": raised(
            "TypeError: x",
            *["send (requests/sessions.py:1)"] * 4,
            "__init__ (sglang/srt/disaggregation/mooncake/conn.py:1)",
            "handle_generate_request (sglang/srt/managers/scheduler.py:1)",
        ),
        "a missing file while serving": raised("FileNotFoundError: [Errno 2] 'x'", "f (transformers/x.py:1)", *FORWARD),
    },
}
#: By class, level and the frames that they came through: exceptions that have it.
RAISED: dict[tuple[str, str, Sequence[str]], list[str]] = {
    ("host_oom", SUP, FORWARD): [
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3.20 GiB for an array",
        "RuntimeError: unable to mmap 18329065000 bytes from file </m/x.safetensors>: Cannot allocate memory (12)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: 9",
    ],
    ("cuda_fault", SUP, FORWARD): [
        "torch.distributed.DistBackendError: NCCL error in: x\nCuda failure 700 'an illegal memory access'",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: HIP error: an illegal memory access was encountered",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "RuntimeError: CUDA driver error: misaligned address",
        "RuntimeError: CUDA driver error (/x.hpp:5): 700 (CUDA_ERROR_ILLEGAL_ADDRESS, y)",
        "RuntimeError: Failed: CUDA error /x.cu:1 'an illegal memory access was encountered'",
        "RuntimeError: Run failed with error an illegal memory access was encountered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `x`",
        "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or x",
        # As the libraries write it whose kernels those are.
        "RuntimeError: Failed at /x.cuh:7: CUDA error: an illegal memory access was encountered",
        "RuntimeError: Runtime check failed at /x.cuh:7: CUDA error: misaligned address",
        "RuntimeError: Panic error (/x.hpp:5): f(a, b) failed with CUDA error 700 (CUDA_ERROR_ILLEGAL_X): y",
        "RuntimeError: Panic error (/x.hpp:5): f() failed with CUDA error 719 (cudaErrorLaunchFailure): y",
        "tvm.error.InternalError: Check failed: (a == b) is false: Run failed with error an illegal memory access",
        "tvm.error.InternalError: Failed to run MLA, error: unspecified launch failure",
        "RuntimeError: [TensorRT-LLM][ERROR] CUDA runtime error in f(x): an illegal memory access",
        "torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    ],
    ("cuda_fault", EST, FORWARD): [
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "torch.AcceleratorError: CUDA error: the launch timed out and was terminated",
    ],
    ("host_oom", SUP, (PINNED, *LOADING)): [
        "RuntimeError: CUDA error: out of memory" + ASYNC,
        "torch.AcceleratorError: CUDA error: out of memory" + ASYNC,
    ],
    ("asked_to_stop", EST, (LOADS, LOADER, *LOADING)): ["KeyboardInterrupt: "],
    ("startup_failed", SUP, (LOADS, LOADER, *LOADING)): [
        "RuntimeError: can't start new thread",
        "OSError: [Errno 24] Too many open files: '/m/x.safetensors'",
        "RuntimeError: Failed: Assertion error /x/csrc/deep_ep.cpp:9 'rank == 0'",
    ],
    ("startup_failed", SUP, (LOADER, *LOADING)): [
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling x"
    ],
    ("startup_version", SUP, (LOADS, "load_model (sglang/srt/model_loader/loader.py:1)", *LOADING)): [
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "ValueError: Due to a serious vulnerability issue in `torch.load`, even with x",
    ],
    ("tokenizer_lost", EST, ("x (y.py:1)", "handle_loop (sglang/srt/managers/tokenizer_manager.py:1)")): [
        "KeyError: 'x'"
    ],
    ("gpu_oom_serving", EST, FORWARD): [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
    ],
    ("gpu_oom_serving", SUP, FORWARD): [
        "RuntimeError: CUDA out of memory. Tried",
        "RuntimeError: CUDA error: out of memory" + ASYNC,
        "RuntimeError: CUDA driver error (/x.hpp:5): 2 (CUDA_ERROR_OUT_OF_MEMORY, out of memory)",
        "RuntimeError: Panic error (/x.hpp:5): f() failed with CUDA error 2 (cudaErrorMemoryAllocation): y",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`",
        "RuntimeError: NPU out of memory. Tried",
    ],
    ("exception_in_sglang", SUP, FORWARD): [
        "RuntimeError: CUDA out of memory, as a prompt says",
        "ValueError: CUDA out of memory",
        "RuntimeError: 'No space left on device (os error 28)', says it",
        "safetensors_rust.SafetensorError: x",
        "RuntimeError: Panic error (/x.hpp:5): f() failed with CUDA error 1 (cudaErrorInvalidValue): y",
        "RuntimeError: cannot parse 'it failed with error: an illegal memory access'",
        # Not of a GPU, though of a place that it calls shared memory.
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9",
        "RuntimeError: a tool said 'Watchdog caught collective operation timeout'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/ninja.txt'",
        "nixl._bindings.nixlBackendError: x",
        "AttributeError: module 'torch' has no attribute 'float8'",
        "RuntimeError: selected index k out of range",
        "ValueError: bad prompt 'CUDA error: an illegal memory access'",
        "KeyError: 'torch.OutOfMemoryError: CUDA out of memory'",
        "x.OutOfMemoryError: CUDA",
        "ValueError: the user wrote [Errno 28] No space left on device",
        "RuntimeError: failed on 'pool memory leak detected!'",
        "ValueError: input 'Address already in use'",
        "KeyError: 'MemoryError'",
        "ImportError: lazily",
    ],
    ("gpu_oom_at_start", EST, LOADING): ["torch.OutOfMemoryError: CUDA out of memory."],
    ("gpu_oom_at_start", SUP, LOADING): [
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried",
        "Exception: Capture prefill CUDA graph failed: CUDA out of memory. Tried",
        "RuntimeError: Failed: CUDA error /x.cpp:83 'out of memory'",
        "torch.distributed.DistBackendError: NCCL error in: x, unhandled cuda error\nCuda failure 2 'out of memory'",
    ],
    ("kv_pool_leak", EST, CHECK): ["ValueError: pool memory leak detected! [full] total=1"],
    ("kv_pool_leak", SUP, FORWARD): ["ValueError: token_to_kv_pool_allocator memory leak detected! x"],
    ("shm_exhausted", SUP, FORWARD): [
        "OSError: [Errno 28] No space left on device: '/dev/shm/x'",
        "torch.distributed.DistBackendError: NCCL error\nError while creating shared memory segment /dev/shm/nccl",
        "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)",
    ],
    ("shm_exhausted", EST, ("SemLock.__init__ (multiprocessing/synchronize.py:57)", *FORWARD)): [
        "OSError: [Errno 28] No space left on device"
    ],
    ("disk_full", SUP, FORWARD): [
        "OSError: [Errno 28] No space left on device: '/data/x'",
        "OSError: [Errno 122] Disk quota exceeded: '/data/x'",
        "torch._inductor.exc.InductorError: OSError: [Errno 28] No space left on device",
    ],
    ("disk_full", SUP, LOADING): ["RuntimeError: CAS service error : IO Error: No space left on device (os error 28)"],
    ("startup_port", EST, LOADING): [
        "torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE",
        "zmq.error.ZMQError: Address already in use (addr='tcp://x')",
    ],
    ("startup_model", SUP, LOADING): [
        "RuntimeError: Cannot find any model weights with `/m`",
        "OSError: /m does not appear to have a file named config.json.",
    ],
    ("startup_model", SUP, (TOKENIZER, *LOADING)): ["ValueError: Couldn't instantiate the backend tokenizer"],
    ("startup_model", SUP, (LOADER, *LOADING)): ["ValueError: Cannot find the config file for awq", "AssertionError: "],
    ("startup_version", SUP, (LOADER, *LOADING)): [
        "ImportError: no fastsafetensors",
        "RuntimeError: HIP error: invalid device function" + ASYNC,
    ],
    ("exception_in_sglang", SUP, (LOADER, *FORWARD)): ["ValueError: x"],
    ("startup_model", EST, LOADING): [
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"
    ],
    ("startup_memory", SUP, LOADING): [
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "ValueError: Loaded weights leave no x.\nRaise --mem-fraction-static above 0.03",
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied",
    ],
    ("startup_model", SUP, (TOKENIZER, LAUNCHER)): ["ValueError: Couldn't instantiate the backend tokenizer"],
    ("startup_version", SUP, LOADING): [
        "ImportError: /x/common_ops.so: undefined symbol: _ZN3c10",
        "ModuleNotFoundError: No module named 'flashinfer'",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 1)",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). x Error 803: unsupported display driver",
        "RuntimeError: CUDA error: the provided PTX was compiled with an x",
        "RuntimeError: CUDA driver error (/x.hpp:5): 200 (CUDA_ERROR_INVALID_IMAGE, y)",
        "Exception: Capture cuda graph failed: Ninja build failed.",
        'RuntimeError: Assertion error (/x/compiler.hpp:176): false and "NVCC compilation failed"',
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "AssertionError: Failed to compile /x/kernel.cu",
        "RuntimeError: Error building extension 'x': y",
        "subprocess.CalledProcessError: Command '['/usr/bin/gcc', 'x.c']' returned non-zero exit status 1.",
        "Exception: Capture cuda graph failed: Command '['gcc', 'x.c']' returned non-zero exit status 1.",
        "RuntimeError: \nThe detected CUDA version (11.8) mismatches the version that was used to compile",
        "RuntimeError: SingleDecodeWithKVCache kernel launch failed, error: no kernel image is available for execution",
        "tvm.error.InternalError: Check failed: (a == b) is false: F failed with error no kernel image is available",
        "OSError: /x/libstdc++.so.6: version `GLIBCXX_3.4.32' not found",
        "AttributeError: module 'torch' has no attribute 'float8'",
    ],
    ("startup_failed", SUP, LOADING): [
        "ValueError: tp 3 does not divide",
        "RuntimeError: CUDA error: invalid device ordinal" + ASYNC,
        "subprocess.CalledProcessError: Command '['ninja', '-v']' died with <Signals.SIGKILL: 9>.",
        "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 80, code: -13, name: EACCES",
        "torch.distributed.DistBackendError: NCCL error\nError while creating shared memory segment /dev/shm/nccl-x, "
        "error: Permission denied (13)",
    ],
    ("startup_version", EST, FORWARD): [
        "NotImplementedError: Could not run 'sgl_kernel::rmsnorm' with arguments from the 'CUDA' backend."
    ],
    ("startup_version", EST, LOADING): ["pynvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM mismatch"],
    ("gpu_hardware", EST, FORWARD): ["torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"],
    ("gpu_hardware", SUP, FORWARD): [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered" + ASYNC,
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during x",
    ],
    ("cuda_fault", SUP, LOADING): [
        "Exception: Capture frozen-KV MTP cuda graph failed: CUDA error: device-side assert triggered"
    ],
    ("symmetric_stall", SUP, FORWARD): [
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: x",
        "RuntimeError: DeepEP error: CPU recv timeout",
    ],
    ("host_oom", SUP, LOADING): ["ValueError: Not enough host memory available. Requesting 9 GB"],
    ("kv_pool_exhausted", EST, ("retract_decode (sglang/srt/managers/schedule_batch.py:1)", *FORWARD[1:])): [
        "ValueError: Out of memory even after retracting all other requests in the decode batch."
    ],
    ("asked_to_stop", EST, FORWARD): ["KeyboardInterrupt"],
    ("exited", EST, FORWARD): ["SystemExit: 1"],
    ("startup_timeout", EST, LOADING): [
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0], "
        "but store->get('0') got error: wait timeout after 600000ms",
    ],
    ("startup_timeout", SUP, LOADING): ["ValueError: TP rank 0 could finish the model loading, but there are other"],
    ("startup_version", SUP, (LAUNCHER,)): [
        "Exception: sgl-kernel is installed with version 0.1, which is less than the minimum required version 0.2."
    ],
    ("startup_version", SUP, FORWARD): ["RuntimeError: Ninja build failed. Ninja output:\nx"],
    ("transfer_stuck", EST, (PAIR, *FORWARD)): [
        "nixl._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT",
        "Exception: KVSender failed to post transfer",
    ],
    ("startup_model", SUP, ("hf_raise (huggingface_hub/utils/_http.py:1)", *LOADING)): ["x.OfflineModeIsEnabled: x"],
}
ROWS = [
    *(pytest.param(document, *cause, id=name) for cause, its in TABLE.items() for name, document in its.items()),
    *(pytest.param(raised(one, *key[2]), *key[:2], id=one) for key, errors in RAISED.items() for one in errors),
]


@pytest.mark.parametrize(("document", "name", "level"), ROWS)
def test_an_incident_has_its_cause(document: dict[str, Any], name: str, level: str) -> None:
    found = causes.explain(document)
    assert (found["class"], found["level"]) == (name, level), found
    assert found["reasons"]
    assert found["next_steps"]
    assert found["restart_helps"] in ("yes", "no", "unknown")
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("document", "has_it"),
    [
        (raised("ValueError: x", *FORWARD, **AGAIN, id="1a2b3c4d"), True),
        (raised("ValueError: x", *FORWARD, id="1a2b3c4d", suspects=[{"rid": "r", "level": "supported"}]), True),
        (raised("ValueError: x", *FORWARD, id="1a2b3c4d", suspects=[{"rid": "r", "level": "unknown"}]), False),
    ],
    ids=["poison", "suspected", "a request of the step"],
)
def test_where_a_request_is_suspected_it_is_to_be_bisected(document: dict[str, Any], has_it: bool) -> None:
    first = causes.explain(document)["next_steps"][0]
    assert first.startswith('`sglang-crashkit replay 1a2b3c4d --bisect --serve "COMMAND"`') is has_it


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("RuntimeError: Ninja build failed.", "`nvcc --version; ninja --version; c++ --version` must work"),
        (
            "subprocess.CalledProcessError: Command '['gcc', 'x']' returned non-zero exit status 1.",
            "`nvcc --version; ninja --version",
        ),
        ("RuntimeError: CUDA error: invalid device ordinal", "`nvidia-smi` and CUDA_VISIBLE_DEVICES"),
        ("torch.distributed.DistBackendError: NCCL error in: /x.cpp:9, invalid usage", "NCCL_DEBUG=INFO"),
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). x Error 802: y", "`systemctl status nvidia-fabric"),
        ("zmq.error.ZMQError: Too many open files", "`ulimit -n` bounds"),
        ("RuntimeError: can't start new thread", "`cat /sys/fs/cgroup/pids.max; ulimit -u` bound"),
        ("RuntimeError: a prompt with 'Too many open files'", "`sglang-crashkit show 0 --stacks` begins"),
    ],
)
def test_what_an_exception_asks_for_is_the_next_step(error: str, step: str) -> None:
    assert causes.explain(raised(error, *LOADING))["next_steps"][0].startswith(step)


@pytest.mark.parametrize(("frames", "helps"), [(FORWARD, "yes"), (LOADING, "unknown")])
def test_what_was_raised_at_a_start_may_be_raised_again(frames: Sequence[str], helps: str) -> None:
    error = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert causes.explain(raised(error, *frames))["restart_helps"] == helps


def test_where_ranks_diverged_the_command_that_shows_it_is_told() -> None:
    steps = causes.explain(hung(doing=BOTH_WAIT, divergence=DIVERGED, id="1a2b3c4d"))["next_steps"]
    assert steps[0].startswith("`sglang-crashkit steps 1a2b3c4d` ")


def test_a_process_that_the_kernel_holds_has_its_command() -> None:
    steps = causes.explain(TABLE["stopped_process", EST]["stopped"])["next_steps"]
    assert [step.startswith("`kill -CONT 11`") for step in steps if "kill -CONT" in step] == [True]
    found = causes.explain(TABLE["stuck_in_kernel", SUP]["in the kernel"])
    assert found["next_steps"][0].startswith("`cat /proc/11/stack` ")


@pytest.mark.parametrize(
    ("suspects", "step"),
    [
        ([{"rid": "r7", "level": "supported"}, {"rid": "r8"}], "find request r7 in requests/requests.jsonl, and"),
        ([{"rid": "r7", "level": "unknown"}], "find it in requests/requests.jsonl by the ids that the rank names, and"),
    ],
)
def test_the_request_that_is_to_be_blocked_is_named(suspects: list[dict[str, Any]], step: str) -> None:
    taken_in = "handle_generate_request (sglang/srt/managers/scheduler.py:1)"
    found = causes.explain(raised("TypeError: x", taken_in, *FORWARD[1:], suspects=suspects))
    assert f"{step} block its like at the gateway" in found["next_steps"]
    assert ("Request r7 is suspected most." in found["reasons"]) is ("r7" in step)
    # It would end the server again.
    assert found["restart_helps"] == "unknown"


def test_a_suspect_alone_makes_it_the_request_and_says_why() -> None:
    found = causes.explain(raised("IndexError: x", *FORWARD, **SUSPECTED))
    assert found["reasons"][1] == "Request r1 is suspected most: it was alone."
    assert found["next_steps"][1] == "find request r1 in requests/requests.jsonl, and block its like at the gateway"


def test_every_class_has_advice_and_a_row() -> None:
    assert {name for name, _rule in rules.RULES} | {"unknown"} == set(ADVICE)
    assert {cause[0] for cause in (*TABLE, *RAISED)} == set(ADVICE)


def test_the_documentation_lists_every_class() -> None:
    text = (Path(__file__).parents[4] / "docs" / "incidents.md").read_text().split("\n## ")
    (part,) = [one for one in text if one.startswith("Causes")]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ADVICE)


def test_the_step_that_it_died_in_is_told() -> None:
    step = {"number": 7, "mode": "decode", "size": 2, "rids": ["a", "b"]}
    document = but(incident("signal", TP1, end=killed()), TP1, steps={"last": [], "in_step": step})
    assert causes.explain(document)["reasons"][1] == "It was in step 7 (decode, 2 requests, with a, b)."


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (raised("ValueError: no such file", "load_model (loader.py:1)"), [TP0]),
        (incident("signal", TP1, end=killed("SIGSEGV", "x")), [TP1]),
        # Nobody stands out: the first that was at it.
        (hung(), [TP0]),
    ],
)
def test_a_control_request_that_it_failed_at_is_a_reason(document: dict[str, Any], names: list[str]) -> None:
    for process in document["processes"]:
        process["control"] = "flush_cache" if process["role"] == "scheduler" else ""
    told = [one for one in causes.explain(document)["reasons"] if "control request" in one]
    assert told == [f"{name} (pid {PEOPLE[name][0]}) worked on flush_cache, a control request." for name in names]


def test_the_record_of_a_rank_tells_more_than_the_timeline() -> None:
    document = raised("torch.AcceleratorError: CUDA error: an illegal")
    record = {
        "message": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "traceback": [
            "run_scheduler_process (sglang/srt/managers/scheduler.py:1)",
            "forward (sglang/srt/models/x.py:2)",
        ],
    }
    assert causes.explain(document)["class"] == "exception"
    found = causes.explain(document, {10: record})
    assert found["class"] == "cuda_fault"
    assert "in forward (x.py)" in found["reasons"][0]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "2026-01-01T00:00:00Z ERROR uvicorn.error: [Errno 98] error while attempting to bind on address",
            "startup_port",
        ),
        ("2026-01-01T00:00:00Z INFO sglang.srt: ERROR uvicorn.error: [Errno 98] a prompt", "exited"),
    ],
)
def test_the_last_words_of_an_http_server_name_its_port(line: str, name: str) -> None:
    ended = incident("exit_status", "server", end=STATUS)
    assert causes.explain(ended, logs={1: ["an earlier line", line]})["class"] == name
    left = raised("SystemExit: 3", "startup (uvicorn/server.py:1)", first="server")
    assert causes.explain(left, logs={1: [line]})["class"] == name
    assert causes.explain(incident("signal", "server", end=killed()), logs={1: [line]})["class"] == "killed"


def test_a_broken_rule_costs_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_case: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(causes, "RULES", (("host_oom", broken), *rules.RULES))
    monkeypatch.setattr(causes, "load_issues", broken)
    assert causes.explain(incident("signal", TP1, end=killed()))["class"] == "killed"
    assert "the rule for host_oom failed" in caplog.text
    assert "known issues could not be looked up" in caplog.text


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"verdict": 5, "processes": [None, {}], "timeline": [1, {"event": "exception"}], "gpus": {"xid": "x"}},
        {"verdict": {"kind": "hang"}, "processes": [{"role": "scheduler", "doing": 1, "state": 2, "looks": [3]}]},
        {
            "kind": "hang",
            "divergence": [],
            "environment": {"shared_memory": {"used_bytes": "x"}, "command_line": 4, "arguments": []},
            "collectives": {"findings": 1},
        },
    ],
)
def test_a_document_of_another_shape_has_a_cause(document: dict[str, Any]) -> None:
    assert causes.explain(document)["class"] in ADVICE
