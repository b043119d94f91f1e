"""Send requests to a server, as many at once as were under way; and start a server that they may break."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.fingerprint import is_same_fault, words_of
from sglang_crashkit.incident.requests import StoredRequest
from sglang_crashkit.incident.store import StoredIncident, find_incidents, parse_name
from sglang_crashkit.kernel import procfs, signals
from sglang_crashkit.kernel.private_files import create_private, make_private_folder
from sglang_crashkit.kernel.server_address import Address, holders_of, listening_at
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.settings import unpublished

#: In seconds: within which a server that is asked to end has ended; that it has to write an incident; and within which
#: a server that answered everything fails, if it is about to.
_END_SECS, INCIDENT_SECS, _SETTLE_SECS = 30.0, 90.0, 1.0
_LOOK_SECS, _POLL_SECS, _HEALTH_SECS = 0.1, 0.05, 5.0
#: Bytes of an answer that are read at once, and that are kept of an answer that refuses.
_CHUNK, _MAX_PROBLEM = 1 << 16, 500
#: Most requests under way at once: each has a thread and a descriptor.
_MAX_AT_ONCE = 512
#: Replayed requests keep the time between them, but for at most this many seconds.
MAX_GAP_SECS = 1.0
#: How often a server is started at most: another program may take a port, or memory, that it needs.
_MAX_STARTS = 3
#: Ports below those that the kernel gives to clients, with room above for those that SGLang derives: the port of gRPC
#: is the server's plus 10,000, and a port beyond 65,535 ends the launch.
_PORTS, _MAX_PORTS_TRIED = range(20_000, 30_000), 100
_HOST = "127.0.0.1"
#: Options that are taken out of the command: they name another server, which must not be reached, and its secrets.
_REPLACED = frozenset(
    {
        *("--port", "--host", "--crash-dump-folder", "--api-key", "--admin-api-key"),
        *("--ssl-certfile", "--ssl-keyfile", "--ssl-keyfile-password", "--ssl-ca-certs"),
    }
)
#: A program that kills the process group in its argument when its standard input ends without data: SIGKILL of the
#: process that started a server leaves no other process to end the server.
_WATCH = "import os, signal, sys; os.read(0, 1) or os.killpg(int(sys.argv[1]), signal.SIGKILL)"
#: Kinds of incidents that are no failure of the server itself.
_NO_FAILURE = frozenset({"peer_lost", "snapshot"})


@dataclass
class Answer:
    """The answer to a request, or the reason why no answer came."""

    rid: str  # the request's id
    status: int | None = None  # the HTTP status; None where there was no answer
    problem: str = ""  # why there was no answer, or why the server refuses the request; empty otherwise
    secs: float = 0.0  # how long it took, in seconds

    @property
    def is_refused(self) -> bool:
        """Whether the server did not take the request."""
        return self.status is not None and 400 <= self.status < 500


def send(
    address: Address,
    body: Mapping[str, Any],
    timeout_secs: float,
    path: str = "/generate",
    is_meant: Callable[[], bool] = lambda: True,
) -> Answer:
    """Send one request and read its answer to the end, within `timeout_secs`; the text of a good answer is dropped.

    Nothing is sent unless `is_meant` holds for the server that listens at the address, once it is connected.
    """
    answer, began = Answer(str(body.get("rid"))), time.monotonic()
    headers = {"Content-Type": "application/json"}
    connection, deadline = None, began + timeout_secs
    try:
        connection = address.connect(timeout_secs)
        connection.connect()
        if not is_meant():
            raise ConnectionError(f"what listens at {address} is not the server that was started: nothing was sent")
        connection.request("POST", f"{address.prefix}{path}", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        text = b""
        while chunk := response.read1(_CHUNK):
            text += chunk[: _MAX_PROBLEM - len(text)]
            if time.monotonic() > deadline:
                raise TimeoutError
        answer.status = response.status
        if response.status >= 400:
            answer.problem = text.decode(errors="replace")
    except TimeoutError:
        answer.problem = f"no answer within {timeout_secs:g} s"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.problem = str(error) or type(error).__name__
    finally:
        if connection is not None:
            connection.close()
    answer.secs = time.monotonic() - began
    return answer


def send_all(
    address: Address,
    requests: Sequence[StoredRequest],
    timeout_secs: float,
    *,
    max_gap_secs: float = 0.0,
    is_over: Callable[[], bool] = lambda: False,
    is_meant: Callable[[], bool] = lambda: True,
) -> list[Answer]:
    """Send requests in their order, without waiting for earlier answers, and return the answers that came.

    They are sent as far apart in time as they arrived, but at most `max_gap_secs` seconds. Answers are no longer waited
    for once `is_over`, such as when the server has ended; for `is_meant` see `send`.
    """
    answers: list[Answer] = []

    free = threading.Semaphore(_MAX_AT_ONCE)

    def ask(request: StoredRequest) -> None:
        try:
            answers.append(send(address, request.body, timeout_secs, request.path, is_meant))
        finally:
            free.release()

    threads: list[threading.Thread] = []
    for before, request in zip([None, *requests], requests, strict=False):
        if before is not None and max_gap_secs:
            time.sleep(min(max_gap_secs, max(0.0, request.arrived - before.arrived)))
        while not free.acquire(timeout=_POLL_SECS):
            if is_over():
                return [*answers]
        # A daemon thread, so that a stuck request does not keep this process from ending.
        threads.append(threading.Thread(target=ask, args=(request,), daemon=True))
        threads[-1].start()
    for thread in threads:
        while thread.is_alive() and not is_over():
            thread.join(_POLL_SECS)
    return [*answers]


@dataclass
class Tried:
    """The result of requests that were sent to a server."""

    answers: list[Answer]
    outcome: str  # the result in words
    incident: StoredIncident | None  # the incident that the server wrote of its failure
    is_same: bool  # whether that incident has the same fault as the given one
    serves_on: bool


class OwnServer(contextlib.AbstractContextManager["OwnServer"]):
    """Runs a server from `start` to `end`.

    The server listens at a free port of the loopback address, has a crash folder of its own and no API key; the
    command's options for these are ignored. Its logs and crash folders go to `folder`.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.address = Address("http", _HOST, 0)  # its address, once it is started
        self._command, skip = list[str](), False
        for word in command:
            name, equals, _value = word.partition("=")
            if not skip and name not in _REPLACED:
                self._command.append(word)
            skip = not skip and name in _REPLACED and not equals
        self._crash_folder = folder / "crash"
        self._popen: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._sockets: set[str] = set()
        # Starts the server in a thread, where no signal's exception can come between Popen and the attribute it sets.
        self._launcher = ThreadPoolExecutor(1)

    def start(self, ready_secs: float, say: Callable[[str], object] = lambda _line: None) -> None:
        """Start the server and wait until it serves; start it again, a few times, if it ends before; `say` reports it.

        Raises:
            CrashkitError: it cannot be started, ended each time, or is not ready in time.
        """
        make_private_folder(self.folder)
        for number in range(1, _MAX_STARTS + 1):
            # A new folder, so that incidents of an earlier run do not count as failures of this server.
            self._crash_folder = Path(tempfile.mkdtemp(prefix=f"crash-{number}-", dir=self.folder))
            log = self.folder / f"server-{number}.log"
            self.address = Address("http", _HOST, _free_port())
            try:
                self._launcher.submit(self._launch, log).result()
            except OSError as error:
                raise CrashkitError(f"{self._command[0]} cannot be started: {error}") from error
            problem = self._wait_ready(ready_secs, log)
            if not problem:
                return
            self._stop()
            say(f"{self.folder.name}: {problem} (see {log}), start {number} of {_MAX_STARTS}")
        raise CrashkitError(
            f"the server was not ready in {_MAX_STARTS} starts: so no request is to blame",
            next_step=f"read {log}, and the incidents below {self.folder}",
        )

    def _launch(self, log: Path) -> None:
        options = ["--host", _HOST, "--port", str(self.address.port), "--crash-dump-folder", str(self._crash_folder)]
        log.unlink(missing_ok=True)
        with create_private(log) as file:
            self._popen = subprocess.Popen(
                [*self._command, *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=unpublished(os.environ),
                start_new_session=True,
            )
        watch = [sys.executable, "-IS", "-c", _WATCH, str(self._popen.pid)]
        self._watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)

    def _wait_ready(self, ready_secs: float, log: Path) -> str:
        """Wait until the server serves, and return why it does not; empty where it does."""
        deadline = time.monotonic() + ready_secs
        while time.monotonic() < deadline:
            if self.has_ended:
                return "it ended before it was ready"
            is_own = self.is_listening()
            if is_own is False:
                return f"another program listens at {self.address}"
            with contextlib.suppress(OSError):
                if is_own and self.address.ask("/health", _HEALTH_SECS) == 200:
                    has_failed = self._wait_failure(is_lost=False) is not None
                    return "it failed before anything was sent to it" if has_failed else ""
            time.sleep(_LOOK_SECS)
        raise CrashkitError(f"the server was not ready within {ready_secs:g} s", next_step=f"read {log}")

    def is_listening(self) -> bool | None:
        """Say whether only this server listens at its port; None where no process does."""
        found, popen = listening_at(self.address.port), self._popen
        if found and found != self._sockets and popen is not None:
            # Looked up only when the sockets change: a listening socket has the same holder until it is closed.
            held = holders_of(found, procfs.TreeScanner(popen.pid).scan())
            self._sockets = found if found == held.keys() else set()
        return found == self._sockets if found else None

    @property
    def has_ended(self) -> bool:
        """Whether the server's main process has ended."""
        return self._popen is None or self._popen.poll() is not None

    def try_requests(
        self, requests: Sequence[StoredRequest], incident: Incident, secs: float, max_gap_secs: float = 0.0
    ) -> Tried:
        """Send requests, each for up to `secs` seconds, and say whether the server fails as in the incident."""
        answers = send_all(
            self.address,
            requests,
            secs,
            max_gap_secs=max_gap_secs,
            is_over=lambda: self.has_ended or bool(self._failures()),
            is_meant=lambda: self.is_listening() is True,
        )
        is_lost = len(answers) < len(requests) or any(answer.status is None for answer in answers)
        found = self._wait_failure(is_lost=is_lost)
        is_same = found is not None and is_same_fault(found.incident, incident)
        serves_on = found is None and not is_lost and not self.has_ended
        if found is not None:
            outcome = f"{'the same' if is_same else 'another'} fault: {words_of(found.incident)}"
        elif not serves_on:
            outcome = "it answers no more, and there is no incident"
        elif all(answer.is_refused for answer in answers):
            outcome = f"it refuses the requests with status {answers[0].status}: {answers[0].problem}"
        else:
            outcome = "not reproduced: it serves on"
        return Tried(answers, outcome, found, is_same, serves_on)

    def _failures(self) -> list[StoredIncident]:
        found = find_incidents(self._crash_folder)
        return [one for one in found if (name := parse_name(one.name)) and name.kind not in _NO_FAILURE]

    def _wait_failure(self, *, is_lost: bool) -> StoredIncident | None:
        """Return the oldest incident of a failure, once it is finished; None if none is finished in time."""
        began = time.monotonic()
        while True:
            failures = self._failures()
            whole = [one for one in failures if one.finished and one.document is not None]
            # An incident may still come: the crash handler begins it before the server ends.
            may_come = bool(failures) or (is_lost and not self.has_ended)
            if whole or time.monotonic() > began + (INCIDENT_SECS if may_come else _SETTLE_SECS):
                return whole[-1] if whole else None
            time.sleep(_LOOK_SECS)

    def end(self) -> None:
        """End the server and every process that it started; it cannot be started again."""
        self._launcher.shutdown()
        self._stop()

    def _stop(self) -> None:
        popen, watcher = self._popen, self._watcher
        if popen is None:
            return
        try:
            popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(_END_SECS)
        finally:
            # The server has its own session: every process left in its group belongs to it.
            with contextlib.suppress(OSError):
                signals.kill_group(popen.pid)
            if watcher is not None:
                # Otherwise it would kill the group later, when another group may have that number.
                watcher.kill()
                watcher.communicate(timeout=_END_SECS)
        popen.wait(_END_SECS)
        self._popen = self._watcher = None

    def __exit__(self, *_error: object) -> None:
        self.end()


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, _MAX_PORTS_TRIED):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port
    raise CrashkitError(f"no free port between {_PORTS.start} and {_PORTS.stop - 1}")
