from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_crashkit.judge.knowledge import load
from unit.judge.live_incidents import TP0, TP1, hung, raised, verdict_of

ISSUES = load("known_issues")
CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("known_issues_cases.yaml").read_text())
BY_ISSUE = {case["issue"]: case for case in CASES}
ORDINARY: list[list[str]] = yaml.safe_load(Path(__file__).with_name("ordinary_errors.yaml").read_text())


def document_of(case: dict[str, Any]) -> dict[str, Any]:
    more = {"environment": {"command_line": " ".join(["python", *case.get("arguments", ())])}}
    release = case.get("release", "0.5.13")
    if case.get("hang"):
        return hung(doing=dict.fromkeys((TP0, TP1), case["frames"]), release=release, **more)
    return raised(case["error"], *case.get("frames", ()), release=release, **more)


def known(document: dict[str, Any]) -> list[int]:
    return [one.issue for one in verdict_of(document).known_issues]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["issue"]))
def test_an_issue_is_known_by_its_own_signs_only(case: dict[str, Any]) -> None:
    assert known(document_of(case)) == [case["issue"]]


def test_each_entry_has_its_case() -> None:
    assert Counter(issue["issue"] for issue in ISSUES) == Counter(case["issue"] for case in CASES)
    assert len(ISSUES) >= 40


@pytest.mark.parametrize(("error", "frame"), ORDINARY)
def test_what_goes_wrong_every_day_is_no_known_issue(error: str, frame: str) -> None:
    assert known(raised(error, frame, "run_scheduler_process (sglang/srt/managers/scheduler.py:1)")) == []


@pytest.mark.parametrize(
    ("doing", "state", "issues"),
    [
        (["spin (x.py:1)"], "R (running)", []),
        (["broadcast (torch/distributed/distributed_c10d.py:1)"], "T (stopped)", []),
        (["broadcast (torch/distributed/distributed_c10d.py:1)"], "S (sleeping)", [26921]),
        ([], "S (sleeping)", [26921]),
    ],
)
def test_an_issue_of_waiting_needs_all_to_wait(doing: list[str], state: str, issues: list[int]) -> None:
    assert known(hung(TP1, doing={TP0: BY_ISSUE[26921]["frames"], TP1: doing}, state={TP1: state})) == issues


def test_an_issue_of_all_ranks_needs_each_of_them() -> None:
    case = BY_ISSUE[34582]
    waits, more = case["frames"], {"environment": {"command_line": " ".join(case["arguments"])}}
    assert known(hung(doing={TP0: waits, TP1: ["spin (x.py:1)"]}, **more)) == []


def test_an_issue_of_waiting_needs_all_nodes_to_be_seen() -> None:
    several = {"arguments": ["--nnodes=2"]}
    assert known(document_of(BY_ISSUE[26921] | several)) == []
    assert known(document_of(BY_ISSUE[35822] | several)) == [35822]


@pytest.mark.parametrize(
    "frame", ["all_reduce (torch/distributed/distributed_c10d.py:1)", "synchronize (torch/cuda/streams.py:1)"]
)
def test_a_hang_in_an_ordinary_place_is_no_known_issue(frame: str) -> None:
    assert known(hung(doing={TP0: [frame, "run_batch (sglang/srt/managers/scheduler.py:1)"]})) == []


def test_an_issue_is_unknown_in_a_release_with_its_fix() -> None:
    case = BY_ISSUE[29516]
    assert known(document_of(case | {"release": "0.5.13.post1"})) == [29516]
    assert known(document_of(case | {"release": "0.5.14"})) == []
    assert known(document_of(case | {"release": "0.5.23+crashkit.1"})) == []


def test_an_unknown_argument_is_not_taken_for_granted() -> None:
    case = BY_ISSUE[40729]
    assert known(document_of(case)) == [40729]
    assert known(document_of(case | {"arguments": ["--disaggregation-mode", "decode"]})) == []
    resolved = {"enable_hisparse": True, "disaggregation_mode": "decode", "speculative_algorithm": None}
    assert known(document_of(case) | {"environment": {"arguments": resolved}}) == [40729]
    assert known(document_of(case) | {"environment": {"arguments": resolved | {"enable_hisparse": False}}}) == []
