from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_crashkit.cli.reporters.incident_files import IncidentFiles, bounded


def test_no_link_pipe_or_outside_file_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "incident"
    (folder / "logs").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (folder / "logs" / "one.log").write_text("first\nlast")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    files = IncidentFiles(folder)
    assert {name: file.size for name, file in files.listed.items()} == {"logs/one.log": 10}
    assert [files.read(name, 9) for name in ("link", "pipe", "../secret", 5)] == [b""] * 4
    assert (files.read("logs/one.log", 5), files.read("logs/one.log", 4, from_end=True)) == (b"first", b"last")


def test_what_became_a_link_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    path.write_text("x")
    files = IncidentFiles(tmp_path)
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert files.read("one.log", 9) == b""


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "[1]"])
def test_what_is_no_object_counts_as_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert IncidentFiles(tmp_path).read_object("x.json") == {}


def test_what_is_too_long_is_left_out_and_said() -> None:
    found = bounded(
        {"list": [0] * 10**6, "text": "x" * 10**6, "number": 10**99, "deep": json.loads("[" * 99 + "]" * 99)}
    )
    text = json.dumps(found)
    assert len(text) < 10**6
    for words in ("more left out", "more characters left out", "a number too long to show", "nested too deeply"):
        assert words in text
