"""The rows of findings.yaml: each has a class that there is, and the judge's code gives what its templates name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sglang_crashkit import judge
from sglang_crashkit.judge.finding import finding_of, steps_of
from sglang_crashkit.judge.knowledge import load

ROWS, LISTS = load("findings")["findings"], load("findings")["steps"]
TREES = [ast.parse(path.read_text()) for path in Path(judge.__file__).parent.glob("*.py")]
NODES = [node for tree in TREES for node in ast.walk(tree)]
#: Text in the code: names of rows, keys of fields, parts of f-strings.
TEXTS = {node.value for node in NODES if isinstance(node, ast.Constant) and isinstance(node.value, str)}
GIVEN = TEXTS | {node.arg for node in NODES if isinstance(node, ast.keyword) and node.arg}
#: Rows that a table of failures.yaml names.
TABLED = {one["row"] for name in ("kernel", "containers") for one in load("failures")[name]}
#: A row may be named by what it is of.
MADE = ("watched_", "_beside")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_found_by_the_code(name: str) -> None:
    assert finding_of(name).kind in load("classes")
    assert name in TEXTS | TABLED or name.startswith(MADE[0]) or name.endswith(MADE[1])


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_steps_is_taken_by_the_code(name: str) -> None:
    assert name in TEXTS
    assert isinstance(steps_of(name), list)


def test_the_code_gives_each_field() -> None:
    templates = [text for row in ROWS.values() for text in (row.get("headline", ""), *row.get("next", ()))]
    templates += [step for steps in LISTS.values() for step in steps]
    named = {name for text in templates for name in re.findall(r"\{(\w+)[|}]", text)}
    asked = {found[1] for text in templates if (found := re.match(r"!?(\w+)\? ", text))}
    components = set(load("components"))  # steps of a kernel are asked for by its part
    assert (named | asked) - GIVEN - components == set()


def test_an_optional_part_and_a_condition_of_a_template() -> None:
    found = finding_of("segfault", victim="TP0", pid=0)
    assert found.headline == "TP0 (pid 0) died of a segmentation fault"
    assert finding_of("no_work", standing="TP0 sleeps").headline.endswith(
        "no request reaches them, or no answer comes back"
    )
    assert len(steps_of("branch", places="`f`", hicache=True)) == len(steps_of("branch", places="`f`")) + 1
    assert steps_of("named_options", options="") == []


@pytest.mark.parametrize(
    "table", [*Path(judge.__file__).with_name("knowledge").glob("*.yaml")], ids=lambda one: one.name
)
def test_no_table_has_a_name_twice(table: Path) -> None:
    def names_in(node: yaml.Node) -> Iterator[list[str]]:
        if isinstance(node, yaml.MappingNode):
            yield [key.value for key, _value in node.value]
            for _key, value in node.value:
                yield from names_in(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                yield from names_in(value)

    for names in names_in(yaml.compose(table.read_text())):
        assert len(names) == len(set(names)), names
