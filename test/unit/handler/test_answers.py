from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit import protocol
from sglang_crashkit.handler.answers import Answers, ServerLog
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.kernel.stack_hooks import HANDLER_PID, HookFiles
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings
from unit.support.targets import start_ticks
from unit.support.waiting import LONG, wait_until

STEP = 20.0


class Sender:
    """Waits for the end of an incident, as a server's main process does."""

    def __init__(self, path: str) -> None:
        self.asked: list[float] = []
        self.answer: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._work, args=(path,))
        self._thread.start()

    def _work(self, path: str) -> None:
        self.answer = protocol.request(path, "crash_dump_ended", LONG, on_wait=self.asked.append)

    def join(self) -> None:
        self._thread.join(LONG)
        assert not self._thread.is_alive()


@pytest.fixture
def path(short_folder: Path) -> str:
    (short_folder / HANDLER_PID).write_text(str(os.getpid()))
    return str(short_folder / "sock")


@pytest.fixture
def mailbox(path: str) -> Iterator[Mailbox]:
    with Mailbox.bind(Path(path)) as receiver:
        yield Mailbox(receiver)


def received(mailbox: Mailbox) -> Message:
    (message,) = wait_until(mailbox.receive, "a message is there")
    return message


def heard(sender: Sender, count: int) -> list[float]:
    wait_until(lambda: len(sender.asked) >= count, "it is told to wait")
    return sender.asked


def test_who_waits_is_told_anew_when_the_end_has_moved(path: str, mailbox: Mailbox) -> None:
    answers, sender = Answers(mailbox, STEP), Sender(path)
    answers.add(received(mailbox), None)
    answers.ask_all_to_wait(10.0)
    assert len(heard(sender, 1)) == 1
    # Little was written meanwhile.
    answers.ask_all_to_wait(10.0 + STEP / 2)
    answers.ask_all_to_wait(10.0 + STEP + 1.0)
    first, second = heard(sender, 2)
    assert (first, second) == (pytest.approx(15.0, abs=0.5), pytest.approx(15.0 + STEP + 1.0, abs=0.5))
    answers.give(lambda message: mailbox.acknowledge(message, ack="finished"))
    sender.join()
    assert (sender.answer, len(sender.asked)) == ({"ack": "finished"}, 2)


def test_who_comes_later_is_told_at_once(path: str, mailbox: Mailbox) -> None:
    answers, sender = Answers(mailbox, STEP), Sender(path)
    answers.ask_all_to_wait(60.0)
    answers.add(received(mailbox), 30.0)
    assert heard(sender, 1) == [pytest.approx(35.0, abs=0.5)]
    answers.give(lambda message: mailbox.acknowledge(message, ack="finished"))
    sender.join()


def test_without_a_core_nobody_is_told_to_wait(path: str, mailbox: Mailbox) -> None:
    answers, sender = Answers(mailbox, STEP), Sender(path)
    answers.add(received(mailbox), None)
    answers.ask_all_to_wait(None)
    answers.give(lambda message: mailbox.acknowledge(message, ack="finished"))
    sender.join()
    assert (sender.answer, sender.asked) == ({"ack": "finished"}, [])


def test_a_sender_that_reads_late_gets_its_answer(path: str, mailbox: Mailbox) -> None:
    answers, gate = Answers(mailbox, STEP), threading.Event()
    results: list[dict[str, Any]] = []

    def read_late(_seconds: float) -> None:
        gate.wait(LONG)

    work = threading.Thread(
        target=lambda: results.append(protocol.request(path, "crash_dump_ended", LONG, on_wait=read_late))
    )
    work.start()
    answers.add(received(mailbox), None)
    # A core that grows for ten times the wait, looked at ten times a second.
    for look in range(100):
        answers.ask_all_to_wait(STEP + look * STEP / 11)
    answers.give(lambda message: mailbox.acknowledge(message, ack="finished"))
    began = time.monotonic()
    gate.set()
    work.join(LONG)
    assert results == [{"ack": "finished"}]
    assert time.monotonic() - began < LONG / 2


def test_a_line_goes_to_the_main_process_cut_short(short_folder: Path) -> None:
    tree = ProcessTree(os.getpid())
    path = HookFiles.of(short_folder, os.getpid(), start_ticks(os.getpid())).say
    with Mailbox.bind(path) as receiver:
        mailbox = Mailbox(receiver)
        ServerLog(tree.root, short_folder).say("x" * 100_000)
        (message,) = mailbox.receive()
    tree.root.handle.close()
    assert (message.event, message.fields["text"]) == ("say", "x" * 3000)


def test_one_that_does_not_listen_is_logged(short_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = ProcessTree(os.getpid())
    with caplog.at_level(logging.WARNING):
        ServerLog(tree.root, short_folder).say("it hangs")
    tree.root.handle.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("the server's own log does not report it: ")


def test_lines_of_the_start_wait_until_somebody_listens(short_folder: Path) -> None:
    place = Place(short_folder / "host", short_folder / "spool", short_folder / "runtime")
    place.runtime.mkdir()
    with Mailbox.bind(place.runtime / "handler.sock") as messages:
        handler = CrashHandler(os.getpid(), Mailbox(messages), place, Settings.from_environ({}))
        handler.history = ["3 crashes in the last hour", "12 segments"]
        handler.look()
        with Mailbox.bind(HookFiles.of(place.runtime, os.getpid(), start_ticks(os.getpid())).say) as receiver:
            handler.look()
            handler.look()
            messages_of_it = Mailbox(receiver).receive()
        handler.close()
    said = [(message.event, message.fields["text"]) for message in messages_of_it]
    assert said == [("say", "3 crashes in the last hour"), ("say", "12 segments")]
