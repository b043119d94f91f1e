"""Recognise what a process was doing, from what the kernel says of it and from the functions on its main thread.

A wait is recognised by the innermost function alone: what a thread does inside a function that usually waits, such as
run a signal handler, is no wait. Compiling and loading are recognised by what called it. What is not recognised stays
``unknown``, with the function in which it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_crashkit.model.sample import Frame, Sample, main_thread

#: In these a rank waits for other ranks, or for a GPU that may wait for them.
WAITS_FOR_OTHERS = frozenset({"collective", "store", "cuda_sync"})

#: Where the kernel keeps a process that a cgroup of version 2 freezes; nothing else sleeps there.
FREEZER = frozenset({"do_freezer_trap", "get_signal"})

_WORDS = {
    "collective": "waited in a collective",
    "store": "waited for the others through the store, as at startup",
    "cuda_sync": "waited for its GPU",
    "kernel": "waited for its GPU, which ran a kernel of its own",
    "gil_wait": "waited for the GIL of its own process",
    "lock": "waited for a lock or an event",
    "socket": "waited for a socket",
    "compiling": "compiled a kernel",
    "loading": "loaded weights",
    "profiling": "wrote a profile",
    "idle": "was in its loop for requests",
    "unknown": "was",
}

#: Native functions, the first that matches wins; from the symbols of CPython, NCCL, gloo, mooncake, torch and CUDA.
_NATIVE = (
    (re.compile(r"^(take_gil|PyGILState_Ensure|PyEval_(RestoreThread|Acquire\w+))\b"), "gil_wait", ""),
    # What makes a group waits in the store, below what carries its collectives.
    (re.compile(r"c10d::(\w*Store\b|detail::\w*(Client|Socket))|^gloo::rendezvous::"), "store", ""),
    (re.compile(r"^p?nccl[A-Z]|^nccl::|ProcessGroupNCCL|WorkNCCL"), "collective", "NCCL"),
    (re.compile(r"^gloo::|ProcessGroupGloo|GlooWork"), "collective", "gloo"),
    (re.compile(r"^mooncake::|Mooncake(Backend|Worker|Work)\b|ProcessGroupMooncake"), "collective", "mooncake"),
    (re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize|^cu(da)?Memcpy(?!\w*Async)"), "cuda_sync", ""),
    (re.compile(r"^zmq::|^zmq_(poll|recv|msg_recv)"), "socket", ""),
    (
        re.compile(r"^(__lll_lock_wait\w*|_*pthread_(mutex_lock|cond_\w*wait)|_*sem_wait|___pthread_\w+lock)"),
        "lock",
        "",
    ),
    (re.compile(r"^(__GI_)?_*(libc_)?(recv(from|msg)?|accept4?|p?poll|p?select|epoll_p?wait)(64)?$"), "socket", ""),
)
#: Where the interpreter called native code: beyond it, native functions say nothing of the wait.
_INTERPRETER = re.compile(r"^_?PyEval_Eval|^_PyObject_(Make|Vector)|^cfunction_|\.py$")

_STORE = re.compile(
    r"^(_store_based_barrier|_?tcp_rendezvous_handler|_env_rendezvous_handler|_create_c10d_store|rendezvous"
    r"|init_process_group|_new_process_group_helper|new_group|_new_group_with_tag|_create_\w+_process_group)$"
)
_STORE_FILE = re.compile(r"(^|/)torch/distributed/rendezvous\.py$|(^|/)distributed/utils\.py$")
_MOONCAKE_FILE = re.compile(r"(^|/)(mooncake/|mooncake_transfer_engine\.py$)")
#: py-spy leaves out ``sglang/srt`` where that has no ``__init__.py``.
_COLLECTIVE_FILE = re.compile(
    r"(^|/)torch/distributed/|^(.*sglang/srt/)?distributed/(parallel_state|communication_op|device_communicators/)"
    r"|(^|/)sglang/srt/distributed/"
)
_CUDA_FILE, _CUDA = re.compile(r"(^|/)torch/cuda/"), re.compile(r"^(synchronize|wait|wait_event|wait_stream)$")
_COMPILING = re.compile(
    r"(^|/)(torch/_dynamo/(convert_frame|symbolic_convert|output_graph|guards|bytecode_transformation)\.py"
    r"|torch/_inductor/(?!runtime/|output_code|utils)|torch/_functorch/(aot_autograd\.py|_aot_autograd/autograd_cache)"
    r"|torch/utils/cpp_extension\.py|triton/(compiler/|runtime/build\.py|backends/)|flashinfer/jit/|tilelang/jit/"
    r"|deep_gemm/jit|tvm_ffi/cpp/|jit_kernel/utils\.py|cutlass/\S*compiler)"
)
_LOADING_FILE = re.compile(r"(^|/)(model_loader/|safetensors/|huggingface_hub/)")
_LOADING = re.compile(r"^(load_model|load_weights|_?load_weights_\w+)$")
_PROFILING = re.compile(r"^(_?(start|stop)_profile|export_chrome_trace|export_stacks)$")
_RECEIVING = re.compile(
    r"^(recv_requests|ingest_requests|maybe_sleep|maybe_sleep_on_idle|on_idle|self_check_during_idle"
    # With prefill and decode apart, what asks after the transfers.
    r"|poll_and_all_reduce\w*|process_decode_queue|pop_transferred|pop_preallocated|pop_bootstrapped)$"
)
_RECEIVING_FILE = re.compile(r"(^|/)request_receiver\.py$")
_LOOP = re.compile(r"^event_loop\w*$")
_LOCK_FILE = re.compile(r"(^|/)(threading|queue|multiprocessing/(synchronize|queues|managers))\.py$|(^|/)filelock/")
_SOCKET_FILE = re.compile(
    r"(^|/)(zmq/|(socket|ssl|selectors|socketserver)\.py$|multiprocessing/connection\.py$|http/client\.py$)"
)
_SERVING = re.compile(r"(^|/)(asyncio/(runners|base_events|unix_events)|uvloop/\S*)\.py|(^|/)uvicorn/")
#: What stands between a wait and what it is for.
_BETWEEN = re.compile(
    r"^<frozen|(^|/)(contextlib|functools|subprocess|threading|queue|socket|ssl|selectors)\.py$"
    r"|(^|/)(zmq|filelock|multiprocessing|torch/utils|http|urllib3?|requests)/"
)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process was doing at one moment."""

    kind: str  # the state as far as it was recognised: one of `_WORDS`, or of those of `of_state`
    words: str  # the same as part of a sentence, with the function where it is known
    function: str = ""  # the innermost function, as ``function (file:line)``; empty without a stack
    requests: bool = False  # it waited for, or passed on, new requests, as it does all the time when there are none
    batch: bool = False  # it worked at a batch

    @property
    def is_work(self) -> bool:
        """Whether it may take minutes and is no hang."""
        return self.kind in _WORK


