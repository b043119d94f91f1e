"""``scripts/serve`` as a person uses it: it answers while it runs, and Ctrl-C leaves nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.scenario import generate
from lanelib import procs
from lanelib.lanes import ensure_lane
from lanelib.paths import ROOT

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

SERVE = ROOT / "scripts" / "serve"
READY = re.compile(r"ready after \d+ s: (http://\S+)")
READY_TIMEOUT_S = 400
STOP_TIMEOUT_S = 120


def test_serve_answers_on_two_ranks_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    ensure_lane("0.5.23")
    said = tmp_path / "stdout"
    with said.open("wb") as out:
        serve = subprocess.Popen(
            [sys.executable, SERVE, "--lane", "0.5.23", "--tp", "2"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        url = _wait_ready(serve, said)
        members = procs.tree_of(serve.pid)
        titles = [procs.title_of(process.pid) for process in members]
        assert {"sglang::scheduler_TP0", "sglang::scheduler_TP1"} <= {title.split(" ")[0] for title in titles}
        assert len(generate(url)) == 8

        serve.send_signal(signal.SIGINT)

        assert serve.wait(timeout=STOP_TIMEOUT_S) == 0
        assert procs.alive(members) == []
        assert said.read_text().endswith("stopping\nstopped\n")
    finally:
        if serve.poll() is None:
            serve.terminate()
            serve.wait(timeout=STOP_TIMEOUT_S)


def _wait_ready(serve: subprocess.Popen[bytes], said: Path) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (match := READY.search(said.read_text())) is None:
        assert serve.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)
    # The lines after it name the processes.
    while "Ctrl-C ends it" not in said.read_text():
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.05)
    return match.group(1)
