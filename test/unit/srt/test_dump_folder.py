from __future__ import annotations

import errno
import subprocess
import tempfile
from pathlib import Path

import pytest

from sglang_crashkit.settings import fallback_folder
from sglang_crashkit.srt import dump_folder
from sglang_crashkit.srt.dump_folder import give_name, safe_folder
from unit.small_disk import fill, mounted


@pytest.fixture(autouse=True)
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return fallback_folder()


def test_a_folder_that_takes_more_is_made_and_used(tmp_path: Path, fallback: Path) -> None:
    folder = tmp_path / "crash" / "host"
    assert safe_folder(folder) == safe_folder(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not fallback.exists()


def test_of_a_full_disk_the_fallback_folder_takes_the_place(
    tmp_path: Path, fallback: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "small") as folder:
        assert safe_folder(folder / "host") == folder / "host"
        fill(folder)
        assert safe_folder(folder / "host") == fallback / "host"
    assert f"the disk is full: '{folder}/host': the requests go to {fallback}/host" in caplog.text


def test_so_does_it_of_a_folder_that_became_read_only(
    tmp_path: Path, fallback: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "small") as folder:
        (folder / "host").mkdir(mode=0o700)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True, timeout=30)
        assert safe_folder(folder / "host") == fallback / "host"
    assert f"it cannot be written to: '{folder}/host': the requests go to {fallback}/host" in caplog.text


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_that_is_taken_gets_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    if not has_links:
        monkeypatch.setattr(dump_folder.os, "link", refuse)
    (tmp_path / "dump.pkl").write_text("first")
    (tmp_path / "new").write_text("second")
    given = give_name(tmp_path / "new", tmp_path / "dump.pkl")
    assert given.read_text() == "second"
    assert given.name == ("dump.1.pkl" if has_links else "dump.pkl")