def activity_of(process: Sample) -> Activity:
    """Return what a process was doing, by the kernel's word first, then by its main thread."""
    thread = main_thread(process.threads, process.pid)
    native = main_thread(process.native, process.pid)
    seen = of_frames(thread.frames if thread else (), native.frames if native else (), process.kernels)
    if thread is not None and thread.owns_gil and process.state == "S":
        seen = replace(seen, words=f"{seen.words}, holding the GIL in native code")
    return of_state(process.state, process.wchan, process.tracer) or seen


def of_state(state: str, wchan: str = "", tracer: int = 0) -> Activity | None:
    """Return what the kernel's state of a process says by itself, None where it says nothing.

    Args:
        state: the letter in ``/proc/PID/stat``.
        wchan: the kernel function in which it sleeps, empty where it is not known.
        tracer: pid of who traces it, 0 where nobody does.
    """
    if state == "T":
        return Activity("stopped", "was stopped (state T) until somebody sends SIGCONT")
    if state == "S" and wchan in FREEZER:
        return Activity("stopped", "was frozen by its cgroup, as a container that is paused")
    if state == "t":
        by = f"process {tracer}, a debugger or tracer" if tracer else "a debugger or tracer"
        return Activity("traced", f"was held by {by} (state t)")
    if state == "D":
        where = f" in the kernel's {wchan}" if wchan else ""
        return Activity("disk_sleep", f"was in uninterruptible sleep (state D){where}")
    if state and state in "ZX":
        return Activity("gone", f"had ended (state {state})")
    return None


