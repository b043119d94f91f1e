from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.installer.environment import Environment
from unit.installer.fake_sglang import OTHER_PATCHES, FakeKit, install, make_kit, write_wheel


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
