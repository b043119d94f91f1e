from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_crashkit
from sglang_crashkit.installer.environment import Environment
from unit.installer.fake_sglang import OTHER_PATCHES, FakeKit, install, make_kit, write_wheel


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power, and a busy disk takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "wheels")


@pytest.fixture
def environment(tmp_path: Path, wheel: Path) -> Environment:
    return install(wheel, tmp_path / "site")


@pytest.fixture
def kit(tmp_path: Path, wheel: Path) -> FakeKit:
    return make_kit(tmp_path / "patches", wheel)


@pytest.fixture
def other_kit(tmp_path: Path, wheel: Path) -> FakeKit:
    return make_kit(tmp_path / "other-patches", wheel, OTHER_PATCHES)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A real virtual environment, without pip."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture
def bare_site(venv: Path) -> Path:
    """Its folder of packages, with neither SGLang nor the kit."""
    return next((venv / "lib").glob("python*/site-packages"))


@pytest.fixture
def site(bare_site: Path, wheel: Path) -> Path:
    """Its folder of packages, with a small SGLang and the kit."""
    install(wheel, bare_site)
    (bare_site / "kit.pth").write_text(f"{Path(sglang_crashkit.__file__).parents[1]}\n")
    return bare_site
