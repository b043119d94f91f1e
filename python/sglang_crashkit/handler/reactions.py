"""What is done about each message from the server's processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglang_crashkit.handler.asked_to_end import AskedToEnd, dump_event
from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.farewell import Farewell
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.hang_detector import HangWatch
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.peers import PeerProber
from sglang_crashkit.handler.processes import FailedRanks, ProcessTree, TrackedProcess
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.policy import Event, Mode
from sglang_crashkit.protocol import Mailbox, Message

logger = logging.getLogger(__name__)

#: More than one machine's server ever starts.
_MAX_MEMBERS = 4096


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
        farewell: who answers a main process that is about to end.
        prober: who watches the other servers of a pair.
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
        farewell: Farewell,
        prober: PeerProber,
        look: Callable[[], None],
        reconsider: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._mailbox = mailbox
        self._place = place
        self._outlook = outlook
        self._current = current
        self._end = end
        self._farewell = farewell
        self._prober = prober
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
            "pair": self._on_pair,
            "peer_lost": self._on_peer_lost,
            "draining": self._on_draining,
            "member": lambda _message, sender: self._on_member(sender),
            "members": self._on_members,
            "beat": lambda message, sender: hangs.follow(sender, message.descriptor, message.fields.get("modes")),
            "journal": lambda message, sender: current.journals.follow(sender, message.descriptor),
        }

    def take(self, message: Message, sender: TrackedProcess | None) -> None:
        """React to one message.

        Args:
            message: what was said.
            sender: the process of the server that said it; None for any other, whose word counts for a teardown only.
        """
        if message.event == "teardown":
            self._on_teardown(message, sender)
        elif message.event == "launch" and sender is not None and sender.is_root:
            self._on_launch(message)
        elif message.event == "farewell" and sender is not None and sender.is_root:
            # What is ended after it is announced to nobody any more: a program's exit handlers run last in, first out.
            self._outlook.expected |= self._members_of(sender.pid)
            self._farewell.hear(message)
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

    def _on_launch(self, message: Message) -> None:
        """Begin anew: what was announced before concerned an earlier server of the same program."""
        mode = message.fields.get("mode")
        alive = {process.pid for process in self._tree if process.exited_at is None and not process.is_root}
        if not any(process.is_own and process.pid in alive - self._outlook.expected for process in self._tree):
            # No server of before is left, so nothing that it was asked is under way.
            self._current.journals.close()
        self._outlook.begin(Mode(mode) if mode in tuple(Mode) else Mode.LIBRARY, alive)
        self._current.begin_anew()

    def _on_member(self, sender: TrackedProcess) -> None:
        # The kernel says who it is, and its parents that it is this server's: it may have the socket by inheritance.
        if self._tree.started_by_own(sender):
            self._tree.register(sender.pid, 0)

    def _on_members(self, message: Message, sender: TrackedProcess) -> None:
        if not (sender.is_root or sender.is_own):
            return
        self._look()
        started = message.fields.get("started")
        for pid, start_ticks in (started if isinstance(started, list) else [])[:_MAX_MEMBERS]:
            if type(pid) is int and type(start_ticks) is int and start_ticks > 0:
                self._tree.register(pid, start_ticks)

    def _on_exception(self, message: Message, sender: TrackedProcess) -> None:
        current, seconds = self._current, _time_of(message)
        current.make_room()
        run = current.run or current.open("exception", "exception", sender, seconds)
        if not current.is_ending:
            current.awaited.harden()
        is_replaced = sender.role == "tokenizer_worker"
        action = current.apply(Event.WORKER_DIED if is_replaced else Event.RAISED)
        # Its dump, which follows, belongs to it.
        current.awaited.may_end = current.awaited.may_end or is_replaced
        run.add_exception(sender, seconds, str(message.fields.get("message", "")), self._place.record_of(message))
        if not run.photographed and not run.finished:
            current.photograph()
            if action.tells:
                current.awaited.await_exception()
            else:
                current.observe()
        self._mailbox.acknowledge(message, ack="photographed", incident=run.incident.id)

    def _on_dump_begun(self, message: Message, sender: TrackedProcess) -> None:
        self._current.make_room()
        if self._is_orderly_end():
            # SGLang takes it for a crash that its processes ended, which were asked to like itself.
            logger.info("process %d saves its requests because others were asked to end, too", sender.pid)
            return
        self._current.awaited.await_dump(sender.pid)
        run = self._end.join_dump(sender, _time_of(message))
        if run is not None:
            run.note(_time_of(message), message.event, pid=message.pid)

    def _is_orderly_end(self) -> bool:
        return self._current.run is None and self._outlook.draining and self._outlook.has_left

    def _on_dump_ended(self, message: Message, sender: TrackedProcess) -> None:
        current = self._current
        if self._is_orderly_end():
            self._mailbox.acknowledge(message, ack="finished", path=None, orderly=True)
            return
        if not current.awaited.is_dumping(sender.pid):
            current.make_room()
        run = current.join("child_failure", "crash_dump", sender, _time_of(message), dump_event(sender))
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
        if self._note_consequence(message):
            return
        current.awaited.harden()
        # Before the exits are taken in: a rank that died when it had hardly begun to run looks like a helper.
        self._look()
        names_them = self._failed.learn(message.fields, _time_of(message), current.run)
        run = current.join("failed_start", message.event, sender, _time_of(message), Event.FAILED)
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
        if self._note_consequence(message):
            return
        current.awaited.harden()
        run = current.join("child_failure", message.event, sender, _time_of(message), Event.FAILED)
        if run is not None:
            run.note(_time_of(message), message.event, pid=message.pid, **_words_of(message))
            self._failed.name_the_unknown(run)
            run.set_requests({"reason": "the server's main process held no requests"})
        current.answer_when_finished(message)
        current.finish()

    def _note_consequence(self, message: Message) -> bool:
        """Note the main process's word for a failure which is that of a finished incident; say whether it is."""
        current = self._current
        if current.run is None or not current.is_ending:
            return False
        current.run.note(_time_of(message), message.event, pid=message.pid, **_words_of(message))
        current.answer(message)
        return True

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
        current.make_room_for_hang(sender)
        is_new = current.run is None
        run = current.run or current.open("hang", message.event, sender, seconds)
        current.apply(Event.HUNG if is_soft else Event.TIMED_OUT)
        run.add_hang(sender, seconds, message.fields)
        # Before the photograph, for which exits are taken in: one of them is an incident of its own.
        if is_new and is_soft:
            current.observe()
        if not run.photographed:
            current.photograph()
            if is_new and is_soft and current.run is run:
                # The sender asks for the stacks once more; however long they took, they are the same.
                current.observe()
        self._tell_of_stacks(message)

    def _on_stacks_wanted(self, message: Message, sender: TrackedProcess) -> None:
        current = self._current
        if not current.is_open:
            current.make_room()
        if current.run is None:
            current.open("snapshot", message.event, sender, _time_of(message))
            current.apply(Event.STACKS_WANTED)
            current.observe()
            current.photograph()
        self._tell_of_stacks(message)

    def _on_pair(self, message: Message, sender: TrackedProcess) -> None:
        self._prober.take_rank(sender.pid, message.descriptor, message.fields)

    def _on_peer_lost(self, message: Message, sender: TrackedProcess) -> None:
        peer = LostPeer.from_fields(message.fields, sender.pid)
        if peer is not None:
            self._prober.hear(peer)

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
        if message.fields.get("whole") is False:
            members.discard(pid)
        self._outlook.expected |= members
        if self._current.run is None:
            return
        by_server, awaited = sender is not None and sender.is_root, self._current.awaited
        # Somebody else may kill a server that hangs.
        is_no_incident = awaited.may_be_shutdown or (awaited.pardonable and by_server)
        if is_no_incident and self._tree.root.pid == pid:
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


def _time_of(message: Message) -> float:
    seconds, now = message.fields.get("time"), time.time()
    # Sender and handler share a clock; what is far from it (or no number at all) is no time.
    return float(seconds) if isinstance(seconds, (int, float)) and now - 3600 < seconds < now + 3600 else now


def _words_of(message: Message) -> dict[str, str]:
    words = message.fields.get("message")
    return {"message": words.encode(errors="backslashreplace").decode()} if isinstance(words, str) else {}
