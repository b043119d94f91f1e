from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.handler import place as place_module
from sglang_crashkit.handler.place import Place


def test_an_earlier_server_may_have_left_something_in_any_of_three_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "fallback_folder", lambda: tmp_path / "other")
    host_folder = tmp_path / "crash" / "host"
    place = Place(host_folder, host_folder / "incidents" / ".spool", tmp_path / "run")
    assert place.earlier() == [host_folder, tmp_path / "other" / "host", tmp_path / "other"]
    place = Place(tmp_path / "other" / "host", tmp_path / "spool", tmp_path / "run")
    assert place.earlier() == [tmp_path / "other" / "host", tmp_path / "other"]


def test_what_the_servers_processes_could_not_finish_is_removed(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "incidents" / ".spool", tmp_path / "run")
    (tmp_path / "run").mkdir()
    kept = [
        "crash_dump_2026-11-21_01-26-13.pkl",
        ".crash_dump_2026-11-21_01-26-13.pkl.12.partial",
        ".crash_dump_2026-11-21_01-26-13.pkl.partial",
        ".crash_dump_x.pkl.\N{SUPERSCRIPT TWO}.partial",
    ]
    torn = [".crash_dump_2026-11-21_01-26-13.pkl.7.partial", ".crash_dump_2026-11-21_01-26-13.1.pkl.8.partial"]
    for name in [*kept, *torn]:
        (tmp_path / name).write_text("")
    place.clean_up([7, 8, 9])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
