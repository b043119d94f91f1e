"""``scripts/serve`` as a person uses it: it answers while it runs, and Ctrl-C leaves nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.scenario import generate
from lanelib import procs
from lanelib.lanes import ensure_lane
from lanelib.paths import ROOT
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

SERVE = ROOT / "scripts" / "serve"
#: The lines between the two name the processes.
READY = re.compile(r"ready after \d+ s: (http://\S+).*Ctrl-C ends it", re.DOTALL)
READY_TIMEOUT_S = 400
STOP_TIMEOUT_S = 120


def test_serve_answers_on_two_ranks_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    ensure_lane("0.5.23")
    said = tmp_path / "stdout"
    with said.open("wb") as out:
        serve = subprocess.Popen(
            [sys.executable, SERVE, "--lane", "0.5.23", "--tp", "2"], stdout=out, stderr=subprocess.STDOUT
        )

    def said_ready() -> re.Match[str] | None:
        assert serve.poll() is None, said.read_text()
        return READY.search(said.read_text())

    try:
        url = wait_until(said_ready, "it is ready", READY_TIMEOUT_S)[1]
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
