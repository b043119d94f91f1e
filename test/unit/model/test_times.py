from __future__ import annotations

import pytest

from sglang_crashkit.model.times import iso_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01T00:00:00.000000Z"), (1_700_000_000.25, "2023-11-14T22:13:20.250000Z")],
)
def test_a_time_is_utc_with_microseconds(seconds: float, text: str) -> None:
    assert iso_time(seconds) == text
