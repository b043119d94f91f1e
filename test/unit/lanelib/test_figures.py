from __future__ import annotations

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
    measure,
    page,
    with_costs,
)
from lanelib.paths import ROOT


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
