"""What a server was asked when it crashed is sent to an unpatched one as it came."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from integration.scenario import SCHEDULER, run_kit, serving, whole_incidents
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.kernel.server_address import Address
from sglang_crashkit.replay.server import send
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

RELEASE = os.environ.get("SGLANG_CRASHKIT_TEST_RELEASE", "0.5.23")
#: In seconds, on a busy machine; and between the first request and those that come together.
ANSWER_S, GAP_S = 300.0, 0.8
LONG = {"max_new_tokens": 150, "ignore_eos": True}
BODIES: tuple[dict[str, Any], ...] = (
    {"rid": "first", "text": "Hello \u00fc\u4f60\n", "sampling_params": {"max_new_tokens": 2, "stop": ["##", "zz"]}},
    {
        "rid": "streamed",
        "input_ids": [100, 20, 30],
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 3,
        "logprob_start_len": 1,
        "sampling_params": {**LONG, "temperature": 0.25, "top_p": 0.9, "logit_bias": {"7": -2.5}},
    },
    {"rid": "second", "text": "again", "sampling_params": {**LONG, "min_p": 0.125, "regex": "[a-z]{400}"}},
    {"rid": "third", "input_ids": [5] * 40, "priority": 3, "sampling_params": {**LONG, "stop_token_ids": [511]}},
)


class Recorder(http.server.ThreadingHTTPServer):
    """Passes requests on to a server, and notes what came when, what was answered, and how many were under way."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.upstream = port
        self.came: list[tuple[float, dict[str, Any]]] = []
        self.answered: dict[str, tuple[int, str]] = {}
        self.under_way = self.most = 0
        self.lock = threading.Lock()


class _Passing(http.server.BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(data)
        with self.server.lock:
            self.server.came.append((time.monotonic(), body))
            self.server.under_way += 1
            self.server.most = max(self.server.most, self.server.under_way)
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=ANSWER_S)) as connection:
            connection.request("POST", self.path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        with self.server.lock:
            self.server.under_way -= 1
            self.server.answered[body["rid"]] = response.status, str(response.headers.get_content_type())
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The crash folder of a server that was killed while it was asked."""
    folder = tmp_path / "crash"
    with serving(RELEASE, folder) as server:
        address = Address("http", "127.0.0.1", server.port)
        assert send(address, BODIES[0], ANSWER_S).status == 200
        time.sleep(GAP_S)
        for body in BODIES[1:]:
            threading.Thread(target=lambda body=body: send(address, body, ANSWER_S), daemon=True).start()
            # So that there is an order.
            time.sleep(0.1)
        os.kill(server.pid_of(SCHEDULER), signal.SIGKILL)
        wait_until(lambda: whole_incidents(folder), "it ended")
        with suppress(subprocess.TimeoutExpired):
            server.popen.wait(ANSWER_S)
    return folder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """What stands before an unpatched server."""
    with Server.start(ensure_lane(RELEASE, pristine=True)) as server:
        server.wait_ready()
        with Recorder(server.port) as recorder:
            threading.Thread(target=recorder.serve_forever, daemon=True).start()
            yield recorder
            recorder.shutdown()


def test_requests_are_sent_to_an_unpatched_server_as_they_came(crashed: Path, recorder: Recorder) -> None:
    url = f"http://127.0.0.1:{recorder.server_address[1]}"
    done = run_kit("replay", crashed, "--json", "--url", url, timeout_s=ANSWER_S)
    assert {line["rid"]: line["status"] for line in map(json.loads, done.stdout.splitlines())} == {
        body["rid"]: 200 for body in BODIES
    }
    # In their order, as far apart as they came, and those that were under way together.
    assert [body["rid"] for _at, body in recorder.came] == [body["rid"] for body in BODIES]
    (first, _), (second, _), *_others, (last, _) = recorder.came
    assert second - first >= GAP_S
    assert last - second < second - first
    assert recorder.most == 3
    # With all that was asked for, and nothing else that matters.
    for (_at, came), body in zip(recorder.came, BODIES, strict=True):
        assert {name: came.get(name) for name in body} == body
        assert {name for name in came.keys() - body.keys() if came[name]} <= {"log_metrics", "logprob_start_len"}
    assert recorder.answered["streamed"] == (200, "text/event-stream")
    assert {kind for rid, (_status, kind) in recorder.answered.items() if rid != "streamed"} == {"application/json"}
