"""A stand-in server in a container, whose end takes its crash handler with it."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_crashkit.incident.store import find_incidents
from unit.support.server_driver import HOST, SCRIPT
from unit.support.waiting import LONG

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")

CONTAINER = ("unshare", "-pf", "--mount-proc", "--kill-child")
OPTIONS = {"answers_sigquit": True, "catches_sigquit": True, "tears_down_on_sigterm": True}
#: A shell as process 1, which ends with what it runs.
SHELL = ("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh")


class Contained:
    """A server in a container that is given commands."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def line(self) -> str:
        assert select.select([self.process.stdout], [], [], LONG)[0], "the server says nothing"
        return self.process.stdout.readline().decode().strip()

    def say(self, command: str) -> None:
        self.process.stdin.write(command.encode() + b"\n")


@contextmanager
def contained(temporary: Path, crash: Path, *prefix: str) -> Iterator[Contained]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environ = inherited | {"TMPDIR": str(temporary), "HOSTNAME": HOST, "SGLANG_CRASHKIT_JOURNAL": "0"}
    options = json.dumps(OPTIONS | {"crash_folder": str(crash)})
    with subprocess.Popen(
        [*CONTAINER, *prefix, sys.executable, str(SCRIPT), options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=environ,
    ) as process:
        try:
            server = Contained(process)
            words = server.line().split()
            assert words[0] == "ready", words
            yield server
        finally:
            process.kill()


def left(temporary: Path, crash: Path) -> list[str]:
    run = temporary / f"sglang-crashkit-{os.getuid()}" / "run"
    host = crash / HOST
    found = [*run.iterdir(), *(host / "incidents").iterdir(), *host.glob(".*")]
    # The record of which faults there were is of all servers.
    return [str(path) for path in found if path.name != "faults.json"]


@pytest.mark.wide
@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param((), id="process 1"),
        pytest.param(
            ("tini", "--"),
            id="tini",
            marks=pytest.mark.skipif(shutil.which("tini") is None, reason="no tini here: apt-get install tini"),
        ),
        pytest.param(SHELL, id="shell"),
    ],
)
def test_a_clean_stop_in_a_container_leaves_nothing(short_folder: Path, tmp_path: Path, prefix: Sequence[str]) -> None:
    with contained(short_folder, tmp_path, *prefix) as server:
        assert len(left(short_folder, tmp_path)) == 2
        server.say("teardown")
        server.process.wait(LONG)
        assert left(short_folder, tmp_path) == []


def test_process_1s_handler_outlives_the_servers_children(short_folder: Path, tmp_path: Path) -> None:
    with contained(short_folder, tmp_path) as server:
        # WHEN the program shuts its engine down, and a process of another program asks for nothing
        server.say("teardown children")
        assert server.line() == "done"
        assert len(left(short_folder, tmp_path)) == 2
        # THEN its own end is still no crash, and leaves nothing
        server.say("teardown")
        server.process.wait(LONG)
        assert left(short_folder, tmp_path) == []


@pytest.mark.wide
def test_an_incident_at_hand_is_written_before_the_container_ends(short_folder: Path, tmp_path: Path) -> None:
    with contained(short_folder, tmp_path) as server:
        # An observed one, of a server that goes on: it would be finished some seconds later.
        server.say("tell scheduler_TP0 snapshot")
        assert server.line() == "the handler"
        server.say("teardown")
        server.process.wait(LONG)
        (incident,) = find_incidents(tmp_path)
        assert incident.finished
        assert left(short_folder, tmp_path) == [str(incident.path)]
