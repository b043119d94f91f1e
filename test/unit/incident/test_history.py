from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_crashkit.incident.fingerprint import INDEX
from sglang_crashkit.incident.history import recent_crashes
from sglang_crashkit.model.incident import iso_time
from unit.stored import NOON, make_incident

FAULT = {"fault": {"what": "IndexError", "who": "scheduler tp=1"}, "count": 3}


def index(folder: Path, last: float) -> None:
    told = {"schema_version": 1, "faults": {"a": FAULT | {"last": iso_time(last)}}}
    (folder / INDEX).write_text(json.dumps(told))


def test_the_crashes_of_the_last_hour_are_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "host" / "incidents"
    for kind, age in (("exception", 10), ("exception", 20), ("killed", 30), ("hang", 5), ("killed", 4000)):
        make_incident(folder, kind=kind, seconds=NOON - age)
    index(folder, NOON - 10)
    assert recent_crashes(folder, NOON) == (
        "3 crashes on this host in the last hour (2 exception, 1 killed); the latest: IndexError of scheduler tp=1, "
        f"seen 3 times in all; next: sglang-crashkit incidents {tmp_path}"
    )
    index(folder, NOON - 4000)
    assert "the latest" not in recent_crashes(folder, NOON)


@pytest.mark.parametrize("kind", ["hang", "peer_lost", "snapshot"])
def test_what_ended_no_server_is_no_crash(tmp_path: Path, kind: str) -> None:
    make_incident(tmp_path, kind=kind, seconds=NOON)
    assert recent_crashes(tmp_path, NOON + 1) == ""


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError, TimeoutError])
def test_a_folder_that_cannot_be_read_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    def fail(_path: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "iterdir", fail)
    assert recent_crashes(tmp_path) == ""


def test_without_a_folder_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert recent_crashes(tmp_path / "none") == ""
