from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.kernel.titles import label_of, rank_of, role_of


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("sglang::scheduler", "scheduler"),
        ("sglang::scheduler_DP0_PP1_TP2_EP3", "scheduler"),
        ("sglang::detokenizer", "detokenizer"),
        ("sglang::detokenizer_2", "detokenizer"),
        ("sglang::detokenizer_router", "detokenizer_router"),
        ("sglang::data_parallel_controller", "data_parallel_controller"),
        ("sglang::tokenizer_worker:4711", "tokenizer_worker"),
        ("sglang::crash_handler", "crash_handler"),
        ("sglang::something_new: 3", "something_new"),
        ("sglang::", "helper"),
        ("python -c multiprocessing.spawn", "starting"),
        ("python3.11 -c multiprocessing.resource_tracker", "helper"),
        ("ninja", "helper"),
        ("", "helper"),
    ],
)
def test_a_role_follows_from_the_title(title: str, role: str) -> None:
    assert role_of(title) == role
    assert role_of(title, is_root=True) == "server"


@pytest.mark.parametrize(
    ("title", "rank"),
    [
        ("sglang::scheduler", {}),
        ("sglang::scheduler_TP0", {"tp": 0}),
        ("sglang::scheduler_DP0_PP1_TP12_EP3", {"dp": 0, "pp": 1, "tp": 12, "ep": 3}),
        ("sglang::scheduler_PP0_ATTN_CP1_MOE_DP2_TP3", {"pp": 0, "attn_cp": 1, "moe_dp": 2, "tp": 3}),
        ("sglang::scheduler_TPX", {}),
        ("sglang::scheduler_TP8000000000", {}),
        ("sglang::detokenizer_TP0", {}),
        ("scheduler_TP0", {}),
    ],
)
def test_ranks_follow_from_a_schedulers_title(title: str, rank: dict[str, int]) -> None:
    assert rank_of(title) == rank


@given(st.text(st.characters(max_codepoint=0x2FF), max_size=100), st.integers(1, 2**22))
def test_a_label_is_a_safe_file_name(title: str, pid: int) -> None:
    label = label_of(title, pid)
    assert re.fullmatch(r"[A-Za-z0-9_.]+-\d+", label)
    assert label.endswith(f"-{pid}")
    assert len(label) < 80
