"""`replay --bisect` on servers that break by a rule."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.replay.bisect import minimize
from unit.replay.breakable import BY_PARAMETERS, POISON, incident
from unit.replay.conftest import commands
from unit.support.command import Cli
from unit.support.stored import make_incident
from unit.support.waiting import LONG, wait_until

SECRET = "hunter2-of-production"


def bisect(path: Path, out: Path, command: str, cli: Cli, *more: str) -> dict[str, Any]:
    said = cli("replay", path, "--bisect", "--serve", command, "-o", out, "--json", *more, status=None)
    assert said.status == (0 if said.json["reproduced"] else 5)
    result: dict[str, Any] = said.json
    return result


@pytest.mark.wide
@pytest.mark.parametrize("suspects", [None, ["0"]])
def test_a_fault_of_parameters_is_reduced_to_them(
    tmp_path: Path, serve: Any, cli: Cli, suspects: list[str] | None
) -> None:
    path = incident(tmp_path / "crash", {"text": "a secret prompt", **POISON}, suspects=suspects)
    command = f"{serve(BY_PARAMETERS)} --port 1 --host 192.0.2.1 --api-key {SECRET}"
    result = bisect(path, tmp_path / "out", command, cli)
    assert (result["reproduced"], result["rids"], result["needs_prompt"]) == (True, ["0"], False)
    assert sorted(result["parameters"]) == sorted(POISON)
    assert result["requests"] == [{"text": "a", "sampling_params": {"max_new_tokens": 4}, **POISON}]
    assert result["starts"] <= (8 if suspects else 11)
    told = (tmp_path / "out" / "reproduce.sh").read_text() + (tmp_path / "out" / "reproducer.json").read_text()
    assert "secret prompt" not in told
    # Each server prints its arguments; a key of production is in no file.
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert any("api_key=" in file.read_text() for file in files)
    assert [file for file in files if SECRET in file.read_text() or file.stat().st_mode & 0o077] == []


@pytest.mark.wide
@pytest.mark.parametrize(
    ("rule", "what", "reason"),
    [
        ("False", "forward", "not reproduced in 3 tries of 13 requests"),
        (BY_PARAMETERS, "another_place", "not reproduced in 3 tries of 13 requests"),
        # Whatever is sent brings it back.
        ("served > 0", "forward", "others bring it back, too, so it is not due to one request"),
    ],
)
def test_what_does_not_come_back_is_said(
    tmp_path: Path, serve: Any, cli: Cli, rule: str, what: str, reason: str
) -> None:
    path = incident(tmp_path / "crash", {"text": "a", "session_params": {"id": "s"}, **POISON})
    result = bisect(path, tmp_path / "out", serve(rule, what), cli)
    assert not result["reproduced"]
    assert result["reason"].startswith(reason)


@pytest.mark.wide
def test_a_fault_of_two_together_is_found_as_both(tmp_path: Path, serve: Any, cli: Cli) -> None:
    path = incident(tmp_path / "crash", {"text": "left"}, {"text": "right"})
    rule = "{'left', 'right'} <= {b['text'] for b in bodies}"
    result = bisect(path, tmp_path / "out", f"{serve(rule)} --hold 0.5", cli)
    assert (result["reproduced"], result["rids"]) == (True, ["0", "1"])


def test_no_more_servers_are_started_than_allowed(tmp_path: Path, serve: Any, cli: Cli) -> None:
    path = incident(tmp_path / "crash", {"text": "a", **POISON})
    result = bisect(path, tmp_path / "out", serve(BY_PARAMETERS), cli, "--starts", "2")
    assert (result["reproduced"], result["starts"]) == (False, 2)
    assert result["reason"] == "2 servers were started, and --starts allows no more"


def test_the_smallest_part_that_fails_is_kept() -> None:
    for guilty in ({7}, {0, 19}, {3, 4, 5}, set(range(20))):
        assert set(minimize(range(20), lambda some, guilty=guilty: guilty <= {*some})) == guilty


def test_ctrl_c_leaves_no_server(tmp_path: Path, serve: Any) -> None:
    path, out = incident(tmp_path / "crash", {"text": "a", **POISON}), tmp_path / "out"
    words = [sys.executable, "-m", "sglang_crashkit", "replay", str(path), "--bisect", "--serve", serve(BY_PARAMETERS)]
    with subprocess.Popen([*words, "-o", str(out)]) as popen:
        wait_until((out / "server-2").exists, "something was tried")
        popen.send_signal(signal.SIGINT)
        assert popen.wait(LONG) != 0
    assert str(out) not in commands()


def test_an_incident_without_requests_leaves_no_folder(tmp_path: Path, serve: Any, cli: Cli) -> None:
    folder = tmp_path / "bisected"
    path = make_incident(tmp_path)
    cli("replay", path, "--bisect", "--serve", serve("False"), "-o", folder, status=3)
    assert not folder.exists()


def test_a_bisection_is_never_of_a_server_that_is_named(tmp_path: Path, cli: Cli) -> None:
    path = incident(tmp_path / "crash", {"text": "a"})
    cli("replay", path, "--bisect", "--url", "http://127.0.0.1:1", status=2)


@pytest.mark.parametrize(
    ("rid", "outcome", "status"), [("0", "the same fault: It raised.", 5), ("3", "not reproduced: it serves on", 0)]
)
def test_replay_tells_a_program_in_json_alone(
    tmp_path: Path, serve: Any, cli: Cli, rid: str, outcome: str, status: int
) -> None:
    path = incident(tmp_path / "crash", {"text": "a", **POISON})
    command = ["replay", str(path), "--only", rid, "--json", "--serve", serve(BY_PARAMETERS)]
    *answers, last = map(json.loads, cli(*command, "-o", tmp_path / "own", status=status).out.splitlines())
    assert [one["rid"] for one in answers] in ([rid], [])
    assert (last["outcome"], last["is_same"], bool(last["incident"])) == (outcome, status == 5, status == 5)
