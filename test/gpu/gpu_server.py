"""A real server on the GPU, what tells that it works, and what two readers say of a core."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from integration.scenario import Wreck, wreck
from lanelib.gpulanes import GPU_ARGS
from lanelib.lanes import Lane
from lanelib.servers import Server
from sglang_crashkit.capture.debugger import parse_kernels

SCHEDULER = "sglang::scheduler"
#: The first server compiles kernels: nvcc and Triton take a minute or more.
READY_S = 420.0
CUDA_GDB_S = 240.0
#: So long a batch may wait for its kernels to be compiled without being taken for one that hangs.
PATIENCE = {"SGLANG_CRASHKIT_HANG_SECS": "300"}


def start(lane: Lane, crash_folder: Path, env: Mapping[str, str] | None = None, args: Sequence[str] = ()) -> Server:
    """Start a server on the first GPU, with `crash_folder` as its ``--crash-dump-folder``."""
    options = [*GPU_ARGS, "--crash-dump-folder", str(crash_folder), *args]
    return Server.start(lane, device="cuda", extra_args=options, env=PATIENCE | dict(env or {}))


def break_server(
    lane: Lane,
    crash_folder: Path,
    strike: Callable[[Server], None],
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
) -> Wreck:
    """Start a server, break it while it works on a request, and return what is left."""
    with start(lane, crash_folder, env, args) as server:
        server.wait_ready(READY_S)
        # What is compiled for the first request would be in the way of the one that is broken.
        server.generate("Hello", max_new_tokens=8, timeout_s=READY_S)
        return wreck(server, crash_folder, strike, requests=1)


def pipes_of(pid: int) -> list[str]:
    """Return the named pipes that a process has open."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return sorted(name for name in links if name.startswith("/") and Path(name).is_fifo())


def cuda_gdb() -> str | None:
    """Return the path of cuda-gdb, None where it is not installed."""
    return shutil.which("cuda-gdb") or shutil.which("cuda-gdb", path="/usr/local/cuda/bin")


def account_of(program: str, core: Path) -> tuple[str, ...]:
    """Return the kernels that cuda-gdb lists for a core."""
    words = [program, "-nx", "-batch", "-iex", "set auto-load off", "-iex", "set width 0"]
    words += ["-ex", f"target cudacore {core}", "-ex", "info cuda kernels"]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=CUDA_GDB_S,
        check=False,
    )
    text = done.stdout.decode(errors="replace")
    assert "(cuda-gdb)" in text or "Kernel" in text or "No CUDA kernels" in text, text
    return parse_kernels(text)
