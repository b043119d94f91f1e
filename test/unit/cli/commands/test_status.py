from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_crashkit.cli.commands.status import RunningServer, find_running_servers, format_server
from sglang_crashkit.kernel.stack_hooks import HANDLER_PID
from sglang_crashkit.protocol import Mailbox
from unit.support.waiting import child

TITLE = "sglang::scheduler_TP0"
WORKER = """
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import HookFiles
from pathlib import Path
stat = procfs.read_stat(os.getpid())
held = open(HookFiles.of(Path(sys.argv[1]), stat.pid, stat.start_ticks).fault, "w")
ready()
pause()
"""


@pytest.fixture
def runtime(short_folder: Path) -> Path:
    """The runtime folder of a handler, which is this process."""
    (short_folder / HANDLER_PID).write_text("4711")
    return short_folder


def found(runtime: Path) -> list[RunningServer]:
    return [server for server in find_running_servers() if server.runtime == str(runtime)]


def test_a_server_with_its_handler_is_found_once(runtime: Path) -> None:
    with (
        Mailbox.bind(runtime / "handler.sock"),
        child(WORKER, str(runtime), title=TITLE),
        child(WORKER, str(runtime), title="sglang::detokenizer"),
    ):
        (server,) = found(runtime)
        assert server.problem == ""
        assert server.handler == 4711
        assert format_server(server).endswith("is watched by crash handler 4711")


def test_a_handler_that_has_ended_is_said(runtime: Path) -> None:
    Mailbox.bind(runtime / "handler.sock").close()
    with child(WORKER, str(runtime), title=TITLE) as process:
        (server,) = found(runtime)
        assert (server.pid, server.title) == (process.pid, TITLE)
        assert server.problem == "its crash handler has ended"
        assert "a crash of it leaves no incident; next: restart it" in format_server(server)


def test_a_runtime_folder_that_a_cleaner_removed_is_said(runtime: Path) -> None:
    with Mailbox.bind(runtime / "handler.sock"), child(WORKER, str(runtime), title=TITLE):
        shutil.rmtree(runtime)
        (server,) = found(runtime)
        assert server.handler is None
        assert "runtime folder is gone (No such file or directory)" in server.problem


def test_a_server_that_never_had_a_handler_is_listed_as_well() -> None:
    with child("ready(); pause()", title=TITLE) as process:
        (server,) = [server for server in find_running_servers() if server.pid == process.pid]
        assert (server.title, server.handler) == (TITLE, None)
        assert "has no crash handler: it was started without the kit" in format_server(server)
