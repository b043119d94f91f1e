from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit import settings


@pytest.fixture
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers without a crash folder would leave incidents, which is not there; and no server runs."""
    folder = tmp_path / "fallback"
    monkeypatch.setattr(settings, "fallback_folder", lambda: folder)
    monkeypatch.setattr("sglang_crashkit.cli.commands.status.find_running_servers", list)
    return folder
