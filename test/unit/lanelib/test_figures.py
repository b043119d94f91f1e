from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lanelib import figures
from lanelib.errors import LaneError
from lanelib.figures import BEGIN, DATA, END, PAGE, README, Benchmark, figure, measure, page, with_costs

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
    return measure(Benchmark(program.name, (arguments, 0.1)), kept, quick=False, env=os.environ)


def test_what_it_printed_is_kept(program: Path) -> None:
    first = run(program, "0")
    assert (first.command, first.lines, first.status, first.why) == ("benchmarks/fast 0", ("row  0",), 0, "")
    # An interrupted run goes on with what it has.
    program.unlink()
    assert run(program, "0") == first


def test_a_missed_goal_has_its_reason(program: Path) -> None:
    found = run(program, "1")
    assert (found.status, found.why) == (1, "much too slow")


def test_a_benchmark_without_output_is_an_error(program: Path) -> None:
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(LaneError, match="printed nothing, status 3: broken"):
        run(program, "")


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
