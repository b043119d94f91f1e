"""The command that ``sglang-crashkit wheel`` prints, run by a real pip in real environments."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lanelib.paths import ROOT
from sglang_crashkit import __version__
from sglang_crashkit.installer import kitwheel
from sglang_crashkit.installer.patchedwheel import build_patched_wheel, install_command
from sglang_crashkit.installer.record import format_row
from unit.installer.fake_sglang import RELEASE, FakeKit

#: What the small SGLang and the kit require.
REQUIRED = ("torch", "psutil", "py-spy", "PyYAML", "setproctitle")


@pytest.fixture
def folder(tmp_path: Path, wheel: Path, kit: FakeKit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The patched wheel of a small SGLang, and that of a kit with its patches."""
    folder = tmp_path / "built wheels"
    folder.mkdir()
    monkeypatch.setattr(kitwheel, "find_patch_root", lambda: kit.patches.root)
    build_patched_wheel(wheel, folder, kit.patches, kit.lock)
    kitwheel.build_kit_wheel(folder)
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Stands in for the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in REQUIRED:
        write_empty_wheel(folder, name)
    return folder


def write_empty_wheel(folder: Path, name: str) -> None:
    escaped = name.replace("-", "_")
    info = f"{escaped}-999.dist-info"
    members = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 999\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(format_row(path, text.encode()) for path, text in members.items())
    with zipfile.ZipFile(folder / f"{escaped}-999-py3-none-any.whl", "w") as archive:
        for path, text in members.items():
            archive.writestr(path, text)


@pytest.mark.parametrize("upstream_before", [True, False], ids=["over-upstream", "fresh"])
def test_the_command_that_is_printed_ends_with_a_patched_sglang(
    upstream_before: bool, folder: Path, index: Path, wheel: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ensurepip")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=240, capture_output=True)
    environ = {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command], check=False, capture_output=True, text=True, timeout=240, env=environ
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if upstream_before:
        run(f"pip install {wheel}")
    output = run(install_command(folder, RELEASE))
    assert f"sglang   {RELEASE}+crashkit.{__version__} in {venv}" in output
    assert "state    patched, by wheel" in output
    assert "No broken requirements found." in run("pip check")


def test_the_readme_gives_the_command_that_is_printed() -> None:
    assert f"\n{install_command(Path('wheels'), '0.5.23')}\n" in (ROOT / "README.md").read_text()
