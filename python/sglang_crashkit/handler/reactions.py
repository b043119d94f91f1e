"""What is done about each message from the server's processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglang_crashkit.core import procfs
from sglang_crashkit.core.channel import Mailbox, Message
from sglang_crashkit.core.peers import LostPeer
from sglang_crashkit.handler.asked_to_end import AskedToEnd
from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.failed_ranks import FailedRanks
from sglang_crashkit.handler.hang_watch import HangWatch
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.place import Place
from sglang_crashkit.handler.tree import ProcessTree, TrackedProcess

logger = logging.getLogger(__name__)

#: All ranks notice that a peer is lost within this time, in seconds.
_RANKS_SECS = 2.0
#: A rank that was busy says so within this time, in seconds; what was lost again since is another incident.
_LATE_SECS = 30.0


class Reactions:
    """Reacts to messages.

    Args:
        tree: the server's processes.
        mailbox: where messages are acknowledged.
        place: where failing ranks leave their records.
        outlook: where announcements are noted.
        current: the incident at hand.
        hangs: who follows heartbeats.
        end: who looks at a server that is asked to end.
        look: called to find new processes.
        reconsider: called when the exits seen so far may be a shutdown after all.
    """

    def __init__(
        self,
        tree: ProcessTree,
        mailbox: Mailbox,
        place: Place,
        outlook: Outlook,
        current: CurrentIncident,
        hangs: HangWatch,
        end: AskedToEnd,
        look: Callable[[], None],
        reconsider: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._mailbox = mailbox
        self._place = place
        self._outlook = outlook
        self._current = current
        self._end = end
        self._look = look
        self._reconsider = reconsider
        self._failed = FailedRanks(tree, outlook)
        self._ignored = 0
        self._by_event: dict[str, Callable[[Message, TrackedProcess], None]] = {
            "exception": self._on_exception,
            "crash_dump_begun": self._on_dump_begun,
            "crash_dump_ended": self._on_dump_ended,
            "launch_failed": self._on_launch_failed,
            "startup_timeout": self._on_launch_failed,
            "child_failed": self._on_child_failed,
            "await_incident": self._on_await_incident,
            "watchdog_timeout": self._on_watchdog_timeout,
            "stacks_wanted": self._on_stacks_wanted,
            "peer_lost": self._on_peer_lost,
            "draining": self._on_draining,
            "beat": lambda message, sender: hangs.follow(sender, message.descriptor),
        }

    def take(self, message: Message, sender: TrackedProcess | None) -> None:
        """React to one message.

        Args:
            message: what was said.
            sender: the process of the server that said it; None for any other, whose word counts for a teardown only.
        """
        if message.event == "teardown":
            self._on_teardown(message, sender)
        elif sender is None:
            self._ignore(message)
        elif message.event in self._by_event:
            self._by_event[message.event](message, sender)

    def _ignore(self, message: Message) -> None:
        """Say so of the 1st, the 10th, the 100th and so on: whoever sends them may never end."""
        self._ignored += 1
        if str(self._ignored).strip("0") == "1":
            words = "message %.100r of process %d, not the server's, ignored (%d so far)"
            logger.warning(words, message.event, message.pid, self._ignored)

    def _on_exception(self, message: Message, sender: TrackedProcess) -> None:
        current, seconds = self._current, _time_of(message)
        current.make_room()
        run = current.run or current.open("exception", "exception", sender, seconds)
        current.awaited.harden()
        run.add_exception(sender, seconds, str(message.fields.get("message", "")), self._place.record_of(message))
        if not run.photographed:
            current.photograph()
            current.awaited.await_exception()
        self._mailbox.acknowledge(message, ack="photographed", incident=run.incident.id)

    def _on_dump_begun(self, message: Message, sender: TrackedProcess) -> None:
        self._current.make_room()
        self._current.awaited.await_dump(sender.pid)
        run = self._end.join_dump(sender, _time_of(message))
        if run is not None:
            run.note(_time_of(message), message.event, pid=message.pid)

    def _on_dump_ended(self, message: Message, sender: TrackedProcess) -> None:
        current = self._current
        run = current.join("child_failure", "crash_dump", sender, _time_of(message))
        if run is not None:
            run.add_requests(message.fields)
        if not current.awaited.end_dump(sender.pid):
            # Another tokenizer worker, or the server that waits for all of them, is not done.
            self._mailbox.acknowledge(message, ack="saved")
            return
        # The HTTP server starts a worker anew that ended by itself.
        current.awaited.observed = sender.role == "tokenizer_worker"
        current.answer_when_finished(message)
        self._end.finish()

    def _on_launch_failed(self, message: Message, sender: TrackedProcess) -> None:
        current = self._current
        current.make_room()
        current.awaited.harden()
        current.awaited.hear(sender.pid)
        # Before the exits are taken in: a rank that died when it had hardly begun to run looks like a helper.
        self._look()
        names_them = self._failed.learn(message.fields, _time_of(message), current.run)
        run = current.join("failed_start", message.event, sender, _time_of(message))
        if run is not None:
            run.note(_time_of(message), message.event, pid=message.pid, **_words_of(message))
            if not names_them:
                self._failed.name_the_unknown(run)
            run.set_requests({"reason": "the server had not started to serve"})
        current.answer_when_finished(message)
        current.finish()

    def _on_child_failed(self, message: Message, sender: TrackedProcess) -> None:
        # Unlike a tokenizer manager, which saves its requests, the sender has none to save.
        current = self._current
        current.make_room()
        current.awaited.harden()
        current.awaited.hear(sender.pid)
        run = current.join("child_failure", message.event, sender, _time_of(message))
        if run is not None:
            run.note(_time_of(message), message.event, pid=message.pid, **_words_of(message))
            self._failed.name_the_unknown(run)
            run.set_requests({"reason": "the server's main process held no requests"})
        current.answer_when_finished(message)
        current.finish()

    def _on_await_incident(self, message: Message, _sender: TrackedProcess) -> None:
        # Whoever is about to end the server waits for what it would cut short.
        if self._current.is_open and not self._current.awaited.may_be_shutdown:
            self._current.answer_when_finished(message)
        else:
            self._current.answer(message)

    def _on_watchdog_timeout(self, message: Message, sender: TrackedProcess) -> None:
        current, seconds, is_soft = self._current, _time_of(message), message.fields.get("soft") is True
        if not is_soft:
            # It ends the server, which is another matter than what a soft one saw before.
            current.make_room()
        is_new = current.run is None
        run = current.run or current.open("hang", message.event, sender, seconds)
        run.add_hang(sender, seconds, message.fields)
        # Before the photograph, for which exits are taken in: one of them is an incident of its own.
        if is_new and is_soft:
            current.observe()
        if not run.photographed:
            current.photograph()
        self._tell_of_stacks(message)

    def _on_stacks_wanted(self, message: Message, sender: TrackedProcess) -> None:
        current = self._current
        if current.run is None:
            current.open("snapshot", message.event, sender, _time_of(message))
            current.observe()
            current.photograph()
        self._tell_of_stacks(message)

    def _on_peer_lost(self, message: Message, sender: TrackedProcess) -> None:
        current, seconds, outlook = self._current, _time_of(message), self._outlook
        peer = LostPeer.from_fields(message.fields, sender.pid)
        if peer is None:
            return
        if self._tree.root.pid in outlook.expected or (outlook.draining and not peer.count + peer.unassigned_count):
            logger.info("%s server %s ended while this one ends", peer.role, peer.address)
            return
        run = current.run
        if run is not None and run.finished and not _is_late_word(run, peer):
            current.make_room()
        is_new = current.run is None
        run = current.run or current.open("peer_lost", message.event, sender, seconds)
        try:
            run.add_peer(seconds, peer)
        except OSError as error:
            logger.error("incident %s could not be written anew: %s", run.path, error)
        # Before the photograph, as above.
        if is_new:
            current.observe(_RANKS_SECS)
        if not run.photographed:
            current.photograph()

    def _tell_of_stacks(self, message: Message) -> None:
        run = self._current.run
        if run is not None and not run.finished:
            self._mailbox.acknowledge(message, captured=run.stacks, incident=run.incident.id)
        else:
            # Those of an incident that is over are not what the sender wants to know.
            self._mailbox.acknowledge(message, captured=0, incident=None)

    def _on_draining(self, message: Message, sender: TrackedProcess) -> None:
        current = self._current
        self._outlook.draining = True
        self._reconsider()
        self._end.hear(sender, _time_of(message), unhealthy=message.fields.get("unhealthy") is True)
        if current.run is not None:
            current.run.note(_time_of(message), "draining", pid=message.pid)

    def _on_teardown(self, message: Message, sender: TrackedProcess | None) -> None:
        pid = message.fields.get("pid")
        # Only the server itself and its parent's side may announce the end of the whole.
        members = self._members_of(pid) if isinstance(pid, int) else set()
        self._outlook.expected |= members
        if self._current.run is None:
            return
        by_server, awaited = sender is not None and sender.is_root, self._current.awaited
        # Somebody else may kill a server that hangs.
        is_no_incident = awaited.may_be_shutdown or (awaited.pardonable and by_server)
        if is_no_incident and self._tree.root.pid in members:
            logger.info("it was a shutdown: process %d ends the server", message.pid)
            self._current.discard()
            return
        self._current.run.note(_time_of(message), "teardown", pid=message.pid, tree_of=pid, by_server=by_server)

    def _members_of(self, pid: int) -> set[int]:
        if pid not in self._tree:
            return set()
        if pid == self._tree.root.pid:
            # It may be dead and reaped by now, so that nothing is below it any more.
            return {pid, *(process.pid for process in self._tree)}
        return {pid} | procfs.TreeScanner(pid).scan()


def _is_late_word(run: IncidentRun, peer: LostPeer) -> bool:
    """Say whether a finished incident already tells of a lost peer: not every rank notices at the same moment."""
    return run.knows_peer(peer) and time.monotonic() < run.opened + _LATE_SECS


def _time_of(message: Message) -> float:
    seconds, now = message.fields.get("time"), time.time()
    # Sender and handler share a clock; what is far from it (or no number at all) is no time.
    return float(seconds) if isinstance(seconds, (int, float)) and now - 3600 < seconds < now + 3600 else now


def _words_of(message: Message) -> dict[str, str]:
    words = message.fields.get("message")
    return {"message": words.encode(errors="backslashreplace").decode()} if isinstance(words, str) else {}
