from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_crashkit.handler import folders as place_module
from sglang_crashkit.handler.folders import Place


def test_an_earlier_server_may_have_left_something_in_any_of_three_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "fallback_folder", lambda: tmp_path / "other")
    host_folder = tmp_path / "crash" / "host"
    place = Place(host_folder, host_folder / "incidents" / ".spool", tmp_path / "run")
    assert place.earlier() == [host_folder, tmp_path / "other" / "host", tmp_path / "other"]
    place = Place(tmp_path / "other" / "host", tmp_path / "spool", tmp_path / "run")
    assert place.earlier() == [tmp_path / "other" / "host", tmp_path / "other"]


def test_nothing_of_another_server_is_removed_that_has_the_same_pids(tmp_path: Path) -> None:
    """Hosts may share a name and a crash folder, and each main process may be process 1."""
    places = [Place(tmp_path, tmp_path / "incidents" / f".spool-1-5-{n}", tmp_path / "run" / f"1-5-{n}") for n in "12"]
    for place in places:
        place.spool.mkdir(parents=True)
        place.runtime.mkdir(parents=True)
    dump = tmp_path / ".crash_dump_x.pkl.1-5-2.partial"
    dump.write_text("")
    places[0].clean_up(["1-5-1"])
    assert [place.spool.exists() for place in places] == [False, True]
    assert [place.runtime.exists() for place in places] == [False, True]
    assert dump.exists()


def test_what_the_servers_processes_could_not_finish_is_removed(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "incidents" / ".spool", tmp_path / "run")
    (tmp_path / "run").mkdir()
    kept = [
        "crash_dump_2026-11-21_01-26-13.pkl",
        ".crash_dump_2026-11-21_01-26-13.pkl.7-5-2.partial",
        ".crash_dump_2026-11-21_01-26-13.pkl.7-6-1.partial",
        ".crash_dump_2026-11-21_01-26-13.pkl.partial",
        ".crash_dump_x.pkl.\N{SUPERSCRIPT TWO}.partial",
    ]
    torn = [".crash_dump_2026-11-21_01-26-13.pkl.7-5-1.partial", ".crash_dump_2026-11-21_01-26-13.1.pkl.8-5-1.partial"]
    for name in [*kept, *torn]:
        (tmp_path / name).write_text("")
    flight = tmp_path / "flight_recorder"
    flight.mkdir()
    for key in ("7-5-1", "7-5-2", "7-6-1"):
        (flight / f"{key}-rank0").write_text("")
    place.clean_up(["7-5-1", "8-5-1", "9-5-1"])
    assert sorted(path.name for path in flight.iterdir()) == ["7-5-2-rank0", "7-6-1-rank0"]
    shutil.rmtree(flight)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
