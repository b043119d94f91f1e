from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lanelib.commands import LaneError
from paired import Load, Run, Switch, interval, run_pairs, spread, trimmed
from unit.support.waiting import spawned

CODE = "def switch(is_on):\n    return True\n"
OTHER = "def switch(is_on):\n    return False\n"
PROGRAM = "print('ready', flush=True); import sys; sys.stdin.read()"


class Answers(BaseHTTPRequestHandler):
    """Answers every request, unless its prompt is too long."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if len(body["input_ids"]) < 100 else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        return


class Served:
    """Stands for a server: this process, and the one that is switched."""

    log_path = Path("log")

    def __init__(self, port: int, pid: int) -> None:
        self.url, self.pid = f"http://127.0.0.1:{port}", pid

    def processes(self) -> list[tuple[int, str]]:
        return [(os.getpid(), "main"), (self.pid, "sglang::scheduler")]


def started(switch: Switch) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Return a process that the switch reaches."""
    return spawned([sys.executable, "-c", PROGRAM], env=os.environ | switch.env, stdin=subprocess.PIPE)


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path, CODE)


@pytest.fixture
def server(switch: Switch) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as answers, started(switch) as process:
        threading.Thread(target=answers.serve_forever, daemon=True).start()
        yield Served(answers.server_address[1], process.pid)
        answers.shutdown()


def test_pairs_run_with_and_without_after_a_discarded_one(
    server: Any, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched = []
    real = switch.set
    monkeypatch.setattr(switch, "set", lambda pid, *, on: (switched.append(on), real(pid, on=on)))
    pairs = list(run_pairs(server, switch, server.pid, Load(2, 3, 4, 5), 2))
    assert switched == [False, True, True, False]
    assert all(
        isinstance(run, Run) and run.wall_s > 0 and run.all_s >= run.own_s >= 0 for pair in pairs for run in pair
    )


def test_a_request_that_is_refused_ends_it(server: Any, switch: Switch) -> None:
    with pytest.raises(LaneError, match="answers 400"):
        list(run_pairs(server, switch, server.pid, Load(1, 1, 100, 1), 1))


def test_a_process_without_the_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paired.TIMEOUT_S", 0.2)
    other = Switch(tmp_path, OTHER)
    with started(other) as process, pytest.raises(LaneError, match="did not switch"):
        other.set(process.pid, on=True)


def test_a_median_is_told_with_its_spread() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0], ".1f").strip() == "3.0 (5 pairs; 95 %: 1.0 to 5.0)"


def test_the_interval_of_a_ratio_narrows_with_more_pairs() -> None:
    few, many = (interval([[0.99, 1.03] * pairs]) for pairs in (5, 100))
    for middle, low, high in (few, many):
        assert low < middle < high
        assert middle == pytest.approx((0.99 * 1.03) ** 0.5)
    assert many[2] - many[1] < (few[2] - few[1]) / 3


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    assert interval([[2.0, 2.0, 2.0]]) == pytest.approx((2.0, 2.0, 2.0))


def test_starts_that_differ_widen_the_interval() -> None:
    middle, low, high = interval([[0.95] * 100, [1.05] * 100, [1.0] * 100, [1.0] * 100])
    assert low < 0.98 < middle < 1.02 < high


def test_what_lies_far_out_does_not_move_a_trimmed_mean() -> None:
    values = [1.0, 1.01, 0.99, 1.02, 0.98] * 20
    mean, least, most = trimmed(values)
    assert (mean, trimmed([50.0, *values[1:]])[0]) == pytest.approx((1.0, 1.0), abs=0.001)
    assert least < 1.0 < most
    # Four times as many values are known twice as well.
    assert most - mean == pytest.approx(2 * (trimmed(values * 4)[2] - mean), rel=0.02)
