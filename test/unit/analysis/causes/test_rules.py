from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
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


def in_step(title: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with a rank in the middle of a step."""
    told = {"number": 7, "mode": "extend", "phase": "forward_begun"}
    next(one for one in document["processes"] if one["title"] == title)["steps"] = {"last": [], "in_step": told}
    return document


def of_stage(pp: int, document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with TP1 in another pipeline stage than TP0."""
    next(one for one in document["processes"] if one["title"] == TP1)["rank"] = {"pp": pp, "tp": 0}
    return document


def replicas(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document of two replicas."""
    for dp, title in enumerate((TP0, TP1)):
        next(one for one in document["processes"] if one["title"] == title)["rank"] = {"dp": dp}
    return document


def alone(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without TP1, which another node has."""
    document["processes"] = [one for one in document["processes"] if one["title"] != TP1]
    return document


def frozen(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with TP1 held by the freezer of its cgroup."""
    next(one for one in document["processes"] if one["title"] == TP1)["state"]["wchan"] = "do_freezer_trap"
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
    document = hung(TP1)
    for process in document["processes"]:
        if process["title"] == TP1:
            process["looks"] = [
                {"time": f"2026-01-01T00:00:{at}00000Z", "state": state, "cpu_secs": cpu} for at, cpu in points
            ]
    return document


def with_exit(document: dict[str, Any], title: str, end: Exit) -> dict[str, Any]:
    next(one for one in document["processes"] if one["title"] == title)["exit"] = vars(end)
    return document


def at(document: dict[str, Any], trigger: str, event: float) -> dict[str, Any]:
    document["trigger"]["time"] = trigger
    document["gpus"]["xids"][0]["time"] = event
    return document


def on_gpu(document: dict[str, Any], line: str) -> dict[str, Any]:
    next(one for one in document["processes"] if one["title"] == TP0)["gpu"] = [line]
    return document


EST, SUP, UNK = "established", "supported", "unknown"
FAULT, RAISES, OOM_SERVING = ("cuda_fault", SUP), ("exception_in_sglang", SUP), ("gpu_oom_serving", SUP)
PAIR = "transfer_worker (sglang/srt/disaggregation/nixl/conn.py:1153)"
DEADLOCK = ("weight_update_deadlock", SUP)
DETOKENIZER_TITLE, STUCK = "sglang::detokenizer", ("detokenizer_stuck", SUP)
APART, DETOKENIZER = ("rank_divergence", SUP), ("detokenizer_lost", EST)
STARTING = ("launch_failed",)
TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    # -- the kernel's word
    ("killed for memory", incident("oom_kill", TP1, end=OOM), "host_oom", EST),
    ("killed for memory while it raised", incident("oom_kill", TP1, end=OOM, events=["draining"]), "host_oom", EST),
    ("another killed for memory", with_exit(incident("signal", TP0, end=killed()), TP1, OOM), "host_oom", SUP),
    ("SIGKILL, no OOM kill", incident("signal", TP1, end=killed()), "killed", EST),
    (
        "SIGKILL, nobody counts",
        incident("signal", TP1, end=killed(detail="no OOM counter could be read")),
        "killed",
        SUP,
    ),
    (
        "SIGKILL while it starts",
        incident("signal", TP1, end=killed(), opened="failed_start", events=STARTING),
        "killed",
        EST,
    ),
    ("SIGSEGV", died("SIGSEGV"), "segfault", EST),
    ("SIGABRT", died("SIGABRT"), "aborted", EST),
    ("SIGBUS", incident("signal", TP1, end=BUS), "bus_error", EST),
    ("SIGBUS, /dev/shm full", incident("signal", TP1, end=BUS, **FULL_SHM), "shm_exhausted", SUP),
    ("SIGSEGV, /dev/shm full", died("SIGSEGV", **FULL_SHM), "segfault", EST),
    ("SIGFPE", died("SIGFPE"), "fatal_signal", EST),
    ("SIGTERM to one", died("SIGTERM"), "asked_to_stop", EST),
    ("nobody failed, asked to end", incident(events=["draining"], level=UNK), "asked_to_stop", SUP),
    ("ended by itself", incident("exit_status", TP1, end=STATUS), "exited", EST),
    ("a shell's child killed", incident("exit_status", TP1, end=replace(STATUS, code=137)), "exited", SUP),
    ("ended, maybe of another's", incident("exit_status", TP1, end=STATUS, level="supported"), "exited", SUP),
    ("ended, nobody knows how", incident("unknown", TP1, end=REAPED), "unknown", UNK),
    ("ended with its parent", incident("parent_ended", TP1, end=killed(cause="parent_ended")), "unknown", UNK),
    ("the detokenizer killed", incident("signal", "sglang::detokenizer", end=killed()), "detokenizer_lost", EST),
    ("the detokenizer for memory", incident("oom_kill", "sglang::detokenizer", end=OOM), "host_oom", EST),
    (
        "the detokenizer asked",
        incident("signal", "sglang::detokenizer", end=killed("SIGTERM", "x")),
        "asked_to_stop",
        EST,
    ),
    ("the detokenizer raised", raised("ValueError: x", first="sglang::detokenizer"), "detokenizer_lost", EST),
    ("a tokenizer worker", incident("signal", "sglang::tokenizer_worker:0", end=killed()), "tokenizer_lost", EST),
    ("the main process", incident("signal", "server", end=killed()), "killed", EST),
    # -- GPU
    ("Xid 79 of its GPU", died("SIGABRT", first=TP0, **xid(79, 10)), "gpu_hardware", EST),
    ("Xid 79 of some GPU", raised("RuntimeError: x", *FORWARD, **xid(79)), "gpu_hardware", SUP),
    ("a link of Blackwell's", died("SIGABRT", first=TP0, **xid(149, 10)), "gpu_hardware", EST),
    ("Xid 31 is a program's", died("SIGABRT", first=TP0, **xid(31, 10)), "cuda_fault", SUP),
    ("an old Xid", at(raised("RuntimeError: x", **xid(79)), "1970-01-01T01:00:00Z", 60.0), "exception", SUP),
    ("a fresh Xid", at(raised("RuntimeError: x", **xid(79)), "1970-01-01T01:00:00Z", 3590.0), "gpu_hardware", SUP),
    ("Xid, and memory", raised("torch.OutOfMemoryError: x", *FORWARD, **xid(94, 10)), "gpu_oom_serving", EST),
    ("Xid, and a CUDA error", raised("RuntimeError: CUDA error: x", *FORWARD, **xid(79, 10)), "gpu_hardware", EST),
    ("Xid, and words of no GPU", raised("RuntimeError: shapes differ", *FORWARD, **xid(145, 10)), "gpu_hardware", SUP),
    ("Xid, and killed", incident("signal", TP0, end=killed(), **xid(79, 10)), "killed", EST),
    ("Xid 45 follows", died("SIGABRT", first=TP0, **xid(45, 10)), "aborted", EST),
    ("no Xid seen", incident("signal", TP0, end=killed(), gpus={"devices": [{"index": 0}], "xids": []}), "killed", EST),
    (
        "an exception in a GPU core",
        on_gpu(died("SIGABRT", first=TP0), "exception: CUDA_EXCEPTION_14 in kernel"),
        "cuda_fault",
        EST,
    ),
    ("a kernel in a GPU core", on_gpu(incident("signal", TP0, end=killed()), "kernel gemm"), "killed", EST),
    (
        "illegal access, new",
        raised("torch.AcceleratorError: CUDA error: an illegal memory access was encountered" + ASYNC, *FORWARD),
        "cuda_fault",
        EST,
    ),
    ("GPU memory, failed start", raised("torch.OutOfMemoryError: x", opened="failed_start"), "gpu_oom_at_start", EST),
    # -- pools
    (
        "no room in the pool",
        raised(
            "RuntimeError: Prefill out of memory. Try to lower your batch size.",
            "alloc_for_extend (sglang/srt/mem_cache/common.py:1)",
        ),
        "kv_pool_exhausted",
        EST,
    ),
    # -- disks
    (
        "/dev/shm, by its frames",
        raised("OSError: [Errno 28] No space left on device", "__init__ (multiprocessing/shared_memory.py:1)"),
        "shm_exhausted",
        EST,
    ),
    # -- the start
    (
        "a port, the kernel's word",
        raised("OSError: [Errno 98] Address already in use", opened="failed_start"),
        "startup_port",
        SUP,
    ),
    (
        "too slow",
        incident(events=[{"event": "startup_timeout", "message": "TP1 not ready"}], opened="failed_start"),
        "startup_timeout",
        EST,
    ),
    (
        "a status",
        incident("exit_status", TP0, end=STATUS, opened="failed_start", events=STARTING),
        "startup_failed",
        EST,
    ),
    # -- who makes no progress
    ("stopped", hung(TP1, state={TP1: "T (stopped)"}), "stopped_process", EST),
    (
        "the detokenizer stopped",
        hung("sglang::detokenizer", state={"sglang::detokenizer": "T"}),
        "stopped_process",
        EST,
    ),
    ("both stopped", hung(state={TP0: "T (stopped)", TP1: "T (stopped)"}), "stopped_process", EST),
    (
        "stopped, until another one gave up",
        incident("lost_peer", TP1, level=SUP, state={TP1: "T (stopped)"}),
        "stopped_process",
        EST,
    ),
    ("frozen", frozen(hung(TP1, state={TP1: "S (sleeping)"})), "stopped_process", EST),
    ("traced", hung(TP1, state={TP1: "t (tracing stop)"}), "stopped_process", EST),
    ("a helper stopped", hung(TP1, state={"ninja": "T (stopped)"}), "no_progress", UNK),
    ("ended, another stopped", incident("unknown", TP1, end=REAPED, state={TP0: "T (stopped)"}), "unknown", UNK),
    ("killed, another stopped", incident("signal", TP1, end=killed(), state={TP0: "T (stopped)"}), "killed", EST),
    ("starved", looks(("01.0", 5.0), ("05.0", 5.1)), "starved_process", SUP),
    ("spins", looks(("01.0", 5.0), ("05.0", 9.0)), "no_progress", UNK),
    ("in the kernel", looks(("01.0", 5.0), ("05.0", 5.0), state="D"), "stuck_in_kernel", SUP),
    ("one elsewhere", hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}), "rank_stuck", SUP),
    # What idle ranks are in meanwhile says nothing of it.
    ("the detokenizer", hung(DETOKENIZER_TITLE, doing={DETOKENIZER_TITLE: [WORKS], TP1: [WAITS]}), *STUCK),
    ("the detokenizer, unseen", hung(DETOKENIZER_TITLE, doing={TP0: [GATHERS], TP1: [WAITS]}), *STUCK),
    (
        "the detokenizer, while a rank is in a step",
        in_step(TP0, hung(DETOKENIZER_TITLE, doing={DETOKENIZER_TITLE: [WORKS], TP1: RECEIVES})),
        *STUCK,
    ),
    ("the main process's loop", hung("server", doing={"server": [WORKS], TP1: [WAITS]}), "tokenizer_stuck", SUP),
    ("a worker's loop", hung("sglang::tokenizer_worker:0"), "tokenizer_stuck", SUP),
    ("the main process stopped", hung("server", state={"server": "T (stopped)"}), "stopped_process", EST),
    ("all in one", hung(doing=BOTH_WAIT), "symmetric_stall", SUP),
    ("all in one, with its class", hung(doing={TP0: PYNCCL, TP1: PYNCCL}), "symmetric_stall", SUP),
    ("the only rank here waits", alone(hung(TP0, doing={TP0: [WAITS]}, **SUSPECTED, **NODES)), "symmetric_stall", SUP),
    ("the only rank waits", alone(hung(TP0, doing={TP0: [WAITS]})), "no_progress", UNK),
    ("the only rank here is elsewhere", alone(hung(TP0, doing={TP0: [WORKS]})), "no_progress", UNK),
    ("two collectives", hung(doing={TP0: [WAITS], TP1: [GATHERS]}), "collective_mismatch", SUP),
    ("spins in another collective", hung(TP1, doing={TP0: [WAITS], TP1: [WORKS, GATHERS]}), "rank_stuck", SUP),
    ("of two stages", of_stage(1, hung(doing={TP0: [WAITS], TP1: [GATHERS]})), "no_progress", UNK),
    (
        "crossed, and one elsewhere",
        hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}, **crossed([10], [11])),
        "rank_stuck",
        SUP,
    ),
    ("asked for in two places", hung(doing=TWO_PLACES), "collective_mismatch", SUP),
    (
        "asked for in two places, and seen in one",
        hung(doing=TWO_PLACES, **finding("waiting", SUP)),
        "symmetric_stall",
        SUP,
    ),
    ("asked for by one that is not seen", hung(doing={TP0: [WAITS], TP1: [WAITS, WORKS]}), "symmetric_stall", SUP),
    ("asked for in two places, of several nodes", hung(doing=TWO_PLACES, **NODES), "no_progress", UNK),
    ("all in one, and one of them named", hung(TP1, doing=BOTH_WAIT), "symmetric_stall", SUP),
    ("all in one, and one behind", hung(TP1, doing=BOTH_WAIT, **finding("behind")), "rank_stuck", SUP),
    ("waited for until a time limit", incident("lost_peer", TP1, level=SUP, events=[TIME_LIMIT]), "rank_stuck", SUP),
    ("each behind the other", hung(**crossed([10], [11])), "collective_mismatch", SUP),
    ("both behind a third", hung(**crossed([10], [10])), "no_progress", UNK),
    ("two collectives, recorded", hung(**finding("mismatch")), "collective_mismatch", EST),
    ("an unsure recorder", hung(**finding("mismatch", UNK)), "no_progress", UNK),
    ("recorded wait", hung(**finding("waiting")), "symmetric_stall", SUP),
    ("diverged", hung(doing=BOTH_WAIT, divergence=DIVERGED), "rank_divergence", EST),
    ("ended earlier", hung(doing=BOTH_WAIT, divergence=DIVERGED | {"kind": "ended_earlier"}), "symmetric_stall", SUP),
    ("left out", in_step(TP0, hung(doing={TP0: [WAITS], TP1: RECEIVES})), "rank_divergence", SUP),
    ("called meanwhile", in_step(TP0, hung(doing={TP0: [WAITS], TP1: CALLED})), "collective_mismatch", SUP),
    ("in a step itself", in_step(TP1, hung(doing={TP0: [WAITS], TP1: RECEIVES})), "collective_mismatch", SUP),
    ("not diverged", hung(doing=BOTH_WAIT, divergence={"kind": "none"}), "symmetric_stall", SUP),
    (
        "killed and apart",
        incident("signal", TP1, end=killed(), divergence=DIVERGED, **finding("mismatch")),
        "killed",
        EST,
    ),
    ("aborted and apart", incident("signal", TP1, end=ABORTED, divergence=DIVERGED), "rank_divergence", SUP),
    (
        "aborted amid a mismatch",
        incident("signal", TP1, end=ABORTED, **finding("mismatch")),
        "collective_mismatch",
        SUP,
    ),
    (
        "aborted, apart, on an Xid",
        incident("signal", TP0, end=ABORTED, divergence=DIVERGED, **xid(31, 10)),
        "cuda_fault",
        SUP,
    ),
    ("aborted after a wait", died("SIGABRT", **finding("behind", waiting=[11])), "rank_stuck", SUP),
    ("aborted, and others wait for it", died("SIGABRT", **finding("behind", waiting=[10])), "aborted", EST),
    ("aborted while all wait", died("SIGABRT", **finding("waiting", waiting=[10, 11])), "symmetric_stall", SUP),
    ("gloo's limit", incident("lost_peer", TP0, error=GLOO, frames=FORWARD, level=SUP), "symmetric_stall", SUP),
    (
        "an update, with its class",
        hung(doing={TP0: ["f (x.py:1)", UPDATES]}),
        "weight_update_deadlock",
        SUP,
    ),
    ("a weight update", hung(doing=UPDATE), "weight_update_deadlock", SUP),
    (
        "an update that waits for a rank elsewhere",
        hung(TP1, doing=UPDATE | {TP0: [WAITS], TP1: [WORKS]}),
        "rank_stuck",
        SUP,
    ),
    ("an update in which a rank hangs", hung(TP1, doing={TP0: [WAITS], TP1: [WORKS, UPDATES]}), *DEADLOCK),
    ("busy", incident("busy", level=SUP, opened="hang", trigger="no_progress", text="At work."), "busy", SUP),
    ("watchdog, no stacks", hung(events=["watchdog_timeout"], level=UNK), "no_progress", UNK),
    # -- others' failures
    (
        "a pair's",
        incident("peer_lost", peers=[{"sign": "refused"}], opened="peer_lost", trigger="peer_lost"),
        "peer_lost",
        EST,
    ),
    ("transfers only", incident("peer_lost", level=SUP, peers=[{"sign": "failed_transfer"}]), "transfer_stuck", SUP),
    (
        "a node's",
        incident("lost_peer", TP0, error="RuntimeError: Connection closed by peer", level=SUP),
        "connection_lost",
        SUP,
    ),
    (
        "a connection while one host starts",
        incident("lost_peer", TP0, error="RuntimeError: NCCL error: unhandled system error", frames=LOADING, level=SUP),
        "startup_failed",
        SUP,
    ),
    (
        "a connection while several start",
        incident("lost_peer", TP0, error="RuntimeError: Connection closed", frames=LOADING, level=SUP, **NODES),
        "connection_lost",
        SUP,
    ),
    # -- one request
    (
        "taken in",
        raised("TypeError: x", "handle_generate_request (sglang/srt/managers/scheduler.py:1)", *FORWARD[1:]),
        "poison_request",
        SUP,
    ),
    (
        "known",
        raised(
            "RuntimeError: selected index k out of range",
            "get_top_logprobs_raw (sglang/srt/layers/logprob_processor.py:94)",
        ),
        "poison_request",
        SUP,
    ),
    ("again", raised("ValueError: x", *FORWARD, **AGAIN), "poison_request", SUP),
    ("for the first time", raised("ValueError: x", *FORWARD, suspects=[{"rid": "r1"}]), "exception_in_sglang", SUP),
    ("new, and suspected", raised("IndexError: x", *FORWARD, **SUSPECTED), "poison_request", SUP),
    ("new, and alone in a server", raised("IndexError: x", *FORWARD, **ONLY_ONE), "exception_in_sglang", SUP),
    ("new, and alone in its step", raised("IndexError: x", *FORWARD, **ONLY_ONE, **OF_THREE), "poison_request", SUP),
    (
        "new, and alone in its replica",
        replicas(raised("IndexError: x", *FORWARD, **ONLY_ONE, **OF_THREE)),
        "exception_in_sglang",
        SUP,
    ),
    ("new, and in no step yet", raised("RuntimeError: x", "act (<string>:1)", **WAITING), "exception", SUP),
    ("begun", raised("ValueError: x", "S.prepare_for_extend (a.py:1)", **WAITING), "poison_request", SUP),
    ("the host's limit, and suspected", raised("OSError: [Errno 24] x", *FORWARD, **SUSPECTED), *RAISES),
    (
        "a thread too many, and suspected",
        raised("RuntimeError: can't start new thread", *FORWARD, **SUSPECTED),
        *RAISES,
    ),
    ("SIGSEGV, and suspected", died("SIGSEGV", **SUSPECTED), "segfault", EST),
    ("exits, and suspected", incident("exit_status", TP1, end=STATUS, **SUSPECTED), "exited", EST),
    ("hangs, and suspected", hung(TP1, **SUSPECTED), "poison_request", SUP),
    # What is told of something else stands before that.
    ("for memory, and suspected", incident("oom_kill", TP1, end=OOM, **SUSPECTED), "host_oom", EST),
    ("GPU memory, and suspected", raised("torch.OutOfMemoryError: x", *FORWARD, **SUSPECTED), "gpu_oom_serving", EST),
    (
        "a leak, and suspected",
        raised("ValueError: pool memory leak detected! x", *CHECK, **SUSPECTED),
        "kv_pool_leak",
        EST,
    ),
    ("illegal access, and suspected", on_gpu(raised("X: y", **SUSPECTED), "exception: x"), "cuda_fault", EST),
    ("elsewhere, and suspected", hung(TP1, doing={TP0: [WAITS], TP1: [WORKS]}, **SUSPECTED), "rank_stuck", SUP),
    ("stopped, and suspected", hung(TP1, state={TP1: "T"}, **SUSPECTED), "stopped_process", EST),
    ("aborted, apart, suspected", incident("signal", TP1, end=ABORTED, divergence=DIVERGED, **SUSPECTED), *APART),
    ("a node's, and suspected", incident("lost_peer", TP0, error="X: y", **SUSPECTED), "connection_lost", SUP),
    ("the detokenizer, and suspected", raised("X: y", first="sglang::detokenizer", **SUSPECTED), *DETOKENIZER),
    ("asked, and suspected", died("SIGTERM", **SUSPECTED), "asked_to_stop", EST),
    (
        "taken in, while the other of a pair is away",
        raised(
            "TypeError: x",
            "__init__ (sglang/srt/disaggregation/mooncake/conn.py:1)",
            "handle_generate_request (sglang/srt/managers/scheduler.py:1)",
        ),
        "exception_in_sglang",
        SUP,
    ),
    # -- words that must not fool it
    (
        "a missing file while serving",
        raised("FileNotFoundError: [Errno 2] 'x'", "f (transformers/x.py:1)", *FORWARD),
        "exception_in_sglang",
        SUP,
    ),
    (
        "somebody else's code",
        raised("RuntimeError: asked to raise", "fail (/site/sitecustomize.py:1)"),
        "exception",
        SUP,
    ),
    (
        "one who is a consequence",
        incident(
            "signal",
            TP1,
            end=killed(),
            events=[{"event": "exception", "pid": 10, "message": "torch.OutOfMemoryError: x"}],
        ),
        "killed",
        EST,
    ),
    ("nothing", incident(level=UNK), "unknown", UNK),
]
#: What a process raised, and through which frames.
RAISED = [
    ("MemoryError", FORWARD, "host_oom", SUP),
    ("OSError: [Errno 12] Cannot allocate memory", FORWARD, "host_oom", SUP),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: 9",
        FORWARD,
        "host_oom",
        SUP,
    ),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", FORWARD, "cuda_fault", SUP),
    ("torch.AcceleratorError: CUDA error: device-side assert triggered", FORWARD, "cuda_fault", EST),
    ("RuntimeError: HIP error: an illegal memory access was encountered", FORWARD, "cuda_fault", SUP),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", FORWARD, "gpu_oom_serving", EST),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory.", FORWARD, "gpu_oom_serving", EST),
    ("RuntimeError: CUDA out of memory. Tried", FORWARD, "gpu_oom_serving", SUP),
    ("RuntimeError: CUDA error: out of memory" + ASYNC, FORWARD, "gpu_oom_serving", SUP),
    ("RuntimeError: CUDA out of memory, as a prompt says", FORWARD, "exception_in_sglang", SUP),
    ("torch.OutOfMemoryError: CUDA out of memory.", LOADING, "gpu_oom_at_start", EST),
    ("Exception: Capture cuda graph failed: CUDA out of memory. Tried", LOADING, "gpu_oom_at_start", SUP),
    ("ValueError: CUDA out of memory", FORWARD, "exception_in_sglang", SUP),
    ("ValueError: pool memory leak detected! [full] total=1", CHECK, "kv_pool_leak", EST),
    ("ValueError: token_to_kv_pool_allocator memory leak detected! x", FORWARD, "kv_pool_leak", SUP),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", FORWARD, "shm_exhausted", SUP),
    ("OSError: [Errno 28] No space left on device: '/data/x'", FORWARD, "disk_full", SUP),
    ("RuntimeError: CAS service error : IO Error: No space left on device (os error 28)", LOADING, "disk_full", SUP),
    ("RuntimeError: 'No space left on device (os error 28)', says it", FORWARD, *RAISES),
    ("OSError: [Errno 122] Disk quota exceeded: '/data/x'", FORWARD, "disk_full", SUP),
    (
        "torch.distributed.DistBackendError: NCCL error\nError while creating shared memory segment /dev/shm/nccl",
        FORWARD,
        "shm_exhausted",
        SUP,
    ),
    (
        "torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE",
        LOADING,
        "startup_port",
        EST,
    ),
    ("zmq.error.ZMQError: Address already in use (addr='tcp://x')", LOADING, "startup_port", EST),
    ("RuntimeError: Cannot find any model weights with `/m`", LOADING, "startup_model", SUP),
    ("OSError: /m does not appear to have a file named config.json.", LOADING, "startup_model", SUP),
    ("ValueError: Couldn't instantiate the backend tokenizer", (TOKENIZER, *LOADING), "startup_model", SUP),
    ("ValueError: Cannot find the config file for awq", (LOADER, *LOADING), "startup_model", SUP),
    ("AssertionError: ", (LOADER, *LOADING), "startup_model", SUP),
    ("ImportError: no fastsafetensors", (LOADER, *LOADING), "startup_version", SUP),
    ("ValueError: x", (LOADER, *FORWARD), "exception_in_sglang", SUP),
    ("safetensors_rust.SafetensorError: x", FORWARD, "exception_in_sglang", SUP),
    (
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        LOADING,
        "startup_model",
        EST,
    ),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", LOADING, "startup_memory", SUP),
    ("ValueError: Loaded weights leave no x.\nRaise --mem-fraction-static above 0.03", LOADING, "startup_memory", SUP),
    ("ValueError: Couldn't instantiate the backend tokenizer", (TOKENIZER, LAUNCHER), "startup_model", SUP),
    ("ImportError: /x/common_ops.so: undefined symbol: _ZN3c10", LOADING, "startup_version", SUP),
    ("ModuleNotFoundError: No module named 'flashinfer'", LOADING, "startup_version", SUP),
    ("ValueError: tp 3 does not divide", LOADING, "startup_failed", SUP),
    ("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered", FORWARD, "cuda_fault", SUP),
    ("RuntimeError: CUDA driver error: misaligned address", FORWARD, "cuda_fault", SUP),
    (
        "RuntimeError: CUDA driver error (/x.hpp:5): 700 (CUDA_ERROR_ILLEGAL_ADDRESS, y)",
        FORWARD,
        "cuda_fault",
        SUP,
    ),
    (
        "RuntimeError: Failed: CUDA error /x.cu:1 'an illegal memory access was encountered'",
        FORWARD,
        "cuda_fault",
        SUP,
    ),
    ("RuntimeError: Run failed with error an illegal memory access was encountered", FORWARD, "cuda_fault", SUP),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `x`", FORWARD, "cuda_fault", SUP),
    ("torch.AcceleratorError: CUDA error: the launch timed out and was terminated", FORWARD, "cuda_fault", EST),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", FORWARD, "gpu_hardware", EST),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered" + ASYNC, FORWARD, "gpu_hardware", SUP),
    ("RuntimeError: CUDA error: uncorrectable NVLink error detected during x", FORWARD, "gpu_hardware", SUP),
    ("RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or x", FORWARD, "cuda_fault", SUP),
    # As the libraries write it whose kernels those are.
    ("RuntimeError: Failed at /x.cuh:7: CUDA error: an illegal memory access was encountered", FORWARD, *FAULT),
    ("RuntimeError: Runtime check failed at /x.cuh:7: CUDA error: misaligned address", FORWARD, *FAULT),
    (
        "RuntimeError: Panic error (/x.hpp:5): f(a, b) failed with CUDA error 700 (CUDA_ERROR_ILLEGAL_X): y",
        FORWARD,
        *FAULT,
    ),
    (
        "RuntimeError: Panic error (/x.hpp:5): f() failed with CUDA error 719 (cudaErrorLaunchFailure): y",
        FORWARD,
        *FAULT,
    ),
    ("RuntimeError: Panic error (/x.hpp:5): f() failed with CUDA error 1 (cudaErrorInvalidValue): y", FORWARD, *RAISES),
    (
        "tvm.error.InternalError: Check failed: (a == b) is false: Run failed with error an illegal memory access",
        FORWARD,
        *FAULT,
    ),
    ("tvm.error.InternalError: Failed to run MLA, error: unspecified launch failure", FORWARD, *FAULT),
    ("RuntimeError: [TensorRT-LLM][ERROR] CUDA runtime error in f(x): an illegal memory access", FORWARD, *FAULT),
    ("RuntimeError: cannot parse 'it failed with error: an illegal memory access'", FORWARD, *RAISES),
    ("Exception: Capture frozen-KV MTP cuda graph failed: CUDA error: device-side assert triggered", LOADING, *FAULT),
    ("Exception: Capture prefill CUDA graph failed: CUDA out of memory. Tried", LOADING, "gpu_oom_at_start", SUP),
    ("RuntimeError: Failed: CUDA error /x.cpp:83 'out of memory'", LOADING, "gpu_oom_at_start", SUP),
    ("RuntimeError: CUDA driver error (/x.hpp:5): 2 (CUDA_ERROR_OUT_OF_MEMORY, out of memory)", FORWARD, *OOM_SERVING),
    (
        "RuntimeError: Panic error (/x.hpp:5): f() failed with CUDA error 2 (cudaErrorMemoryAllocation): y",
        FORWARD,
        *OOM_SERVING,
    ),
    # Not of a GPU, though of a place that it calls shared memory.
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9", FORWARD, *RAISES),
    (
        "torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        FORWARD,
        "cuda_fault",
        SUP,
    ),
    ("RuntimeError: Triton Error [CUDA]: out of memory", FORWARD, "gpu_oom_serving", SUP),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`", FORWARD, "gpu_oom_serving", SUP),
    (
        "torch.distributed.DistBackendError: NCCL error in: x, unhandled cuda error\nCuda failure 2 'out of memory'",
        LOADING,
        "gpu_oom_at_start",
        SUP,
    ),
    ("RuntimeError: Application timeout caused pair closure", FORWARD, "symmetric_stall", SUP),
    ("RuntimeError: a tool said 'Watchdog caught collective operation timeout'", FORWARD, *RAISES),
    ("RuntimeError: [Rank 3] Watchdog caught collective operation timeout: x", FORWARD, "symmetric_stall", SUP),
    ("RuntimeError: DeepEP error: CPU recv timeout", FORWARD, "symmetric_stall", SUP),
    ("ValueError: Not enough host memory available. Requesting 9 GB", LOADING, "host_oom", SUP),
    (
        "ValueError: Out of memory even after retracting all other requests in the decode batch.",
        ("retract_decode (sglang/srt/managers/schedule_batch.py:1)", *FORWARD[1:]),
        "kv_pool_exhausted",
        EST,
    ),
    ("RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied", LOADING, "startup_memory", SUP),
    ("RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)", FORWARD, "shm_exhausted", SUP),
    ("RuntimeError: NPU out of memory. Tried", FORWARD, "gpu_oom_serving", SUP),
    ("KeyboardInterrupt", FORWARD, "asked_to_stop", EST),
    ("SystemExit: 1", FORWARD, "exited", EST),
    (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        LOADING,
        "startup_timeout",
        EST,
    ),
    (
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect",
        LOADING,
        "startup_timeout",
        EST,
    ),
    ("ValueError: TP rank 0 could finish the model loading, but there are other", LOADING, "startup_timeout", SUP),
    (
        "Exception: sgl-kernel is installed with version 0.1, which is less than the minimum required version 0.2.",
        (LAUNCHER,),
        "startup_version",
        SUP,
    ),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 1)", LOADING, "startup_version", SUP),
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). x Error 803: unsupported display driver",
        LOADING,
        "startup_version",
        SUP,
    ),
    ("RuntimeError: CUDA error: the provided PTX was compiled with an x", LOADING, "startup_version", SUP),
    ("RuntimeError: CUDA driver error (/x.hpp:5): 200 (CUDA_ERROR_INVALID_IMAGE, y)", LOADING, "startup_version", SUP),
    ("RuntimeError: Ninja build failed. Ninja output:\nx", FORWARD, "startup_version", SUP),
    ("Exception: Capture cuda graph failed: Ninja build failed.", LOADING, "startup_version", SUP),
    (
        'RuntimeError: Assertion error (/x/compiler.hpp:176): false and "NVCC compilation failed"',
        LOADING,
        "startup_version",
        SUP,
    ),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", LOADING, "startup_version", SUP),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/data/ninja.txt'", FORWARD, *RAISES),
    ("RuntimeError: CUDA error: invalid device ordinal" + ASYNC, LOADING, "startup_failed", SUP),
    # -- pairs
    ("nixl._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT", (PAIR, *FORWARD), "transfer_stuck", EST),
    ("nixl._bindings.nixlBackendError: x", FORWARD, *RAISES),
    ("Exception: KVSender failed to post transfer", (PAIR, *FORWARD), "transfer_stuck", EST),
    ("OSError: /x/libstdc++.so.6: version `GLIBCXX_3.4.32' not found", LOADING, "startup_version", SUP),
    ("AttributeError: module 'torch' has no attribute 'float8'", LOADING, "startup_version", SUP),
    ("AttributeError: module 'torch' has no attribute 'float8'", FORWARD, "exception_in_sglang", SUP),
    ("x.OfflineModeIsEnabled: x", ("hf_raise (huggingface_hub/utils/_http.py:1)", *LOADING), "startup_model", SUP),
    ("RuntimeError: selected index k out of range", FORWARD, "exception_in_sglang", SUP),
    ("ValueError: bad prompt 'CUDA error: an illegal memory access'", FORWARD, "exception_in_sglang", SUP),
    ("KeyError: 'torch.OutOfMemoryError: CUDA out of memory'", FORWARD, "exception_in_sglang", SUP),
    ("x.OutOfMemoryError: CUDA", FORWARD, "exception_in_sglang", SUP),
    ("ValueError: the user wrote [Errno 28] No space left on device", FORWARD, "exception_in_sglang", SUP),
    ("RuntimeError: failed on 'pool memory leak detected!'", FORWARD, "exception_in_sglang", SUP),
    ("ValueError: input 'Address already in use'", FORWARD, "exception_in_sglang", SUP),
    ("KeyError: 'MemoryError'", FORWARD, "exception_in_sglang", SUP),
    ("ImportError: lazily", FORWARD, "exception_in_sglang", SUP),
]
TABLE += [(error, raised(error, *frames), name, level) for error, frames, name, level in RAISED]


@pytest.mark.parametrize(("document", "name", "level"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
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
    assert first.startswith('`sglang-crashkit bisect 1a2b3c4d --serve "COMMAND"`') is has_it


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("RuntimeError: Ninja build failed.", "`nvcc --version; ninja --version; c++ --version` must work"),
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


def test_the_signal_of_a_shells_child_is_named() -> None:
    found = causes.explain(incident("exit_status", TP1, end=replace(STATUS, code=139)))
    assert found["reasons"][1] == "A shell ends so whose child died of SIGSEGV."


def test_where_ranks_diverged_the_command_that_shows_it_is_told() -> None:
    steps = causes.explain(hung(doing=BOTH_WAIT, divergence=DIVERGED, id="1a2b3c4d"))["next_steps"]
    assert steps[0].startswith("`sglang-crashkit steps 1a2b3c4d` ")
    sampled = DIVERGED | {"kind": "sampled_token"}
    steps = causes.explain(hung(doing=BOTH_WAIT, divergence=sampled))["next_steps"]
    assert steps[0].startswith("SYNC_TOKEN_IDS_ACROSS_TP=1 ")


def test_a_token_without_effect_is_no_cause() -> None:
    found = DIVERGED | {"kind": "sampled_token", "level": "unknown"}
    assert causes.explain(hung(doing=BOTH_WAIT, divergence=found))["class"] == "symmetric_stall"


def test_one_command_lets_a_stopped_process_go_on() -> None:
    document = next(row[1] for row in TABLE if row[2] == "stopped_process")
    steps = causes.explain(document)["next_steps"]
    assert [step.startswith("`kill -CONT 1") for step in steps if "kill -CONT" in step] == [True]


def test_a_stack_in_the_kernel_has_its_command() -> None:
    document = next(row[1] for row in TABLE if row[2] == "stuck_in_kernel")
    pid = document["verdict"]["first_failure"]["pid"]
    assert causes.explain(document)["next_steps"][0].startswith(f"`cat /proc/{pid}/stack` ")


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


def test_a_step_without_a_batch_is_said_to_be_none() -> None:
    document = in_step(TP0, raised("ValueError: x", *FORWARD))
    first = next(one for one in document["processes"] if one["title"] == TP0)
    first["steps"]["in_step"] = {"number": 43, "mode": "", "phase": "received", "size": 0, "rids": []}
    assert causes.explain(document)["reasons"][-1] == "It was in step 43 (not yet scheduled)."


def test_every_class_has_advice_and_a_row() -> None:
    assert {name for name, _rule in rules.RULES} | {"unknown"} == set(ADVICE)
    assert {row[2] for row in TABLE} == set(ADVICE)


def test_the_step_that_it_died_in_is_told() -> None:
    document = incident("signal", TP1, end=killed())
    step = {"number": 7, "mode": "decode", "size": 2, "rids": ["a", "b"]}
    next(one for one in document["processes"] if one["title"] == TP1)["steps"] = {"last": [], "in_step": step}
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
