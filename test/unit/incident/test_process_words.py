from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.incident.process_words import lines_of

MANY = 514


def rank(number: int, **fields: Any) -> dict[str, Any]:
    pid = 1000 + number
    evidence = [
        {"kind": "stack", "status": "captured", "path": f"stacks/{pid}.txt", "source": "py-spy", "seconds": pid / 1e4},
        {"kind": "flight_recorder", "status": "skipped", "reason": f"there is no pipe /run/{pid}.pipe"},
        {"kind": "proc_state", "status": "captured"},
    ]
    process = {"pid": pid, "title": f"sglang::scheduler_TP{number}", "role": "scheduler", "evidence": evidence}
    step = {"number": 14, "mode": "decode", "size": 3, "phase": "forward_begun", "seconds": 9.5 + number / 1000}
    process |= {"doing": ["all_reduce (x.py:3)"], "steps": {"in_step": step}}
    process |= {"last_sign": {"doing": "batch 14", "seconds_before": 5.0 + number % 2}}
    return process | {"gpu": [f"kernel spin on GPU {number // 257}"]} | fields


def text_of(*processes: dict[str, Any], first: int | None = None) -> str:
    document = {"processes": list(processes), "verdict": {"first_failure": {"pid": first}}}
    return "\n".join(lines_of(document))


def test_many_ranks_that_agree_are_one_section() -> None:
    ranks = [rank(number) for number in range(MANY)]
    # One of them has a log that others lack, for a reason.
    ranks[3]["evidence"].append({"kind": "log", "status": "skipped", "reason": "it logged nothing"})
    assert (
        text_of(*ranks)
        == """
### sglang::scheduler_TP0-513 (514 processes): alive then
- pids: TP0 1000, TP1 1001, TP2 1002, TP3 1003, TP4 1004, TP5 1005, TP6 1006, TP7 1007 and 506 more in incident.json
- all_reduce (x.py:3)
- last sign: batch 14, 5.0 to 6.0 s before
- in step 14: decode, 3 requests, forward begun, for 9.500 to 10.013 s
- GPU of TP0-256: kernel spin on GPU 0
- GPU of TP257-513: kernel spin on GPU 1
- stack: captured by py-spy (stacks/, 514 files, 0.100 to 0.151 s)
- flight_recorder: skipped (there is no pipe /run/N.pipe)
- proc_state: captured (in incident.json)
- log: skipped of TP3 (it logged nothing)"""
    )


def test_who_failed_first_has_a_section_of_its_own_before_all_others() -> None:
    detokenizer = {"pid": 7, "title": "sglang::detokenizer", "role": "detokenizer"}
    text = text_of(detokenizer, *(rank(number) for number in range(4)), first=1002)
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [
        "### sglang::scheduler_TP2 (pid 1002): alive then",
        "### sglang::scheduler_TP0-1, sglang::scheduler_TP3 (3 processes): alive then",
        "### sglang::detokenizer (pid 7): alive then",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"doing": ["forward (y.py:9)"]},
        {"state": {"State": "T (stopped)"}},
        {"exit": {"signal": "SIGKILL", "cause": "signal", "detail": "x"}},
        {"steps": {"in_step": {"number": 15}}},
        {"last_sign": {"doing": "batch 15"}},
        {"gpu": ["kernel gemm on GPU 1"]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_rank_that_differs_stands_apart(other: dict[str, Any]) -> None:
    heads = [line for line in text_of(rank(0), rank(1, **other), rank(2)).splitlines() if line.startswith("#")]
    assert len(heads) == 2
    assert heads[0].startswith("### sglang::scheduler_TP0, sglang::scheduler_TP2 (2 processes)")


def test_a_group_has_no_end_of_lines() -> None:
    ranks = [rank(number, evidence=[{"kind": f"{'k' * number}", "status": "captured"}]) for number in range(99)]
    lines = text_of(*ranks).splitlines()
    assert len(lines) < 40
    assert lines[-1] == "- 75 more in incident.json"
    assert max(map(len, lines)) < 250


def test_many_lines_of_gpus_push_out_no_evidence() -> None:
    ranks = [rank(number, gpu=[f"kernel spin on GPU {number}"]) for number in range(64)]
    text = text_of(*ranks)
    assert "- GPU of TP7: kernel spin on GPU 7\n- 56 more in incident.json\n- stack: captured" in text
    assert "- proc_state: captured" in text


def test_evidence_that_failed_with_another_number_stands_apart() -> None:
    ranks = [rank(number) for number in range(16)]
    for number, one in enumerate(ranks):
        why = f"py-spy ended with status {2 if number == 9 else 1} after {number}.5 s"
        one["evidence"].append({"kind": "native", "status": "failed", "reason": why})
    text = text_of(*ranks)
    assert "- native: failed of TP0-8, TP10-15 (py-spy ended with status 1 after N.N s)" in text
    assert "- native: failed of TP9 (py-spy ended with status 2 after 9.5 s)" in text
