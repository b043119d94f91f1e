"""Notice within 0.1 s that a process on which a test depends has ended, whatever its exit status.

::

    with watch(lambda: [("prefill", cls.prefill), ("decode", cls.decode)]):
        ...

The watcher calls the callable every 0.1 s. Before a test ends a process on purpose, it ends the watch, or its callable
no longer returns the process. The watcher captures the stacks of the surviving processes before it kills them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from sglang_crashkit import protocol
from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.store import StoredIncident, find_incident_of
from sglang_crashkit.kernel import procfs, signals, titles
from sglang_crashkit.kernel.private_files import make_private_folder, write_private
from sglang_crashkit.model.sample import format_threads, main_thread
from sglang_crashkit.settings import Settings, fallback_folder, socket_of
from sglang_crashkit.visible import visible

logger = logging.getLogger(__name__)

#: The longest that collecting the evidence of a death may take, in seconds.
EVIDENCE_SECS = 2.0
#: The longest that the watcher waits for the killed survivors to end, in seconds.
KILL_SECS = 10.0
#: How often the watcher checks the processes, in seconds; the same as upstream's watcher.
_POLL_SECS = 0.1
#: Seconds by which the evidence may be late on a busy machine.
_LATE_SECS = 1.0
#: Seconds to wait for an exit, because a process's connections break shortly before the process has ended.
_GRACE_SECS = 0.2
_FRAMES = 3


@dataclass
class Held:
    """A watched process."""

    name: str  # its name in the source
    process: subprocess.Popen[Any]
    since: float  # when the source named it first, in seconds since the epoch


@dataclass
class Death:
    """An unexpected exit."""

    name: str  # the name of the process in the source
    pid: int  # its process id
    returncode: int  # its exit status, or minus the number of the signal that ended it, as in `subprocess`
    noticed: float  # when it was noticed, in seconds since the epoch
    #: Other watched processes that had ended unexpectedly at that time, each as ``name (pid=…) exited rc=…``.
    others: tuple[str, ...] = ()
    folder: Path | None = None  # the folder with the survivors' stacks; None if no stack was written
    survivors: list[str] = field(default_factory=list)  # the top frames of each surviving process
    #: The incident that the dead process's crash handler wrote; None if absent.
    incident: StoredIncident | None = None

    @property
    def headline(self) -> str:
        """The process that ended, and how."""
        return f"{self.name} (pid={self.pid}) exited rc={self.returncode}"

    @property
    def verdict(self) -> str:
        """The verdict and the path of the incident; empty if there is no incident."""
        if self.incident is None:
            return ""
        verdict = self.incident.incident.verdict
        return f"{verdict.text if verdict is not None else 'no verdict'} ({self.incident.path})"

    def lines(self) -> Iterator[str]:
        """Yield lines for people to read: the headline, the incident's verdict, the top frames of the survivors."""
        yield self.headline
        yield from (f"also: {other}" for other in self.others)
        if self.incident is not None:
            yield f"incident: {self.verdict}"
        if self.folder is not None:
            yield f"stacks of the survivors: {self.folder}"
        yield from (f"meanwhile: {survivor}" for survivor in self.survivors)


NamedProcesses = Iterable[tuple[str, "subprocess.Popen[Any] | None"]]
Source = NamedProcesses | Callable[[], NamedProcesses]


