"""The crash handler's loop: messages and exits come in, one incident comes out."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time

from sglang_crashkit.handler.asked_to_end import AskedToEnd
from sglang_crashkit.handler.collectors.server_log import ServerLog
from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.exits import Exits
from sglang_crashkit.handler.farewell import Farewell
from sglang_crashkit.handler.folders import KeptFolder, Place
from sglang_crashkit.handler.hang_detector import HangWatch
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.peers import PeerLosses, PeerProber
from sglang_crashkit.handler.processes import Leftovers, ProcessTree, TrackedProcess
from sglang_crashkit.handler.reactions import Reactions
from sglang_crashkit.kernel.identity_key import server_key
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

#: Processes that the server leaves behind end by themselves within this time, in seconds.
_LINGER_SECS = 3.0
_SCAN_STARTING_SECS = 0.2
#: Deaths are told by pidfds; only new processes, which an incident looks for itself, are found by looking.
_SCAN_SETTLED_SECS = 4.0


class CrashHandler:
    """Watches one server.

    Raises:
        ProcessLookupError: there is no process `server_pid`.
    """

    def __init__(self, server_pid: int, mailbox: Mailbox, place: Place, settings: Settings) -> None:
        self._tree = ProcessTree(server_pid)
        self._mailbox = mailbox
        self._place = place
        self._outlook = Outlook()
        self._current = CurrentIncident(self._tree, mailbox, place, settings, self._outlook, self)
        log = ServerLog(self._tree.root, place.runtime)
        self._exits = Exits(self._tree, self._outlook, self._current, self._unwatch, place.runtime, log)
        self._hangs = HangWatch(self._tree, self._outlook, self._current, settings, log.say)
        self._end = AskedToEnd(self._outlook, self._current, self._hangs)
        self._farewell = Farewell(self._current, mailbox, place)
        self._kept = KeptFolder(place.runtime)
        self._strangers: set[int] = set()
        self._prober = PeerProber(PeerLosses(self._tree, self._outlook, self._current, log.say).tell)
        self._reactions = Reactions(
            self._tree,
            mailbox,
            place,
            self._outlook,
            self._current,
            self._hangs,
            self._end,
            self._farewell,
            self._prober,
            self.look,
            self._exits.reconsider,
        )
        self._leftovers = Leftovers(self._tree)
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ)
        self._selector.register(self._prober, selectors.EVENT_READ)
        self._watch(self._tree.root)

    def run(self) -> None:
        """Work until the server is gone and its incident is whole; then leave nothing but evidence behind."""
        logger.info("watching server %d, incidents go to %s", self._tree.root.pid, self._place.host_folder)
        next_scan = 0.0
        try:
            while not self._done():
                if time.monotonic() >= next_scan:
                    self._strangers.clear()
                    self.look()
                    next_scan = time.monotonic() + self._scan_interval()
                ready = self._selector.select(max(0.0, min(next_scan, self._next_due()) - time.monotonic()))
                # Before the exits: an announcement was sent before the processes that it speaks of were ended.
                self._take_messages()
                for key, _events in ready:
                    if isinstance(key.data, TrackedProcess):
                        self._exits.take(key.data)
                # What a process said before it ended is there by now, and counts before its end does.
                self._take_messages()
                self._current.act_on_time()
                self._end.act_on_time()
                self._farewell.act_on_time()
                self._kept.touch_on_time()
                self._prober.act_on_time()
                self._leftovers.note_on_time()
                self._hangs.act_on_time()
        finally:
            removed, left = self._leftovers.clear()
            self._current.close(removed=removed, left=left)
            if self._outlook.gone_at is not None:
                # While the server lives, its ranks may still make pipes in there, without which PyTorch ends them.
                self._place.clean_up([server_key(each.pid, each.handle.start_ticks) for each in self._tree])
            self._kept.release()
            logger.info("server %d is gone, so is its crash handler %d", self._tree.root.pid, os.getpid())

    def look(self) -> None:
        """Find new processes and watch them."""
        if self._current.run is None:
            self._exits.recent_unexplained()
        for process in self._tree.refresh():
            self._watch(process)

    def collect_exits(self) -> None:
        """Take in the exits that the selector has not told of yet."""
        self._exits.collect()

    def unexplained(self) -> list[TrackedProcess]:
        """Return the children that died lately, maybe ranks, before they said what they are."""
        if any(process.role == "tokenizer_worker" for process in self._tree):
            # The ranks are ready by then; it is a tokenizer, which the HTTP server starts anew.
            return []
        return self._exits.recent_unexplained()

    def _take_messages(self) -> None:
        with contextlib.ExitStack() as descriptors:
            messages = self._mailbox.receive(descriptors=True)
            for message in messages:
                descriptors.callback(message.close)
            for message in messages:
                if message.pid not in self._tree and message.pid not in self._strangers:
                    self.look()
                    if message.pid not in self._tree:
                        # Looking costs more than sending, and whoever sends that may never end.
                        self._strangers.add(message.pid)
                try:
                    self._reactions.take(message, self._tree.get(message.pid))
                except Exception:
                    # One message that cannot be taken in must not cost the evidence of all that comes.
                    logger.exception("message %.100r of process %d could not be taken in", message.event, message.pid)

    def _watch(self, process: TrackedProcess) -> None:
        self._selector.register(process.handle, selectors.EVENT_READ, process)

    def _unwatch(self, process: TrackedProcess) -> None:
        self._selector.unregister(process.handle)

    def _scan_interval(self) -> float:
        return _SCAN_SETTLED_SECS if self._tree.settled else _SCAN_STARTING_SECS

    def _next_due(self) -> float:
        if not self._current.is_open and self._outlook.gone_at is not None:
            return self._outlook.gone_at + _LINGER_SECS
        return min(part.next_due() for part in (self._current, self._end, self._hangs, self._prober))

    def _done(self) -> bool:
        if self._outlook.gone_at is None or self._current.is_open:
            return False
        return not self._tree.alive() or time.monotonic() >= self._outlook.gone_at + _LINGER_SECS
