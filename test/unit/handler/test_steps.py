"""The last steps of the schedulers of a stand-in server: in every incident, however a rank ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.collectors.steps import in_short
from sglang_crashkit.memory.steps import STEPS
from sglang_crashkit.model.step import Step, StepRequest
from unit.handler.driver import Server, document_of, report_of
from unit.waiting import descriptors, wait_until

Start = Callable[..., Server]
RANKS = ("scheduler_TP0", "scheduler_TP1")


def records(server: Server) -> int:
    """Return how many records of steps the crash handler holds."""
    assert server.handler is not None
    return sum(name.startswith("/memfd:sglang-crashkit-steps") for name in descriptors(server.handler.pid).values())


def stepping(server: Server, number: int = 3, *rids: str) -> Server:
    for name in RANKS:
        assert server.ask(f"tell {name} step {number} {' '.join(rids or ('ab12', 'cd34'))}") == "in a step"
    wait_until(lambda: records(server) == len(RANKS), "the handler has the records")
    return server


def evidence_of(process: dict[str, Any]) -> dict[str, Any]:
    (piece,) = [piece for piece in process["evidence"] if piece["kind"] == "steps"]
    assert isinstance(piece, dict)
    return piece


def lines_of(document: dict[str, Any], process: dict[str, Any]) -> list[dict[str, Any]]:
    piece = evidence_of(process)
    assert piece["status"] == "captured", piece
    assert piece["path"] == f"ranks/{process['title'].removeprefix('sglang::')}-{process['pid']}.steps.jsonl"
    path = Path(document["folder"]) / piece["path"]
    assert path.stat().st_mode & 0o077 == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def kill_server(server: Server) -> None:
    server.process.kill()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda server: server.kill("scheduler_TP1"), id="SIGKILL", marks=pytest.mark.story),
        pytest.param(lambda server: server.kill("scheduler_TP1", signal.SIGSEGV), id="SIGSEGV"),
        pytest.param(lambda server: server.say("tell scheduler_TP1 abort"), id="abort"),
        pytest.param(lambda server: server.say("tell scheduler_TP1 exit 3"), id="exit"),
        pytest.param(lambda server: server.say("tell scheduler_TP1 raise no room"), id="exception"),
        pytest.param(kill_server, id="the server is killed"),
    ],
)
def test_the_steps_of_every_rank_are_there_however_one_ended(
    start_server: Start, end: Callable[[Server], None]
) -> None:
    server = stepping(start_server())
    end(server)
    document = document_of(server)
    hashes = []
    for name in RANKS:
        process = report_of(document, name)
        lines = lines_of(document, process)
        assert [(line["number"], line["phase"]) for line in lines] == [
            *((number, "processed") for number in (1, 2, 3)),
            (4, "forward_begun"),
        ]
        told = process["steps"]
        assert [line["number"] for line in told["last"]] == [1, 2, 3, 4]
        assert told["last"] == lines
        step = told["in_step"]
        assert (step["number"], step["phase"], step["size"], step["rids"]) == (4, "forward_begun", 2, ["ab12", "cd34"])
        assert step["seconds"] >= 0
        hashes.append([line["agreed_hash"] for line in lines])
    assert hashes[0] == hashes[1]


def test_an_incident_names_few_steps_and_its_file_all(start_server: Start) -> None:
    server = stepping(start_server(), STEPS + 50, *(f"r{number}" for number in range(100)))
    server.kill("scheduler_TP0")
    document = document_of(server)
    process = report_of(document, "scheduler_TP0")
    lines = lines_of(document, process)
    assert [line["number"] for line in lines] == list(range(52, STEPS + 52))
    assert [len(line["requests"]) for line in lines] == [0] * (STEPS - 327) + [100] * 327
    assert {line["size"] for line in lines} == {100}
    assert [len(line["requests"]) for line in process["steps"]["last"]] == [8] * 5
    assert (process["steps"]["in_step"]["size"], len(process["steps"]["in_step"]["rids"])) == (100, 64)
    assert (Path(document["folder"]) / "incident.json").stat().st_size < 60_000


def test_of_a_second_step_that_is_not_finished_the_requests_are_told() -> None:
    requests = tuple(StepRequest(f"r{number}", number, 1, 9) for number in range(100))
    done, launched, current = (
        Step(number, 1.0, 2.0 if number == 1 else None, "scheduled", "decode", requests, 100, 100)
        for number in (1, 2, 3)
    )
    for step, most in ((done, 8), (launched, 64), (current, 8)):
        assert in_short(step, current)["requests"] == step.to_json()["requests"][:most]


@pytest.mark.parametrize("environ", [{}, {"SGLANG_CRASHKIT_STEPS": "0"}])
def test_without_steps_it_says_why(start_server: Start, environ: dict[str, str]) -> None:
    server = start_server(environ=environ)
    if environ:
        assert server.ask("tell scheduler_TP1 step 1 a") == "in a step"
    server.kill("scheduler_TP1")
    process = report_of(document_of(server), "scheduler_TP1")
    piece = evidence_of(process)
    assert (piece["status"], piece["path"], process["steps"]) == ("skipped", None, None)
    assert "SGLANG_CRASHKIT_STEPS" in piece["reason"]


def test_a_record_that_is_none_is_not_held(start_server: Start) -> None:
    server = start_server()
    assert server.ask("tell scheduler_TP0 step 1 a") == "in a step"
    wait_until(lambda: records(server) == 1, "the handler has the record")
    script = server.temp / "liar.py"
    script.write_text(
        "import os\nfrom sglang_crashkit import protocol\n"
        "path = os.environ['SGLANG_CRASHKIT_SOCKET']\n"
        "for descriptor in (os.memfd_create('sglang-crashkit-steps'), os.open('/dev/null', os.O_RDONLY)):\n"
        "    protocol.notify(path, 'steps', descriptor=descriptor, modes=[1])\n"
        "protocol.notify(path, 'steps', modes={})\n"
    )
    server.say(f"tell scheduler_TP1 run {script}")
    server.settle()
    assert records(server) == 1
    server.kill("scheduler_TP1")
    assert evidence_of(report_of(document_of(server), "scheduler_TP1"))["status"] == "skipped"
