"""A server of one's own, started to be broken: what its crash handler wrote of its end, and its end at last."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from sglang_crashkit.errors import CrashkitError, UsageError
from sglang_crashkit.incident.store import StoredIncident, find_incidents, parse_name
from sglang_crashkit.kernel import signals
from sglang_crashkit.kernel.server_arguments import serves_tls, value_of
from sglang_crashkit.settings import unpublished
from sglang_crashkit.watch.health import Address, Question

#: All in seconds. A server that is asked to end has done so by then; it has so long to write an incident; one that
#: answered everything and is about to fail does so by then.
_END_SECS, _INCIDENT_SECS, _SETTLE_SECS = 30.0, 90.0, 1.0
_LOOK_SECS, _HEALTH_SECS = 0.05, 5.0
#: So often it is started at most: another program may take a port, or memory, that it needs.
_MAX_STARTS = 3
#: Below the ports that the kernel gives to clients, and with room above for those that SGLang derives: gRPC's is 10,000
#: above the server's, and one beyond 65,535 ends the launch.
_PORTS, _MAX_PORTS_TRIED = range(20_000, 30_000), 100
_PORT, _HOST, _CRASH_FOLDER = "--port", "--host", "--crash-dump-folder"
_SETS_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
#: Where it answers on the loopback address, too.
_ALL_HOSTS = (None, "0.0.0.0", "::")  # noqa: S104 - what the command may say
#: A program that ends the process group it is given where its standard input ends without a word: SIGKILL of whoever
#: started a server leaves nobody else to end it.
_WATCH = "import os, signal, sys; os.read(0, 1) or os.killpg(int(sys.argv[1]), signal.SIGKILL)"
#: What a kind of incident is called that is no failure of the server's own.
_NO_FAILURE = frozenset({"peer_lost", "snapshot"})


def parse_command(text: str) -> list[str]:
    """Return the words of a command that serves, as a shell would have them, variables before it among them.

    Raises:
        UsageError: there are none, or a quote is open.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no command: {error}") from None
    if not words:
        raise UsageError("--serve wants a command", next_step="--serve 'python -m sglang.launch_server …'")
    # A shell sets them.
    return ["env", *words] if _SETS_VARIABLE.match(words[0]) else words


def _without(words: list[str], name: str) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return kept


