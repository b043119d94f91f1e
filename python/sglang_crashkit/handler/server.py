"""The crash handler's loop: messages and exits come in, one incident comes out.

Each of them is taken in under one guard: what goes wrong is logged and noted, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import time
from collections.abc import Callable

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.handler import folders
from sglang_crashkit.handler.collectors.server_log import ServerLog
from sglang_crashkit.handler.folders import KeptFolder, Place
from sglang_crashkit.handler.hang_detector import HangDetector
from sglang_crashkit.handler.metrics import MetricsPublisher
from sglang_crashkit.handler.peers import PeerLosses, PeerProber
from sglang_crashkit.handler.processes import ProcessTree, SharedMemory, TrackedProcess
from sglang_crashkit.handler.session import SILENT_SECS, Session, Subject
from sglang_crashkit.handler.state import Seen
from sglang_crashkit.handler.triage import Triage
from sglang_crashkit.incident.exit_status import FATAL_SIGNALS
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.identity_key import server_key
from sglang_crashkit.kernel.stack_hooks import ArmedFiles
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.policy import Mode
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Processes that the server leaves behind end by themselves within this time, in seconds.
_LINGER_SECS = 3.0
_SCAN_STARTING_SECS = 0.2
#: Deaths are told by pidfds; only new processes, which an incident looks for itself, are found by looking.
_SCAN_SETTLED_SECS = 4.0
#: What failed as its time came is tried again after this time, in seconds.
_RETRY_SECS = 1.0
#: Once its main thread is gone, the rest of a process follows within this time, in seconds.
_LAST_THREAD_SECS = 0.2
#: A process that was sent SIGKILL is gone within this time, in seconds.
_PARENT_SECS = 1.0
#: A process that can tell at all how its child ended does it within this time, in seconds.
_ASK_SECS = 0.3
#: More than one machine's server ever starts.
_MAX_MEMBERS = 4096
#: Messages that `triage` judges, beside those that anybody may send or the main process alone.
_JUDGED = frozenset(
    {"exception", "crash_dump_begun", "crash_dump_ended", "launch_failed", "startup_timeout", "child_failed"}
    | {"await_incident", "watchdog_timeout", "stacks_wanted", "draining"}
)


class CrashHandler:
    """Watches one server.

    Raises:
        ProcessLookupError: there is no process `server_pid`.
    """

    def __init__(self, server_pid: int, mailbox: Mailbox, place: Place, settings: Settings) -> None:
        self.tree = ProcessTree(server_pid)
        self.triage = Triage(server_pid, settings.budget_secs)
        self.session = Session(self.tree, mailbox, place, settings, self.triage, self)
        self._mailbox = mailbox
        self._place = place
        self._log = ServerLog(self.tree.root, place.runtime)
        self._hangs = HangDetector(self.tree, self.session, settings, self._log.say)
        self._metrics = MetricsPublisher(self.tree, self.session, place.host_folder / "incidents", settings.disk)
        self._to_tell = ""
        self._kept = KeptFolder(place.runtime)
        self._prober = PeerProber(PeerLosses(self.tree, self.session, self._log.say).tell)
        self._shared_memory = SharedMemory(self.tree)
        self._strangers: set[int] = set()
        self._ignored = 0
        #: Parents that did not answer.
        self._silent: set[TrackedProcess] = set()
        self._retry_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ)
        self._selector.register(self._prober, selectors.EVENT_READ)
        self._watch(self.tree.root)

    def tell(self, text: str) -> None:
        """Write a line to the server's own log, as soon as its main process listens; nothing where it is empty."""
        self._to_tell = text

    def run(self) -> None:
        """Work until the server is gone and its incident is whole; then leave nothing but evidence behind."""
        logger.info("watching server %d, incidents go to %s", self.tree.root.pid, self._place.host_folder)
        next_scan = 0.0
        self._guard("the watch for Xid events", self.session.gpus.watch)
        try:
            while not self._done():
                if time.monotonic() >= next_scan:
                    self._strangers.clear()
                    self._guard("a look at the processes", self.look)
                    folders.reap()
                    next_scan = time.monotonic() + self._scan_interval()
                due = max(min(next_scan, self._next_due()), self._retry_at)
                ready = self._selector.select(max(0.0, due - time.monotonic()))
                # Before the exits: an announcement was sent before the processes that it speaks of were ended.
                self._take_messages()
                for key, _events in ready:
                    if isinstance(key.data, TrackedProcess):
                        self.take_exit(key.data)
                # What a process said before it ended is there by now, and counts before its end does.
                self._take_messages()
                self._act_on_time()
        finally:
            removed, left = self._shared_memory.clear()
            self.session.close(removed=removed, left=left)
            if self.triage.shutdown.gone_at is not None:
                # While the server lives, its ranks may still make pipes in there, without which PyTorch ends them.
                self._place.clean_up([server_key(each.pid, each.handle.start_ticks) for each in self.tree])
            self._guard("the last metrics", self._metrics.close)
            self._kept.release()
            logger.info("server %d is gone, so is its crash handler %d", self.tree.root.pid, os.getpid())

    def close(self) -> None:
        """Give the descriptors of a handler back that does not run."""
        for process in self.tree:
            process.handle.close()
        self._prober.close()
        self._selector.close()

    # -- what happens

    def look(self) -> None:
        """Find new processes and watch them."""
        if self.session.run is None:
            self.tree.recent_unexplained()
        for process in self.tree.refresh():
            self._watch(process)
        if self._to_tell and self._log.is_heard:
            text, self._to_tell = self._to_tell, ""
            self._log.say(text)

    def collect_exits(self) -> None:
        """Take in the exits that the selector has not told of yet."""
        for process in self.tree.alive():
            if process.handle.has_exited():
                self.take_exit(process)

    def unexplained(self) -> list[TrackedProcess]:
        """Return the children that died lately, maybe ranks, before they said what they are."""
        if any(process.role == "tokenizer_worker" for process in self.tree):
            # The ranks are ready by then; it is a tokenizer, which the HTTP server starts anew.
            return []
        return self.tree.recent_unexplained()

    def take_exit(self, process: TrackedProcess) -> None:
        """Take in the exit of a process, once; what goes wrong with it ends neither the loop nor another exit."""
        if process.exited_at is None:
            self._guard(f"the exit of process {process.pid}", functools.partial(self._take_exit, process))

    def take(self, message: Message, sender: TrackedProcess | None) -> None:
        """Take in one message.

        Args:
            message: what was said.
            sender: the process of the server that said it; None for any other, whose word counts for a teardown only.
        """
        event, fields = message.event, message.fields
        if sender is not None and "gpu" in fields:
            sender.gpu = fields["gpu"]
        if event == "teardown":
            self._on_teardown(message, sender)
        elif sender is None:
            self._ignore(message)
        elif event == "launch" and sender.is_root:
            self._on_launch(message)
        elif event == "farewell" and sender.is_root:
            self.session.take(Seen("farewell", members=self._members_of(sender.pid)))
            self.session.hear_farewell(message)
        elif event == "beat":
            self._hangs.follow(sender, message.descriptor, fields.get("modes"))
        elif event == "journal":
            self.session.journals.follow(sender, message.descriptor)
        elif event == "steps":
            self.session.steps.follow(sender, message.descriptor, fields.get("modes"))
        elif event == "log":
            self.session.logs.follow(sender, message.descriptor)
        elif event == "surroundings" and sender.is_root:
            self.session.surroundings.hear(message.descriptor, _time_of(message), ready=fields.get("ready") is True)
        elif event == "quarantine":
            self._metrics.hear(sender.pid, fields.get("hits"))
        elif event == "pair":
            self._prober.take_rank(sender.pid, message.descriptor, fields)
        elif event == "peer_lost":
            peer = LostPeer.from_fields(fields, sender.pid)
            if peer is not None:
                self._prober.hear(peer)
        elif event == "member":
            # The kernel says who it is, and its parents that it is this server's: the socket may be inherited.
            if self.tree.started_by_own(sender):
                self.tree.register(sender.pid, 0)
        elif event == "members":
            self._on_members(message, sender)
        elif event in _JUDGED:
            self._judge(message, sender)

    # -- exits

    def _take_exit(self, process: TrackedProcess) -> None:
        try:
            for earlier in (self.tree.root, process.parent):
                if earlier is not None and earlier.exited_at is None and self._ended_before(earlier, process):
                    # The ranks ask the kernel for a signal when it ends, so their end is a consequence.
                    self.take_exit(earlier)
                    if process.exited_at is not None:
                        return
        finally:
            if process.exited_at is None:
                self._selector.unregister(process.handle)
        try:
            if process.matters and process.pid not in self.triage.shutdown.expected:
                self._ask_parent_of(process)
            status = process.exit_status()
            if process.is_own and status.signal in FATAL_SIGNALS - {"SIGKILL"}:
                self._log.report_fault()
            seen = Seen(
                "exited",
                process.pid,
                process.role,
                is_root=process.is_root,
                status=status,
                matters=process.matters,
                is_unknown=process.is_unknown,
                is_foreign=process.is_foreign,
                others_serve=self._serves(),
            )
            self.session.take(seen, Subject(process, time.time()))
        finally:
            process.exited_at = process.exited_at or time.time()

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
        socket = ArmedFiles.of(self._place.runtime, parent.pid, parent.handle.start_ticks).socket
        began = time.monotonic()
        status = ask_exit(socket, parent.pid, process.pid, _ASK_SECS)
        if status is not None:
            process.handle.take_exit_status(status)
        elif time.monotonic() >= began + _ASK_SECS:
            # The exits of a hundred ranks are not each to wait for a parent that is stuck.
            self._silent.add(parent)

    def _serves(self) -> bool:
        """Say whether there are processes of the server whose end was not announced."""
        expected = self.triage.shutdown.expected
        return any(one.is_own and one.pid not in expected for one in self.tree)

    # -- messages

    def _take_messages(self) -> None:
        with contextlib.ExitStack() as descriptors:
            messages = self._mailbox.receive(descriptors=True)
            for message in messages:
                descriptors.callback(message.close)
            for message in messages:
                what = f"message {message.event!r:.100} of process {message.pid}"
                self._guard(what, functools.partial(self._take_message, message))

    def _take_message(self, message: Message) -> None:
        if message.pid not in self.tree and message.pid not in self._strangers:
            self.look()
            if message.pid not in self.tree:
                # Looking costs more than sending, and whoever sends that may never end.
                self._strangers.add(message.pid)
        self.take(message, self.tree.get(message.pid))

    def _judge(self, message: Message, sender: TrackedProcess) -> None:
        event, fields = message.event, message.fields
        if event in ("launch_failed", "startup_timeout"):
            # Before what the message says of them: its ranks may have hardly begun to run.
            self.look()
        titles = fields.get("titles")
        stage = self.triage.stage
        may_be_silent = event == "crash_dump_begun" and (stage is None or stage.observed)
        seen = Seen(
            event,
            sender.pid,
            sender.role,
            is_root=sender.is_root,
            soft=fields.get("soft") is True,
            unhealthy=fields.get("unhealthy") is True,
            silent=may_be_silent and self.triage.shutdown.draining and bool(self._hangs.silent(SILENT_SECS)),
            names_ranks=event != "child_failed" and isinstance(titles, dict) and bool(titles),
        )
        self.session.take(seen, Subject(sender, _time_of(message), message))

    def _on_launch(self, message: Message) -> None:
        mode = message.fields.get("mode")
        alive = {process.pid for process in self.tree if process.exited_at is None and not process.is_root}
        expected = self.triage.shutdown.expected
        serves = any(process.is_own and process.pid in alive - expected for process in self.tree)
        known = Mode(mode) if mode in tuple(Mode) else Mode.LIBRARY
        self.session.take(Seen("launch", members=alive, mode=known, others_serve=serves))

    def _on_members(self, message: Message, sender: TrackedProcess) -> None:
        if not (sender.is_root or sender.is_own):
            return
        self.look()
        started = message.fields.get("started")
        for pid, start_ticks in (started if isinstance(started, list) else [])[:_MAX_MEMBERS]:
            if type(pid) is int and type(start_ticks) is int and start_ticks > 0:
                self.tree.register(pid, start_ticks)

    def _on_teardown(self, message: Message, sender: TrackedProcess | None) -> None:
        pid = message.fields.get("pid")
        if not isinstance(pid, int):
            pid = 0
        # Only the server itself and its parent's side may announce the end of the whole.
        members = self._members_of(pid)
        if message.fields.get("whole") is False:
            members.discard(pid)
        by_server = sender is not None and sender.is_root
        seen = Seen("teardown", message.pid, is_root=by_server, tree_of=pid, members=members)
        self.session.take(seen, Subject(sender or self.tree.root, _time_of(message), message))

    def _members_of(self, pid: int) -> set[int]:
        if pid not in self.tree:
            return set()
        if pid == self.tree.root.pid:
            # It may be dead and reaped by now, so that nothing is below it any more.
            return {pid, *(process.pid for process in self.tree)}
        return {pid} | procfs.TreeScanner(pid).scan()

    def _ignore(self, message: Message) -> None:
        """Say so of the 1st, the 10th, the 100th and so on: whoever sends them may never end."""
        self._ignored += 1
        if str(self._ignored).strip("0") == "1":
            words = "message %.100r of process %d, not the server's, ignored (%d so far)"
            logger.warning(words, message.event, message.pid, self._ignored)

    # -- the loop

    def _guard(self, what: str, take: Callable[[], None]) -> bool:
        """Take something in, and say whether that went well: what does not must not cost the evidence of what comes."""
        try:
            take()
        except Exception as error:  # noqa: BLE001 - told in the log and the incident
            self.session.note_error(what, error, "could not be taken in")
            return False
        return True

    def _act_on_time(self) -> None:
        parts = (self.session, self._prober, self._hangs, self._kept, self._shared_memory, self._metrics)
        if time.monotonic() < self._retry_at:
            return
        # All of them, whichever fails.
        went_well = [self._guard(f"what is due of {type(part).__name__}", part.act_on_time) for part in parts]
        if not all(went_well):
            self._retry_at = time.monotonic() + _RETRY_SECS

    def _watch(self, process: TrackedProcess) -> None:
        self._selector.register(process.handle, selectors.EVENT_READ, process)

    def _scan_interval(self) -> float:
        return _SCAN_SETTLED_SECS if self.tree.settled else _SCAN_STARTING_SECS

    def _next_due(self) -> float:
        gone_at = self.triage.shutdown.gone_at
        if not self.triage.is_open and gone_at is not None:
            return gone_at + _LINGER_SECS
        return min(part.next_due() for part in (self.session, self._hangs, self._prober, self._metrics))

    def _done(self) -> bool:
        gone_at = self.triage.shutdown.gone_at
        if gone_at is None or self.triage.is_open:
            return False
        return not self.tree.alive() or time.monotonic() >= gone_at + _LINGER_SECS


def _time_of(message: Message) -> float:
    seconds, now = message.fields.get("time"), time.time()
    # Sender and handler share a clock; what is far from it (or no number at all) is no time.
    return float(seconds) if isinstance(seconds, (int, float)) and now - 3600 < seconds < now + 3600 else now
