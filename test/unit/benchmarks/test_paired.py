from __future__ import annotations

import pytest

from paired import interval, trimmed


def test_the_interval_of_a_ratio_narrows_with_more_pairs() -> None:
    few, many = (interval([[0.99, 1.03] * pairs]) for pairs in (5, 100))
    for middle, low, high in (few, many):
        assert low < middle < high
        assert middle == pytest.approx((0.99 * 1.03) ** 0.5)
    assert many[2] - many[1] < (few[2] - few[1]) / 3


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    assert interval([[2.0, 2.0, 2.0]]) == pytest.approx((2.0, 2.0, 2.0))


def test_starts_that_differ_widen_the_interval() -> None:
    middle, low, high = interval([[0.95] * 100, [1.05] * 100, [1.0] * 100, [1.0] * 100])
    assert low < 0.98 < middle < 1.02 < high


def test_what_lies_far_out_does_not_move_a_trimmed_mean() -> None:
    values = [1.0, 1.01, 0.99, 1.02, 0.98] * 20
    mean, least, most = trimmed(values)
    assert (mean, trimmed([50.0, *values[1:]])[0]) == pytest.approx((1.0, 1.0), abs=0.001)
    assert least < 1.0 < most
    # Four times as many values are known twice as well.
    assert most - mean == pytest.approx(2 * (trimmed(values * 4)[2] - mean), rel=0.02)
