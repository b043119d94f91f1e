"""Real servers that break on a request: it is found, or it is said that it is not the request."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.import_hook import write_site
from integration.memory_group import NoMemoryGroupError, memory_group
from integration.scenario import incidents_of, run_kit, serving, wait_for_incident, whole_incidents
from lanelib.lanes import ensure_lane
from lanelib.servers import Server, command_of
from sglang_crashkit.incident.requests import StoredRequest, read_requests
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel.server_address import Address
from sglang_crashkit.model import ABORTED
from sglang_crashkit.replay.server import Answer, send, send_all
from sglang_crashkit.view.first_screen import first_screen
from unit.support.waiting import LONG

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1800)]

#: In seconds, on a busy machine.
ANSWER_S, END_S, BISECT_S = 120.0, 120.0, 1500.0
RELEASE = os.environ.get("SGLANG_CRASHKIT_TEST_RELEASE", "0.5.23")
#: Runs in every Python process of the server, and has a scheduler look at each batch before it is computed. A fault is
#: named by the environment variable POISON; a prompt is told by the token ids that it begins with.
SITECUSTOMIZE = """
import ctypes
import os
import time

MARK = [7, 7, 7]
hoard = []


def marked(requests):
    return [one for one in requests if list(one.origin_input_ids[:3]) == MARK]


def token(requests):
    if any(11 in one.origin_input_ids for one in requests):
        raise IndexError("no such token")


def segv(requests):
    if marked(requests):
        ctypes.string_at(8)


def hang(requests):
    while marked(requests):
        time.sleep(0.1)


