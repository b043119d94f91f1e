"""Judge the exits of the server's processes: which of them is an incident.

What ends without being expected opens an incident. Expected is what a process of the server announced: a teardown
(``kill_process_tree``), or an exit with status 0 while the server drains after SIGTERM. So is the end of the server's
main process by SIGTERM or another signal that asks for it, as long as it has no handler for it. An exit by an orderly
signal or by a status is *soft*: it may be a shutdown whose announcement is on its way, so it is photographed at once
and judged a moment later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sglang_crashkit import policy
from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.handler.collectors.server_log import ServerLog
from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS, is_orderly
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import ArmedFiles
from sglang_crashkit.policy import Event, Mode

logger = logging.getLogger(__name__)

#: A child that died before it had a title has to do with what happens within this time, in seconds.
_UNEXPLAINED_SECS = 60.0
#: Where the server says that a child failed, it may have been that one; a start may take so long, in seconds.
_KEPT_SECS = 3600.0
_MOST_UNEXPLAINED = 64
#: Once its main thread is gone, the rest of a process follows within this time, in seconds.
_LAST_THREAD_SECS = 0.2
#: A process that was sent SIGKILL is gone within this time, in seconds.
_PARENT_SECS = 1.0
#: A process that can tell at all how its child ended does it within this time, in seconds.
_ASK_SECS = 0.3


class Exits:
    """Takes in one exit after the other.

    Args:
        tree: the server's processes.
        outlook: what was announced; the server's own end is noted there.
        current: the incident at hand.
        unwatch: called with a process whose exit was taken in.
        runtime: where the server's processes say what they armed.
        log: the server's own.
    """

    def __init__(
        self,
        tree: ProcessTree,
        outlook: Outlook,
        current: CurrentIncident,
        unwatch: Callable[[TrackedProcess], None],
        runtime: Path,
        log: ServerLog,
    ) -> None:
        self._tree = tree
        self._outlook = outlook
        self._current = current
        self._unwatch = unwatch
        self._runtime = runtime
        self._log = log
        self._silent: set[TrackedProcess] = set()

    def take(self, process: TrackedProcess) -> None:
        """Take in the exit of a process, once."""
        if process.exited_at is not None:
            return
        for earlier in (process.parent, self._tree.root):
            if earlier is not None and earlier.exited_at is None and self._ended_before(earlier, process):
                # The ranks ask the kernel for a signal when it ends, so their end is a consequence.
                self.take(earlier)
                if process.exited_at is not None:
                    return
        expected = process.pid in self._outlook.expected or self._is_users_own(process)
        if process.matters and not expected:
            if not self._is_pardoned(process):
                self._current.make_room()
            self._ask_parent_of(process)
        self._unwatch(process)
        process.exited_at = time.time()
        if process.is_own and process.exit_status().signal in FATAL_SIGNALS - {"SIGKILL"}:
            self._log.tell_of_fault()
        if process.is_root:
            self._outlook.gone_at = time.monotonic()
            # A user's program may end with any status; its ranks end with it.
            self._outlook.ended_well = is_orderly(process.exit_status()) or self._is_users_own(process)
            self.reconsider()
        if self._current.run is not None and not process.is_foreign:
            self._current.run.add_exit(process)
            self._end_dump_of(process)
        elif not process.matters or expected or self._is_clean(process):
            # One that died before it said what it is may be a rank, or a worker of a pool that is of no account. It is
            # kept: if the start fails for it, the incident knows of what it died.
            unexplained = process.is_unknown and not expected and process.exit_status().code != 0
            if unexplained:
                # How it ended is known by now as well as it will be.
                process.handle.close()
                self._forget_beyond(_MOST_UNEXPLAINED)
            elif not process.is_root:
                self._tree.forget(process)
        else:
            self._begin(process, process.exited_at)

    def _forget_beyond(self, most: int) -> None:
        """Of the children that died before they said what they are keep the latest."""
        kept = [process for process in self._tree if process.exited_at is not None and process.is_unknown]
        for process in kept[: max(0, len(kept) - most)]:
            self._tree.forget(process)

    def collect(self) -> None:
        """Take in every exit that there is."""
        for process in self._tree.alive():
            if process.handle.has_exited():
                self.take(process)

    def reconsider(self) -> None:
        """Take the exits seen for a shutdown where they are one by what is known now; then there is no incident."""
        dead = [process for process in self._tree if process.exited_at is not None and process.matters]
        if self._current.awaited.may_be_shutdown and all(self._is_clean(process) for process in dead):
            logger.info("the exits were a shutdown: the server was asked to end")
            self._current.discard()

    def recent_unexplained(self) -> list[TrackedProcess]:
        """Return the children that died lately before they said what they are; forget those that died long ago.

        Those of which nothing is known are among them once the server named them as its own.
        """
        now = time.time()
        dead = {
            process: now - process.exited_at
            for process in self._tree
            if process.exited_at is not None and (process.is_unknown or process.is_awaited)
        }
        for process, age in dead.items():
            if age >= _KEPT_SECS:
                self._tree.forget(process)
        recent = [process for process, age in dead.items() if age < _UNEXPLAINED_SECS]
        return [process for process in recent if process.is_starting or process.is_awaited]

    def _is_clean(self, process: TrackedProcess) -> bool:
        status, outlook = process.exit_status(), self._outlook
        if process.is_root or outlook.ended_well:
            # What outlives the main process, the kernel ends.
            return is_orderly(status) or (outlook.ended_well and status.signal == "SIGKILL")
        event = policy.death(orderly=is_orderly(status), draining=outlook.draining)
        outlook.has_left = outlook.has_left or (event is Event.LEFT and status.code != 0)
        return not outlook.decide(event).records

    def _is_users_own(self, process: TrackedProcess) -> bool:
        """Say whether the end of a user's program is its own matter: it has no server, or ended by itself."""
        if not process.is_root or self._outlook.mode is not Mode.LIBRARY:
            return False
        has_server = any(one.is_own and one.pid not in self._outlook.expected for one in self._tree)
        return not has_server or process.exit_status().signal not in FATAL_SIGNALS

    def _is_pardoned(self, process: TrackedProcess) -> bool:
        """Say whether an exit belongs to an end in good order; a scheduler or server that ends so did not hang."""
        if not self._current.awaited.pardonable or not is_orderly(process.exit_status()):
            return False
        if process.is_root or process.role == "scheduler":
            self._current.discard()
        return True

    def _ended_before(self, earlier: TrackedProcess, process: TrackedProcess) -> bool:
        """Say whether a process that may have started another has ended, if that has.

        The kernel may tell of it later: a child is sent its signal when the thread that started it is gone, a process
        has ended when its last thread is.
        """
        if earlier is process:
            return False
        if earlier.handle.has_exited():
            return True
        if procfs.is_ending(earlier.pid):
            return earlier.handle.has_exited(_PARENT_SECS)
        stat = procfs.read_stat(earlier.pid)
        # Without one it was reaped since the lines above.
        return (stat is None or stat.state in "ZX") and earlier.handle.has_exited(_LAST_THREAD_SECS)

    def _ask_parent_of(self, process: TrackedProcess) -> None:
        """Learn from its parent how a process ended, where this one may not know: that takes the right to trace it."""
        parent = process.parent
        if parent is None or parent.exited_at is not None or parent in self._silent or process.exit_status().known:
            return
        socket = ArmedFiles.of(self._runtime, parent.pid, parent.handle.start_ticks).socket
        began = time.monotonic()
        status = ask_exit(socket, parent.pid, process.pid, _ASK_SECS)
        if status is not None:
            process.handle.take_exit_status(status)
        elif time.monotonic() >= began + _ASK_SECS:
            # The exits of a hundred ranks are not each to wait for a parent that is stuck.
            self._silent.add(parent)

    def _begin(self, process: TrackedProcess, seconds: float) -> None:
        hard = process.exit_status().signal in FATAL_SIGNALS
        current = self._current
        run = current.open("killed" if hard else "exited", "process_exited", process, seconds)
        # The HTTP server starts a tokenizer worker anew.
        event = policy.death(orderly=False, draining=False, replaced=process.role == "tokenizer_worker")
        action = current.apply(event)
        run.add_exit(process)
        if hard:
            current.awaited.harden()
        else:
            current.awaited.hold()
        current.photograph()
        if current.run is not run:
            # Exits that were seen meanwhile make it a shutdown.
            return
        if not hard:
            current.awaited.hold()
        if action.tells:
            current.awaited.await_server(soft=not hard)
        else:
            current.observe()

    def _end_dump_of(self, process: TrackedProcess) -> None:
        """Wait no longer for a process that died while it saved its requests."""
        if (
            not process.is_root
            and self._current.awaited.is_dumping(process.pid)
            and self._current.awaited.end_dump(process.pid)
        ):
            self._current.finish()
