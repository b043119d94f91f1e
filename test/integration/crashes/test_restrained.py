"""Real two-rank servers that no one may trace, without py-spy, and with two things that happen at once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.crashes.restrained import NOBODY, RESTRAIN, can_restrain
from integration.scenario import RELEASES, Wreck, wreck
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

RANKS = FIRST, SECOND = "sglang::scheduler_TP0", "sglang::scheduler_TP1"
DETOKENIZER = "sglang::detokenizer"
#: On a loaded machine, in seconds.
LONG = 120.0
#: What every Python of the server runs first: no one may trace it without the capability; and a rank that finds a file
#: says so, and holds the GIL in C for ever. Not by a signal, which Python does not take while it waits for
#: the other rank.
SITE = """
import ctypes, os, pathlib, threading, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
def hold_the_lock():
    folder, own = pathlib.Path(__file__).parent, pathlib.Path("/proc/self/cmdline")
    while not (folder / "hold").exists():
        time.sleep(0.2)
    if own.read_text().startswith("sglang::scheduler"):
        (folder / f"{os.getpid()}.held").touch()
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
threading.Thread(target=hold_the_lock, daemon=True).start()
"""


def stack_of(left: Wreck, title: str) -> str:
    return (left.folder / left.evidence(title, "stack")["path"]).read_text()


@pytest.fixture
def their_folder() -> Iterator[Path]:
    """A folder of another user's, not below one that only root may enter."""
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(not can_restrain(), reason="a server of another user takes root and setpriv")
@pytest.mark.parametrize("release", RELEASES)
def test_faulthandler_tells_of_ranks_that_nobody_may_trace(release: str, their_folder: Path) -> None:
    crash = their_folder / "crash"
    (their_folder / "sitecustomize.py").write_text(SITE)
    env = {"PYTHONPATH": str(their_folder), "TMPDIR": str(their_folder)}
    options = ["--crash-dump-folder", str(crash)]

    def fault(server: Server) -> None:
        (their_folder / "hold").touch()
        held = "both ranks hold their GILs"
        wait_until(lambda: len(list(their_folder.glob("*.held"))) == 2, held, LONG)
        os.kill(server.pid_of(DETOKENIZER), signal.SIGKILL)

    with Server.start(ensure_lane(release), tp=2, extra_args=options, env=env, prefix=RESTRAIN) as server:
        server.wait_ready()
        left = wreck(server, crash, fault)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    assert left.incident["verdict"]["first_failure"]["title"] == DETOKENIZER
    for title in RANKS:
        stack = left.evidence(title, "stack")
        assert (stack["status"], stack["source"]) == ("captured", "faulthandler"), stack
        assert "Permission Denied" in stack["reason"]
        assert "hold_the_lock" in stack_of(left, title)
    assert left.incident["requests"]["unfinished"] == 3
    assert left.folder.stat().st_uid == NOBODY


def test_a_rank_dying_at_shutdown_is_told_without_py_spy(tmp_path: Path) -> None:
    missing = str(tmp_path / "py-spy")

    def fault(server: Server) -> None:
        os.kill(server.pid_of(SECOND), signal.SIGKILL)
        os.kill(server.pid, signal.SIGTERM)

    env = {"SGLANG_CRASHKIT_PYSPY": missing}
    options = ["--crash-dump-folder", str(tmp_path / "crash")]
    with Server.start(ensure_lane("0.5.23"), tp=2, extra_args=options, env=env) as server:
        server.wait_ready()
        left = wreck(server, tmp_path / "crash", fault)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    first = left.incident["verdict"]["first_failure"]
    assert (left.incident["kind"], first["title"]) == ("killed", SECOND)
    assert left.incident["requests"]["unfinished"] == 3
    stack = left.evidence(FIRST, "stack")
    assert stack["status"] == "captured"
    assert stack["source"] in ("in-process", "faulthandler")
    assert f"{missing}: No such file or directory" in stack["reason"]
    assert "run_scheduler_process" in stack_of(left, FIRST)


def test_two_ranks_that_die_at_once_are_one_incident(tmp_path: Path) -> None:
    def fault(server: Server) -> None:
        pids = [server.pid_of(title) for title in RANKS]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    with Server.start(ensure_lane("0.5.23"), tp=2, extra_args=["--crash-dump-folder", str(tmp_path)]) as server:
        server.wait_ready()
        left = wreck(server, tmp_path, fault)
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    assert left.incident["kind"] == "killed"
    assert left.incident["verdict"]["first_failure"]["title"] in RANKS
    for title in RANKS:
        assert left.report(title)["exit"]["signal"] == "SIGKILL"
    survivors = [process for process in left.incident["processes"] if process["role"] in ("detokenizer", "server")]
    assert len(survivors) == 2
    for process in survivors:
        assert [piece["status"] for piece in process["evidence"] if piece["kind"] == "stack"] == ["captured"]
    assert left.incident["requests"]["unfinished"] == 3
