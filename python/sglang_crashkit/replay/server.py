"""Requests are sent to a server, as many at once as were under way; and a server of one's own, to be broken by them."""

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

#: All in seconds. A server that is asked to end has done so by then; it has so long to write an incident; one that
#: answered everything and is about to fail does so by then.
_END_SECS, INCIDENT_SECS, _SETTLE_SECS = 30.0, 90.0, 1.0
_LOOK_SECS, _POLL_SECS, _HEALTH_SECS = 0.1, 0.05, 5.0
#: So much of an answer is read at once, and kept of one that refuses, in bytes.
_CHUNK, _MAX_PROBLEM = 1 << 16, 500
#: No more requests are under way at once: each has a thread and a descriptor.
_MAX_AT_ONCE = 512
#: Requests that are replayed keep their distances, but for longer ones than this, in seconds.
MAX_GAP_SECS = 1.0
#: So often it is started at most: another program may take a port, or memory, that it needs.
_MAX_STARTS = 3
#: Below the ports that the kernel gives to clients, and with room above for those that SGLang derives: gRPC's is 10,000
#: above the server's, and one beyond 65,535 ends the launch.
_PORTS, _MAX_PORTS_TRIED = range(20_000, 30_000), 100
_HOST = "127.0.0.1"
#: What the command says of these is about another server, which must not be reached, nor its secrets be kept here.
_REPLACED = frozenset(
    {
        *("--port", "--host", "--crash-dump-folder", "--api-key", "--admin-api-key"),
        *("--ssl-certfile", "--ssl-keyfile", "--ssl-keyfile-password", "--ssl-ca-certs"),
    }
)
#: A program that ends the process group it is given where its standard input ends without a word: SIGKILL of the
#: process that started a server leaves no other to end it.
_WATCH = "import os, signal, sys; os.read(0, 1) or os.killpg(int(sys.argv[1]), signal.SIGKILL)"
#: Kinds of incidents that are no failure of the server's own.
_NO_FAILURE = frozenset({"peer_lost", "snapshot"})


@dataclass
class Answer:
    """What came of a request."""

    rid: str  # its id
    status: int | None = None  # the HTTP status; None where there was no answer
    problem: str = ""  # why there was no answer, or what the server has against it; empty otherwise
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
    """Send one request and read its answer, which is thrown away, to the end, which comes within `timeout_secs`.

    Nothing is sent unless, once the connection is made, the server that listens at the address `is_meant`.
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
    """Send requests in their order, without waiting for the answers of those before, and return what was answered.

    They are sent as far apart as they arrived, but no further than `max_gap_secs`. Nothing is waited for once
    `is_over`, as the server has ended; for `is_meant` see `send`.
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
        # A request that is stuck must not keep this process.
        threads.append(threading.Thread(target=ask, args=(request,), daemon=True))
        threads[-1].start()
    for thread in threads:
        while thread.is_alive() and not is_over():
            thread.join(_POLL_SECS)
    return [*answers]


@dataclass
class Tried:
    """What came of requests that were sent to a server."""

    answers: list[Answer]
    outcome: str  # in words
    incident: StoredIncident | None  # that the server wrote of its failure
    is_same: bool  # its fault is the one that was looked for
    serves_on: bool


class OwnServer(contextlib.AbstractContextManager["OwnServer"]):
    """Runs a server from `start` to `end`.

    It listens at a free port of the loopback address, and has a crash folder of its own and no API key, whatever the
    command says of these. Its logs and crash folders go to `folder`.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.address = Address("http", _HOST, 0)  # where it answers, once it is started
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
        # An exception that a signal raises in the main thread cannot come between the start and what is known of it.
        self._launcher = ThreadPoolExecutor(1)

    def start(self, ready_secs: float, say: Callable[[str], object] = lambda _line: None) -> None:
        """Start it and wait until it serves; one that ends before that is started again, a few times, which is said.

        Raises:
            CrashkitError: it cannot be started, ended each time, or is not ready in time.
        """
        make_private_folder(self.folder)
        for number in range(1, _MAX_STARTS + 1):
            # What an earlier run left is no failure of this server.
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
        """Wait until it serves, and return why it does not; empty where it does."""
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
        """Say whether what listens at its port is this server, and nothing else; None where nothing does."""
        found, popen = listening_at(self.address.port), self._popen
        if found and found != self._sockets and popen is not None:
            # Seldom: a socket that listens is its holder's until it is closed.
            held = holders_of(found, procfs.TreeScanner(popen.pid).scan())
            self._sockets = found if found == held.keys() else set()
        return found == self._sockets if found else None

    @property
    def has_ended(self) -> bool:
        """Whether its main process has ended."""
        return self._popen is None or self._popen.poll() is not None

    def try_requests(
        self, requests: Sequence[StoredRequest], incident: Incident, secs: float, max_gap_secs: float = 0.0
    ) -> Tried:
        """Send requests, each of which may take `secs`, and say whether it fails as an incident tells."""
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
        """Return the oldest incident of a failure, once it is whole; None if absent."""
        began = time.monotonic()
        while True:
            failures = self._failures()
            whole = [one for one in failures if one.finished and one.document is not None]
            # Its handler begins the incident before the server ends.
            may_come = bool(failures) or (is_lost and not self.has_ended)
            if whole or time.monotonic() > began + (INCIDENT_SECS if may_come else _SETTLE_SECS):
                return whole[-1] if whole else None
            time.sleep(_LOOK_SECS)

    def end(self) -> None:
        """End it and everything that it started; it is not started again."""
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
            # A session of its own: whatever is left in its group belongs to it.
            with contextlib.suppress(OSError):
                signals.kill_group(popen.pid)
            if watcher is not None:
                # It would end the group later, whose number may be another's by then.
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
