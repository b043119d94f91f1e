"""What the incident is told of a core; `test_core_evidence` has the whole way."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture.cuda_core.child import Reading
from sglang_crashkit.handler.collectors.gpu import cores
from sglang_crashkit.handler.collectors.gpu.cores import CoreReadings
from sglang_crashkit.incident.retention import NoRoomError
from sglang_crashkit.model.incident import Evidence, ProcessReport


class Run:
    """What is used of an incident."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.folder = self
        self.files: dict[str, Any] = {}

    def write_json(self, name: str, value: Any) -> str:
        if self.error is not None:
            raise self.error
        self.files[name] = value
        return name


class Reader:
    """Has its answer at the second look."""

    answer: Reading | None = None

    def __init__(self, path: Path, seconds: float) -> None:
        if path.name == "none":
            raise OSError(errno.EAGAIN, "no process")
        self.looks = 0

    def look(self) -> Reading | None:
        self.looks += 1
        return self.answer if self.looks > 1 else None


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ProcessReport:
    monkeypatch.setattr(cores, "CoreReader", Reader)
    return ProcessReport(8, "sglang::scheduler_TP1", "scheduler", {"tp": 1})


def read(run: Any, report: ProcessReport, answer: Reading, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    monkeypatch.setattr(Reader, "answer", answer)
    readings = CoreReadings(run)
    assert readings.are_done
    readings.start(Path("core"), report)
    readings.look()
    assert not readings.are_done
    assert report.evidence == []
    readings.look()
    assert readings.are_done
    (piece,) = report.evidence
    return piece


def test_what_a_core_says_becomes_a_file(report: ProcessReport, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    piece = read(run, report, Reading({"kernels": []}, ["no kernel"]), monkeypatch)
    assert (piece.kind, piece.status, piece.path) == ("gpu_kernels", "captured", "gpu/scheduler_TP1-8.kernels.json")
    assert run.files == {piece.path: {"kernels": []}}
    assert report.gpu == ["no kernel"]


@pytest.mark.parametrize(
    ("error", "status"), [(NoRoomError(errno.ENOSPC, "full"), "skipped"), (OSError(errno.EIO, "broken"), "failed")]
)
def test_without_a_file_it_is_told_in_short(
    report: ProcessReport, monkeypatch: pytest.MonkeyPatch, error: OSError, status: str
) -> None:
    piece = read(Run(error), report, Reading({"kernels": []}, ["no kernel"]), monkeypatch)
    assert (piece.status, piece.path) == (status, None)
    assert report.gpu == ["no kernel"]


def test_what_cannot_be_read_is_a_failed_piece(report: ProcessReport, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = read(Run(), report, Reading(None, reason="no core"), monkeypatch)
    assert (piece.status, piece.reason) == ("failed", "no core")
    assert report.gpu == []


def test_where_no_reader_can_be_started_that_is_told(report: ProcessReport) -> None:
    run: Any = Run()
    readings = CoreReadings(run)
    readings.start(Path("none"), report)
    assert readings.are_done
    assert report.evidence[0].status == "failed"
    assert "no process" in (report.evidence[0].reason or "")
