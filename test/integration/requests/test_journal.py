"""What a server was asked to do is in the incident, also where its main process was killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.faults import send
from integration.scenario import EXIT_TIMEOUT_S, HANDLER, SCHEDULER, Wreck, run_in_lane, serving, wait_in_flight, wreck
from lanelib.lanes import Lane
from lanelib.servers import Server, opener
from sglang_crashkit import settings
from sglang_crashkit.incident.store import find_incidents

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SECRET = "sk-canary-4f1c7a90"
PROMPT = "the canary prompt of the journal"
IDS = list(range(5, 105))
SAMPLING = {"temperature": 0.25, "top_p": 0.5, "max_new_tokens": 3500, "stop": ["</never>"], "ignore_eos": True}


#: Loads the dump as upstream's scripts/playground/replay_request_dump.py does, and says what that would send.
READ_PICKLE = """
import json, pickle, sys
from dataclasses import asdict
data = pickle.load(open(sys.argv[1], "rb"))
records = data["requests"]
records.sort(key=lambda record: record[-2])
replayed = []
for request, output, start_time, end_time in records:
    body = asdict(request)
    replayed.append({name: body[name] for name in ("text", "stream", "sampling_params", "rid")})
print(json.dumps({"keys": sorted(data), "shapes": [len(record) for record in records], "requests": replayed}))
"""


@dataclass(frozen=True)
class Left:
    """What was left of a server, the requests of the incident by id, and the files with a prompt before the fault."""

    wreck: Wreck
    requests: dict[str, dict[str, Any]]
    written_before: list[Path]
    pid: int


def kill_all(server: Server) -> None:
    """Kill every process of a server at once; its crash handler excepted."""
    for pid, title in server.processes():
        if title != HANDLER:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(lambda server: os.kill(server.pid, signal.SIGKILL), id="main process"),
        pytest.param(kill_all, marks=pytest.mark.matrix, id="all processes"),
    ],
)
def killed(request: pytest.FixtureRequest, lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The main process was killed, or all processes at once."""
    return break_it(lane, tmp_path_factory.mktemp("crash"), request.param)


