from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from lanelib import figures
from lanelib.figures import (
    BEGIN,
    DATA,
    END,
    PAGE,
    README,
    Benchmark,
    Table,
    figure,
    measure,
    page,
    with_costs,
    write_documents,
)
from lanelib.paths import ROOT

TABLE = [
    "which         median    longest",
    "upstream    51.21 ms   96.75 ms",
    "kit/upstream    0.01",
    "on   8  0.37 us",
]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand for the only benchmark."""
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    path = tmp_path / "fast"
    path.write_text('#!/bin/sh\necho "row  $1"\necho much too slow >&2\nexit "$1"\n')
    path.chmod(0o755)
    return path


def run(program: Path, arguments: str) -> figures.Run:
    kept = program.parent / "kept.json"
    return measure(Benchmark(program.name, (arguments, 0.1)), kept, form="whole", env=os.environ)


def test_what_it_printed_is_kept(program: Path) -> None:
    first = run(program, "0")
    assert (first.command, first.lines, first.status, first.why) == ("benchmarks/fast 0", ("row  0",), 0, "")
    # An interrupted run goes on with what it has.
    program.unlink()
    assert run(program, "0") == first


def test_what_is_named_is_run_as_it_is_run_alone() -> None:
    benchmark = Benchmark("faults", ("--release x", 18), alone=("--all", 60))
    assert [benchmark.arguments(form) for form in ("whole", "alone", "quick")] == [
        ["--release", "x"],
        ["--all"],
        ["--release", "x"],
    ]


def test_a_missed_goal_has_its_reason(program: Path) -> None:
    found = run(program, "1")
    assert (found.status, found.why) == (1, "much too slow")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo broken >&2\nexit 3", "it printed nothing, status 3: broken"),
        ("exec sleep 60", "it did not end in 0 minutes"),
    ],
)
def test_one_that_fails_says_why_and_is_run_again(
    program: Path, script: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(figures, "PATIENCE", 0.05)
    found = run(program, "")
    assert (bool(found.status), found.why) == (True, why)
    assert not (program.parent / "kept.json").exists()


def test_one_that_fails_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "PAGE", "README"):
        monkeypatch.setattr(figures, name, tmp_path / name)
    (tmp_path / "README").touch()
    good = figures.Run("beat", "benchmarks/beat", ("on  1 us",), 1.0, 0, "2026-01-01 00:00")
    for one in (good, dataclasses.replace(good, lines=(), status=1, why="it printed nothing")):
        write_documents([one], "2 cores", 1.0)
    text = (tmp_path / "PAGE").read_text()
    assert "on  1 us" in text
    assert "The run after it failed, 2026-01-01 00:00 UTC: it printed nothing." in text


@pytest.mark.parametrize(
    ("as_json", "expected"),
    [
        (False, "fault  seconds\nslow       1.5\nseen\n"),
        (True, '{"fault": "slow", "seconds": "1.5"}\n{"note": "seen"}\n'),
    ],
)
def test_a_table_is_text_or_json(as_json: bool, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table({"fault": 4, "seconds": 5}, as_json=as_json)
    table.row("slow", "1.5")
    table.note("seen")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("beginning", "column", "expected"),
    [
        ("upstream", 1, "96.75 ms"),
        ("upstream", -1, "96.75 ms"),
        ("kit/upstream", 0, "0.01"),
        ("on 8", 0, "0.37 us"),
        ("nobody", 0, None),
    ],
)
def test_a_cell_is_found_by_its_row(beginning: str, column: int, expected: str | None) -> None:
    assert figure(TABLE, beginning, column) == expected


def test_the_documents_say_what_the_last_run_measured() -> None:
    document = json.loads(DATA.read_text())
    assert PAGE.read_text() == page(document)
    text = README.read_text()
    assert BEGIN in text
    assert END in text
    assert with_costs(text, document) == text


FIGURE = re.compile(r"\d ?(?:ns|us|µs|ms|s|MB|MiB|GB|%|times|minutes?|seconds?)(?!\w)")
#: What is so short is measured, and no setting.
MEASURED = re.compile(r"\d ?(?:ns|us|µs)(?!\w)|% of a core")
TEXTS = [README, *sorted(path for path in (ROOT / "docs").rglob("*.md") if path != PAGE)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_text_has_figures_of_its_own(path: Path) -> None:
    head, _begin, rest = path.read_text().partition(BEGIN)
    for block in re.split(r"\n\n|\n(?=- |\| )", head + rest.partition(END)[2]):
        cites = "`benchmarks/" in block or "benchmarks.md#" in block
        assert not (FIGURE if cites else MEASURED).search(block), f"to be left to {PAGE.name}: {block}"
