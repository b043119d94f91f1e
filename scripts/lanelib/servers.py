"""Start real SGLang servers on a lane's tiny model, ask them, and end them without a trace.

::

    with Server.start(ensure_lane("0.5.23"), tp=2) as server:
        server.wait_ready()
        print(server.generate("Hello", max_new_tokens=8))
        os.kill(server.pid_of("sglang::scheduler_TP1"), signal.SIGKILL)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lanelib.lanes import Lane
from lanelib.managed import ManagedProcess, free_port

#: A library that cannot be loaded turns pynccl off, and gloo carries the collectives.
NO_NCCL = "/nonexistent.so"
#: Where a server on a GPU keeps what it compiles, below its lane.
CACHES = ("TRITON_CACHE_DIR", "TVM_FFI_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH")


class Server(ManagedProcess):
    """A real SGLang server on a lane's tiny model."""

    @classmethod
    def start(
        cls,
        lane: Lane,
        *,
        tp: int = 1,  # tensor-parallel ranks
        dp: int = 1,  # data-parallel ranks
        device: str = "cpu",  # or cuda
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,  # a free one by default
        log_path: Path | None = None,  # a new file below ``.lanes/logs`` by default
        name: str | None = None,  # what messages and the log's name call it
        prefix: Sequence[str] = (),  # a command that runs it, such as ``unshare`` with its options
        spins: bool = False,  # idle schedulers go round and round, as by SGLang's default
    ) -> Server:
        """Start it; `wait_ready` tells when it serves. What is given in `extra_args` and `env` wins over ours."""
        port = port or free_port()
        argv = [*prefix, *command_of(lane, port, tp=tp, dp=dp, device=device, host=host, spins=spins)]
        argv += extra_args
        merged = lane.serve_env() | device_env(lane, device) | parallel_env(lane, tp, dp) | dict(env or {})
        return cls(name or f"sglang-{lane.name}", argv, env=merged, host=host, port=port, log_path=log_path)


def command_of(
    lane: Lane,
    port: int,
    *,
    tp: int = 1,
    dp: int = 1,
    device: str = "cpu",
    host: str = "127.0.0.1",
    spins: bool = False,
) -> list[str | Path]:
    """Return the command that serves a lane's tiny model; see `Server.start`."""
    argv: list[str | Path] = [lane.python, "-m", "sglang.launch_server"]
    argv += ["--model-path", lane.model_dir, "--load-format", "dummy", "--device", device]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    argv += ["--skip-server-warmup", "--max-total-tokens", "8192", "--mem-fraction-static", "0.2"]
    argv += ["--tp", str(tp)] if tp > 1 else []
    argv += ["--dp", str(dp)] if dp > 1 else []
    # Two idle ranks take more than a core from whatever else starts on this machine.
    argv += [] if spins or device != "cpu" else ["--sleep-on-idle"]
    # To capture a graph takes longer than to serve the tiny model.
    return argv if device == "cpu" else [*argv, "--disable-cuda-graph"]


def device_env(lane: Lane, device: str) -> dict[str, str]:
    """Return what a server on `device` needs in its environment beside the lane's, which is for a CPU."""
    if device == "cpu":
        return {}
    # What is compiled for a GPU is compiled by the lane's own ninja.
    path = os.pathsep.join([str(lane.root / "bin"), os.environ.get("PATH", os.defpath)])
    return {"SGLANG_USE_CPU_ENGINE": "0", "PATH": path} | {name: str(lane.root / "cache" / name) for name in CACHES}


def parallel_env(lane: Lane, tp: int, dp: int) -> dict[str, str]:
    """Return what `tp` times `dp` ranks on one machine's cores need in their environment."""
    if tp * dp == 1:
        return {}
    env = {"SGLANG_NCCL_SO_PATH": NO_NCCL}
    ranks = tp if lane.binds_replicas_alike() else tp * dp
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return env
