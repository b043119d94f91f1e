from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from sglang_crashkit.handler.collectors.server_log import ServerLog
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.server import CrashHandler
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import Settings
from unit.targets import start_ticks


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
