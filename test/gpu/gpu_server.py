"""A real server on the GPU, and what tells that it works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from integration.scenario import Wreck, wreck
from lanelib.gpulanes import GPU_ARGS
from lanelib.lanes import Lane
from lanelib.servers import Server

SCHEDULER = "sglang::scheduler"
#: The first server compiles kernels: nvcc and Triton take a minute or more.
READY_S = 420.0
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
