"""A crash handler in this process that watches a server which starts, for tests in a fixed order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.incident.judging import judge
from sglang_crashkit.policy import Mode
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings
from unit.support.waiting import child, wait_until

#: For a main process: starts a child that is ready when this returns its pid, ends with it and is never reaped.
STARTS = """
import ctypes, subprocess
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
def start(code):
    command = [sys.executable, "-c", code + "; import signal; print(flush=True); signal.pause()"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
    started.stdout.readline()
    return started.pid
def start_titled(title):
    return start(f"import setproctitle; setproctitle.setproctitle({title!r})")
"""
#: A main process with two children: one that has its title, and one that has not got so far.
LAUNCHER = (
    STARTS
    + """
ready(f"{start_titled('sglang::scheduler_TP0')} {start('from multiprocessing.spawn import spawn_main')}")
pause()
"""
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A handler that watches a launching server whose second rank has no title yet."""

    handler: CrashHandler
    titled: int
    starting: int

    def fail(self, titles: Any, event: str = "launch_failed", **fields: Any) -> dict[str, str]:
        """Let the server say that its launch failed, and return the titles in the incident by pid."""
        tree = self.handler.tree
        fields |= {"titles": titles, "message": "died"}
        message = Message(event, fields, tree.root.pid, None)
        self.handler.take(message, tree.root)
        run = self.handler.session.run
        assert run.finished
        return {str(process.pid): process.title for process in run.incident.processes}

    def say(self, event: str, pid: int = 0, **fields: Any) -> None:
        """Let a process of the server say something, by default its main process."""
        pid = pid or self.handler.tree.root.pid
        self.handler.take(Message(event, fields, pid, None), self.handler.tree.get(pid))

    def end(self, pid: int) -> None:
        """Kill a rank, whose end the handler does not notice. No process reaps it, so that it stays a zombie."""
        os.kill(pid, signal.SIGKILL)
        wait_until(self.handler.tree.get(pid).handle.has_exited, "the rank is dead")

    def kill(self, pid: int) -> None:
        """Kill a rank, and have the handler take in its end."""
        self.end(pid)
        self.handler.session.collect_exits()

    def failures(self) -> list[int]:
        """Return the processes that the incident takes for failed, in the order that it learned of them."""
        run = self.handler.session.run
        return [event.pid for event in run.incident.failures]

    def verdict(self) -> Any:
        run = self.handler.session.run
        return judge(run.incident, run.folder.path)


@contextlib.contextmanager
def handling(
    code: str, tmp_path: Path, short_folder: Path, *arguments: str, own: int | None = None, title: str | None = None
) -> Iterator[tuple[CrashHandler, Any]]:
    """Yield a handler that takes no stacks, and its server, which tells the pids of its own processes first.

    Args:
        code: the server's.
        tmp_path: where its incidents go.
        short_folder: where its socket is.
        arguments: the server's.
        own: how many of the pids are its own processes', all of them where that is None.
        title: the server's.
    """
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(code, *arguments, title=title) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        handler.session.triage.shutdown.mode = Mode.SERVER
        refresh = handler.tree.refresh

        def refresh_and_register() -> list[TrackedProcess]:
            new = refresh()
            for pid in process.first_line.split()[:own]:
                handler.tree.register(int(pid), 0)
            return new

        # It knows of the server's own processes as soon as it sees them.
        handler.tree.refresh = refresh_and_register  # type: ignore[method-assign]
        try:
            yield handler, process
        finally:
            handler.tree.close()
            handler.session.shortages.close()


@contextlib.contextmanager
def watched(tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    with handling(LAUNCHER, tmp_path, short_folder, own=1) as (handler, process):
        titled, starting = map(int, process.first_line.split())
        yield Case(handler, titled, starting)
