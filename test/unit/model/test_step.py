from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sglang_crashkit.model.step import Step, StepRequest

STEP = Step(
    7,
    1.5,
    None,
    "forward_begun",
    "mixed",
    (StepRequest("ü\n", 3, 9),),
    1,
    3,
    decisions={"abort": 2},
)


@pytest.mark.parametrize("step", [STEP, replace(STEP, ended=2.0, agreed_hash=3, requests=(), decisions={})])
def test_a_step_is_read_as_it_was_written(step: Step) -> None:
    assert Step.from_json(json.loads(json.dumps(step.to_json()))) == step


@pytest.mark.parametrize(
    "changes",
    [
        {"number": "7"},
        {"began": None},
        {"ended": float("inf")},
        {"requests": {}},
        {"requests": [1]},
        {"requests": [{"rid": "a"}]},
        {"size": 1.5},
        {"decisions": {"abort": None}},
        {"phase": 1},
    ],
)
def test_what_is_no_step_is_an_error(changes: dict[str, Any]) -> None:
    document = json.loads(json.dumps(STEP.to_json())) | changes
    with pytest.raises(ValueError, match=r"."):
        Step.from_json(document)
    with pytest.raises(ValueError, match="no step"):
        Step.from_json({})
