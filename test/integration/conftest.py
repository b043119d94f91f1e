"""The longest files begin first, so that none of them is alone at the end."""

from __future__ import annotations

import pytest

LONGEST = ("test_no_harm", "test_hangs", "test_first_crash", "test_collect", "test_watch_crash", "test_process_1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort what was collected; the rest stays in its order."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