class OwnServer:
    """Runs a server from `start` to `end`, which another thread may call at any moment.

    A crash folder, and a port where there is none, are added to the words of its command. Its log and its crash folder
    go to `folder`; those of each start, if it takes several.

    Attributes:
        address: where it answers.
        folder: see above.
        crash_folder: its crash folder.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self._given = command
        self._popen: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._is_over, self._lock = False, threading.Lock()
        # An exception that a signal raises in the main thread cannot come between the start and what is known of it.
        self._launcher = ThreadPoolExecutor(1)
        self._prepare(1)

    def _prepare(self, number: int) -> None:
        """Choose the paths and the port of the start of this number."""
        suffix = f"-{number}" if number > 1 else ""
        self.crash_folder, self._log = self.folder / f"crash{suffix}", self.folder / f"server{suffix}.log"
        port = value_of(self._given, _PORT)
        command = [*_without(self._given, _CRASH_FOLDER), _CRASH_FOLDER, str(self.crash_folder)]
        if port is None:
            port = str(_free_port())
            command += [_PORT, port]
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"{port!r} is no port")
        if serves_tls(command):
            raise UsageError(
                "a server of --serve is asked without TLS", next_step="leave --ssl-certfile and --ssl-keyfile out of it"
            )
        host = value_of(command, _HOST)
        self.address = Address("http", host if host not in _ALL_HOSTS else "127.0.0.1", int(port))
        self._command = command

    def start(self, ready_secs: float, say: Callable[[str], object] = lambda _line: None) -> None:
        """Start it and wait until it serves; one that ends before that is started again, a few times, which is said.

        Raises:
            CrashkitError: it cannot be started, ended each time, or is not ready in time.
        """
        for number in range(1, _MAX_STARTS + 1):
            if self._serves(ready_secs):
                return
            with self._lock:
                self._stop()
            if self._is_over:
                raise CrashkitError("the server was ended while it started")
            if number < _MAX_STARTS:
                say(f"{self.folder.name}: it ended before it was ready (see {self._log}): starting once more")
                self._prepare(number + 1)
        raise CrashkitError(
            f"the server ended before it was ready, {_MAX_STARTS} times: so its fault is no request's",
            next_step=f"read {self._log}, and the incidents below {self.folder}",
        )

    def _serves(self, ready_secs: float) -> bool:
        """Start it once; say whether it serves, or has failed before anything was sent to it."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if not _is_free(self.address):
            raise CrashkitError(
                f"something listens at {self.address}", next_step="name another --port in the command, or none"
            )
        try:
            self._launcher.submit(self._launch).result()
        except OSError as error:
            raise CrashkitError(f"{self._command[0]} cannot be started: {error}") from error
        deadline = time.monotonic() + ready_secs
        while time.monotonic() < deadline:
            question = Question(self.address, "/health", _HEALTH_SECS)
            while not question.is_over:
                time.sleep(_LOOK_SECS)
            if question.status == 200:
                return self.failure(wait=False) is None and not self.has_ended
            if self.has_ended:
                return False
            time.sleep(_LOOK_SECS)
        raise CrashkitError(f"the server was not ready within {ready_secs:g} s", next_step=f"read {self._log}")

    def _launch(self) -> None:
        with self._lock, self._log.open("wb") as log:
            if not self._is_over:
                self._popen = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=unpublished(os.environ),
                    start_new_session=True,
                )
                self._watcher = subprocess.Popen(
                    [sys.executable, "-IS", "-c", _WATCH, str(self._popen.pid)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )

    @property
    def has_ended(self) -> bool:
        """Whether its main process has ended."""
        popen = self._popen
        return popen is None or popen.poll() is not None

    @property
    def is_failing(self) -> bool:
        """Whether it has ended, or its crash handler has begun an incident."""
        return self.has_ended or bool(self._begun())

    def failure(self, *, wait: bool) -> StoredIncident | None:
        """Return the oldest incident of a failure, once it is whole; None where there is none.

        With `wait` some request was not answered, so that there may well be one soon.
        """
        deadline = time.monotonic() + (_INCIDENT_SECS if wait else _SETTLE_SECS)
        while time.monotonic() < deadline:
            whole = [one for one in self._incidents() if one.finished and one.document is not None]
            if whole:
                return whole[-1]
            if self.has_ended and not self._begun():
                # Its handler writes the incident before the server ends.
                wait, deadline = False, min(deadline, time.monotonic() + _SETTLE_SECS)
            elif self._begun() and not wait:
                wait, deadline = True, time.monotonic() + _INCIDENT_SECS
            time.sleep(_LOOK_SECS)
        return None

    def end(self) -> None:
        """End it and everything that it started; it is not started again."""
        with self._lock:
            self._is_over = True
            self._stop()

    def _stop(self) -> None:
        popen = self._popen
        if popen is None:
            return
        try:
            if popen.poll() is None:
                popen.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(_END_SECS)
        finally:
            # A session of its own: whatever is left in its group belongs to it.
            with contextlib.suppress(OSError):
                signals.kill_group(popen.pid)
            self._dismiss_watcher()
        popen.wait(_END_SECS)
        self._popen = None

    def _dismiss_watcher(self) -> None:
        """End what would end the group later, whose number may be another's by then."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            try:
                watcher.communicate(b"\n", _END_SECS)
            except subprocess.TimeoutExpired:
                watcher.kill()
                watcher.wait(_END_SECS)

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.end()

    def _begun(self) -> list[Path]:
        return [
            path
            for path in self.crash_folder.glob("*/incidents/*")
            if (name := parse_name(path.name)) is not None and name.kind not in _NO_FAILURE
        ]

    def _incidents(self) -> list[StoredIncident]:
        if not self.crash_folder.is_dir():
            return []
        found = find_incidents(self.crash_folder)
        return [one for one in found if (name := parse_name(one.name)) is not None and name.kind not in _NO_FAILURE]


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, _MAX_PORTS_TRIED):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise CrashkitError(
        f"no free port between {_PORTS.start} and {_PORTS.stop - 1}", next_step=f"give the server its {_PORT} PORT"
    )


def _is_free(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), _HEALTH_SECS).close()
    except socket.gaierror as error:
        raise UsageError(f"{address.host!r} is no host: {error.strerror}") from error
    except OSError:
        return True
    return False