def length(requests):
    longest = max((len(one.origin_input_ids) for one in requests), default=0)
    if longest > 100:
        # What is taken from now on is of a small memory cgroup.
        with open(os.environ["POISON_CGROUP"] + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        hoard.append(b"x" * (longest * longest << 12))


def change(module):
    forward = module.TpModelWorker.forward_batch_generation
    fault = globals()[os.environ["POISON"]]

    def looked_at(self, batch, *args, **kwargs):
        fault(getattr(batch, "reqs", None) or ())
        return forward(self, batch, *args, **kwargs)

    module.TpModelWorker.forward_batch_generation = looked_at

"""
MARK = [7, 7, 7]


def poisoned(folder: Path, fault: str) -> dict[str, str]:
    """Return the environment of a server that breaks by a fault of the hook above, which is written to a folder."""
    return write_site(folder, SITECUSTOMIZE, "sglang.srt.managers.tp_worker") | {"POISON": fault}


def ordinary(count: int) -> list[dict[str, Any]]:
    """Return requests that do no harm."""
    return [
        {"rid": f"ordinary-{number}", "input_ids": [100 + number, 20, 30], "sampling_params": {"max_new_tokens": 24}}
        for number in range(count)
    ]


def guilty(rid: str, *ids: int) -> dict[str, Any]:
    """Return a request that does, by its token ids."""
    return {"rid": rid, "input_ids": [*MARK, *ids], "sampling_params": {"max_new_tokens": 8, "temperature": 0.5}}


def ask(server: Server, bodies: Sequence[Mapping[str, Any]], within_s: float = ANSWER_S) -> list[Answer]:
    """Send requests at once, and return the answers of those that the server lives to answer."""
    stored = [StoredRequest(str(body.get("rid")), 0.0, False, body) for body in bodies]
    address = Address("http", "127.0.0.1", server.port)
    return send_all(address, stored, within_s, is_over=lambda: server.popen.poll() is not None)


def crash(
    folder: Path, env: Mapping[str, str], bodies: Sequence[Mapping[str, Any]], at_once: str = "8"
) -> StoredIncident:
    """Break a server by requests, and return its newest incident."""
    with serving(RELEASE, folder, "--max-running-requests", at_once, env=env) as server:
        ask(server, bodies)
        wait_for_incident(folder, LONG)
        server.popen.wait(timeout=END_S)
    return whole_incidents(folder)[0]


def bisect(crash_folder: Path, out: Path, env: Mapping[str, str], *more: str) -> dict[str, Any]:
    """Run `replay --bisect` with servers that break alike, and return what it found."""
    lane = ensure_lane(RELEASE)
    serve = " ".join(str(word) for word in command_of(lane, 0))
    path = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    environ = os.environ | lane.serve_env() | dict(env) | {"PYTHONPATH": path}
    words = ["replay", crash_folder, "--bisect", "--serve", serve, "--json", "-o", out, *more]
    done = run_kit(*words, status=None, timeout_s=BISECT_S, env=environ)
    assert done.returncode in (0, 5), done.stderr
    out.joinpath("said.txt").write_text(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


#: More than the tiny model has tokens.
POISON = {"return_logprob": True, "top_logprobs_num": 600}


def test_a_poison_request_is_suspected_reduced_and_refused(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"rid": f"ordinary-{number}", "text": f"Once {number}", "sampling_params": {"max_new_tokens": 64}}
        for number in range(200)
    ]
    bad = {"rid": "poison", "text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0.7}, **POISON}
    asked.insert(100, bad)
    crash_folder = tmp_path / "crash"
    incident = crash(crash_folder, {}, asked, "16")
    assert incident.document["suspects"][0]["rid"] == "poison"
    result = bisect(crash_folder, tmp_path / "out", {})
    assert result["reproduced"]
    assert result["rids"] == ["poison"]
    assert sorted(result["parameters"]) == sorted(POISON)
    assert not result["needs_prompt"]
    assert result["starts"] <= 10


#: Prints a logit processor, of no class of SGLang's, that raises once its request is one of a batch that decodes.
PROCESSOR = """
import json
import dill
class Late:
    calls = 0
    def __call__(self, logits, custom_param_list=None):
        type(self).calls += 1
        if type(self).calls > 3:
            raise IndexError("index 7 is out of range")
        return logits
print(json.dumps({"callable": dill.dumps(Late).hex()}))
"""


def test_the_last_of_a_large_batch_is_suspected(tmp_path: Path) -> None:
    lane, folder = ensure_lane(RELEASE), tmp_path / "crash"
    made = subprocess.run([lane.python, "-c", PROCESSOR], capture_output=True, text=True, check=True, timeout=ANSWER_S)
    processor = made.stdout.strip()
    # One request of many prompts, which are one batch from its first step on.
    bodies = [*ordinary(24), guilty("poison", 11)]
    asked = {name: [body[name] for body in bodies] for name in ("rid", "input_ids")} | {
        "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
        "custom_logit_processor": [None] * 24 + [processor],
    }
    with serving(lane, folder, "--max-running-requests", "32", "--enable-custom-logit-processor") as server:
        assert send(Address("http", "127.0.0.1", server.port), asked, ANSWER_S).status is None
        wait_for_incident(folder, LONG)
        server.popen.wait(timeout=END_S)
    (incident,) = incidents_of(folder)
    document = incident.document or {}
    suspects = document["suspects"]
    assert (len(suspects), document["suspects_left_out"]) == (16, 9)
    assert (suspects[0]["rid"], suspects[0]["level"]) == ("poison", "supported")
    assert any("it alone asks for custom_logit_processor" in reason for reason in suspects[0]["reasons"])
    (line,) = [one for one in read_requests(incident) if one.rid == "poison"]
    assert line.is_complete
    assert line.body["custom_logit_processor"] == processor


def test_a_control_request_that_kills_is_named_and_no_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    with serving(RELEASE, folder) as server:
        model = {"model_path": str(ensure_lane(RELEASE).model_dir), "load_format": "no_such_format"}
        address = Address("http", "127.0.0.1", server.port)
        lasting = {"rid": "lasting", "text": "a", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        threading.Thread(target=send, args=(address, lasting, ANSWER_S), daemon=True).start()
        assert send(address, model, ANSWER_S, path="/update_weights_from_disk").status is None
        wait_for_incident(folder, LONG)
        server.popen.wait(timeout=END_S)
    incident = incidents_of(folder)[0].incident
    assert incident.suspects == []
    assert ", while it worked on update_weights_from_disk" in " ".join(line.strip() for line in first_screen(incident))
    assert any("worked on update_weights_from_disk, a control request" in one for one in incident.cause.reasons)


def test_a_request_that_hangs_a_rank_is_found_by_itself(tmp_path: Path) -> None:
    # SGLang looks every four seconds whether a client has gone.
    env = poisoned(tmp_path / "site", "hang") | {"SGLANG_CRASHKIT_HANG_SECS": "12"}
    folder = tmp_path / "crash"
    with serving(RELEASE, folder, env=env) as server:
        threading.Thread(target=ask, args=(server, ordinary(6)), daemon=True).start()
        gone = send(Address("http", "127.0.0.1", server.port), guilty("poison", 12), 1.0)
        assert gone.status is None
        wait_for_incident(folder, LONG)
    incident = incidents_of(folder)[-1]
    assert incident.document["kind"] == "hang"
    suspects = {one["rid"]: one for one in incident.document["suspects"]}
    # Its client left because of the hang, which tells nothing of it.
    assert ABORTED not in suspects["poison"]["reasons"]
    result = bisect(incident.path, tmp_path / "out", env, "--starts", "8")
    assert result["reproduced"], result
    assert result["rids"] == ["poison"]


@pytest.fixture
def limited() -> Iterator[dict[str, str]]:
    """The environment in which what a long request takes is of a small memory cgroup."""
    try:
        with memory_group("crashkit-poison") as group:
            group.limit.write_text(str(128 << 20))
            yield {"POISON_CGROUP": str(group.path)}
    except NoMemoryGroupError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("fault", "body", "kind"),
    [
        pytest.param("token", guilty("poison", 11, 12), "exception", id="token"),
        pytest.param("segv", guilty("poison", 12), "signal", id="segv"),
        # The group that counts the kill is one that the rank has just entered.
        pytest.param("length", {**guilty("poison"), "input_ids": [9] * 300}, "signal", id="length"),
    ],
)
def test_one_request_that_breaks_it_is_named_and_found(
    tmp_path: Path, fault: str, body: dict[str, Any], kind: str, request: pytest.FixtureRequest
) -> None:
    env, takes_memory = poisoned(tmp_path / "site", fault), fault == "length"
    if takes_memory:
        # Where no such group can be made, this one alone is skipped.
        env |= request.getfixturevalue("limited")
    incident = crash(tmp_path / "crash", env, [*ordinary(12), body, *ordinary(24)[12:]])
    assert incident.document["verdict"]["kind"] == kind
    # Where it is not known who killed it, no request is suspected.
    suspected = "poison" in [one["rid"] for one in incident.document["suspects"]]
    assert suspected is not takes_memory
    result = bisect(tmp_path / "crash", tmp_path / "out", env, "--starts", "10")
    assert result["reproduced"], result
    assert result["rids"] == ["poison"]
