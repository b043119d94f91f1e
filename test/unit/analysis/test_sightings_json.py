from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from sglang_crashkit.analysis.explain import explain
from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.analysis.sightings_json import from_json, to_json
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from unit.analysis.real_stacks import ALL_REDUCE, SPIN, process, rounds

ROW = [process(10 + tp, SPIN if tp == 3 else ALL_REDUCE, tp=tp, cpu_secs=1.5) for tp in range(8)]
SIGHTINGS = Sightings.of(
    [*rounds(ROW, ROW, ROW[:7]), NodeSnapshot("n2", 1.0, (), (Problem("node n2", "it is silent", "ask"),))]
)


def test_sightings_survive_their_json() -> None:
    document = json.loads(json.dumps(to_json(SIGHTINGS), allow_nan=False))
    read = from_json(document)
    assert next(iter(document)) == "schema_version"
    assert explain(read).to_json() == explain(SIGHTINGS).to_json()
    assert (read.tree, read.rounds, read.problems()) == (SIGHTINGS.tree, SIGHTINGS.rounds, SIGHTINGS.problems())
    assert list(read.processes()) == list(SIGHTINGS.processes())


def test_what_many_ranks_do_stands_once() -> None:
    document = to_json(SIGHTINGS)
    assert len(document["doings"]) == 2
    assert len(document["stacks"]) == 2
    # More ranks and looks make no more of it.
    assert document["doings"] == to_json(Sightings.of(rounds(*[ROW] * 9)))["doings"]


def test_it_is_small_beside_the_snapshots() -> None:
    nodes = rounds(*[ROW] * 3)
    whole = sum(len(json.dumps(node.to_json())) for node in nodes)
    assert len(json.dumps(to_json(Sightings.of(nodes)))) < whole


def test_those_of_a_newer_kit_are_refused_with_both_versions() -> None:
    with pytest.raises(ValueError, match=r"^the set of sightings has schema_version 2, this kit reads up to 1$"):
        from_json(to_json(SIGHTINGS) | {"schema_version": 2})


@pytest.mark.parametrize("document", [None, [], "x", 5, {}])
def test_what_has_no_version_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"^not a set of sightings: there is no schema_version$"):
        from_json(document)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (["rounds"], 5, "no attribute 'items'"),
        (["rounds", "n1"], "now", "'now' is not a number"),
        (["processes"], None, "None is not a list"),
        (["processes", 0, "pid"], "10", "'10' is not a whole number"),
        (["processes", 0, "side"], "both", "'both' is neither prefill nor decode"),
        (["processes", 0, "last"], float("nan"), "nan is not a number"),
        (["processes", 0, "last"], None, "None is not a number"),
        (["processes", 0, "gone"], None, "None is not a whole number"),
        (["processes", 0, "looks"], {}, "{} is not a list"),
        (["processes", 0, "looks", 0], [1.0], "not enough values"),
        (["processes", 0, "looks", 0, 1], 7, "7 is not text"),
        (["processes", 0, "looks", 0, 3], 99, "in a table of 2"),
        (["doings", 0, "kind"], "dancing", "'dancing' is not a state that is known"),
        (["doings", 0, "words"], None, "None is not text"),
        (["doings", 0, "stack"], -1, "in a table of 2"),
        (["stacks", 0, 0], 9999, "in a table of"),
        (["frames", 0], ["f", "x.py"], "not enough values"),
        (["problems", 0], {}, "it lacks 'what'"),
        (["tree", "nodes"], [], "the first node is no root"),
        (["tree", "nodes", 1, 0], 7, "a node has no parent before it"),
    ],
)
def test_what_is_no_set_of_sightings_is_refused_with_one_reason(path: list[Any], value: Any, why: str) -> None:
    document = copy.deepcopy(to_json(SIGHTINGS))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=r"^not a set of sightings: ") as caught:
        from_json(document)
    assert why in str(caught.value)


@pytest.mark.parametrize("name", [name for name in to_json(SIGHTINGS) if name != "schema_version"])
def test_what_lacks_a_part_is_refused_by_its_name(name: str) -> None:
    document = to_json(SIGHTINGS)
    del document[name]
    with pytest.raises(ValueError, match=f"^not a set of sightings: it lacks '{name}'$"):
        from_json(document)
