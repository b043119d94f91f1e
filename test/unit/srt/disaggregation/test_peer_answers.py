from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.model.peers import (
    AnswerReader,
    KnownPeers,
    PeerProcess,
    Role,
    WaitingRequest,
    Waits,
    known_question,
    waiting_question,
)
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt.disaggregation import peer_answers
from sglang_crashkit.srt.disaggregation.peer_answers import PeerAnswers, Waiting
from unit.support.waiting import LONG, descriptors, wait_until

ADDRESS = "prefill:8998"
KNOWN = KnownPeers({ADDRESS: frozenset({PeerProcess(0, "10.0.0.1", 51)})})


class Tables:
    """SGLang's tables as a test writes them."""

    role: Role = "prefill"
    is_lead = True

    def __init__(self) -> None:
        self.its: KnownPeers | None = KNOWN
        self.its_waiting: Waiting | None = {ADDRESS: [WaitingRequest("a", 1)], None: [WaitingRequest("b", 2)]}
        self.error: Exception | None = None

    def known(self) -> KnownPeers | None:
        if self.error is not None:
            raise self.error
        return self.its

    def waiting(self) -> Waiting | None:
        return self.its_waiting


class Handler:
    """The crash handler's end."""

    def __init__(self, folder: Path) -> None:
        self.mailbox_socket = Mailbox.bind(folder / "sock")
        self.mailbox = Mailbox(self.mailbox_socket)
        self.connection: socket.socket | None = None

    def take(self) -> dict[str, object]:
        """Take the next message and, with it, the pair's other end."""
        (message,) = wait_until(lambda: self.mailbox.receive(1, descriptors=True), "a scheduler says so")
        if message.descriptor is not None:
            self.connection = socket.socket(fileno=os.dup(message.descriptor))
            self.connection.settimeout(LONG)
        message.close()
        return {"event": message.event} | message.fields

    def ask(self, question: bytes) -> KnownPeers | Waits | bool:
        self.connection.send(question)
        return AnswerReader(7).take(self.connection.recv(100_000))

    def close(self) -> None:
        self.mailbox_socket.close()
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def handler(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handler]:
    before = descriptors()
    made = Handler(short_folder)
    monkeypatch.setenv(SOCKET_VARIABLE, str(short_folder / "sock"))
    yield made
    made.close()
    wait_until(lambda: not threads(), "the thread ends")
    assert descriptors().keys() <= before.keys()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "crashkit-peers"]


def start(tables: Tables, handler: Handler) -> PeerAnswers:
    answers = PeerAnswers(tables)
    answers.start()
    assert handler.take() == {"event": "pair", "role": "prefill", "lead": tables.is_lead} | {
        "time": pytest.approx(0, abs=1e12)
    }
    return answers


def test_peers_are_told_in_full_only_when_they_changed(handler: Handler) -> None:
    tables = Tables()
    start(tables, handler)
    assert handler.ask(known_question()) == KNOWN
    assert handler.ask(known_question()) is True
    tables.its = KnownPeers({}, frozenset({ADDRESS}))
    assert handler.ask(known_question()) == tables.its
    tables.its = KNOWN
    assert handler.ask(known_question()) == KNOWN


def test_who_waits_for_a_peer_is_told(handler: Handler) -> None:
    start(Tables(), handler)
    answer = handler.ask(waiting_question([ADDRESS, "other:1"]))
    assert isinstance(answer, Waits)
    assert (answer.name, answer.told.requests, answer.told.unassigned) == (
        ADDRESS,
        [WaitingRequest("a", 1)],
        [WaitingRequest("b", 2)],
    )
    other = AnswerReader(7).take(handler.connection.recv(100_000))
    assert isinstance(other, Waits)
    assert (other.name, other.told.count) == ("other:1", 0)


def test_others_than_the_lead_tell_of_failed_transfers_only(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables()
    monkeypatch.setattr(Tables, "is_lead", False)
    tables.its = KnownPeers(KNOWN.peers, frozenset({"10.0.0.2:42"}))
    start(tables, handler)
    assert handler.ask(known_question()) == KnownPeers({}, frozenset({"10.0.0.2:42"}))


def test_the_heartbeat_is_told_of_by_itself(handler: Handler) -> None:
    answers = start(Tables(), handler)
    answers.note_heartbeat(ADDRESS)
    told = handler.take()
    assert (told["event"], told["sign"], told["requests"]) == ("peer_lost", "heartbeat", [{"rid": "a", "room": 1}])


@pytest.mark.parametrize("gone", ["handler", "tables"])
def test_the_thread_ends_with_the_handler_or_sglangs_tables(handler: Handler, gone: str) -> None:
    tables = Tables()
    start(tables, handler)
    if gone == "handler":
        handler.connection.close()
    else:
        tables.its = None
        handler.connection.send(known_question())
        assert handler.connection.recv(100) == b""
    wait_until(lambda: not threads(), "the thread ends")


def test_the_thread_ends_where_no_handler_takes_the_other_end(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(short_folder / "nobody"))
    PeerAnswers(Tables()).start()
    wait_until(lambda: not threads(), "the thread ends")


def test_answers_that_fail_end_with_a_word(handler: Handler, caplog: pytest.LogCaptureFixture) -> None:
    tables = Tables()
    start(tables, handler)
    tables.error = AttributeError("SGLang calls it something else")
    for _ in range(3):
        handler.connection.send(known_question())
    assert handler.connection.recv(100) == b""
    wait_until(lambda: not threads(), "the thread ends")
    assert "not reported any more" in caplog.text
    assert "SGLang calls it something else" in caplog.text


def test_a_handler_that_reads_nothing_does_not_hold_the_thread(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_answers, "_SEND_SECS", 1)
    tables = Tables()
    many = [frozenset({PeerProcess(0, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 51)}) for n in range(4000)]
    tables.its = KnownPeers({f"a-long-name-of-a-peer-{number:0100}": its for number, its in enumerate(many)})
    answers = start(tables, handler)
    handler.connection.send(known_question())
    answers.stop()
    wait_until(lambda: not threads(), "the thread ends")


def test_too_many_peers_are_told_of_once(
    handler: Handler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_answers, "MAX_PROCESSES", 1)
    caplog.set_level(logging.WARNING)
    tables = Tables()
    start(tables, handler)
    for number in range(2):
        tables.its = KnownPeers({ADDRESS: frozenset(), "other:1": frozenset(), f"{number}:1": frozenset()})
        handler.ask(known_question())
    assert caplog.text.count("of 3 peers only 1 are watched") == 1


@pytest.mark.parametrize("why", ["no handler", "SGLANG_CRASHKIT_PEER_WATCH", "SGLANG_CRASHKIT_ENABLED"])
def test_nothing_is_told_where_nobody_would_ask(handler: Handler, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "no handler":
        monkeypatch.delenv(SOCKET_VARIABLE)
    else:
        monkeypatch.setenv(why, "false")
    peer_answers.replace(Tables())
    assert (peer_answers.current(), threads()) == (None, [])


def test_new_answers_replace_the_old_ones(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    peer_answers.replace(Tables())
    old = peer_answers.current()
    peer_answers.replace(Tables())
    assert peer_answers.current() not in (None, old)
    wait_until(lambda: len(threads()) == 1, "the old thread ends")
    monkeypatch.delenv(SOCKET_VARIABLE)
    peer_answers.replace(Tables())
    wait_until(lambda: not threads(), "the new thread ends")
    assert peer_answers.current() is None
    for message in handler.mailbox.receive(descriptors=True):
        message.close()
