"""A real server with secrets in an argument, a variable and a header crashes: none of them stands in what it left."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.faults import CRASH
from integration.requests.test_journal import post
from integration.scenario import EXIT_TIMEOUT_S, run_in_lane, serving, wait_for_incident
from lanelib.lanes import Lane

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

API_KEY, VARIABLE, HEADER = "canary-argument-5b1c", "canary-variable-9d2e", "canary-header-77aa"
PROMPT = "canary prompt 30f4: sing of the mine"
READ_PICKLE = """
import json, pickle, sys
with open(sys.argv[1], "rb") as file:
    data = pickle.load(file)
args = data["server_args"]
from sglang.srt.server_args import ServerArgs
print(json.dumps({
    "type": type(args) is ServerArgs,
    "api_key": args.api_key,
    "crash_dump_folder": args.crash_dump_folder,
    "launch_command": data["launch_command"],
    "prompts": [request[0].text for request in data["requests"]],
}))
"""


@dataclass(frozen=True)
class Left:
    """What a crashed server left."""

    folder: Path  # the crash folder
    incident: dict[str, Any]  # the one incident in it

    def holding(self, text: str) -> list[str]:
        """Return the files below the crash folder that hold `text`."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        assert any(path.name == "crash_handler.log" for path in files)
        return [str(path.relative_to(self.folder)) for path in files if text.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def left(lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("crash")
    options = ("--api-key", API_KEY, f"--admin-api-key={API_KEY}-admin", "--log-requests")
    with serving(lane, folder, *options, env=CRASH | {"OTHER_SERVICE_TOKEN": VARIABLE}) as server:
        asked = (server, {"text": PROMPT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}})
        headers = {"Authorization": f"Bearer {API_KEY}", "X-Secret-Token": HEADER}
        client = threading.Thread(target=post, args=asked, kwargs=headers, daemon=True)
        client.start()
        server.popen.wait(timeout=EXIT_TIMEOUT_S)
        client.join(timeout=EXIT_TIMEOUT_S)
    return Left(folder, wait_for_incident(folder, EXIT_TIMEOUT_S).document or {})


@pytest.mark.parametrize("secret", [API_KEY, VARIABLE, HEADER])
def test_a_secret_stands_nowhere(left: Left, secret: str) -> None:
    assert left.incident["verdict"]["kind"] == "exception"
    assert left.holding(secret) == []


def test_what_surrounded_the_server_was_among_what_was_searched(left: Left) -> None:
    assert any(name.endswith("/environment.json") for name in left.holding('"api_key": "<redacted>"'))
    # SGLang logs its arguments at the launch, and here the text of each request, too.
    assert any("/logs/" in name for name in left.holding("server_args="))


def test_a_prompt_stands_among_the_requests_only(left: Left) -> None:
    path = Path(left.incident["requests"]["path"])
    outside = [name for name in left.holding(PROMPT) if "/requests/" not in name]
    assert outside == [str(path.relative_to(left.folder))]


def test_the_dump_has_upstreams_type_and_shape(lane: Lane, left: Left) -> None:
    content = run_in_lane(lane, READ_PICKLE, left.incident["requests"]["path"])
    assert content["type"] is True
    assert content["api_key"] == "<redacted>"
    assert content["crash_dump_folder"] == str(left.folder)
    assert content["prompts"] == [PROMPT]
    assert "--api-key <redacted> --admin-api-key=<redacted>" in content["launch_command"]


def test_modes_are_private(left: Left) -> None:
    for path in left.folder.rglob("*"):
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} {mode:o}"
        assert path.stat().st_uid == os.geteuid()
