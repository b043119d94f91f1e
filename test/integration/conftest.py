"""Fixtures of most files; and the longest files begin first, so that none of them is alone at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.scenario import RELEASES
from lanelib.lanes import Lane, ensure_lane

#: What takes a minute or more, the longest first.
LONGEST = (
    "test_no_harm",
    "test_hangs",
    "test_stuck_loop",
    "test_startup_timeout",
    "test_collect",
    "test_process_1",
    "test_first_crash",
    "test_busy",
    "test_kit_uninstalled",
    "test_kit_breaks",
    "test_faults",
    "test_startup_death",
    "test_capture_ladder",
    "test_divergence",
    "test_journal",
    "test_two_nodes",
    "test_several_tokenizers",
    "test_exit_status",
    "test_privacy",
)


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each release in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def lane(release: str) -> Lane:
    return ensure_lane(release)


@pytest.fixture(scope="module", params=["0.5.9", pytest.param("0.5.12.post1", marks=pytest.mark.matrix), "0.5.23"])
def end_lane(request: pytest.FixtureRequest) -> Lane:
    """The lanes of the oldest and of the newest release, and in the matrix of one between."""
    return ensure_lane(request.param)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for servers: SGLang and the kit put their sockets there, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ck-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort what was collected; the rest stays in its order."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
