"""Start real SGLang servers on a lane's tiny model, send them requests, and end them with all their processes.

::

    with Server.start(ensure_lane("0.5.23"), tp=2) as server:
        server.wait_ready()
        print(server.generate("Hello", max_new_tokens=8))
        os.kill(server.pid_of("sglang::scheduler_TP1"), signal.SIGKILL)
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lanelib.commands import LaneError
from lanelib.lanes import Lane
from lanelib.paths import LANES
from lanelib.procs import Process, alive, send, title_of, tree_of, wait_gone, watchers_of

#: SGLang's own timeout of a health check is 20 s; the server would go on with a check that is given up earlier.
HEALTH_TIMEOUT_S = 25.0
#: On a busy machine the imports take minutes before a server answers.
READY_TIMEOUT_S = 600.0
#: Seconds between SIGTERM and SIGKILL; an idle server takes up to 11 s to end.
GRACE_S = 20.0
#: Seconds that the kit's handler is given to finish an incident once its server is gone.
HANDLER_GRACE_S = 60.0
POLL_S = 0.2
TAIL_LINES = 30
_Self = TypeVar("_Self", bound="ManagedProcess")
#: A socket in the abstract namespace for each port that `free_port` returned; it is gone when this process ends.
_holders: list[socket.socket] = []
#: Without the proxy that the environment may name: the servers are on this machine.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: A library that cannot be loaded turns pynccl off, so that gloo runs the collectives.
NO_NCCL = "/nonexistent.so"
#: Folders of finished incidents, below a crash folder.
INCIDENTS = "*/incidents/[0-9]*"
INCIDENT_TIMEOUT_S = 60.0
#: Variables for the caches of code that a server on a GPU compiles, which are kept in its lane.
CACHES = ("TRITON_CACHE_DIR", "TVM_FFI_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH")


class ManagedProcess:
    """A process with an HTTP server in it, in a session of its own."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        host: str,
        port: int,
        log_path: Path | None = None,
    ) -> None:
        self.name = name  # the name in messages
        self.port = port
        self.url = f"http://{host}:{port}"
        unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.urandom(2).hex()}.log"
        self.log_path = log_path or LANES / "logs" / unique
        self.ready_s: float | None = None  # seconds from its start to its first answer
        #: The servers that this object stands for, each in a session of its own.
        self.members: tuple[ManagedProcess, ...] = (self,)
        self._started = time.monotonic()
        self._known: dict[tuple[int, int], Process] = {}
        self._watchers: dict[tuple[int, int], Process] = {}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self.popen = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # this process handles Ctrl-C; the session finds orphans
            )

    @property
    def pid(self) -> int:
        """The main process's pid."""
        return self.popen.pid

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def processes(self) -> list[tuple[int, str]]:
        """Return (pid, title) of each living process of its tree."""
        return [(process.pid, title_of(process.pid)) for process in self._tree()]

    def pid_of(self, title: str) -> int:
        """Return the pid of the one living process in its tree whose title is, or begins with, `title`."""
        found = self.processes()
        pids = [pid for pid, its in found if its == title or its.split(" ")[0] == title]
        pids = pids or [pid for pid, its in found if its.startswith(title)]
        if len(pids) != 1:
            titles = ", ".join(f"{pid} {its[:60]}" for pid, its in found)
            raise LaneError(f"{len(pids)} processes titled {title} in {self.name}: {titles}")
        return pids[0]

    def log_tail(self) -> str:
        """Return the last `TAIL_LINES` lines of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def require_running(self) -> None:
        """Check that its main process has not ended."""
        if (status := self.popen.poll()) is not None:
            when = "" if self.ready_s else " before it was ready"
            raise LaneError(
                f"{self.name} ended with status {status}{when}:\n{self.log_tail()}", next_step=f"read {self.log_path}"
            )

    def poll_ready(self) -> bool:
        """Say whether it answers its health check."""
        self._tree()
        self.require_running()
        with suppress(OSError, http.client.HTTPException):
            self.ask("health", timeout_s=HEALTH_TIMEOUT_S)
            self.ready_s = time.monotonic() - self._started
            self._note_watchers()
            return True
        return False

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until each of its members answers; see `wait_all_ready`."""
        wait_all_ready(self.members, timeout_s)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> bytes:
        """Post `body` as JSON, or get without a body, and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})  # noqa: S310
        with opener.open(request, timeout=timeout_s) as response:
            return bytes(response.read())

    def ask_later(self, path: str, body: Mapping[str, Any], timeout_s: float) -> threading.Thread:
        """Send a request in a thread of its own, for a server that may end before it answers."""

        def ask() -> None:
            with suppress(OSError, ValueError, http.client.HTTPException):
                self.ask(path, body, timeout_s)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return thread

    def generate(self, prompt: str = "Hello", *, max_new_tokens: int = 8, timeout_s: float = 60.0) -> dict[str, Any]:
        """Ask for exactly `max_new_tokens` tokens, greedily, as `ask` does."""
        return dict(json.loads(self.ask("generate", greedy(prompt, max_new_tokens), timeout_s)))

    def terminate(self) -> None:
        """Ask the main process to end."""
        self._tree()
        self._note_watchers()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End all its processes, known before or found now, and wait until they are gone.

        It also waits for the kit's handler, which outlives its server to finish an incident.
        """
        self.terminate()
        for is_killed in (False, True):
            deadline = time.monotonic() + grace_s
            # New ones may appear while the old ones are killed.
            while (left := self._members()) and time.monotonic() < deadline:
                for process in left if is_killed else ():
                    send(process, signal.SIGKILL)
                self.popen.poll()  # reap it, or it stays as a zombie
                time.sleep(POLL_S / 4)
        for process in wait_gone(self._watchers.values(), HANDLER_GRACE_S):
            send(process, signal.SIGKILL)
        left = [*self._members(), *wait_gone(self._watchers.values(), 5)]
        if left:
            raise LaneError(f"processes of {self.name} survive SIGKILL: {[p.pid for p in left]}")
        self.popen.wait(timeout=grace_s)

    def _tree(self) -> list[Process]:
        # Once the main process is reaped, another process may get its pid, unless its session still has processes.
        if self.popen.returncode is not None and not alive(self._known.values()):
            return []
        tree = tree_of(self.pid)
        self._known |= {process.key: process for process in tree}
        return tree

    def _members(self) -> list[Process]:
        self._tree()
        return alive(self._known.values())

    def _note_watchers(self) -> None:
        found = watchers_of(pid for pid, _ in self._known)
        self._watchers |= {one.key: one for one in found if title_of(one.pid).startswith("sglang::")}


