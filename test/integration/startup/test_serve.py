"""``scripts/serve`` as a person uses it: it answers while it runs, and Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from lanelib import procs
from lanelib.lanes import ensure_lane
from lanelib.paths import ROOT
from lanelib.servers import opener

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
        assert len(_generate(url)["output_ids"]) == 4

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


def _generate(url: str) -> dict[str, object]:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with opener.open(request, timeout=60) as response:
        return json.load(response)
