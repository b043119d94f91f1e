from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt import hooks
from sglang_crashkit.srt.utils.watchdog import on_watchdog_timeout
from unit.srt.conftest import Listener
from unit.support.waiting import LONG


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_hook_lets_through_what_ends_the_program(error: type[BaseException]) -> None:
    @hooks.never_raises
    def hook() -> None:
        raise error

    with pytest.raises(error):
        hook()


def test_without_a_handler_nothing_is_said_and_nothing_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert hooks.notify("event") is False
    assert hooks.request("event", 600.0) is None
    assert caplog.text == ""


def test_a_handler_that_dies_is_no_error(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    # While it is waited for.
    assert hooks.request("die", 600.0) is None
    assert "no crash handler" in caplog.text
    assert hooks.notify("event") is False


def test_what_cannot_be_sent_is_not_sent(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.notify("event", text="x" * 100_000) is False
    assert hooks.notify("event", **{"time": {1: object()}}) is True
    monkeypatch.setenv(SOCKET_VARIABLE, "/x" * 200)
    assert not hooks.notify("event")
    monkeypatch.setenv(SOCKET_VARIABLE, str(Path(__file__)))
    assert not hooks.notify("event")


def test_paths_are_those_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["", "/a", "/a/b/", "/c"])
    assert hooks.shorten("/a/b/sglang/x.py") == "sglang/x.py"
    assert hooks.shorten("/a/other.py") == "other.py"
    assert hooks.shorten("/elsewhere/y.py") == "/elsewhere/y.py"
    assert hooks.shorten("<string>") == "<string>"


@pytest.mark.parametrize("open_both", [os.pipe, lambda: [end.detach() for end in socket.socketpair()]])
@pytest.mark.parametrize(("is_open", "said"), [(True, "say(b'x' * 200_000)"), (False, "say_line('x')")])
def test_a_standard_error_that_nobody_reads_holds_nobody_up(
    open_both: Callable[[], Sequence[int]], is_open: bool, said: str
) -> None:
    reader, writer = open_both()
    if not is_open:
        os.close(reader)
    # As a program does that ends where no one reads what it says.
    code = "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
    code += f"from sglang_crashkit.srt import hooks\nhooks.{said}\nprint('on')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, timeout=LONG)
    for descriptor in (reader, writer) if is_open else (writer,):
        os.close(descriptor)
    assert done.stdout == b"on\n"


def test_a_timeout_is_told_with_what_the_watchdog_knows(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    on_watchdog_timeout(SimpleNamespace(debug_name="Scheduler", watchdog_timeout=300.0, soft=False))
    told = listener.heard()
    wanted = {"event": "watchdog_timeout", "name": "Scheduler", "silent_secs": 300.0, "soft": False}
    assert wanted.items() <= told.items()
    assert "incident abc" in caplog.text
