"""What is to be done about each class of causes: data, for the rules to point at."""

from __future__ import annotations

import re
from typing import Literal

#: Stands in a step for the id of the incident.
INCIDENT = "INCIDENT"

#: Whether the server is likely to serve again by being started again.
Restart = Literal["yes", "no", "unknown"]


class Advice:
    """A class of causes: what it is, whether a restart is likely to help, and what to do next.

    The steps are commands and settings, the most promising first; one with a command begins with it.
    """

    def __init__(self, words: str, restart: Restart, *steps: str) -> None:
        self.words, self.restart, self.steps = words, restart, steps


_STACKS = f"`sglang-crashkit show {INCIDENT} --stacks`"
_EXCEPTION = f"{_STACKS} begins with its exception"
_AT_THE_SIGNAL = f"{_STACKS} has where it was when the signal came; all its threads are in its fault_stack in stacks/"
_GPU_MEMORY = "`nvidia-smi -q -d PIDS`"
_OPTIONS_OF_GPU_MEMORY = (
    "lower --mem-fraction-static by 0.05 to 0.1, so that more is left for activations",
    "lower --chunked-prefill-size and --max-running-requests",
    f"{_GPU_MEMORY} names others that hold memory of this GPU",
)
_RERUN_FOR_KERNEL = (
    "CUDA_LAUNCH_BLOCKING=1 at the next start has the stack name the call that failed",
    "--disable-cuda-graph, then another --attention-backend, under the same load find the part at fault",
    "read the kernel and the exception in gpu/ of this incident, where there is a GPU core",
)
_READ_ITS_STACKS = (
    f"{_STACKS} has where it is; in stacks/ is where it was at the other two moments",
    f'`sglang-crashkit replay {INCIDENT} --bisect --serve "COMMAND"` finds the request, where one does it',
)
_COMPARE_RANKS = (
    f"{_STACKS} has where each rank is; what it waits in is in summary.md under Collectives",
    "`sglang-crashkit collect` shows more, while it hangs still",
)

