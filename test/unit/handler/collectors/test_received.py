"""What the processes of a stand-in server passed on, in its incident: their last steps and log records, and more."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit import redact
from sglang_crashkit.handler.collectors import received
from sglang_crashkit.handler.collectors.received import StepRecords, format_log
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.memory.ring import LogRecord
from sglang_crashkit.memory.steps import STEPS, LastSteps, StepReader, StepWriter
from sglang_crashkit.model.incident import Evidence
from unit.support.server_driver import Server, crash, document_of, piece_of, report_of
from unit.support.tracked import begin_incident
from unit.support.waiting import descriptors, wait_until

Start = Callable[..., Server]
RANKS = ("scheduler_TP0", "scheduler_TP1")


def stepping(server: Server, number: int = 3, *rids: str) -> Server:
    for name in RANKS:
        assert server.ask(f"tell {name} step {number} {' '.join(rids or ('ab12', 'cd34'))}") == "in a step"

    def records() -> int:
        held = descriptors(server.handler.pid).values()
        return sum(name.startswith("/memfd:sglang-crashkit-steps") for name in held)

    wait_until(lambda: records() == len(RANKS), "the handler has the records")
    return server


def lines_of(document: dict[str, Any], process: dict[str, Any]) -> list[dict[str, Any]]:
    piece = piece_of(process, "steps")
    assert piece["status"] == "captured", piece
    assert piece["path"] == f"ranks/{process['title'].removeprefix('sglang::')}-{process['pid']}.steps.jsonl"
    path = document["folder"] / piece["path"]
    assert path.stat().st_mode & 0o077 == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "fault", [pytest.param("SIGKILL", marks=pytest.mark.story), "SIGSEGV", "abort", "exit 3", "raise no room", None]
)
def test_the_steps_of_every_rank_are_there_however_one_ended(start_server: Start, fault: str | None) -> None:
    server = stepping(start_server())
    if fault is None:
        server.process.kill()
    else:
        server.strike("scheduler_TP1", fault)
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
    assert [len(line["requests"]) for line in lines] == [0] * (STEPS - 655) + [100] * 655
    assert {line["size"] for line in lines} == {100}
    assert [len(line["requests"]) for line in process["steps"]["last"]] == [8] * 5
    assert (process["steps"]["in_step"]["size"], len(process["steps"]["in_step"]["rids"])) == (100, 64)
    assert (document["folder"] / "incident.json").stat().st_size < 60_000


@pytest.mark.parametrize("environ", [{}, {"SGLANG_CRASHKIT_STEPS": "0"}])
def test_without_steps_it_says_why(start_server: Start, environ: dict[str, str]) -> None:
    server = start_server(environ=environ)
    if environ:
        assert server.ask("tell scheduler_TP1 step 1 a") == "in a step"
    server.kill("scheduler_TP1")
    process = report_of(document_of(server), "scheduler_TP1")
    piece = piece_of(process, "steps")
    assert (piece["status"], piece["path"], process["steps"]) == ("skipped", None, None)
    assert "SGLANG_CRASHKIT_STEPS" in piece["reason"]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_whose_steps_cannot_be_read_costs_no_other_its_own(
    tmp_path: Path, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = itertools.count(), StepReader.read

    def read_but_one(reader: StepReader) -> LastSteps:
        if next(reads) == odd:
            raise KeyError(7)
        return read(reader)

    monkeypatch.setattr(StepReader, "read", read_but_one)
    records, tree, writers = StepRecords(), ProcessTree(os.getpid()), list[StepWriter]()
    ranks = [tree.add_reaped(pid, f"sglang::scheduler_TP{pid}", ExitStatus(), 1.0) for pid in range(3)]
    for rank in ranks:
        writers.append(writer := StepWriter())
        writer.begin_round(1, 1.0)
        writer.schedule(1, 1.0, 1, ["ab12"], [5], None, 1, {}, 0)
        records.follow(rank, writer.fd, {"1": "decode"})
    run = begin_incident(tree, tmp_path)
    records.take(run, math.inf)
    records.close()
    run.discard()
    for each in (tree, *writers):
        each.close()
    for rank in ranks:
        report = run.report(rank)
        (piece,) = report.evidence
        if rank.pid == odd:
            assert piece == Evidence("steps", "failed", reason="it cannot be read: KeyError")
        else:
            assert piece.status == "captured"
            assert [step.number for step in report.steps.last] == [1]


PROMPT = "once upon a time there was a mine in the hills"


def record(text: str, level: int = logging.ERROR) -> LogRecord:
    return LogRecord(0.0, level, "sglang", text)


@pytest.mark.parametrize(
    ("text", "level", "expected"),
    [
        ("Authorization: Bearer abcdef123456", logging.INFO, "Authorization: <redacted>"),
        ("the token is canary-of-the-environment", logging.INFO, "the token is <redacted>"),
        (f"ValueError: no {PROMPT}!", logging.ERROR, "ValueError: no <redacted>!"),
        (f"got {PROMPT}", logging.INFO, "got <redacted>"),
        ("Decode batch, #running-req: 3", logging.INFO, "Decode batch, #running-req: 3"),
    ],
)
def test_a_log_is_told_without_secrets_and_prompts(
    monkeypatch: pytest.MonkeyPatch, text: str, level: int, expected: str
) -> None:
    monkeypatch.setattr(redact, "learned", {"canary-of-the-environment"})
    (line,) = format_log([record(text, level)], [PROMPT], time.monotonic() + 60)
    assert line == f"1970-01-01T00:00:00.000000Z {logging.getLevelName(level)} sglang: {expected}\n"


def test_many_records_are_searched_for_prompts_in_parts() -> None:
    records = [record(f"{number} {'x' * 2000} {PROMPT}") for number in range(30)]
    lines = format_log(records, [PROMPT], time.monotonic() + 60)
    assert [int(line.split()[3]) for line in lines] == list(range(30))
    assert not any("mine in the hills" in line for line in lines)


def test_what_could_not_be_searched_in_time_is_withheld() -> None:
    assert "withheld" in format_log([record("text")], [], time.monotonic() - 1)[0]


@pytest.mark.story
def test_a_killed_rank_leaves_its_log_and_the_servers_environment(start_server: Start) -> None:
    server = start_server()
    document = crash(server)
    folder = document["folder"]
    for title in ("scheduler_TP0", "scheduler_TP1", "detokenizer"):
        piece = piece_of(report_of(document, title), "log")
        assert piece["path"] == f"logs/{title}-{server.ranks[title]}.log"
        assert (folder / piece["path"]).read_text().endswith(f"Z INFO sglang.srt: sglang::{title} is ready\n")
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["model"], environment["parallel"]) == ("tiny", {"tp": 2})
    assert environment["arguments"]["api_key"] == "<redacted>"
    assert "fake_server.py" in environment["command_line"]
    assert {"sglang-crashkit", "python", "kernel"} <= set(environment["versions"])
    open_files = {one["title"]: one["open_files"] for one in environment["processes"]}
    assert open_files["sglang::scheduler_TP0"] > 0
    assert document["environment"]["path"] == "environment.json"
    assert "- model: tiny, tp 2\n" in (folder / "summary.md").read_text()
    written = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any("canary-api-key" in text for text in written)


def test_a_killed_servers_launch_facts_are_told(start_server: Start) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_LOG_RECORDS": "0"})
    server.process.kill()
    document = document_of(server)
    assert document["environment"]["model"] == "tiny"
    assert "fake_server.py" in json.loads((document["folder"] / "environment.json").read_text())["command_line"]
    piece = piece_of(report_of(document, "scheduler_TP0"), "log")
    assert (piece["status"], piece["reason"]) == ("skipped", received.OFF)
