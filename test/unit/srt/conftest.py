from __future__ import annotations

import faulthandler
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.kernel.stack_hooks import HANDLER_PID
from sglang_crashkit.memory.journal import JournalReader, JournalWriter
from sglang_crashkit.settings import (
    LAUNCH_VARIABLE,
    MODE_VARIABLE,
    SOCKET_VARIABLE,
    SPOOL_VARIABLE,
)
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.hooks import notify
from unit.support.fake_scheduler import scheduler
from unit.support.waiting import LONG

CONTEXT = multiprocessing.get_context("fork")

_SCRIPT = """
import json, sys
from pathlib import Path
from sglang_crashkit.protocol import Mailbox
mailbox = Mailbox(Mailbox.bind(Path(sys.argv[1])))
answers = json.loads(sys.argv[2])
print("ready", flush=True)
while True:
    for message in mailbox.receive(descriptors=True):
        about = {"event": message.event, "pid": message.pid, "has_descriptor": message.descriptor is not None}
        message.close()
        print(json.dumps(about | message.fields), flush=True)
        if message.event in answers:
            answer = answers[message.event]
            if answer is None:
                sys.exit(0)
            mailbox.acknowledge(message, **answer)
    import select
    select.select([mailbox], [], [], 30)
"""


class Listener:
    """A process that listens where the crash handler would, and says what it heard."""

    def __init__(self, path: Path, answers: dict[str, dict[str, Any] | None]) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(path), json.dumps(answers)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"
        path.with_name(HANDLER_PID).write_text(str(self.process.pid))

    def heard(self) -> dict[str, Any]:
        """Return the next message."""
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        return message

    def heard_so_far(self) -> list[dict[str, Any]]:
        """Return all messages that were not returned yet."""
        notify("marker")
        found = [self.heard()]
        while found[-1]["event"] != "marker":
            found.append(self.heard())
        return found[:-1]

    def heard_but_members(self) -> dict[str, Any]:
        """Return the next message that does not name the processes that were started."""
        while (message := self.heard())["event"] == "members":
            pass
        return message

    def kill(self) -> None:
        """End it as a crash would: the socket stays, and no one is behind it."""
        self.process.kill()
        self.process.wait(LONG)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def without_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SOCKET_VARIABLE, SPOOL_VARIABLE, LAUNCH_VARIABLE, MODE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no crash that a test makes up end this process; nothing of it is left for the next test."""
    monkeypatch.setattr(crash_exit, "state", crash_exit.State())
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_arguments, **_options: None)
    monkeypatch.setattr(crash_exit, "start_new_thread", lambda *_arguments: None)


@pytest.fixture
def listener(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """A listener that this process takes for its crash handler."""
    finished = {"ack": "finished", "path": "/incident"}
    answers: dict[str, dict[str, Any] | None] = {
        "crash_dump_ended": finished,
        "launch_failed": finished,
        "exception": {"ack": "stacks_captured"},
        "watchdog_timeout": {"captured": 3, "incident": "abc"},
        "await_incident": finished | {"exit_status": 85},
        "child_failed": finished | {"exit_status": 137},
        "die": None,
    }
    (short_folder / "spool").mkdir()
    monkeypatch.setenv(MODE_VARIABLE, "server")
    monkeypatch.setenv(SPOOL_VARIABLE, str(short_folder / "spool"))
    with Listener(short_folder / "sock", answers) as found:
        monkeypatch.setenv(SOCKET_VARIABLE, str(found.path))
        yield found


@pytest.fixture
def started() -> Iterator[list[Any]]:
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()
        process.join(LONG)


def launch(started: list[Any], *behaviours: str) -> tuple[list[Any], list[Any]]:
    readers, processes = [], []
    for rank, behaviour in enumerate(behaviours):
        reader, writer = CONTEXT.Pipe(duplex=False)
        title = f"sglang::scheduler_TP{rank}"
        process = CONTEXT.Process(target=scheduler, args=(title, behaviour, writer), daemon=True)
        process.start()
        writer.close()
        started.append(process)
        readers.append(reader)
        processes.append(process)
    return readers, processes


def told(journal: JournalWriter, by: str = "rid") -> dict[str, str]:
    """Return what a journal tells of each request, by its id or another field."""
    reader, found = JournalReader(journal.fd), {}
    for one in reader.requests:
        how = "finished" if one.finished else "dropped" if one.ended else "aborted" if one.aborted else "under way"
        found[str((reader.load(one) or {})[by])] = how
    return found