ADVICE: dict[str, Advice] = {
    "host_oom": Advice(
        "the host's memory ran out",
        "unknown",
        "raise the container's memory limit, or lower --hicache-size, --hicache-ratio and --cpu-offload-gb",
        "`cat /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory.stat` in the container tells, over time, what grows",
    ),
    "gpu_hardware": Advice(
        "the GPU, or a link of it, failed",
        "no",
        "`dcgmi diag -r 3` tests the node's GPUs, once it is out of service",
        "`nvidia-smi -q` tells of ECC errors, remapped rows and links",
        'look the Xid up in NVIDIA\'s "XID Errors"; most of these want the GPU reset or exchanged',
    ),
    "stopped_process": Advice(
        "a process was stopped from outside",
        "yes",
        "find out who stopped it (SIGSTOP, a debugger, a checkpoint, the freezer of a cgroup)",
    ),
    "starved_process": Advice(
        "a process wants to run and gets no CPU time",
        "unknown",
        "`cat /sys/fs/cgroup/cpu.stat /sys/fs/cgroup/cpu.pressure` shows whether its CPU limit is too low",
    ),
    "stuck_in_kernel": Advice(
        "a process waits in the kernel and cannot be interrupted",
        "unknown",
        "`dmesg -T` may name a file system that does not answer, or a GPU driver",
        "read `wchan` in incident.json: the kernel's function in which it waits",
    ),
    "rank_divergence": Advice(
        "ranks that must agree did different things",
        "yes",
        f"`sglang-crashkit steps {INCIDENT}` shows at which step, and by which request, the ranks diverged",
        "report it with this incident; --disable-overlap-schedule often avoids it until it is mended",
    ),
    "collective_mismatch": Advice(
        "ranks were in different collectives of one group",
        "yes",
        *_COMPARE_RANKS,
        "leave out what decides by rank, such as --enable-hierarchical-cache, until it is mended",
    ),
    "weight_update_deadlock": Advice(
        "a weight update or a pause waits for itself",
        "yes",
        "`curl --json '{}' http://HOST:PORT/continue_generation` may let the update go on",
        "pause before each update and wait for its answer, from one client only",
    ),
    "symmetric_stall": Advice(
        "all ranks wait in the same collective",
        "yes",
        "`ibstat -s` shows the links where there are several nodes, NCCL_DEBUG=INFO what NCCL makes of them",
        "--disable-custom-all-reduce and --disable-overlap-schedule each take one suspect out",
    ),
    "rank_stuck": Advice("one rank does not come back, and the others wait for it", "yes", *_COMPARE_RANKS),
    "detokenizer_stuck": Advice(
        "the detokenizer does not come to the next message, so that no answer is given", "yes", *_READ_ITS_STACKS
    ),
    "tokenizer_stuck": Advice(
        "the event loop of the tokenizer manager does not come round, so that its process answers nothing",
        "yes",
        *_READ_ITS_STACKS,
    ),
    "peer_lost": Advice(
        "the other server of a pair is gone",
        "no",
        "`sglang-crashkit incidents` on its host tells why it is gone",
        "this one serves again when that one is back",
    ),
    "transfer_stuck": Advice(
        "a KV transfer between prefill and decode failed or does not end",
        "unknown",
        "`sglang-crashkit incidents` on the other server's host says why that is gone, where it is",
        "where it runs, look at the network of the transfer (--disaggregation-ib-device, MC_FORCE_TCP=1 for a test "
        "without RDMA), and compare both servers' logs by the request's room, which this incident names",
    ),
    "connection_lost": Advice(
        "a rank lost its connection to a rank that this host does not know of",
        "unknown",
        "`sglang-crashkit incidents` on the other nodes tells what came first",
    ),
    "gpu_oom_at_start": Advice(
        "the GPU's memory ran out while the server started",
        "no",
        f"{_GPU_MEMORY} shows whether an earlier server still holds memory",
        "lower --mem-fraction-static or --max-running-requests, or raise --tp",
        "lower --cuda-graph-max-bs, which later releases call --cuda-graph-max-bs-decode",
    ),
    "gpu_oom_serving": Advice("the GPU's memory ran out while the server served", "yes", *_OPTIONS_OF_GPU_MEMORY),
    "kv_pool_leak": Advice(
        "SGLang's own check found tokens of the KV pool that nobody holds",
        "yes",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0 turns the end into a warning; report it with this incident",
        "--disable-radix-cache takes the usual suspect out",
    ),
    "kv_pool_exhausted": Advice(
        "the KV pool had no room for a batch that was scheduled",
        "yes",
        "lower --max-running-requests, or raise --schedule-conservativeness to 1.3 and --max-total-tokens",
    ),
    "cuda_fault": Advice(
        "a GPU kernel accessed memory that it may not, or an assertion in it failed", "yes", *_RERUN_FOR_KERNEL
    ),
    "shm_exhausted": Advice(
        "the shared memory (/dev/shm) is full",
        "no",
        "`df -h /dev/shm; ls -l /dev/shm`: remove what dead servers left",
        "give the container more: --shm-size (Docker), an emptyDir with medium Memory (Kubernetes)",
    ),
    "disk_full": Advice("a disk is full", "no", "`df -h` for the path in the exception; remove files or give it room"),
    "startup_port": Advice(
        "a port that the server needs is taken",
        "no",
        "`ss -ltnp` names who listens; end it, or choose another --port, --nccl-port or --dist-init-addr",
    ),
    "startup_model": Advice(
        "the model is missing, or cannot be loaded as it was asked for",
        "no",
        "check --model-path, --tokenizer-path, --revision, --load-format and HF_TOKEN: may this user read them?",
        "leave out --quantization, --dtype and --tp once: they have to fit the model",
    ),
    "startup_memory": Advice(
        "what is left of the memory is too little for the KV pool",
        "no",
        "raise --mem-fraction-static, or lower --context-length, or raise --tp",
        f"{_GPU_MEMORY} shows whether an earlier server still holds memory",
    ),
    "startup_version": Advice(
        "packages do not fit together",
        "no",
        "`pip check` names what does not fit",
        "install SGLang with its own pins into a fresh environment, or use its container image of this release",
    ),
    "startup_timeout": Advice(
        "the ranks did not get ready in time",
        "unknown",
        f"{_STACKS} has what the ranks were doing",
        "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS gives them longer, where they only load",
        "with several nodes start all of them, each with the same --dist-init-addr, which all must reach",
    ),
    "startup_failed": Advice("the server failed while it started", "no", _EXCEPTION),
    "poison_request": Advice(
        "one request ends the server, and will again",
        # Until it comes again.
        "unknown",
        "switch retries off until it is blocked: they carry it to the next server",
    ),
    "asked_to_stop": Advice(
        "somebody asked it to stop",
        "yes",
        "look at who sends signals: the orchestrator's events, a job's time limit, an operator",
    ),
    "detokenizer_lost": Advice("the detokenizer failed", "yes", f"{_STACKS} has how it ended, or its exception"),
    "tokenizer_lost": Advice("a tokenizer worker failed", "yes", f"{_STACKS} has how it ended, or its exception"),
    "killed": Advice(
        "it was killed by SIGKILL; who sent it is not known",
        "yes",
        "look at the orchestrator's events (eviction, preemption, a failed probe) and for systemd-oomd, earlyoom "
        "or Ray's memory monitor",
        "`auditctl -a exit,always -F arch=b64 -S kill` has the kernel name the sender next time",
    ),
    "segfault": Advice(
        "it died of a segmentation fault",
        "unknown",
        _AT_THE_SIGNAL,
        "SGLANG_CRASHKIT_NATIVE=1 adds native stacks of the others next time",
    ),
    "aborted": Advice("it ended itself by abort()", "unknown", _AT_THE_SIGNAL, "read the last lines of its log"),
    "bus_error": Advice(
        "it accessed memory that is not there",
        "unknown",
        "`df -h /dev/shm`: a full one is the usual reason; a truncated file or a bad disk are others",
    ),
    "fatal_signal": Advice("it died of a signal", "unknown", _AT_THE_SIGNAL),
    "exception_in_sglang": Advice(
        "SGLang raised an exception",
        "unknown",
        "search upstream's issues for the exception and its innermost frames, in ranks/",
    ),
    "exception": Advice("a process raised an exception", "unknown", _EXCEPTION),
    "exited": Advice(
        "a process ended by itself",
        "unknown",
        f"`sglang-crashkit show {INCIDENT} --steps` has its last steps, and logs/ of the incident what it logged last",
        "look in the server's log for what it printed: os._exit, or exit() of a C library, leaves no traceback",
    ),
    "busy": Advice("the ranks are at work", "no", "wait; raise SGLANG_CRASHKIT_HANG_SECS where this is usual"),
    "no_progress": Advice("nobody made progress, and nothing tells why", "yes", *_COMPARE_RANKS),
    "unknown": Advice(
        "the evidence does not tell",
        "unknown",
        f"`sglang-crashkit show {INCIDENT} --timeline` has what happened in its order",
        "read the server's log",
    ),
}

