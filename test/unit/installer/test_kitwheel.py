from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_crashkit import __version__
from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.kitwheel import build_kit_wheel
from sglang_crashkit.installer.record import Record


def test_the_kits_wheel_is_whole_and_the_same_on_a_second_build(tmp_path):
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    first, second = (build_kit_wheel(folder) for folder in folders)
    assert first.name == f"sglang_crashkit-{__version__}-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        info = f"sglang_crashkit-{__version__}.dist-info"
        assert "sglang_crashkit/patches/releases.lock.json" in names
        assert "sglang_crashkit/py.typed" in names
        assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
        assert b"sglang-crashkit = sglang_crashkit.cli.main:main" in archive.read(f"{info}/entry_points.txt")
        assert f"\nVersion: {__version__}\n".encode() in archive.read(f"{info}/METADATA")
        record = Record.parse(archive.read(f"{info}/RECORD"), source="RECORD")
        assert [row.path for row in record.rows] == names


def test_the_kit_runs_from_its_wheel_and_builds_the_same_wheel_again(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    wheel = build_kit_wheel(tmp_path / "1")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    text = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from sglang_crashkit.installer.kitwheel import build_kit_wheel\n"
        "print(build_kit_wheel(Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", text, str(tmp_path / "site"), str(tmp_path / "2")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == wheel.read_bytes()


def test_a_kit_without_metadata_is_refused(tmp_path, monkeypatch):
    def not_found(_name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    with pytest.raises(RefusedError, match="its metadata is not installed"):
        build_kit_wheel(tmp_path)
