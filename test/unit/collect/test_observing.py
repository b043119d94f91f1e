from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_crashkit.collect.collection import Collection, Plan
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.step import Step
from unit.support.targets import start_ticks
from unit.support.waiting import LONG, child

#: A rank that ran three steps a while ago, of which the last one may be its own.
RANK = """
import time
from sglang_crashkit.memory.steps import StepWriter
writer = StepWriter({{"1": "extend", "2": "decode"}})
for number in range(1, 4):
    rids, mode = (["ab12"], 1) if number == 3 and {odd} else (["cd34"], 2)
    writer.schedule(number, time.monotonic() - 123 + number, mode, rids, [5], [5], 5, {{}}, 0)
    writer.end(number, time.monotonic())
ready()
time.sleep(1000)
"""
#: One without any, as of a server that is not patched.
OTHER = "ready()\nimport time; time.sleep(1000)"


def rank(pid: int, number: int, server: int = 1) -> FoundProcess:
    title = f"sglang::scheduler_TP{number}"
    return FoundProcess(pid, start_ticks(pid), title, "scheduler", {"tp": number}, server, (), 0, "title")


@pytest.mark.parametrize(
    ("odd", "statement"),
    [
        (False, "No divergence in the last 3 steps of TP0-1."),
        (
            True,
            "TP0 ran decode of request cd34 (5 tokens) in step 3 where TP1 ran extend of request ab12 (5 tokens); 2"
            " minutes before it was looked at.",
        ),
    ],
)
def test_where_the_ranks_of_a_patched_server_diverged_is_told(tmp_path: Path, odd: bool, statement: str) -> None:
    with (
        child(RANK.format(odd=False)) as first,
        child(RANK.format(odd=odd)) as second,
        child(OTHER) as third,
        child(OTHER) as fourth,
    ):
        ranks = [rank(first.pid, 0), rank(second.pid, 1), rank(third.pid, 0, 2), rank(fourth.pid, 1, 2)]
        plan = Plan(tmp_path, snapshots=1, interval_secs=0.0, tool_secs=LONG)
        collection = Collection(ranks, plan, lambda _line: None)
        collection.take_snapshots()
    found = collection.divergence
    assert found.statement == statement
    assert statement in (tmp_path / "summary.md").read_text()
    (name,) = [name for name in collection.collected[1].files if name.startswith("steps_")]
    last = Step.from_json(json.loads((tmp_path / name).read_text().splitlines()[-1]))
    assert (last.number, last.mode) == (3, "extend" if odd else "decode")
    assert not [name for name in collection.collected[2].files if name.startswith("steps_")]
