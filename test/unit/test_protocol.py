from __future__ import annotations

import array
import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit import protocol
from sglang_crashkit.kernel.private_files import write_private
from sglang_crashkit.kernel.stack_hooks import HANDLER_PID
from sglang_crashkit.protocol import WAIT_FIELD, HandlerUnreachableError, Mailbox, Message
from unit.support.waiting import LONG, child, descriptors, wait_until


@pytest.fixture
def path(short_folder: Path) -> str:
    return str(short_folder / "sock")


@pytest.fixture
def mailbox(path: str) -> Iterator[Mailbox]:
    write_private(Path(path).with_name(HANDLER_PID), str(os.getpid()).encode())
    with Mailbox.bind(Path(path)) as receiver:
        yield Mailbox(receiver)


def receive_one(mailbox: Mailbox) -> Message:
    messages = wait_until(mailbox.receive, "a message is there")
    assert len(messages) == 1
    return messages[0]


@contextlib.contextmanager
def answering(mailbox: Mailbox, **answer: object) -> Iterator[None]:
    """Acknowledge the next message in the background."""
    thread = threading.Thread(target=lambda: mailbox.acknowledge(receive_one(mailbox), **answer))
    thread.start()
    yield
    thread.join(LONG)


def test_a_message_arrives_with_its_fields_and_the_senders_pid(path: str, mailbox: Mailbox) -> None:
    protocol.notify(path, "event", pid=1, text="ü", nothing=None, path=Path("/x"))
    message = receive_one(mailbox)
    assert (message.event, message.pid, message.address) == ("event", os.getpid(), None)
    assert 0 <= time.monotonic() - message.fields.pop("at") < LONG
    assert message.fields == {"pid": 1, "text": "ü", "nothing": None, "path": "/x"}


def test_a_vast_number_in_a_message_is_bounded(path: str, mailbox: Mailbox) -> None:
    protocol.notify(path, "event", count=10**4000, less=-(10**4000), small=-7)
    fields = receive_one(mailbox).fields
    assert (fields["count"], fields["less"], fields["small"]) == (10**18, 10**18, -7)


def test_a_silent_handler_ends_the_wait_at_its_time(path: str, mailbox: Mailbox) -> None:
    assert protocol.request(path, "event", 0.3) == {}


@pytest.mark.parametrize("gone", ["never there", "closed", "removed"])
def test_without_a_handler_the_sender_is_told(path: str, gone: str) -> None:
    if gone != "never there":
        Mailbox.bind(Path(path)).close()
    if gone == "removed":
        Path(path).unlink()
    assert not protocol.is_reachable(path)
    with pytest.raises(HandlerUnreachableError, match=path):
        protocol.notify(path, "event")
    with pytest.raises(HandlerUnreachableError, match=path):
        protocol.request(path, "event", LONG)


HANDLER = """
from pathlib import Path
from sglang_crashkit.protocol import Mailbox
mailbox = Mailbox(Mailbox.bind(Path(sys.argv[1])))
ready()
while not (messages := mailbox.receive()): time.sleep(0.005)
"""


def test_a_handler_that_dies_ends_the_wait(path: str) -> None:
    with child(HANDLER + "os.kill(os.getpid(), 9)", path), pytest.raises(HandlerUnreachableError, match="died"):
        protocol.request(path, "event", 600.0)


@pytest.fixture
def full(path: str, mailbox: Mailbox) -> Mailbox:
    """A mailbox with as many messages as the kernel queues."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
        while True:
            sender.sendto(b"rubbish", socket.MSG_DONTWAIT, path)
    return mailbox


@pytest.mark.usefixtures("full")
def test_a_handler_that_reads_nothing_delays_no_sender_forever(path: str) -> None:
    for attempt in (lambda: protocol.notify(path, "event"), lambda: protocol.request(path, "event", 0.2)):
        with pytest.raises(HandlerUnreachableError):
            attempt()


def test_a_message_too_long_is_refused_before_it_is_sent(path: str, mailbox: Mailbox) -> None:
    with pytest.raises(HandlerUnreachableError, match="over 60000"):
        protocol.notify(path, "event", text="x" * 60_000)
    assert mailbox.receive() == []


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"null", b"[1]", b"{}", b'{"event": null}', b"[" * 50_000, b"{" + b" " * 70_000],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_rubbish_is_passed_over(path: str, mailbox: Mailbox, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, path)
    protocol.notify(path, "good")
    assert [message.event for message in mailbox.receive()] == ["good"]


@pytest.mark.parametrize(("sent", "is_wanted"), [(3, False), (1, True), (3, True)])
def test_one_descriptor_is_kept_where_it_is_wanted(path: str, mailbox: Mailbox, sent: int, is_wanted: bool) -> None:
    fd = os.memfd_create("passed")
    os.write(fd, b"content")
    before = descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        rights = array.array("i", [fd] * sent)
        for data in (b'{"event": "x"}', b"rubbish"):
            sender.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, path)
    (message,) = mailbox.receive(descriptors=is_wanted)
    assert (message.descriptor is not None) is is_wanted
    if message.descriptor is not None:
        assert os.pread(message.descriptor, 100, 0) == b"content"
        assert not os.get_inheritable(message.descriptor)
    message.close()
    assert descriptors().items() <= before.items()
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_message_is_passed_over(path: str, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(path).chmod(0o777)
    Path(path).parent.chmod(0o755)
    code = "from sglang_crashkit import protocol\nos.setuid(65534)\n"
    code += "protocol.notify(sys.argv[1], 'x')\nready(); pause()"
    with child(code, path):
        assert mailbox.receive() == []


#: Tells every datagram socket of this machine that is to be had to wait, for as long as it runs.
ATTACKER = """
import json, re, socket
from pathlib import Path
if len(sys.argv) > 2: os.setuid(int(sys.argv[2]))
attacker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
attacker.setblocking(False)
ready()
while True:
    for line in Path("/proc/net/unix").read_text().splitlines():
        address = line.split()[7:]
        is_wanted = address and (sys.argv[1] in address[0] or re.fullmatch("@[0-9a-f]{5}", address[0]))
        if is_wanted and line.split()[4] == "0002":
            try: attacker.sendto(json.dumps({"ack": "wait", "wait_secs": 5.0}).encode(), address[0].replace("@", "\\0"))
            except OSError: pass
    time.sleep(0.02)
