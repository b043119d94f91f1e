"""A real server's main process is killed while it saves its requests: they are whole, and its output has its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.crashes.whole import journaled
from integration.import_hook import write_site
from integration.scenario import (
    EXIT_TIMEOUT_S,
    PATIENCE,
    PROMPTS,
    SCHEDULER,
    answers_of,
    handler_pid,
    journaled_rids,
    serving,
    stopped,
    wait_for_incident,
)
from lanelib.procs import tree_of
from lanelib.servers import greedy
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel import procfs
from unit.support.targets import state_of
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

REQUESTS = 3
#: On a loaded machine, in seconds.
LONG = 120.0
#: Saving the requests takes for ever in the middle, as it would with thousands of long ones on a slow disk.
SITE = """
import os, pickle, time
real_dump = pickle.dump
def dump(value, file, *arguments, **options):
    if not (isinstance(value, dict) and "requests" in value):
        return real_dump(value, file, *arguments, **options)
    data = pickle.dumps(value)
    file.write(data[: len(data) // 2])
    file.flush()
    open(os.environ["CRASHKIT_TEST_MARKER"], "w").close()
    time.sleep(600)
pickle.dump = dump
"""
#: A program that starts the server and reads its output to the end.
CAPTURE = """
import shutil, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
while chunk := server.stdout.read1(65536):
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()
sys.exit(0 if server.wait() == -9 else 1)
"""


@dataclass(frozen=True)
class Left:
    """What was left of a server."""

    status: int  # of the program that captured the output: 0 when that had its end and the server was killed
    handler_state: str  # of the crash handler when the output had its end
    folder: Path  # the crash folder
    stored: StoredIncident  # the incident


@pytest.fixture(scope="module")
def left(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    folder, site = tmp_path_factory.mktemp("crash"), tmp_path_factory.mktemp("site")
    env = PATIENCE | write_site(site, SITE) | {"CRASHKIT_TEST_MARKER": str(site / "marker")}
    with serving(release, folder, env=env, prefix=(sys.executable, "-c", CAPTURE)) as server:
        answers_of(server)
        (main,) = [one.pid for one in tree_of(server.pid) if one.parent == server.pid]
        handler = handler_pid(server)
        for _ in range(REQUESTS):
            server.ask_later("generate", greedy("Once upon a time", 4000), EXIT_TIMEOUT_S)
        wait_until(lambda: len(journaled_rids(server.pid)) == REQUESTS, "the requests are under way", LONG)
        os.kill(server.pid_of(SCHEDULER), signal.SIGKILL)
        wait_until((site / "marker").exists, "the server saves its requests", LONG)
        # Those of the processes are taken meanwhile; on a busy machine that takes longer.
        wait_until(lambda: [*folder.glob("*/incidents/*/stacks/*launch_server*.txt")], "the stacks are taken", LONG)
        # Whatever it holds open is held open until the output has had its end.
        with stopped(handler):
            os.kill(main, signal.SIGKILL)
            status = server.popen.wait(EXIT_TIMEOUT_S)
            state = state_of(handler)
        stored = wait_for_incident(folder, LONG)
        wait_until(lambda: procfs.read_stat(handler) is None, "the handler leaves", LONG)
        yield Left(status, state, folder, stored)


def test_the_incident_is_whole_and_has_the_requests(left: Left) -> None:
    incident = left.stored.document
    assert incident["complete"] is True
    assert incident["verdict"]["first_failure"]["title"] == SCHEDULER
    requests = incident["requests"]
    assert (requests["source"], requests["unfinished"], requests["finished"]) == ("journal", REQUESTS, len(PROMPTS))
    assert len(journaled(incident, left.stored.path, "unfinished")) == REQUESTS


def test_nothing_torn_is_left(left: Left) -> None:
    assert [path for path in left.folder.rglob("*crash_dump_*") if path.is_file()] == []


def test_whoever_reads_the_servers_output_sees_its_end(left: Left) -> None:
    assert left.status == 0
    assert left.handler_state == "T"
