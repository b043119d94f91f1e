from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.model.step import Step, StepRequest
from unit.support.command import Cli
from unit.support.stored import NOON, make_incident

LONG = StepRequest("ab12", 37, 37)
SHORT = StepRequest("cd34", 1, 20)


def step(number: int, mode: str, *requests: StepRequest, **fields: Any) -> Step:
    tokens = sum(request.tokens for request in requests)
    began = float(number)
    usual = Step(number, began, began + 0.0125, "processed", mode, requests, len(requests), tokens, agreed_hash=number)
    return replace(usual, **fields)


DECODES = [step(number, "decode", SHORT) for number in range(1, 1100)]
IN_FLIGHT = step(1101, "decode", LONG, SHORT, ended=None, phase="forward_begun")
TP0 = [*DECODES, step(1100, "decode", SHORT), IN_FLIGHT]
TP1 = [*DECODES, step(1100, "extend", LONG, agreed_hash=7, decisions={"retract": 3})]


def lines(steps: list[Step]) -> str:
    return "".join(json.dumps(one.to_json()) + "\n" for one in steps)


def pieces(**ranks: list[Step]) -> dict[str, str]:
    return {f"ranks/scheduler_{name}-{pid}.steps.jsonl": lines(ranks[name]) for pid, name in enumerate(ranks, 11)}


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    incidents = tmp_path / "host" / "incidents"
    make_incident(incidents, seconds=NOON - 60, pieces=pieces(TP0=TP0[:1]))
    return make_incident(incidents, pieces=pieces(TP0=TP0, TP1=TP1))


def test_ranks_stand_side_by_side_with_the_divergence_marked(incident: Path, cli: Cli) -> None:
    assert cli("steps", incident, "--last", "3").out == (
        "TP1 decided retract on the way to step 1,100 where TP0 did not: TP1 ran extend of request ab12 (37 tokens) in"
        " step 1,100 where TP0 ran decode of request cd34 (1 token). (supported)\n"
        "\n"
        "step     TP0                                   TP1\n"
        "  1,099  decode, 1 req, 1 tok, 12.5 ms         decode, 1 req, 1 tok, 12.5 ms\n"
        "> 1,100  decode, 1 req, 1 tok, 12.5 ms         extend, 1 req, 37 tok, retract, 12.5 ms\n"
        "  1,101  decode, 2 req, 38 tok, forward begun  -\n"
        "step 1,100 of TP0: request cd34: 1 of 20 tokens\n"
        "step 1,100 of TP1: request ab12: 37 of 37 tokens\n"
    )


@pytest.mark.parametrize("rank", ["TP1", "tp1", "12"])
def test_of_one_rank_a_program_reads_the_same(incident: Path, cli: Cli, rank: str) -> None:
    document = cli("steps", incident, "--json", "--rank", rank, "--last", "2").json
    (found,) = document["ranks"]
    assert (found["title"], found["pid"], found["ranks"]) == ("sglang::scheduler_TP1", 12, {"tp": 1})
    assert [Step.from_json(one) for one in found["steps"]] == TP1[-2:]
    # Who is shown changes nothing in where they diverged.
    assert (document["divergence"]["step"], document["divergence"]["ranks"]) == (1100, "TP1")


def test_what_the_incident_says_of_the_divergence_stands(tmp_path: Path, cli: Cli) -> None:
    known = {"statement": "It did.", "level": "established", "step": 5}
    path = make_incident(tmp_path, pieces=pieces(TP0=TP0, TP1=TP1), divergence=known)
    told = cli("steps", path, "--last", "1").out.splitlines()
    assert told[0] == "It did. (established)"
    # An older one is shown with those around it.
    assert [line.split()[0] for line in told[3:7]] == ["4", ">", "6", "1,101"]


def test_ranks_that_did_the_same_share_a_column(tmp_path: Path, cli: Cli) -> None:
    ranks = {f"TP{number}": TP1 if number == 3 else TP0 for number in range(8)}
    lines = cli("steps", make_incident(tmp_path, pieces=pieces(**ranks))).out.splitlines()
    assert lines[2].split() == ["step", "TP0-2,4-7", "TP3"]


def test_with_one_rank_nothing_is_said_of_others(tmp_path: Path, cli: Cli) -> None:
    path = make_incident(tmp_path / "host" / "incidents", pieces={"ranks/scheduler-11.steps.jsonl": lines(TP0)})
    assert cli("steps", path, "--last", "1").out == (
        "\n"
        "step     scheduler\n"
        "  1,101  decode, 2 req, 38 tok, forward begun\n"
        "step 1,101 of scheduler: request ab12: 37 of 37 tokens\n"
        "step 1,101 of scheduler: request cd34: 1 of 20 tokens\n"
    )


def test_a_torn_line_is_counted_and_the_others_are_read(tmp_path: Path, cli: Cli) -> None:
    torn = lines(TP0[:2]) + "[]\n{}\n" + '{"number": 3, "bega'
    path = make_incident(tmp_path, pieces={"ranks/scheduler-7.steps.jsonl": torn})
    (found,) = cli("steps", path, "--json").json["ranks"]
    assert (len(found["steps"]), found["unread_lines"]) == (2, 3)
    assert "scheduler" in cli("steps", path).out


def test_a_missing_rank_is_named_with_those_there_are(incident: Path, cli: Cli) -> None:
    said = cli("steps", incident, "--rank", "TP7", status=2)
    assert "there is no rank TP7\n  next: --rank TP0   # or TP1" in said.err