"""


@pytest.mark.parametrize("uid", [pytest.param(["65534"], id="another"), pytest.param([], id="own")])
def test_nobody_but_the_handler_moves_the_end_of_a_wait(path: str, mailbox: Mailbox, uid: list[str]) -> None:
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with child(ATTACKER, str(Path(path).parent), *uid):
        assert protocol.request(path, "event", 1.0) == {}
        assert receive_one(mailbox).event == "event"
        with answering(mailbox, ack="done"):
            assert protocol.request(path, "event", LONG) == {"ack": "done"}


@pytest.mark.parametrize("asked", [600.0, 1e300, 100, "long", None, [1], True, float("nan"), float("inf"), -5])
def test_a_wait_is_capped_by_the_one_who_waits(path: str, mailbox: Mailbox, asked: object) -> None:
    is_time = type(asked) in (int, float) and 0 < asked < float("inf")  # type: ignore[operator]
    told: list[float] = []
    began = time.monotonic()
    with answering(mailbox, ack="wait", **{WAIT_FIELD: asked}):
        # What is no time extends no wait.
        most = 2.0 if is_time else 2 * LONG
        assert protocol.request(path, "event", 2 * LONG, on_wait=told.append, max_secs=most) == {}
    assert time.monotonic() - began < LONG
    assert len(told) == 1
    assert told[0] < (2.0 if is_time else 0.01)


def test_a_handler_that_is_not_named_is_not_believed(path: str, mailbox: Mailbox) -> None:
    Path(path).with_name(HANDLER_PID).unlink()
    with answering(mailbox, ack="done"):
        assert protocol.request(path, "event", 0.5) == {}


@pytest.mark.parametrize(
    ("address", "data"),
    [
        ("{0}.reply", b'{"event": "x"}'),
        ("{1}/s", b'{"event": "x", "wait": true}'),
        ("\0crashkit-test", b'{"event": "x", "wait": true}'),
    ],
    ids=["does not wait", "elsewhere", "abstract"],
)
def test_one_who_does_not_wait_here_is_not_answered(
    path: str, mailbox: Mailbox, tmp_path: Path, address: str, data: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.bind(address.format(path, tmp_path))
        sender.sendto(data, path)
        mailbox.acknowledge(receive_one(mailbox), ack="done")
        sender.setblocking(False)
        with pytest.raises(BlockingIOError):
            sender.recv(100)


def test_one_who_waits_is_answered_after_the_folder_was_removed(path: str, mailbox: Mailbox) -> None:
    def answer() -> None:
        message = receive_one(mailbox)
        with mailbox.line_to(message) as line:
            shutil.rmtree(Path(path).parent)
            line(ack="clean")

    thread = threading.Thread(target=answer)
    thread.start()
    assert protocol.request(path, "exiting", LONG) == {"ack": "clean"}
    thread.join(LONG)
    Path(path).parent.mkdir()


def test_a_stopped_handler_is_still_reachable(path: str) -> None:
    with child(HANDLER, path) as process:
        process.send_signal(signal.SIGSTOP)
        assert protocol.is_reachable(path)


@pytest.mark.parametrize(
    ("event", "fields", "kept"),
    [
        ("teardown", {"pid": 7, "whole": False}, {"pid", "whole", "at"}),
        ("teardown", {"pid": "7", "whole": 0}, {"at"}),
        ("teardown", {"pid": True, "at": "now"}, set()),
        ("watchdog_timeout", {"silent_secs": None, "soft": True, "name": "x"}, {"soft", "name", "at"}),
        ("members", {"started": {}, "more": 1}, {"more", "at"}),
        ("of tomorrow", {"pid": "7"}, {"pid", "at"}),
    ],
)
def test_a_field_of_another_type_is_left_out(
    path: str, mailbox: Mailbox, event: str, fields: dict[str, object], kept: set[str]
) -> None:
    protocol.notify(path, event, **fields)
    assert receive_one(mailbox).fields.keys() == kept
