"""The longest files begin first, so that none of them is alone at the end."""

from __future__ import annotations

import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort what was collected; the rest stays in its order."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
