from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sglang_crashkit.errors import UsageError
from sglang_crashkit.watch.health import HEALTH_PATH, INFO_PATH, Address, HealthProbe, read_api_key
from unit.support.waiting import wait_until
from unit.watch.http_server import Answering, answering


def probe_of(server: Answering, timeout_secs: float = 30.0) -> HealthProbe:
    return HealthProbe(Address.parse(server.url), 0.05, timeout_secs)


def settle(probe: HealthProbe, health: str) -> None:
    wait_until(lambda: probe.look() == health, f"its health is {health}")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:30000", Address("http", "127.0.0.1", 30000)),
        ("http://host", Address("http", "host", 80)),
        ("https://host/", Address("https", "host", 443)),
        ("http://[::1]:30000/prefix/", Address("http", "::1", 30000, "/prefix")),
    ],
)
def test_an_address_is_read_from_a_url(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "ftp://host", "http://", "http://host:x", "http://host:99999", "http://a:b@host"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Address.parse(url)


def test_a_silent_server_is_never_asked_twice_at_once() -> None:
    with answering() as server:
        server.statuses[HEALTH_PATH] = 0
        probe = probe_of(server)
        probe.look()
        wait_until(lambda: server.asked, "it is asked")
        for _ in range(100):
            assert probe.look() == "waiting"
        assert server.asked == [HEALTH_PATH]
        server.release()
        settle(probe, "ok")
        assert server.max_open == 1


def test_a_port_that_nobody_listens_on_refuses() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        settle(HealthProbe(Address("http", "127.0.0.1", held.getsockname()[1]), 0.05, 30.0), "refused")


def test_an_unknown_host_is_told_as_a_problem() -> None:
    probe = HealthProbe(Address("http", "no-such-host.invalid", 1), 0.05, 30.0)
    settle(probe, "refused")
    assert "no-such-host.invalid" in probe.problem


@pytest.mark.parametrize(("status", "known"), [(200, True), (401, None), (404, None)])
def test_whether_the_schedulers_answer_something_else(status: int, known: bool | None) -> None:
    with answering() as server:
        server.statuses[INFO_PATH] = status
        probe = probe_of(server)
        probe.answers()
        wait_until(lambda: server.open == 0 and server.asked, "it is asked")
        wait_until(lambda: probe.answers() is known, f"it is known to be {known}")
        for _ in range(10):
            probe.answers()
        assert server.asked == [INFO_PATH]

        def is_asked_again() -> bool:
            probe.forget_answer(is_well=False)
            probe.answers()
            return len(server.asked) > 1

        wait_until(is_asked_again, "it is asked again")


def test_the_key_goes_with_both_questions() -> None:
    with answering() as server:
        server.key = "top secret"
        probe = HealthProbe(Address.parse(server.url), 0.05, 30.0, api_key="top secret")
        settle(probe, "ok")
        probe.answers()
        wait_until(lambda: probe.answers() is True, "they answer")
        assert set(server.keys) == {"Bearer top secret"}
        assert probe.problem == ""


@pytest.mark.parametrize("key", ["", "of another server"])
def test_without_a_key_the_need_is_told_and_none_shown(key: str) -> None:
    with answering() as server:
        server.key = "top secret"
        probe = HealthProbe(Address.parse(server.url), 0.05, 30.0, api_key=key)
        probe.answers()
        wait_until(lambda: probe.answers() is None and probe.problem, "it is told")
        assert probe.problem.startswith(f"{server.url}{INFO_PATH} is answered with 401")
        assert "--api-key-file" in probe.problem
        assert "another" not in probe.problem
        assert set(server.keys) == ({"Bearer of another server"} if key else {None})


def test_schedulers_that_may_still_answer_are_not_asked_again() -> None:
    with answering() as server:
        server.statuses[INFO_PATH] = 0
        probe = probe_of(server)
        probe.answers()
        wait_until(lambda: server.asked, "it is asked")
        probe.forget_answer(is_well=True)
        assert probe.answers() is None
        assert server.asked == [INFO_PATH]


def test_schedulers_that_do_not_answer_in_time_do_not_answer() -> None:
    with answering() as server:
        server.statuses[INFO_PATH] = 0
        probe = probe_of(server, timeout_secs=0.2)
        wait_until(lambda: probe.answers() is False, "it is given up")
        probe.forget_answer(is_well=False)
        assert probe.answers() is False
        assert len(server.asked) == 1
        probe.forget_answer(is_well=True)
        assert probe.answers() is None


@pytest.mark.parametrize("content", ["sk-123", "sk-123\n", " sk-123 \r\n"])
def test_the_key_is_the_only_line_of_a_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    assert read_api_key(path) == "sk-123"
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    assert read_api_key(Path(f"/dev/fd/{reading}")) == "sk-123"
    os.close(reading)


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", b"a\x00b", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_api_key(path)
    assert str(path) in str(raised.value)
    assert "lines" not in str(raised.value)
    with pytest.raises(UsageError, match="No such file"):
        read_api_key(tmp_path / "absent")


@pytest.mark.parametrize(
    ("status", "delay_secs", "timeout_secs", "health"),
    [
        (200, 0.0, 30.0, "ok"),
        (503, 0.0, 30.0, "starting"),
        (503, 2.5, 30.0, "failed"),
        (0, 0.0, 0.2, "silent"),
        (404, 0.0, 30.0, "none"),
    ],
)
def test_what_the_health_check_says_again_and_again(
    status: int, delay_secs: float, timeout_secs: float, health: str
) -> None:
    with answering() as server:
        server.statuses[HEALTH_PATH], server.delay_secs = status, delay_secs
        probe = probe_of(server, timeout_secs)
        assert probe.look() == "waiting"
        settle(probe, health)
        wait_until(lambda: probe.look() and probe.asked > 1, "it is asked again")
        assert set(server.asked) == {HEALTH_PATH}
        assert probe.problem == (f"{server.url}{HEALTH_PATH} is answered with 404" if health == "none" else "")
