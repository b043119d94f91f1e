"""Notice within a tenth of a second that a process which a test depends on has ended, whatever its exit status.

::

    with watch(lambda: [("prefill", cls.prefill), ("decode", cls.decode)]):
        ...

The callable is asked every 0.1 s: a process that it names no more is watched no more, one that it names anew is
watched from then on. Ending one on purpose is announced: by ending the watch, or by naming the process no more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Protocol

from sglang_crashkit.incident.store import find_incident_of
from sglang_crashkit.settings import Settings
from sglang_crashkit.test import evidence
from sglang_crashkit.test.evidence import Death
from sglang_crashkit.visible import visible

if TYPE_CHECKING:
    from sglang_crashkit.test.plugin import FailByName

logger = logging.getLogger(__name__)

#: The longest that the evidence of one death may take, in seconds.
EVIDENCE_SECS = 2.0
#: The longest that the survivors' end is waited for, in seconds.
KILL_SECS = 10.0
#: How often the processes are looked at, in seconds; as often as by upstream's watcher.
_POLL_SECS = 0.1
#: So much later than planned the evidence may be there on a busy machine, in seconds.
_LATE_SECS = 1.0
#: A connection breaks a moment before the process that held it is gone; in seconds.
_GRACE_SECS = 0.2


class Process(Protocol):
    """What is needed of a process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Return its exit status as subprocess tells it, None while it lives."""


@dataclass
class Held:
    """A watched process."""

    name: str  # what it is called
    process: Process
    since: float  # when it was seen first, in seconds since the epoch


NamedProcesses = Iterable[tuple[str, "Process | None"]]
Source = NamedProcesses | Callable[[], NamedProcesses]


class Watcher:
    """Watches processes in a thread of its own until one ends unexpectedly or the watch is ended.

    Args:
        source: name and process, or a callable that returns them as they are now.
        on_death: called in the watcher's thread with all that is known, before the survivors are killed.
        at_the_end: the same, after they were killed.
        consequence: what the message on stderr says will follow.
        any_status: an exit with status 0 is unexpected too.
        folder: where the survivors' stacks go; `evidence.default_folder` when None.

    Attributes:
        stopped: ends the watch when it is set.
        death: the unexpected exit, once its evidence is whole.
    """

    _active: ClassVar[weakref.WeakSet[Watcher]] = weakref.WeakSet()

    def __init__(
        self,
        source: Source,
        on_death: Callable[[Death], None] | None = None,
        *,
        at_the_end: Callable[[Death], None] | None = None,
        consequence: str = "aborting",
        any_status: bool = True,
        folder: Path | None = None,
    ) -> None:
        self._source = source if callable(source) or isinstance(source, list) else list(source)
        self._on_death = on_death
        self._at_the_end = at_the_end
        self._consequence = consequence
        self._any_status = any_status
        self._folder = folder
        self._held: dict[int, Held] = {}
        self._ended = threading.Event()
        self.stopped = threading.Event()
        self.death: Death | None = None
        self._thread = threading.Thread(target=self._run, name="sglang-crashkit-fail-fast", daemon=True)

    @classmethod
    def covering(cls, processes: Iterable[Process]) -> Watcher | None:
        """Return the watcher under which all of `processes` are already, None if absent."""
        wanted = {id(process) for process in processes}
        for watcher in list(cls._active):
            if not wanted or watcher.stopped.is_set():
                continue
            named = watcher._named()
            if named is not None and wanted <= {id(process) for _, process in named}:
                return watcher
        return None

    def start(self) -> Watcher:
        """Begin to watch, and return this watcher."""
        self._active.add(self)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the watch; to be called before the processes are ended on purpose. Twice is no error."""
        self.stopped.set()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # What failed in the block may be a consequence of a death that is being looked into.
            self.settle()
        self.stop()

    def settle(self) -> Death | None:
        """Return the death, waiting for its evidence where a watched process has ended or does so within the grace."""
        deadline = time.monotonic() + _GRACE_SECS
        while self.death is None and not self.stopped.is_set():
            if self._find_dead():
                self._ended.wait(EVIDENCE_SECS + _LATE_SECS)
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return self.death

    def _named(self) -> list[tuple[str, Process]] | None:
        """Return the processes that are there now; None where the caller's code that lists them raised."""
        try:
            source = self._source() if callable(self._source) else self._source
            return [(name, process) for name, process in source if process is not None]
        except Exception as error:  # noqa: BLE001 - the caller's code; the processes known so far are watched on
            logger.warning("crash kit: the watched processes could not be listed: %s", error)
            return None

    def _run(self) -> None:
        try:
            while not self.stopped.is_set():
                self._refresh()
                dead = self._find_dead()
                if dead and not self.stopped.is_set():
                    self._handle(dead)
                    return
                self.stopped.wait(_POLL_SECS)
        except Exception:
            logger.exception("crash kit: the watch of %s failed", [held.name for held in self._held.values()])
        finally:
            self._ended.set()

    def _refresh(self) -> None:
        named = self._named()
        if named is None:
            return
        present = {id(process) for _, process in named}
        for key in self._held.keys() - present:
            del self._held[key]
        for name, process in named:
            if id(process) not in self._held:
                self._held[id(process)] = Held(name, process, time.time())

    def _find_dead(self) -> list[tuple[Held, int]]:
        """Return those that ended unexpectedly, each with its exit status as subprocess tells it."""
        codes = [(held, held.process.poll()) for held in list(self._held.values())]
        return [(held, code) for held, code in codes if code is not None and (code != 0 or self._any_status)]

    def _handle(self, dead: list[tuple[Held, int]]) -> None:
        began = time.monotonic()
        (first, code), *others = dead
        death = Death(first.name, first.process.pid, code, time.time())
        death.others = tuple(f"{held.name} (pid={held.process.pid}) exited rc={rc}" for held, rc in others)
        _say(f"[FIXTURE FAIL-FAST] {death.headline}; {self._consequence}.")
        roots = [(held.name, held.process.pid) for held in self._held.values() if held.process.poll() is None]
        try:
            settings = Settings.from_environ()
            if settings.stacks:
                folder = self._folder or evidence.default_folder()
                evidence.capture(death, roots, folder, min(settings.capture_secs, EVIDENCE_SECS))
            left = max(0.0, began + EVIDENCE_SECS - time.monotonic())
            death.incident = find_incident_of(death.pid, first.since, getattr(first.process, "args", None), left)
        except Exception:
            logger.exception("crash kit: the evidence of %s is not whole", death.headline)
        death.seconds = time.monotonic() - began
        if death.verdict:
            _say(f"[FIXTURE FAIL-FAST] incident: {death.verdict}")
        if death.folder is not None:
            _say(f"[FIXTURE FAIL-FAST] survivors: {death.folder}")
        self.death = death
        self._ended.set()
        if self._on_death is not None:
            self._on_death(death)
        survived = evidence.kill_trees([pid for _, pid in roots], KILL_SECS)
        if survived:
            logger.error("crash kit: processes %s are left after SIGKILL", survived)
        if self._at_the_end is not None:
            self._at_the_end(death)


def abort_on_death(source: Source, *, any_status: bool, folder: Path | None = None) -> Watcher:
    """End this process when a watched one ends unexpectedly; see `Watcher`.

    Its exit status is that of the dead process, 128 + N for signal N, and 1 for a status of 0.
    """
    return Watcher(
        source,
        at_the_end=lambda death: os._exit(death.exit_status),
        any_status=any_status,
        folder=folder,
    ).start()


def watch(source: Source, *, folder: Path | None = None) -> Watcher:
    """Watch processes, whatever status they end with.

    In a pytest run with the kit's plugin the test that runs fails by name, with the evidence in its report, and so do
    those that depend on the same fixture; anywhere else this process ends, as with upstream's watcher. See `Watcher`.
    """
    if (runner := find_runner()) is not None:
        return runner.watch(source, folder=folder)
    return abort_on_death(source, any_status=True, folder=folder)


def find_runner() -> FailByName | None:
    """Return the runner of the pytest plugin, which fails a test by name; None outside a test run with it."""
    # Not imported: elsewhere there need be no pytest.
    plugin = sys.modules.get("sglang_crashkit.test.plugin")
    return plugin.runner if plugin is not None else None


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed, or a full disk behind it
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()