def of_frames(frames: Sequence[Frame], native: Sequence[Frame] = (), kernels: Sequence[str] = ()) -> Activity:
    """Return what the functions of a thread say.

    Args:
        frames: its Python frames, innermost first.
        native: its native frames, innermost first, where they are known.
        kernels: the CUDA kernels that ran for its process.
    """
    kind, backend = _of_python(frames)
    native_kind, native_backend, called = _of_native(native)
    if native_kind is not None and not (native_kind in ("lock", "socket") and kind != "unknown"):
        kind, backend = native_kind, native_backend
    if kind == "cuda_sync" and kernels:
        # A kernel of NCCL waits for the other ranks' kernels.
        is_nccl = all("nccl" in kernel.lower() for kernel in kernels)
        kind, backend = ("collective", "NCCL") if is_nccl else ("kernel", "")
    function = str(frames[0]) if frames else called
    words = _WORDS[kind]
    if backend:
        words = words.replace("a collective", f"a collective of {backend}")
    if kernels and kind in ("collective", "kernel"):
        words += f" ({', '.join(dict.fromkeys(kernels))[:120]})"
    if function:
        words += f" in {function}"
    elif kind == "unknown":
        words = "was in an unknown place"
    return Activity(
        kind,
        words,
        function,
        requests=any(_RECEIVING.match(bare_name(frame)) for frame in frames),
        batch=any(re.match(r"run_batch$|process_batch_result|forward_batch", bare_name(frame)) for frame in frames),
    )


def informative_caller(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame by which a thread is known to compile, load or profile, None where it does not."""
    return next((frame for does in _WORK.values() for frame in frames if does(frame)), None)


def _compiles(frame: Frame) -> bool:
    return _COMPILING.search(frame.file) is not None


def _loads(frame: Frame) -> bool:
    return bool(_LOADING_FILE.search(frame.file) or _LOADING.match(bare_name(frame)))


def _profiles(frame: Frame) -> bool:
    return _PROFILING.match(bare_name(frame)) is not None


#: What may take minutes and is no hang, by the function that says whether a frame does it.
_WORK = {"compiling": _compiles, "loading": _loads, "profiling": _profiles}


def bare_name(frame: Frame) -> str:
    """Return the function's name without its class, which some Python versions put before it."""
    return frame.function.rpartition(".")[2]


def _of_native(frames: Sequence[Frame]) -> tuple[str | None, str, str]:
    """Return kind, backend and the innermost function of the native frames above the interpreter's."""
    above = []
    for frame in frames:
        if _INTERPRETER.search(frame.function) or frame.file.endswith(".py"):
            break
        above.append(frame)
    for pattern, kind, backend in _NATIVE:
        found = next((frame for frame in above if pattern.search(frame.function)), None)
        if found is not None:
            return kind, backend, _place(found)
    return None, "", _place(above[0]) if above else ""


def _place(frame: Frame) -> str:
    """Return a native frame as text; its line and often its file are not known."""
    return str(frame) if frame.line else f"{frame.function} ({frame.file})" if frame.file else frame.function


def _of_python(frames: Sequence[Frame]) -> tuple[str, str]:
    if not frames:
        return "unknown", ""
    leaf, name = frames[0], bare_name(frames[0])
    if _STORE_FILE.search(leaf.file) or (_COLLECTIVE_FILE.search(leaf.file) and _STORE.match(name)):
        return "store", ""
    if _MOONCAKE_FILE.search(leaf.file):
        return "collective", "mooncake"
    if _COLLECTIVE_FILE.search(leaf.file):
        return "collective", "NCCL" if "nccl" in f"{leaf.file} {name}".lower() else ""
    if _CUDA_FILE.search(leaf.file) and _CUDA.match(name):
        return "cuda_sync", ""
    if work := next((kind for kind, does in _WORK.items() if any(map(does, frames))), ""):
        return work, ""
    caller = next((frame for frame in frames if not _BETWEEN.search(frame.file)), leaf)
    is_loop = _RECEIVING.match(bare_name(caller)) or _LOOP.match(bare_name(caller))
    if is_loop or _RECEIVING_FILE.search(caller.file) or _SERVING.search(caller.file):
        return "idle", ""
    if _SOCKET_FILE.search(leaf.file):
        return "socket", ""
    return ("lock", "") if _LOCK_FILE.search(leaf.file) else ("unknown", "")
