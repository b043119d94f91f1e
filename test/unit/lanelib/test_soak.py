from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from lanelib.procs import read_process
from lanelib.servers import Server
from lanelib.soak import Look, Side, descriptors_of, generate, look, memory_mb
from unit.waiting import LONG, wait_until

#: Has two dead children that it does not reap.
PARENT = """
import os, time
for _ in range(2):
    os.posix_spawn("/bin/true", ["true"], {})
print("up", flush=True)
time.sleep(60)
"""


class Answers(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps({"output_ids": [len(self.asked[-1]["text"])]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Answers.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(LONG)


def side_with(memory: list[float]) -> Side:
    looks = [
        Look(at=number, memory_mb=value, descriptors=9, threads=3, zombies=0) for number, value in enumerate(memory)
    ]
    return Side("patched", cast(Server, None), looks=looks)


def test_a_request_follows_from_the_seed_and_its_number(url: str) -> None:
    tokens = [generate(url, seed, number) for seed, number in ((1, 5), (1, 5), (1, 6), (2, 5))]
    first, again, another, of_another_seed = Answers.asked
    assert first == again
    assert tokens[0] == tokens[1]
    assert another not in (first, of_another_seed)
    assert {asked["sampling_params"]["temperature"] for asked in Answers.asked} == {0.0}


def test_growth_is_from_the_first_third_to_the_last_and_bears_a_single_high_look() -> None:
    side = side_with([100, 101, 900, 150, 150, 150, 111, 110, 109])
    assert side.growth(lambda one: one.memory_mb) == 110 - 101
    assert side.growth(lambda one: one.descriptors) == 0


def test_a_look_counts_what_a_server_and_its_children_hold() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wait_until(lambda: look(process.pid, 0.0).zombies == 2, "both children are dead")
            seen = look(process.pid, 7.0)
            assert (seen.at, seen.threads, seen.zombies) == (7.0, 1, 2)
            assert seen.descriptors == len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            assert 1 < seen.memory_mb < 100
        finally:
            process.kill()
            process.wait(LONG)
    assert memory_mb(process.pid) == 0.0


def test_descriptors_are_counted_by_process_and_kind() -> None:
    own = read_process(os.getpid())
    assert own is not None
    before = descriptors_of([own])
    with socket.socket(), socket.socket():
        new = descriptors_of([own]) - before
    assert [(name.split(" ")[1], count) for name, count in new.items()] == [("socket", 2)]