@pytest.fixture(scope="module")
def crashed(lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """A rank was killed, and the server saved its requests itself."""
    return break_it(lane, tmp_path_factory.mktemp("crash"), send(SCHEDULER))


@contextlib.contextmanager
def serve(lane: Lane, folder: Path) -> Iterator[Server]:
    temporary = folder.parent / "t"
    temporary.mkdir(exist_ok=True)
    with serving(lane, folder, "--api-key", SECRET, env={"TMPDIR": str(temporary)}) as server:
        yield server


def break_it(lane: Lane, folder: Path, fault: Callable[[Server], None]) -> Left:
    bodies = [
        {"rid": "text", "text": PROMPT, "sampling_params": SAMPLING, "return_logprob": True},
        {"rid": "ids", "input_ids": IDS, "sampling_params": SAMPLING, "stream": True},
        {"rid": ["one", "two"], "text": [PROMPT, PROMPT], "sampling_params": SAMPLING},
    ]
    written: list[Path] = []

    def break_now(server: Server) -> None:
        written.extend(holding(PROMPT, folder, folder.parent / "t", settings.fallback_folder()))
        fault(server)

    with serve(lane, folder) as server:
        post(server, {"rid": "answered", "input_ids": IDS, "sampling_params": SAMPLING | {"max_new_tokens": 4}})
        log_size = server.log_path.stat().st_size
        for body in bodies:
            threading.Thread(target=post, args=(server, body), daemon=True).start()
        wait_in_flight(server, {"text", "ids", "one", "two"}, log_size)
        left = wreck(server, folder, break_now, requests=0)
    told = left.incident["requests"]["journal"]
    assert told, left.incident["requests"]
    lines = [json.loads(line) for line in (left.folder / told["path"]).read_text().splitlines()]
    return Left(left, {line["rid"]: line for line in lines}, written, server.pid)


def holding(text: str, *folders: Path) -> list[Path]:
    """Return the files in which a text is; those of other servers come and go meanwhile."""
    found = []
    for path in (Path(parent, name) for folder in folders for parent, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def post(server: Server, body: dict[str, Any], **headers: str) -> None:
    """Ask with a key, and bear that it is cut off."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"} | headers
    call = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), headers)
    with (
        contextlib.suppress(OSError, ValueError, http.client.HTTPException),
        opener.open(call, timeout=EXIT_TIMEOUT_S) as answer,
    ):
        answer.read()


def test_the_requests_in_flight_have_their_inputs_and_parameters(killed: Left) -> None:
    found = killed.requests
    assert {rid for rid, request in found.items() if request["state"] == "unfinished"} == {"text", "ids", "one", "two"}
    for rid in ("text", "one", "two"):
        assert found[rid]["text"] == PROMPT
        assert found[rid]["sampling_params"].items() >= SAMPLING.items()
    assert found["text"]["return_logprob"] is True
    assert found["ids"]["input_ids"] == IDS
    assert found["ids"]["stream"] is True
    assert {request["pid"] for request in found.values()} == {killed.pid}
    assert all(request["ended"] is None for request in found.values() if request["state"] == "unfinished")


def test_the_requests_that_were_answered_lately_are_there_too(killed: Left) -> None:
    answered = killed.requests["answered"]
    assert (answered["state"], answered["input_ids"]) == ("finished", IDS)
    assert answered["arrived"] < answered["ended"]


def test_the_incident_says_where_the_requests_come_from(killed: Left) -> None:
    requests = killed.wreck.incident["requests"]
    assert (requests["source"], requests["finished"], requests["unfinished"], requests["path"]) == (
        "journal",
        1,
        4,
        None,
    )
    journal = requests["journal"]
    assert (journal["lost"], journal["left_out"], journal["reason"]) == (0, 0, None)
    assert "1 finished and 4 unfinished, from the journal" in (killed.wreck.folder / "summary.md").read_text()


def test_while_the_server_serves_its_prompts_are_in_no_file(killed: Left) -> None:
    assert killed.written_before == []
    assert killed.wreck.left == []


@pytest.mark.matrix
def test_a_clean_stop_leaves_nothing_of_the_requests(lane: Lane, tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    folder.mkdir()
    with serve(lane, folder) as server:
        post(server, {"rid": "answered", "text": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": 4}})
    found = holding(PROMPT, folder, tmp_path / "t")
    # Releases before 0.5.13 save the requests at each orderly end, too.
    own = [path for path in found if not path.name.startswith("crash_dump_")]
    assert (own, len(found)) == ([], 1 if lane.release in ("0.5.9", "0.5.12.post1") else 0)
    assert find_incidents(folder) == []


def test_prompts_are_below_requests_only_and_the_key_is_nowhere(killed: Left) -> None:
    for path in killed.wreck.crash_folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        if path.is_file():
            content = path.read_bytes()
            assert SECRET.encode() not in content, path
            assert PROMPT.encode() not in content or path.parent.name == "requests", path


@pytest.mark.matrix
def test_the_server_counts_what_the_journal_counts(crashed: Left) -> None:
    requests = crashed.wreck.incident["requests"]
    assert requests["source"] == "pickle"
    assert (requests["finished"], requests["unfinished"]) == (1, 4)
    assert (requests["journal"]["finished"], requests["journal"]["unfinished"]) == (1, 4)


@pytest.mark.matrix
def test_the_dump_is_what_upstreams_replay_script_reads(lane: Lane, crashed: Left) -> None:
    path = crashed.wreck.incident["requests"]["path"]
    content = run_in_lane(lane, READ_PICKLE, path)
    assert {"server_args", "requests", "launch_command"} <= set(content["keys"])
    assert content["shapes"] == [4] * 5
    # What the journal keeps is what upstream would send again.
    for request in content["requests"]:
        ours = crashed.requests[request["rid"]]
        assert ours.get("text") == request["text"]
        assert ours.get("stream", False) == request["stream"]
        assert ours["sampling_params"] == request["sampling_params"]
