from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit import protocol
from sglang_crashkit.handler.notices import Answers, ServerLog
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.kernel.stack_hooks import HANDLER_PID, HookFiles
from sglang_crashkit.protocol import Mailbox, Message
from unit.support.targets import start_ticks
from unit.support.waiting import LONG, wait_until

STEP = 20.0


class Sender:
    """Waits for the end of an incident, as a server's main process does; stopped, it reads on when it is told to."""

    def __init__(self, path: str, *, is_stopped: bool = False) -> None:
        self.asked: list[float] = []
        self.answer: dict[str, Any] | None = None
        self.goes_on = threading.Event()
        if not is_stopped:
            self.goes_on.set()
        self._thread = threading.Thread(target=self._work, args=(path,))
        self._thread.start()

    def _work(self, path: str) -> None:
        self.answer = protocol.request(path, "crash_dump_ended", LONG, on_wait=self._wait)

    def _wait(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.goes_on.wait(LONG)

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


def finish(answers: Answers, mailbox: Mailbox) -> None:
    answers.give(lambda message: mailbox.acknowledge(message, ack="finished"))


@pytest.mark.parametrize(
    ("before", "secs_left", "after", "asked"),
    [
        # In the second one little was written.
        ([], None, [10.0, 10.0 + STEP / 2, 10.0 + STEP + 1.0], [15.0, 15.0 + STEP + 1.0]),
        ([60.0], 30.0, [], [35.0]),
        ([], None, [None], []),
    ],
    ids=["the end moves", "who comes later", "no core is awaited"],
)
def test_who_waits_is_told_how_long(
    path: str,
    mailbox: Mailbox,
    before: list[float],
    secs_left: float | None,
    after: list[float | None],
    asked: list[float],
) -> None:
    answers, sender = Answers(mailbox, STEP), Sender(path)
    for secs in before:
        answers.ask_all_to_wait(secs)
    answers.add(received(mailbox), secs_left)
    for more in after:
        answers.ask_all_to_wait(more)
    finish(answers, mailbox)
    sender.join()
    assert (sender.answer, sender.asked) == ({"ack": "finished"}, [pytest.approx(secs, abs=0.5) for secs in asked])


def test_a_sender_that_reads_late_gets_its_answer(path: str, mailbox: Mailbox) -> None:
    answers, sender = Answers(mailbox, STEP), Sender(path, is_stopped=True)
    answers.add(received(mailbox), None)
    # A core that grows for ten times the wait, looked at ten times a second.
    for look in range(100):
        answers.ask_all_to_wait(STEP + look * STEP / 11)
    finish(answers, mailbox)
    began = time.monotonic()
    sender.goes_on.set()
    sender.join()
    assert sender.answer == {"ack": "finished"}
    assert time.monotonic() - began < LONG / 2


def test_lines_wait_until_the_main_process_listens_and_are_cut(short_folder: Path) -> None:
    tree = ProcessTree(os.getpid())
    log = ServerLog(tree.root, short_folder)
    log.say("3 crashes in the last hour")
    with Mailbox.bind(HookFiles.of(short_folder, os.getpid(), start_ticks(os.getpid())).say) as receiver:
        log.say("x" * 100_000)
        log.say_rest()
        said = [(message.event, message.fields["text"]) for message in Mailbox(receiver).receive()]
    tree.close()
    assert said == [("say", "3 crashes in the last hour"), ("say", "x" * 3000)]