def greedy(prompt: str, max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a request for exactly `max_new_tokens` tokens, with the `more` fields."""
    # Random weights end a sentence at random.
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, **more}


def wait_all_ready(servers: Sequence[ManagedProcess], timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until each of `servers` answers."""
    deadline = time.monotonic() + timeout_s
    pending = list(servers)
    while pending := [server for server in pending if not server.poll_ready()]:
        if time.monotonic() > deadline:
            slow = pending[0]
            raise LaneError(
                f"{slow.name} does not answer at {slow.url} after {timeout_s:.0f} s:\n{slow.log_tail()}",
                next_step=f"read {slow.log_path}",
            )
        time.sleep(POLL_S)


def find_incident(crash_folder: Path, known: Set[Path] = frozenset()) -> Path:
    """Wait for an incident that is not among `known`, and return its folder."""
    deadline = time.monotonic() + INCIDENT_TIMEOUT_S
    while time.monotonic() < deadline:
        for path in {*crash_folder.glob(INCIDENTS)} - known:
            return path
        time.sleep(0.01)
    raise LaneError(f"no incident below {crash_folder} after {INCIDENT_TIMEOUT_S:.0f} s")


def free_port() -> int:
    """Return a TCP port on which no process listens, and which no other process gets from here until this one ends.

    It is below the ports that the kernel gives to clients, with room above for the ports that SGLang
    derives from it. It is reserved because a server listens only long after it was given its port.
    """
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0sglang-crashkit-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        _holders.append(holder)
        return port
    raise LaneError("no free TCP port between 20000 and 29999", next_step="stop other servers")


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
        prefix: Sequence[str] = (),  # a command to run it under, such as ``unshare`` with its options
        spins: bool = False,  # whether idle schedulers poll without sleeping, as by SGLang's default
    ) -> Server:
        """Start a server; `wait_ready` waits until it serves. `extra_args` and `env` override the defaults here."""
        port = port or free_port()
        argv = [*prefix, *command_of(lane, port, tp=tp, dp=dp, device=device, host=host, spins=spins)]
        if dp == 1:
            # An older release takes a port that a client may get in the seconds until the ranks listen on it.
            argv += ["--nccl-port", str(free_port())]
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
    # Two idle ranks that poll take more than a core, which slows all that starts on this machine.
    argv += [] if spins or device != "cpu" else ["--sleep-on-idle"]
    # Capturing a graph takes longer than serving the tiny model.
    return argv if device == "cpu" else [*argv, "--disable-cuda-graph"]


def device_env(lane: Lane, device: str) -> dict[str, str]:
    """Return the variables that a server on `device` needs beside the lane's own, which are for a CPU."""
    if device == "cpu":
        return {}
    # The lane's own ninja compiles code for a GPU.
    path = os.pathsep.join([str(lane.root / "bin"), os.environ.get("PATH", os.defpath)])
    return {"SGLANG_USE_CPU_ENGINE": "0", "PATH": path} | {name: str(lane.root / "cache" / name) for name in CACHES}


def parallel_env(lane: Lane, tp: int, dp: int) -> dict[str, str]:
    """Return the variables that `tp` times `dp` ranks need on one machine's cores."""
    if tp * dp == 1:
        return {}
    env = {"SGLANG_NCCL_SO_PATH": NO_NCCL}
    ranks = tp if lane.binds_replicas_alike() else tp * dp
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return env
