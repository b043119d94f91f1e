from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sglang_crashkit.incident import exit_status
from sglang_crashkit.incident.exit_status import (
    OUT_OF_MEMORY,
    TERMINATION_LOG,
    ServerExit,
    exit_status_of,
    while_starting,
    write_termination_message,
)
from sglang_crashkit.model.incident import Exit, Failure, Incident, ProcessReport, ServerInfo, Trigger, Verdict

PAGE = Path(__file__).parents[3] / "docs" / "incidents.md"


def incident(kind: str, signal_name: str | None = None) -> Incident:
    document = Incident("1", "killed", Trigger("process_exited", "", 10, "x"), ServerInfo(1, "", "", ""))
    report = ProcessReport(10, "x", "scheduler", {})
    report.exit = Exit(None, signal_name, "signal", "", "")
    document.processes.append(report)
    document.verdict = Verdict(kind, Failure(10, "x"), "established", "")
    return document


@pytest.mark.parametrize(
    ("kind", "signal_name", "status"),
    [
        ("oom_kill", "SIGKILL", 137),
        ("signal", "SIGKILL", 82),
        ("signal", "SIGSEGV", 139),
        ("signal", "SIGABRT", 134),
        ("signal", "SIGBUS", 135),
        # 143 and 131 would read as the end of a server that was asked to end.
        ("signal", "SIGTERM", 84),
        ("signal", "SIGQUIT", 84),
        ("exception", None, 83),
        ("exit_status", None, 84),
        ("parent_ended", "SIGKILL", 84),
        ("hang", None, 85),
        ("lost_peer", None, 87),
        ("thread_died", None, 83),
        ("consensus_check", None, 84),
        ("unknown", None, None),
    ],
)
def test_the_cause_of_the_first_failure_has_a_status(kind: str, signal_name: str | None, status: int | None) -> None:
    assert exit_status_of(incident(kind, signal_name)) == status


def test_at_startup_only_signals_and_lost_peers_tell_more() -> None:
    assert {while_starting(status) for status in (None, 81, 83, 84, 85, 86)} == {86}
    assert [while_starting(status) for status in (OUT_OF_MEMORY, 139, 82, 87)] == [137, 139, 82, 87]


def test_each_status_is_documented() -> None:
    rows = set(re.findall(r"^\| (\d{2,3}) ", PAGE.read_text(), re.MULTILINE))
    assert {str(int(status)) for status in (*ServerExit, OUT_OF_MEMORY, 134)} <= rows


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that Kubernetes made, with what an earlier container left there."""
    path = tmp_path / "termination-log"
    path.write_text("what an earlier container left, longer than the new one's words")
    monkeypatch.setattr(exit_status, "DEFAULT_LOG", str(path))
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


@pytest.mark.parametrize("value", ["0", "", "false", "No"])
def test_it_can_be_switched_off(log: Path, value: str) -> None:
    before = log.read_text()
    assert not write_termination_message("why", {TERMINATION_LOG: value})
    assert log.read_text() == before


def test_only_a_file_that_is_there_is_written_to(tmp_path: Path, log: Path) -> None:
    before = log.read_text()
    link, fifo, none = tmp_path / "link", tmp_path / "fifo", tmp_path / "none"
    link.symlink_to(log)
    os.mkfifo(fifo)
    for path in (link, tmp_path, fifo, none):
        assert not write_termination_message("why", {TERMINATION_LOG: str(path)})
    assert log.read_text() == before
    assert not none.exists()
