from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.incident import termination_log
from sglang_crashkit.incident.termination_log import VARIABLE, write_termination_message


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that Kubernetes made, with what an earlier container left there."""
    path = tmp_path / "termination-log"
    path.write_text("what an earlier container left, longer than the new one's words")
    monkeypatch.setattr(termination_log, "_DEFAULT", str(path))
    return path


def test_the_message_takes_the_place_of_what_was_there(log: Path) -> None:
    assert write_termination_message("why\n", {})
    assert log.read_text() == "why\n"


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 2500, "x" + "é" * 2500])
def test_no_more_is_written_than_kubernetes_reads(log: Path, text: str) -> None:
    assert write_termination_message(text, {})
    written = log.read_bytes()
    assert 4090 < len(written) <= 4096
    assert written.decode().endswith(" ...")
    assert text.startswith(written.decode().removesuffix(" ..."))


def test_a_name_that_is_not_utf8_is_no_error(log: Path) -> None:
    assert write_termination_message("\udcff", {})
    assert log.read_text() == "\\udcff"


@pytest.mark.parametrize("value", ["0", "", "false", "No"])
def test_it_can_be_switched_off(log: Path, value: str) -> None:
    before = log.read_text()
    assert not write_termination_message("why", {VARIABLE: value})
    assert log.read_text() == before


def test_another_file_can_be_named(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    assert write_termination_message("why", {VARIABLE: str(other)})
    assert other.read_text() == "why"
    assert log.read_text() != "why"


def test_nothing_is_created_outside_a_container(tmp_path: Path) -> None:
    assert not write_termination_message("why", {VARIABLE: str(tmp_path / "none")})
    assert list(tmp_path.iterdir()) == []


def test_a_link_a_folder_and_a_pipe_are_left_alone(tmp_path: Path, log: Path) -> None:
    before = log.read_text()
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(log)
    os.mkfifo(fifo)
    for path in (link, tmp_path, fifo):
        assert not write_termination_message("why", {VARIABLE: str(path)})
    assert log.read_text() == before


def test_a_file_of_another_users_is_no_error(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    def refuse(*_args: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert not write_termination_message("why", {})
