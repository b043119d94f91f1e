"""What the exit status says after a crash: of a program with an Engine, and of a server where upstream's is wanted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from integration.scenario import journaled_rids, wreck
from lanelib.lanes import ensure_lane
from lanelib.procs import send, title_of, tree_of
from lanelib.servers import Server
from sglang_crashkit.incident.store import find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SCHEDULER = "sglang::scheduler"
PROGRAM_TIMEOUT_S = 400.0
PROGRAM = """
import sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], load_format="dummy", device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", max_total_tokens=8192, mem_fraction_static=0.2, sleep_on_idle=True,
        crash_dump_folder=sys.argv[2],
    )
    print("ready", flush=True)
    engine.generate("Once upon a time", {"max_new_tokens": 4000, "ignore_eos": True})
    print("answered", flush=True)
"""


def test_an_engines_program_ends_as_upstreams_after_its_incident(tmp_path: Path) -> None:
    lane, folder, script = ensure_lane("0.5.23"), tmp_path / "crash", tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [lane.python, script, lane.model_dir, folder]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=lane.serve_env(), start_new_session=True
        )
        try:
            scheduler = wait_for_scheduler(process, Path(log.name))
            wait_until(lambda: journaled_rids(process.pid), "the engine has the request", PROGRAM_TIMEOUT_S)
            os.kill(scheduler, signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        finally:
            for member in tree_of(process.pid):
                send(member, signal.SIGKILL)
            process.wait(60)
    incidents = find_incidents(folder)
    assert len(incidents) == 1
    assert incidents[0].document is not None
    assert incidents[0].finished
    assert incidents[0].document["verdict"]["first_failure"]["pid"] == scheduler
    assert "answered" not in (tmp_path / "log").read_text()


def wait_for_scheduler(process: subprocess.Popen[bytes], log: Path) -> int:
    """Return the pid of a program's scheduler once the program asks its engine."""
    deadline = time.monotonic() + PROGRAM_TIMEOUT_S
    while "\nready\n" not in f"\n{log.read_text(errors='replace')}":
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return next(member.pid for member in tree_of(process.pid) if title_of(member.pid).startswith(SCHEDULER))


@pytest.mark.matrix
def test_whoever_wants_upstreams_status_gets_it_with_the_incident(tmp_path: Path) -> None:
    arguments, env = ["--crash-dump-folder", str(tmp_path)], {"SGLANG_CRASHKIT_EXIT_STATUS": "upstream"}
    with Server.start(ensure_lane("0.5.23"), extra_args=arguments, env=env) as server:
        server.wait_ready()
        left = wreck(server, tmp_path, lambda _server: os.kill(_server.pid_of(SCHEDULER), signal.SIGKILL), requests=1)
    assert left.status == -signal.SIGKILL
    assert left.left == []
    assert left.incident["complete"] is True
    assert left.incident["verdict"]["first_failure"]["title"] == SCHEDULER
