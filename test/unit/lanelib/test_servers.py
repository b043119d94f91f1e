from __future__ import annotations

import os
from pathlib import Path

import pytest

from lanelib.lanes import Lane
from lanelib.servers import parallel_env


@pytest.mark.parametrize(
    ("tp", "dp", "alike", "bound"),
    [
        (1, 1, False, None),
        (3, 1, False, "2|5|2"),
        (1, 2, False, "2|5"),
        (1, 2, True, None),
        (2, 2, True, "2|5"),
        (2, 2, False, "2|5|2|5"),
    ],
)
def test_parallel_env_binds_each_rank_to_a_core(monkeypatch, tp, dp, alike, bound):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5})
    monkeypatch.setattr(Lane, "binds_replicas_alike", lambda lane: alike)
    lane = Lane("0.5.23", False, Path("root"), None)

    assert parallel_env(lane, tp, dp).get("SGLANG_CPU_OMP_THREADS_BIND") == bound
