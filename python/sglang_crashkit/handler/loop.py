"""The crash handler's loop: messages and exits come in, one incident comes out.

What ends without being expected opens an incident. Expected is what a process of the server announced: a teardown
(``kill_process_tree``), or an exit with status 0 while the server drains after SIGTERM. An exit by an orderly signal
or by a status is *soft*: it may be a shutdown whose announcement is on its way, so it is photographed at once and
judged a moment later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.core import procfs
from sglang_crashkit.core.analysis.verdict import FATAL_SIGNALS
from sglang_crashkit.core.channel import Mailbox, Message
from sglang_crashkit.core.settings import Settings, fallback_folder
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.tree import ProcessTree, TrackedProcess

logger = logging.getLogger(__name__)

#: A soft exit is a shutdown when it is announced within this time, in seconds.
_SOFT_HOLD_SECS = 1.0
#: A rank that raised tells the server itself; after this time, in seconds, the handler does.
_EXCEPTION_GRACE_SECS = 0.5
#: The server answers SIGQUIT by saving its requests; this long is waited for it to begin, in seconds.
_ANSWER_SECS = 5.0
#: Processes that the server leaves behind end by themselves within this time, in seconds.
_LINGER_SECS = 3.0
#: A server that lives on this long after an incident, in seconds, may have another one.
_NEXT_INCIDENT_SECS = 60.0
#: A child that died before it had a title has to do with what happens within this time, in seconds.
_UNEXPLAINED_SECS = 60.0
#: What a server that goes on reported, such as a soft watchdog, is whole after this time, in seconds.
_OBSERVED_SECS = 5.0
_SCAN_STARTING_SECS = 0.2
_SCAN_SETTLED_SECS = 1.0
_ANNOUNCED_BY_ANYONE = frozenset({"teardown"})


@dataclass(frozen=True)
class Place:
    """Where the handler works.

    Attributes:
        host_folder: the host's folder in the crash folder; incidents go below it.
        spool: where failing ranks leave their records.
        runtime: the folder of the socket, removed at the end.
    """

    host_folder: Path
    spool: Path
    runtime: Path

    def clean_up(self) -> None:
        """Remove what is of no use without the server; a record that nobody took in stays."""
        shutil.rmtree(self.runtime, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.spool.rmdir()


class CrashHandler:
    """Watches one server.

    Raises:
        ProcessLookupError: there is no process `server_pid`.
    """

    def __init__(self, server_pid: int, mailbox: Mailbox, place: Place, settings: Settings) -> None:
        self._tree = ProcessTree(server_pid)
        self._mailbox = mailbox
        self._place = place
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ)
        self._watch(self._tree.root)
        self._expected: set[int] = set()
        self._draining = False
        self._ended_well = False
        self._run: IncidentRun | None = None
        self._soft_since: float | None = None
        self._quit_due: float | None = None
        self._answer_due: float | None = None
        self._observed_due: float | None = None
        self._observed = False
        self._dump_begun = False
        self._dumping: set[int] = set()
        self._waiting: list[Message] = []
        self._server_gone_at: float | None = None
        self._reactions: dict[str, Callable[[Message, TrackedProcess | None], None]] = {
            "scheduler_exception": self._on_exception,
            "crash_dump_begun": self._on_dump_begun,
            "crash_dump_ended": self._on_dump_ended,
            "launch_failed": self._on_launch_failed,
            "startup_timeout": self._on_launch_failed,
            "await_incident": self._on_await_incident,
            "watchdog_timeout": self._on_watchdog_timeout,
            "stacks_wanted": self._on_stacks_wanted,
            "draining": self._on_draining,
            "teardown": self._on_teardown,
        }

    def run(self) -> None:
        """Work until the server is gone and its incident is whole; then leave nothing but evidence behind."""
        logger.info("watching server %d, incidents go to %s", self._tree.root.pid, self._place.host_folder)
        next_scan = 0.0
        try:
            while not self._done():
                if time.monotonic() >= next_scan:
                    self._scan()
                    next_scan = time.monotonic() + self._scan_interval()
                ready = self._selector.select(max(0.0, min(next_scan, self._next_due()) - time.monotonic()))
                self._take_messages()
                for key, _events in ready:
                    if isinstance(key.data, TrackedProcess):
                        self._on_exit(key.data)
                # What a process said before it ended is there by now, and counts before its end does.
                self._take_messages()
                self._act_on_time()
        finally:
            self._leave()

    # -- what comes in

    def _take_messages(self) -> None:
        # Before the exits: an announcement was sent before the processes that it speaks of were ended.
        for message in self._mailbox.receive():
            sender = self._sender(message)
            if sender is None and message.event not in _ANNOUNCED_BY_ANYONE:
                logger.warning(
                    "message %r of process %d, not the server's, ignored",
                    message.event,
                    message.pid,
                )
                continue
            reaction = self._reactions.get(message.event)
            if reaction is not None:
                reaction(message, sender)

    def _sender(self, message: Message) -> TrackedProcess | None:
        if message.pid not in self._tree:
            self._scan()
        return self._tree.get(message.pid)

    def _on_exit(self, process: TrackedProcess) -> None:
        if process.exited_at is not None:
            return
        root = self._tree.root
        if not process.is_root and root.exited_at is None and root.handle.has_exited():
            # Its ranks ask the kernel for SIGKILL when it ends; the kernel tells of its own end first.
            self._on_exit(root)
            if process.exited_at is not None:
                return
        if process.matters and process.pid not in self._expected:
            self._make_room()
        self._selector.unregister(process.handle)
        process.exited_at = time.time()
        status = process.exit_status()
        if process.is_root:
            self._server_gone_at = time.monotonic()
            self._ended_well = status.code == 0
        if self._run is not None:
            self._run.add_exit(process)
            self._end_dump_of(process)
            return
        clean = status.code == 0 and (self._draining or process.is_root)
        clean = clean or (self._ended_well and status.signal == "SIGKILL")
        if not process.matters or process.pid in self._expected or clean:
            # One that died before it said what it is may be a rank, or a worker of a pool that is of no account. It is
            # kept: if the start fails for it, the incident knows of what it died.
            unexplained = process.is_starting and process.pid not in self._expected and status.code != 0
            if not process.is_root and not unexplained:
                self._tree.forget(process)
            return
        hard = status.signal in FATAL_SIGNALS
        self._open("killed" if hard else "exited", "process_exited", process, process.exited_at)
        if self._run is not None:
            self._run.add_exit(process)
            self._photograph()
            now = time.monotonic()
            self._soft_since = None if hard else now
            if process.role == "tokenizer_worker":
                self._observe()
            else:
                self._quit_due = now + (0.0 if hard else _SOFT_HOLD_SECS)

    def _end_dump_of(self, process: TrackedProcess) -> None:
        """Wait no longer for a process that died while it saved its requests."""
        if process.pid in self._dumping and not process.is_root:
            self._dumping.discard(process.pid)
            if not self._dumping:
                self._finish()

    def _on_exception(self, message: Message, sender: TrackedProcess | None) -> None:
        assert sender is not None
        seconds = _time_of(message)
        self._make_room()
        if self._run is None:
            self._open("exception", "exception", sender, seconds)
        if self._run is None:
            self._mailbox.acknowledge(message)
            return
        self._soft_since = None
        self._run.add_exception(sender, seconds, str(message.fields.get("message", "")), self._record_of(message))
        if not self._run.photographed:
            self._photograph()
            self._quit_due = time.monotonic() + _EXCEPTION_GRACE_SECS
        self._mailbox.acknowledge(message, ack="photographed", incident=self._run.incident.id)

    def _on_dump_begun(self, message: Message, sender: TrackedProcess | None) -> None:
        assert sender is not None
        self._make_room()
        self._dump_begun = True
        self._dumping.add(sender.pid)
        self._quit_due = self._answer_due = self._soft_since = None
        self._join("child_failure", "crash_dump", sender, _time_of(message))
        if self._run is not None:
            self._run.note(_time_of(message), message.event, pid=message.pid)

    def _on_dump_ended(self, message: Message, sender: TrackedProcess | None) -> None:
        assert sender is not None
        self._join("child_failure", "crash_dump", sender, _time_of(message))
        if self._run is not None:
            self._run.add_requests(message.fields)
        self._dumping.discard(sender.pid)
        if self._dumping:
            # Another tokenizer worker, or the server that waits for all of them, is not done.
            self._mailbox.acknowledge(message, ack="saved")
            return
        self._waiting.append(message)
        self._finish()
        # The HTTP server starts a worker anew that ended by itself.
        self._observed = sender.role == "tokenizer_worker"

    def _on_launch_failed(self, message: Message, sender: TrackedProcess | None) -> None:
        assert sender is not None
        self._make_room()
        self._soft_since = None
        self._join("failed_start", message.event, sender, _time_of(message))
        self._learn_titles(message)
        if self._run is not None:
            self._run.note(_time_of(message), message.event, pid=message.pid, **_words_of(message))
            self._run.set_requests({"reason": "the server had not started to serve"})
        self._waiting.append(message)
        self._finish()

    def _on_watchdog_timeout(self, message: Message, sender: TrackedProcess | None) -> None:
        assert sender is not None
        seconds, is_soft = _time_of(message), message.fields.get("soft") is True
        if not is_soft:
            # It ends the server, which is another matter than what a soft one saw before.
            self._make_room()
        is_new = self._run is None
        self._join("hang", message.event, sender, seconds)
        if self._run is not None:
            self._run.add_hang(sender, seconds, message.fields)
        if is_new and is_soft:
            self._observe()
        self._tell_of_stacks(message)

    def _on_stacks_wanted(self, message: Message, sender: TrackedProcess | None) -> None:
        assert sender is not None
        if self._run is None:
            self._join("snapshot", message.event, sender, _time_of(message))
            self._observe()
        self._tell_of_stacks(message)

    def _tell_of_stacks(self, message: Message) -> None:
        run = self._run
        # Those of an incident that is over are not what the sender wants to know.
        fresh = run is not None and not run.finished
        captured = run.stacks if run is not None and fresh else 0
        self._mailbox.acknowledge(message, captured=captured, incident=run.incident.id if run and fresh else None)

    def _observe(self) -> None:
        """Note that the incident tells of a server that goes on, unless more comes."""
        self._observed = self._run is not None
        self._observed_due = time.monotonic() + _OBSERVED_SECS if self._observed else None

    def _make_room(self) -> None:
        """Let what comes be an incident of its own, where the one at hand tells of a server that went on."""
        if self._observed and self._run is not None:
            self._write(self._run)
            self._forget_run()

    def _on_await_incident(self, message: Message, _sender: TrackedProcess | None) -> None:
        # Whoever is about to end the server waits for what it would cut short.
        if self._run is None or self._run.finished:
            self._mailbox.acknowledge(message, ack="finished", path=str(self._run.path) if self._run else None)
        else:
            self._waiting.append(message)

    def _learn_titles(self, message: Message) -> None:
        """Take in what the sender calls processes that died before, or just after, they set their titles."""
        titles = message.fields.get("titles")
        if not isinstance(titles, dict):
            return
        for process in self._tree:
            title = titles.get(str(process.pid))
            if isinstance(title, str) and title and process.is_starting:
                process.title = title[:120].encode(errors="backslashreplace").decode()

    def _on_draining(self, message: Message, _sender: TrackedProcess | None) -> None:
        self._draining = True
        if self._run is not None:
            self._run.note(_time_of(message), "draining", pid=message.pid)

    def _on_teardown(self, message: Message, sender: TrackedProcess | None) -> None:
        pid = message.fields.get("pid")
        # Only the server itself and its parent's side may announce the end of the whole.
        members = self._members_of(pid) if isinstance(pid, int) else set()
        self._expected |= members
        by_server = sender is not None and sender.is_root
        if self._run is None:
            return
        if self._soft_since is not None and not self._dump_begun and self._tree.root.pid in members:
            logger.info("the exits were a shutdown: process %d ends the server", message.pid)
            try:
                self._run.discard()
            except OSError as error:
                logger.error("incident %s could not be removed: %s", self._run.path, error)
            self._forget_run()
            return
        self._run.note(_time_of(message), "teardown", pid=message.pid, tree_of=pid, by_server=by_server)

    def _members_of(self, pid: int) -> set[int]:
        if pid not in self._tree:
            return set()
        if pid == self._tree.root.pid:
            # It may be dead and reaped by now, so that nothing is below it any more.
            return {pid, *(process.pid for process in self._tree)}
        return {pid} | procfs.TreeScanner(pid).scan()

    # -- what is done about it

    def _open(self, kind: str, trigger: str, process: TrackedProcess, seconds: float) -> None:
        for folder in (self._place.host_folder, fallback_folder()):
            try:
                self._run = IncidentRun(
                    kind,
                    trigger,
                    process,
                    seconds,
                    self._tree,
                    folder / "incidents",
                    self._settings,
                )
            except (OSError, CrashkitError) as error:
                logger.error("no incident can be written below %s: %s", folder, error)
            else:
                self._add_unexplained_deaths()
                return

    def _add_unexplained_deaths(self) -> None:
        if any(process.role == "tokenizer_worker" for process in self._tree):
            # The ranks are ready by then; it is a tokenizer, which the HTTP server starts anew.
            return
        for process in self._unexplained():
            if self._run is not None and process.exited_at is not None:
                self._run.add_exit(process)

    def _unexplained(self) -> list[TrackedProcess]:
        """Return the children that died lately before they said what they are; forget those that died long ago."""
        dead = [process for process in self._tree if process.is_starting and process.exited_at is not None]
        recent = [process for process in dead if time.time() - (process.exited_at or 0.0) < _UNEXPLAINED_SECS]
        for process in dead:
            if process not in recent:
                self._tree.forget(process)
        return recent

    def _join(self, kind: str, trigger: str, process: TrackedProcess, seconds: float) -> None:
        if self._run is None:
            self._open(kind, trigger, process, seconds)
        if self._run is not None and not self._run.photographed:
            self._photograph()

    def _photograph(self) -> None:
        assert self._run is not None
        self._scan()
        self._collect_exits()
        self._run.photograph()

    def _collect_exits(self) -> None:
        # An exit that the selector has not told of yet would be photographed in vain.
        for process in self._tree.alive():
            if process.handle.has_exited():
                self._on_exit(process)

    def _act_on_time(self) -> None:
        run, now = self._run, time.monotonic()
        if run is None:
            return
        if run.finished:
            if self._server_gone_at is None and now >= run.opened + self._settings.budget_secs + _NEXT_INCIDENT_SECS:
                self._forget_run()
            return
        if self._soft_since is not None and now >= self._soft_since + _SOFT_HOLD_SECS:
            self._soft_since = None
        if self._quit_due is not None and now >= self._quit_due and self._soft_since is None:
            self._quit_due = None
            self._ask_server_to_end()
        if self._server_gone_at is not None:
            # Nothing more is to come but the exits of those that die with it.
            if not self._tree.alive() or now >= self._server_gone_at + 0.5:
                self._finish()
        elif self._observed_due is not None and now >= self._observed_due:
            run.set_requests({"reason": "the server went on"})
            self._finish()
        elif self._answer_due is not None and now >= self._answer_due:
            run.set_requests({"reason": f"the server did not begin to save them within {_ANSWER_SECS:g} s"})
            self._finish()
        elif now >= run.opened + self._settings.budget_secs:
            run.note(time.time(), "budget_spent", seconds=self._settings.budget_secs)
            self._finish()

    def _ask_server_to_end(self) -> None:
        """Tell the server of a death that it may not have noticed, as its own children would."""
        root = self._tree.root
        if self._run is None or root.exited_at is not None:
            return
        if not procfs.catches_signal(root.pid, signal.SIGQUIT):
            self._run.set_requests({"reason": "the server has no handler for SIGQUIT"})
            self._finish()
            return
        seconds = time.time()
        with contextlib.suppress(OSError):
            root.handle.send_signal(signal.SIGQUIT)
            self._run.note(seconds, "sigquit_sent", pid=root.pid)
        self._answer_due = time.monotonic() + _ANSWER_SECS

    def _finish(self) -> None:
        run = self._run
        if run is not None and not run.finished:
            self._collect_exits()
            if self._run is not run:
                # One of the exits was an incident of its own.
                return
            self._write(run)
        path = str(run.path) if run is not None else None
        for message in self._waiting:
            self._mailbox.acknowledge(message, ack="finished", path=path)
        self._waiting.clear()
        self._quit_due = self._answer_due = self._observed_due = None

    def _write(self, run: IncidentRun) -> None:
        if run.finished:
            return
        try:
            run.finish()
        except (OSError, CrashkitError) as error:
            logger.error("incident %s could not be finished: %s", run.path, error)
            run.finished = True

    def _forget_run(self) -> None:
        self._run = None
        self._tree.forget_dead()
        self._dumping.clear()
        self._dump_begun = self._observed = False
        self._soft_since = self._quit_due = self._answer_due = self._observed_due = None

    # -- housekeeping

    def _scan(self) -> None:
        if self._run is None:
            self._unexplained()
        for process in self._tree.refresh():
            self._watch(process)

    def _watch(self, process: TrackedProcess) -> None:
        self._selector.register(process.handle, selectors.EVENT_READ, process)

    def _scan_interval(self) -> float:
        return _SCAN_SETTLED_SECS if self._tree.settled else _SCAN_STARTING_SECS

    def _next_due(self) -> float:
        run = self._run
        if run is None or run.finished:
            return float("inf") if self._server_gone_at is None else self._server_gone_at + _LINGER_SECS
        dues = [run.opened + self._settings.budget_secs, self._quit_due, self._answer_due, self._observed_due]
        if self._soft_since is not None:
            dues.append(self._soft_since + _SOFT_HOLD_SECS)
        if self._server_gone_at is not None:
            dues.append(self._server_gone_at + 0.5)
        return min(due for due in dues if due is not None)

    def _record_of(self, message: Message) -> Path | None:
        record = message.fields.get("record")
        if not isinstance(record, str):
            return None
        path = Path(record)
        try:
            is_record = path.parent == self._place.spool and path.is_file() and not path.is_symlink()
        except OSError:
            return None
        return path if is_record else None

    def _done(self) -> bool:
        if self._server_gone_at is None or (self._run is not None and not self._run.finished):
            return False
        return not self._tree.alive() or time.monotonic() >= self._server_gone_at + _LINGER_SECS

    def _leave(self) -> None:
        run = self._run
        if run is not None and run.finished:
            status = self._tree.root.exit_status()
            run.note(
                self._tree.root.exited_at or time.time(),
                "server_exited",
                code=status.code,
                signal=status.signal,
            )
            with contextlib.suppress(OSError):
                run.save()
        self._place.clean_up()
        logger.info("server %d is gone, so is its crash handler %d", self._tree.root.pid, os.getpid())


def _time_of(message: Message) -> float:
    seconds, now = message.fields.get("time"), time.time()
    # Sender and handler share a clock; what is far from it (or no number at all) is no time.
    return float(seconds) if isinstance(seconds, (int, float)) and abs(now - seconds) < 3600 else now


def _words_of(message: Message) -> dict[str, str]:
    words = message.fields.get("message")
    return {"message": words.encode(errors="backslashreplace").decode()} if isinstance(words, str) else {}
