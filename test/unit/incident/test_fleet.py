from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident import fleet
from sglang_crashkit.incident.fleet import found_of, read_fleet
from unit.support.stored import NOON, make_incident

DOCUMENT: dict[str, Any] = {
    "kind": "killed",
    "server": {"sglang_version": "0.5.23"},
    "verdict": {"kind": "signal", "first_failure": {"pid": 9}},
    "processes": [
        {"pid": 9, "role": "scheduler", "rank": {"tp": 3}, "exit": {"signal": "SIGSEGV"}, "doing": ["f (a/b.py:7)"]}
    ],
    "environment": {"model": "m", "versions": {"driver": "580.1", "torch": "2.9"}},
    "gpus": {"devices": [{"name": None}, {"name": "H100"}]},
    "cause": {"class": "cuda_fault"},
}
NAME = "/c/20260101T000000.000Z-killed-0123abcd"


@pytest.fixture
def crash_folder(tmp_path: Path) -> Path:
    tmp_path = tmp_path / "fetched" / "crash"
    for host in ("a", "b", "quiet"):
        (tmp_path / host / "incidents").mkdir(parents=True)
    make_incident(tmp_path / "a" / "incidents")
    make_incident(tmp_path / "a" / "incidents", publish=False)
    make_incident(tmp_path / "b" / "incidents", seconds=NOON + 1000)
    return tmp_path


def test_the_incidents_of_all_hosts_are_read(crash_folder: Path) -> None:
    found = read_fleet([crash_folder])
    assert found.hosts == {"a", "b", "quiet"}
    assert [one.host for one in found.incidents] == ["a", "b"]


def test_crash_folders_of_many_hosts_or_of_one_are_read(crash_folder: Path) -> None:
    assert len(read_fleet([crash_folder.parent]).incidents) == 2
    assert read_fleet([crash_folder / "b"]).hosts == {"b"}
    assert len(read_fleet([crash_folder, crash_folder / "a"]).incidents) == 2


def test_earlier_ones_are_left_out(crash_folder: Path) -> None:
    found = read_fleet([crash_folder], since=NOON + 500)
    assert [one.host for one in found.incidents] == ["b"]
    assert len(found.hosts) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_what_cannot_be_read_is_named(crash_folder: Path, text: str) -> None:
    (path,) = (crash_folder / "b" / "incidents").glob("*/incident.json")
    path.write_text(text)
    found = read_fleet([crash_folder])
    assert found.unreadable == [str(path.parent)]
    assert len(found.incidents) == 1


def test_many_are_read_by_several_processes(crash_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = read_fleet([crash_folder])
    monkeypatch.setattr(fleet, "_MANY", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert read_fleet([crash_folder]) == alone


def test_the_fault_is_recognised_in_another_rank_release_and_line() -> None:
    text = json.dumps(DOCUMENT).replace("0.5.23", "0.5.9").replace('"tp": 3', '"tp": 0').replace("b.py:7", "b.py:9")
    one, other = found_of("h", NAME, DOCUMENT), found_of("i", NAME, json.loads(text))
    assert one.fault == other.fault == ("scheduler", "SIGSEGV", "f (a/b.py)")
    assert one.attributes == {"release": "0.5.23", "model": "m", "GPU": "H100", "driver": "580.1", "torch": "2.9"}
    assert (one.kind, one.cause) == ("signal", "cuda_fault")


@pytest.mark.parametrize("document", [{}, {"verdict": 1, "gpus": [], "environment": {"versions": "x"}, "cause": []}])
def test_an_incident_with_gaps_is_one_too(document: dict[str, Any]) -> None:
    assert found_of("h", NAME, document).fault == ()
