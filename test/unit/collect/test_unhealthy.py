"""`collect --when-unhealthy` waits until the health check fails or is not answered."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_crashkit.collect import unhealthy
from sglang_crashkit.collect.unhealthy import wait_until_unhealthy
from sglang_crashkit.errors import UsageError
from sglang_crashkit.kernel.server_address import Address
from unit.support.command import Cli
from unit.support.waiting import LONG

#: What the health check answers, and after how many seconds; the last one again and again.
Answers = list[tuple[int, float]]
Serve = Callable[[Answers], Address]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(unhealthy, "ASK_SECS", 2.0)
    monkeypatch.setattr(unhealthy, "PAUSE_SECS", 0.05)
    monkeypatch.setattr(unhealthy, "AT_ONCE_SECS", 0.5)
    started: list[http.server.ThreadingHTTPServer] = []

    def start(answers: Answers) -> Address:
        left = iter(answers)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, secs = next(left, answers[-1])
                time.sleep(secs)
                self.send_response(status if self.path == "/health_generate" else 404)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        started.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return Address("http", "127.0.0.1", started[-1].server_address[1])

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([(200, 0.0), (503, 0.6)], "its health check is answered with status 503"),
        # One that was not ready yet when the question began hangs, too.
        ([(503, 0.6)], "its health check is answered with status 503"),
        ([(200, 0.0), (200, 3.0)], "its health check is not answered within 2 s"),
        # One failure alone, and a start, do not count.
        ([(503, 0.0), (503, 0.0), (200, 0.0), (500, 0.0), (200, 0.0)], ""),
        ([(503, 0.0)], ""),
    ],
)
def test_a_health_check_that_fails_or_hangs_is_unhealthy(serve: Serve, answers: Answers, reason: str) -> None:
    said: list[str] = []
    address = serve(answers)
    assert wait_until_unhealthy(address, LONG if reason else 2.5, said.append) == reason
    assert len(said) <= len(answers)


def test_a_server_that_is_gone_is_unhealthy_once_it_was_seen(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    address = serve([(200, 0.0)])
    asked: list[int] = []
    ask = Address.ask

    def stop_after_one(self: Address, path: str, timeout_secs: float) -> int:
        asked.append(1)
        return ask(self if len(asked) == 1 else Address("http", "127.0.0.1", 1), path, timeout_secs)

    monkeypatch.setattr(Address, "ask", stop_after_one)
    assert "cannot be asked" in wait_until_unhealthy(address, LONG, lambda _line: None)


def test_what_has_no_health_check_is_an_error(serve: Serve) -> None:
    with pytest.raises(UsageError, match="answered with status 404"):
        wait_until_unhealthy(serve([(404, 0.0)]), LONG, lambda _line: None)


def test_a_server_that_stays_healthy_leaves_nothing_to_collect(serve: Serve, cli: Cli) -> None:
    address = serve([(200, 0.0)])
    said = cli("collect", "--when-unhealthy", address, "--wait", "0.3", status=3)
    assert f"{address} was not unhealthy within 0.3 s" in said.err


@pytest.mark.parametrize("url", ["http://192.0.2.1:30000", "ftp://127.0.0.1", "http://user:secret@127.0.0.1"])
def test_what_is_no_server_of_this_host_is_refused_at_once(url: str, cli: Cli) -> None:
    assert "secret" not in cli("collect", "--when-unhealthy", url, status=2).err