class Watcher:
    """Watches processes in a thread of its own, until a process ends unexpectedly or the watch is ended.

    Args:
        source: names and processes, or a callable that returns the present ones.
        on_death: called in the watcher's thread with all evidence, before the survivors are killed. Without it, this
            process exits after the kills with the dead process's status: 128 + N for signal N, 1 for a status of 0.
        any_status: an exit with status 0 is unexpected too.
        folder: the folder for the survivors' stacks; None for a folder below the fallback folder.
    """

    _active: ClassVar[weakref.WeakSet[Watcher]] = weakref.WeakSet()

    def __init__(
        self,
        source: Source,
        on_death: Callable[[Death], object] | None = None,
        *,
        any_status: bool = True,
        folder: Path | None = None,
    ) -> None:
        self._source = source if callable(source) or isinstance(source, list) else list(source)
        self._on_death = on_death
        self._any_status = any_status
        self._folder = folder
        self._held: dict[int, Held] = {}
        self._ended = threading.Event()
        self.stopped = threading.Event()  # ends the watch when it is set
        self.death: Death | None = None  # the unexpected exit, once its evidence is complete
        self._thread = threading.Thread(target=self._run, name="sglang-crashkit-fail-fast", daemon=True)

    @classmethod
    def covering(cls, processes: Iterable[subprocess.Popen[Any]]) -> Watcher | None:
        """Return the active watcher that watches all of `processes`; None if there is no such watcher."""
        wanted = {id(process) for process in processes}
        for watcher in list(cls._active):
            if not wanted or watcher.stopped.is_set():
                continue
            named = watcher._named()
            if named is not None and wanted <= {id(process) for _, process in named}:
                return watcher
        return None

    def start(self) -> Watcher:
        """Start the watch, and return this watcher."""
        self._active.add(self)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the watch. Call it before the processes are ended on purpose; a second call does nothing."""
        self.stopped.set()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        if kind is not None:
            # The exception may be a consequence of a death whose evidence is still being collected.
            self.settle()
        self.stop()

    def settle(self) -> Death | None:
        """Return the death, after its evidence is complete, if a process has ended or ends within `_GRACE_SECS`."""
        deadline = time.monotonic() + _GRACE_SECS
        while self.death is None and not self.stopped.is_set():
            if self._find_dead():
                self._ended.wait(EVIDENCE_SECS + _LATE_SECS)
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return self.death

    def _named(self) -> list[tuple[str, subprocess.Popen[Any]]] | None:
        """Return the present processes of the source; None if the caller's callable raised."""
        try:
            source = self._source() if callable(self._source) else self._source
            return [(name, process) for name, process in source if process is not None]
        except Exception as error:  # noqa: BLE001 - the caller's code; the watch of the known processes continues
            logger.warning("crash kit: the watched processes could not be listed: %s", error)
            return None

    def _run(self) -> None:
        try:
            while not self.stopped.is_set():
                if (named := self._named()) is not None:
                    known = self._held
                    self._held = {id(one): known.get(id(one)) or Held(name, one, time.time()) for name, one in named}
                dead = self._find_dead()
                if dead and not self.stopped.is_set():
                    self._handle(dead)
                    return
                self.stopped.wait(_POLL_SECS)
        except Exception:
            logger.exception("crash kit: the watch of %s failed", [held.name for held in self._held.values()])
        finally:
            self._ended.set()

    def _find_dead(self) -> list[tuple[Held, int]]:
        """Return the processes that ended unexpectedly, each with its exit status as in `subprocess`."""
        codes = [(held, held.process.poll()) for held in list(self._held.values())]
        return [(held, code) for held, code in codes if code is not None and (code != 0 or self._any_status)]

    def _handle(self, dead: list[tuple[Held, int]]) -> None:
        began = time.monotonic()
        (first, code), *others = dead
        death = Death(first.name, first.process.pid, code, time.time())
        death.others = tuple(f"{held.name} (pid={held.process.pid}) exited rc={rc}" for held, rc in others)
        consequence = "aborting" if self._on_death is None else "failing the tests that depend on it"
        _say(f"[FIXTURE FAIL-FAST] {death.headline}; {consequence}.")
        roots = [(held.name, held.process.pid) for held in self._held.values() if held.process.poll() is None]
        try:
            settings = Settings.from_environ()
            if settings.stacks:
                folder = self._folder or fallback_folder() / socket.gethostname() / "deaths"
                capture(death, roots, folder, min(settings.capture_secs, EVIDENCE_SECS))
            left = max(0.0, began + EVIDENCE_SECS - time.monotonic())
            death.incident = find_incident_of(death.pid, first.since, getattr(first.process, "args", None), left)
        except Exception:
            logger.exception("crash kit: the evidence of %s is incomplete", death.headline)
        if death.verdict:
            _say(f"[FIXTURE FAIL-FAST] incident: {death.verdict}")
        if death.folder is not None:
            _say(f"[FIXTURE FAIL-FAST] survivors: {death.folder}")
        self.death = death
        self._ended.set()
        if self._on_death is not None:
            self._on_death(death)
        survived = kill_trees([pid for _, pid in roots], KILL_SECS)
        if survived:
            logger.error("crash kit: processes %s are left after SIGKILL", survived)
        if self._on_death is None:
            os._exit((code if code >= 0 else 128 - code) or 1)


