"""A process with an HTTP server in it: started, asked, and ended without a trace."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lanelib.errors import LaneError
from lanelib.paths import LANES
from lanelib.procs import (
    Process,
    alive,
    send,
    title_of,
    tree_of,
    wait_gone,
    watchers_of,
)

READY_TIMEOUT_S = 300.0
#: Seconds between SIGTERM and SIGKILL; an idle server of today takes up to 11.
GRACE_S = 20.0
#: Seconds that the kit's handler is given to finish an incident once its server is gone.
HANDLER_GRACE_S = 60.0
POLL_S = 0.2
TAIL_LINES = 30
#: A server on this machine is not behind the proxy that the environment may name.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ManagedProcess:
    """A process with an HTTP server in it, in a session of its own.

    Attributes:
        name: what messages call it.
        url: where it answers, without a slash at the end.
        port: its port.
        log_path: what it printed.
        popen: its main process.
        ready_s: seconds from its start to its first answer; None before.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        host: str,
        port: int,
        log_path: Path | None = None,
        ready_path: str = "/health",
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://{host}:{port}"
        self.log_path = log_path or new_log_path(name)
        self.ready_s: float | None = None
        self._ready_path = ready_path
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
                start_new_session=True,  # Ctrl-C is ours to handle; the session finds orphans
            )

    @property
    def pid(self) -> int:
        """The main process's pid."""
        return self.popen.pid

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def processes(self) -> list[tuple[int, str]]:
        """Return (pid, title) of each living process of its tree."""
        return [(process.pid, title_of(process.pid)) for process in self._tree()]

    def pid_of(self, title: str) -> int:
        """Return the pid of its one living process whose title is, or begins with, `title`.

        Raises:
            LaneError: there is none, or more than one.
        """
        found = self.processes()
        pids = [pid for pid, its in found if its == title or its.split(" ")[0] == title]
        pids = pids or [pid for pid, its in found if its.startswith(title)]
        if len(pids) != 1:
            titles = ", ".join(f"{pid} {its[:60]}" for pid, its in found)
            raise LaneError(f"{len(pids)} processes titled {title} in {self.name}: {titles}")
        return pids[0]

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last `lines` lines of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def poll_ready(self) -> bool:
        """Say whether it answers.

        Raises:
            LaneError: it has ended; the message has its log's tail.
        """
        self._tree()
        status = self.popen.poll()
        if status is not None:
            raise LaneError(
                f"{self.name} ended with status {status} before it was ready:\n{self.log_tail()}",
                next_step=f"read {self.log_path}",
            )
        try:
            with _opener.open(f"{self.url}{self._ready_path}", timeout=5):
                pass
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False
        self.ready_s = time.monotonic() - self._started
        self._note_watchers()
        return True

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until it answers.

        Raises:
            LaneError: it ended, or did not answer within `timeout_s` seconds.
        """
        wait_all_ready([self], timeout_s)

    def generate(
        self,
        prompt: str = "Hello",
        *,
        max_new_tokens: int = 8,
        timeout_s: float = 60.0,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Ask for exactly `max_new_tokens` tokens.

        Returns:
            SGLang's answer: ``text``, ``output_ids``, ``meta_info``.

        Raises:
            urllib.error.URLError: it refused, failed or is gone.
            TimeoutError: no answer within `timeout_s` seconds.
        """
        parameters = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        # Random weights end a sentence at random.
        parameters |= {"ignore_eos": True} | sampling
        body = json.dumps({"text": prompt, "sampling_params": parameters}).encode()
        request = urllib.request.Request(  # noqa: S310 - the scheme is ours
            f"{self.url}/generate", body, {"Content-Type": "application/json"}
        )
        with _opener.open(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def terminate(self) -> None:
        """Ask the main process to end."""
        self._tree()
        self._note_watchers()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End every process of it, known or found now, and wait until they are gone.

        The kit's handler, which outlives its server to finish an incident, is waited for.

        Raises:
            LaneError: a process could not be killed.
        """
        self.terminate()
        deadline = time.monotonic() + grace_s
        while self._members() and time.monotonic() < deadline:
            self.popen.poll()  # reap it, or it stays as a zombie
            time.sleep(POLL_S / 4)
        # New ones may appear while the old ones are killed.
        kill_deadline = time.monotonic() + grace_s
        while (left := self._members()) and time.monotonic() < kill_deadline:
            for process in left:
                send(process, signal.SIGKILL)
            wait_gone(left, 0.5)
            self.popen.poll()
        for process in wait_gone(self._watchers.values(), HANDLER_GRACE_S):
            send(process, signal.SIGKILL)
        left = [*self._members(), *wait_gone(self._watchers.values(), 5)]
        if left:
            raise LaneError(f"processes of {self.name} survive SIGKILL: {[p.pid for p in left]}")
        self.popen.wait(timeout=grace_s)

    def _tree(self) -> list[Process]:
        # Once the main process is reaped, its pid is another's unless its session still lives.
        if self.popen.returncode is not None and not alive(self._known.values()):
            return []
        tree = tree_of(self.pid)
        self._known |= {process.key: process for process in tree}
        return tree

    def _members(self) -> list[Process]:
        self._tree()
        return alive(self._known.values())

    def _note_watchers(self) -> None:
        for process in watchers_of(pid for pid, _ in self._known):
            if title_of(process.pid).startswith("sglang::"):
                self._watchers[process.key] = process


def wait_all_ready(servers: Sequence[ManagedProcess], timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until each of `servers` answers.

    Raises:
        LaneError: one ended, or did not answer within `timeout_s` seconds in all.
    """
    deadline = time.monotonic() + timeout_s
    pending = [server for server in servers if not server.poll_ready()]
    while pending:
        if time.monotonic() > deadline:
            slow = pending[0]
            raise LaneError(
                f"{slow.name} does not answer at {slow.url} after {timeout_s:.0f} s:\n{slow.log_tail()}",
                next_step=f"read {slow.log_path}",
            )
        time.sleep(POLL_S)
        pending = [server for server in pending if not server.poll_ready()]


def free_port() -> int:
    """Return a TCP port that nothing listens on now.

    Below the ports that the kernel gives to clients, and with room above for the ports that SGLang
    derives from it.
    """
    for _ in range(100):
        port = 20000 + int.from_bytes(os.urandom(2), "big") % 10000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaneError("no free TCP port between 20000 and 29999", next_step="stop other servers")


def new_log_path(name: str) -> Path:
    """Return a path below ``.lanes/logs`` for one more log of `name`."""
    moment = time.strftime("%Y%m%d-%H%M%S")
    return LANES / "logs" / f"{moment}-{name}-{os.urandom(2).hex()}.log"
