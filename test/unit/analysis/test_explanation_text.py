from __future__ import annotations

from dataclasses import replace

from sglang_crashkit.analysis.explain import explain
from sglang_crashkit.analysis.explanation_text import format_explanation
from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.model.snapshot import Problem
from unit.analysis.real_stacks import ALL_REDUCE, SPIN, process, rounds


def test_the_verdict_comes_first_and_then_what_it_rests_on() -> None:
    row = [process(10, ALL_REDUCE, tp=0), process(11, SPIN, tp=1)]
    nodes = rounds(row, row)
    nodes[0] = replace(nodes[0], problems=(Problem("pid 12", "it ended", "look again"), Problem("n2", "silent")))
    sightings = Sightings.of(nodes)
    lines = list(format_explanation(explain(sightings), sightings.tree))
    assert lines[0].startswith("Verdict (supported): sglang::scheduler_TP1 (pid 11) was in spin (sitecustomize.py:12)")
    assert lines[1] == "Look at: sglang::scheduler_TP1 (pid 11)"
    assert "Evidence (outlier, supported):" in lines
    assert lines[lines.index("Not collected:") + 1 :][:2] == ["  n2: silent", "  pid 12: it ended; next: look again"]
    tree = lines[lines.index("Python stacks of all threads, outermost call first, what the fewest ranks do first:") :]
    assert any("TP1: " in line and "spin (sitecustomize.py:12)" in tree[at + 1] + line for at, line in enumerate(tree))


def test_of_many_groups_and_problems_some_are_told() -> None:
    row = [process(100 * pp + tp, ALL_REDUCE, tp=tp, pp=pp, state="T") for pp in range(20) for tp in range(2)]
    nodes = rounds(row, row)
    nodes[0] = replace(nodes[0], problems=tuple(Problem(f"pid {n}", "it ended") for n in range(30)))
    sightings = Sightings.of(nodes)
    lines = list(format_explanation(explain(sightings)))
    assert "Look at: 32 more" in lines
    assert "12 more groups: 12 outlier" in lines
    assert "  20 more" in lines
    assert len(lines) < 80


def test_of_nothing_there_is_a_verdict_too() -> None:
    sightings = Sightings()
    assert list(format_explanation(explain(sightings), sightings.tree)) == ["Verdict (unknown): No process was seen."]