#: What a kernel's compilation says where its compiler is not installed.
NO_COMPILER = r"\[Errno 2\] No such file or directory: '(\S*/)?(ninja|nvcc|gcc|g\+\+)'"
#: What is said where it is there, and fails.
COMPILER_FAILED = (
    r"Command '\['(\S*/)?(ninja|nvcc|gcc|g\+\+|cc|c\+\+|clang)'[\s\S]{0,9000}\]' returned non-zero exit status"
)
#: What an exception asks for beside what is done about its class: how its text begins, and the step.
_HINTS = (
    (
        r"[^'\"\n]{0,80}(Ninja build failed|Error building extension|Failed to compile \S+\.cu\b|Could not find nvcc"
        r"|Failed to find C)"
        r'|(Assertion error \(\S+\): false and ")?NVCC (PTX )?compilation failed'
        rf"|[\w ]{{0,80}}(: )?{COMPILER_FAILED}|{NO_COMPILER}",
        "`nvcc --version; ninja --version; c++ --version` must work: a kernel is compiled when it is first used",
    ),
    (
        r"CUDA error: (invalid device ordinal|no CUDA-capable device|CUDA-capable device\(s\) is/are busy)",
        "`nvidia-smi` and CUDA_VISIBLE_DEVICES show which GPUs this server may use: --tp may want more",
    ),
    (
        r"Unexpected error from cudaGetDeviceCount[\s\S]{0,300}Error 802:",
        "`systemctl status nvidia-fabricmanager` on the host: GPUs that a switch connects wait for it",
    ),
    (r"NCCL error", "NCCL_DEBUG=INFO at the next start has NCCL say which call failed, and why"),
    (
        r"([^'\"\n]{0,80} )?Too many open files|\[Errno 24\]",
        "`ulimit -n` bounds the open files of each process: raise it",
    ),
    (
        r"can't start new thread|\[Errno 11\] Resource temporarily unavailable",
        "`cat /sys/fs/cgroup/pids.max; ulimit -u` bound the threads: raise the container's limit of processes",
    ),
)


def hint_of(text: str) -> str:
    """Return the step that an exception with this text asks for, whatever its class; empty where there is none."""
    return next((step for pattern, step in _HINTS if re.match(pattern, text)), "")