def capture(death: Death, survivors: Iterable[tuple[str, int]], folder: Path, deadline_secs: float) -> None:
    """Take the stacks of all surviving Python processes at the same time, without stopping any of them.

    `survivors` has the name and pid of each watched process that lives; their descendants are included. The results go
    into `death`, and into a new subfolder of `folder` with mode 0700.
    """
    owners = {pid: name for name, root in survivors for pid in sorted(procfs.TreeScanner(root).scan())}
    roles = {pid: procfs.read_title(pid) for pid in owners if procfs.is_python(pid)}
    moment = datetime.fromtimestamp(death.noticed, timezone.utc).strftime("%Y%m%dT%H%M%S")
    own = folder / f"{moment}-{titles.label_of(death.name, death.pid)}-{os.urandom(4).hex()}"
    taken = sample_all(roles, deadline_secs)
    # Schedulers first, because JUnit reports keep only the first lines.
    for result in sorted(taken, key=lambda one: titles.role_of(roles[one.pid]) != "scheduler"):
        name, title = owners[result.pid], roles[result.pid]
        doing = f"no stack: {result.problem}"
        if result.threads:
            thread = main_thread(result.threads, result.pid)
            doing = " < ".join(str(frame) for frame in (thread.frames if thread else ())[:_FRAMES])
            file = f"{name}-{titles.label_of(title, result.pid)}.txt".replace("/", "_")
            text = "\n".join(format_threads(title, result.pid, result.threads)) + "\n"
            with contextlib.suppress(OSError, CrashkitError):
                death.folder = make_private_folder(own)
                write_private(death.folder / file, text.encode(errors="replace"))
        if titles.role_of(title) != "helper" or "multiprocessing" not in title:
            # The stacks of multiprocessing's helper processes are of no interest: they only wait.
            death.survivors.append(f"{name}: {title} (pid {result.pid}): {doing}")


def kill_trees(roots: Sequence[int], timeout_secs: float) -> list[int]:
    """Kill processes and their descendants; return the pids of those that still run after `timeout_secs`.

    Notify their crash handlers first, so that the kills are not recorded as an incident.
    """
    deadline = time.monotonic() + timeout_secs
    for root in roots:
        path = socket_of(root)
        if path is not None and path.exists():
            with contextlib.suppress(protocol.HandlerUnreachableError):
                protocol.notify(str(path), "teardown", pid=root)
    pids: set[int] = set()
    # Scan twice: a process may have forked between the first scan and its SIGKILL.
    for _ in range(2):
        pids |= {pid for root in roots for pid in procfs.TreeScanner(root).scan()}
        signals.kill_all(pids)
    while (left := [pid for pid in pids if procfs.is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return left


def watch(source: Source, *, folder: Path | None = None) -> Watcher:
    """Watch processes, whatever status they end with; see `Watcher`.

    In a pytest run with the kit's plugin, the running test fails by name, with the evidence in its report, and so do
    the tests that depend on the same fixture. Without the plugin this process exits, as with upstream's watcher.
    """
    # Don't import the plugin: without it, pytest may not be installed.
    runner = getattr(sys.modules.get("sglang_crashkit.test.plugin"), "runner", None)
    watcher: Watcher = Watcher(source, folder=folder).start() if runner is None else runner.watch(source, folder=folder)
    return watcher


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed, or goes to a full disk
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()
