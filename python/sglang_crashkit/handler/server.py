"""The crash handler's loop: it turns messages and exits into an incident.

Each message and exit is guarded by itself: an error is logged and noted, and the loop goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import time
from collections.abc import Callable

from sglang_crashkit.handler.collectors.gpu import Driver
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.evidence import collectors_of
from sglang_crashkit.handler.folders import Place, SharedMemory, keep
from sglang_crashkit.handler.hang_detector import HangDetector
from sglang_crashkit.handler.metrics import MetricsPublisher
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.handler.session import SILENT_SECS, Session, Subject
from sglang_crashkit.handler.triage import Seen
from sglang_crashkit.incident.marker import ServerMarker
from sglang_crashkit.kernel import clock, forked, procfs, titles
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.policy import Mode
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: How long to wait for processes that the server leaves behind to end by themselves, in seconds.
_LINGER_SECS = 3.0
_SCAN_STARTING_SECS = 0.2
#: The kernel reports exits; only new processes need a scan, and a capture does its own.
_SCAN_SETTLED_SECS = 4.0
#: After a part's due step failed, it is tried again after this time, in seconds.
_RETRY_SECS = 1.0
#: More processes than a server starts on one machine.
_MAX_MEMBERS = 4096
#: The roles that a process may claim for itself in a ``member`` message.
_UNTITLED = frozenset({"scheduler", "encoder"})
#: Messages that `triage` judges; `CrashHandler.take` handles the others by name.
_JUDGED = frozenset(
    {"exception", "thread_died", "crash_dump_begun", "crash_dump_ended", "launch_failed", "startup_timeout"}
    | {"child_failed", "await_incident", "watchdog_timeout", "stacks_wanted", "draining"}
)


class CrashHandler:
    """Watches one server.

    Raises:
        ProcessLookupError: there is no process `server_pid`.
    """

    def __init__(self, server_pid: int, mailbox: Mailbox, place: Place, settings: Settings) -> None:
        self.tree = ProcessTree(server_pid)
        received = Received(self.tree, settings)
        self._driver = Driver(is_on=settings.gpu_facts)
        collectors = collectors_of(received, self._driver)
        self.session = session = Session(self.tree, mailbox, place, settings, received, collectors)
        self.mailbox = mailbox
        self._place = place
        log = session.log
        self._metrics = MetricsPublisher(self.tree, received, place.host_folder / "incidents", log.notify)
        self._shared_memory = SharedMemory(self.tree)
        self._locks = keep(place.runtime)
        self._marker = ServerMarker(place.spool, log.say)
        received.pauses.say = log.say
        hangs = HangDetector(self.tree, session, settings, log.say)
        #: Each has `act_on_time`, which runs its due steps and returns when the next is due, by the monotonic clock.
        self._parts = (
            hangs,
            session,
            self._shared_memory,
            self._metrics,
            self._marker,
            received.pauses,
            session.commands,
        )
        #: Pids of senders that the last scan did not find among the server's processes.
        self._foreign: set[int] = set()
        self._has_ignored = False
        self._due = self._retry_at = 0.0
        self._selector = selectors.DefaultSelector()
        for source in (mailbox, self.tree):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Run until the server is gone and its incident is complete; then remove everything but the evidence."""
        logger.info("watching server %d, incidents go to %s", self.tree.root.pid, self._place.host_folder)
        next_scan = 0.0
        self._marker.create()
        self._guard("the limit of open files", self.session.shortages.raise_limit)
        self._guard("the watch for Xid events", self._driver.watch)
        try:
            while time.monotonic() < (over_at := self._over_at()):
                if time.monotonic() >= next_scan:
                    self._foreign.clear()
                    self.session.shortages.look()
                    self._guard("the scan of the processes", self.look)
                    forked.reap()
                    next_scan = time.monotonic() + (_SCAN_SETTLED_SECS if self.tree.settled else _SCAN_STARTING_SECS)
                self._selector.select(max(0.0, min(next_scan, self._due, over_at) - time.monotonic()))
                # Before the exits: a teardown is announced before its processes are killed.
                ended = self.tree.ended()
                self.take_messages()
                for process in ended:
                    self.session.take_exit(process)
                # Messages that a process sent before it exited have arrived by now.
                self.take_messages()
                self._act_on_time()
        finally:
            removed, left = self._shared_memory.clear()
            self.session.close(removed, left)
            self._driver.xids.close()
            self._place.remove_marker()
            if self.session.triage.shutdown.gone_at is not None:
                # While the server lives, its ranks may still create pipes there; without these, PyTorch ends them.
                self._place.clean_up([server_key(each.pid, each.handle.start_ticks) for each in self.tree])
            self._guard("the last metrics", self._metrics.close)
            for lock in self._locks:
                lock.release()
            logger.info("server %d is gone, so is its crash handler %d", self.tree.root.pid, os.getpid())

    # -- events

    def look(self) -> None:
        """Scan for new processes, and forget unexplained deaths of long ago."""
        if self.session.run is None:
            self.tree.recent_unexplained()
            if all(process.exited_at is None for process in self.tree):
                clock.follow_machine()
        self.tree.refresh()
        self.session.log.say_rest()

    def take(self, message: Message, sender: TrackedProcess | None) -> None:
        """Handle a message; `sender` is None for a process outside this server, which may only report a teardown."""
        event, fields = message.event, message.fields
        if sender is not None and "gpu" in fields:
            sender.gpu = fields["gpu"]
        if event == "teardown":
            pid = fields.get("pid", 0)
            members = self._members_of(pid)
            if fields.get("whole") is False:
                members.discard(pid)
            seen = Seen("teardown", message.pid, tree_of=pid, members=members)
            self.session.take(seen, Subject(sender or self.tree.root, _time_of(message), message))
        elif sender is None:
            # Logged once: the sender may never stop.
            if not self._has_ignored:
                logger.warning("message %.100r of process %d, not the server's, is ignored", event, message.pid)
            self._has_ignored = True
        elif event == "launch" and sender.is_root:
            self._on_launch(message)
        elif event == "exiting" and sender.is_root:
            self.session.take(Seen("exiting", members=self._members_of(sender.pid)))
            self.session.on_exiting(message)
        elif event == "peer_lost":
            self.session.take_lost_peer(fields, sender)
        elif event == "member":
            # The kernel names the sender. Check its parents, because another server may have inherited the socket.
            if sender.is_own or self.tree.started_by_own(sender):
                self._register(sender.pid, 0)
        elif event == "members" and (sender.is_root or sender.is_own):
            self.tree.refresh()
            for pid, start_ticks in fields.get("started", [])[:_MAX_MEMBERS]:
                if type(pid) is int and type(start_ticks) is int and start_ticks > 0:
                    self._register(pid, start_ticks)
        elif event in _JUDGED:
            self._judge(message, sender)
        else:
            self.session.received.take(message, sender, _time_of(message))

    # -- messages

    def take_messages(self) -> None:
        """Handle all received messages, each guarded by itself."""
        with contextlib.ExitStack() as descriptors:
            messages = self.mailbox.receive(descriptors=True)
            for message in messages:
                descriptors.callback(message.close)
            for message in messages:
                what = f"message {message.event!r:.100} of process {message.pid}"
                self._guard(what, functools.partial(self._take_message, message))

    def _take_message(self, message: Message) -> None:
        if message.event == "member" and titles.role_of(title := message.fields.get("title", "")) in _UNTITLED:
            # If Ray's daemon started the process, only the process itself can report that it belongs to this server.
            self.tree.adopt(message.pid, title)
        elif message.pid not in self.tree and message.pid not in self._foreign:
            self.look()
            if message.pid not in self.tree:
                # A scan costs more than a message, and the sender may never stop: don't scan for it again.
                self._foreign.add(message.pid)
        self.take(message, self.tree.get(message.pid))

    def _register(self, pid: int, start_ticks: int) -> None:
        if (died := self.tree.register(pid, start_ticks)) is not None:
            self.session.take_exit(died, again=True)

    def _judge(self, message: Message, sender: TrackedProcess) -> None:
        event, fields, triage = message.event, message.fields, self.session.triage
        if event == "draining":
            self._marker.ask_to_end(_time_of(message))
        if event in ("launch_failed", "startup_timeout"):
            # Find the ranks that the message names before it is judged: they may have just started.
            self.tree.refresh()
        opens = triage.stage is None or triage.stage.observed
        may_be_silent = event == "crash_dump_begun" and opens and triage.shutdown.draining
        seen = Seen(
            event,
            sender.pid,
            sender.role,
            matters=sender.matters,
            soft=fields.get("soft") is True,
            caught=fields.get("caught") is True,
            unhealthy=fields.get("unhealthy") is True,
            silent=may_be_silent and bool(self.session.received.heartbeats.silent(SILENT_SECS)),
        )
        self.session.take(seen, Subject(sender, _time_of(message), message))

    def _on_launch(self, message: Message) -> None:
        mode = message.fields.get("mode")
        alive = {process.pid for process in self.tree.alive() if not process.is_root}
        others = alive - self.session.triage.shutdown.expected
        serves = any(process.is_own and process.pid in others for process in self.tree)
        known = Mode(mode) if mode in tuple(Mode) else Mode.LIBRARY
        self.session.take(Seen("launch", members=alive, mode=known, others_serve=serves))
        if known is not Mode.LIBRARY:
            self._marker.begin(self.tree.root.pid, self.tree.root.handle.start_ticks)

    def _members_of(self, pid: int) -> set[int]:
        if pid not in self.tree:
            return set()
        if pid == self.tree.root.pid:
            # The main process may be dead and reaped, and have no children any more.
            return {pid, *(process.pid for process in self.tree)}
        return {pid} | procfs.TreeScanner(pid).scan()

    # -- the loop

    def _guard(self, what: str, take: Callable[[], None]) -> bool:
        """Call `take` and return whether it succeeded; an error must not cost the evidence of later events."""
        try:
            take()
        except Exception as error:  # noqa: BLE001 - noted in the log and the incident
            self.session.note_error(what, error, "could not be taken in")
            return False
        return True

    def _act_on_time(self) -> None:
        """Run the due steps of all parts, even if one fails, and set when the next is due."""
        now = time.monotonic()
        if now < self._retry_at:
            return
        dues: list[float] = []
        for part in self._parts:
            act = functools.partial(lambda part: dues.append(part.act_on_time()), part)
            if not self._guard(f"what is due of {type(part).__name__}", act):
                self._retry_at = now + _RETRY_SECS
                dues.append(self._retry_at)
        self._due = max(min(dues, default=0.0), self._retry_at)

    def _over_at(self) -> float:
        """Return when to stop: when the server and its processes are gone, or `_LINGER_SECS` after its main one."""
        triage = self.session.triage
        if triage.shutdown.gone_at is None or triage.is_open:
            return float("inf")
        return triage.shutdown.gone_at + (_LINGER_SECS if self.tree.alive() else 0.0)


def _time_of(message: Message) -> float:
    """Return when a message was sent, by `kernel.clock`."""
    sent, now = message.fields.get("at"), time.monotonic()
    # The sender may be in another time namespace, with another monotonic clock.
    return clock.at(sent) if isinstance(sent, (int, float)) and now - 3600 < sent <= now else clock.now()
