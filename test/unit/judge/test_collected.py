"""What `collect` saw of a real server of two ranks (SGLang 0.5.23, three snapshots each) in eight states."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.model.case import case_of
from sglang_crashkit.sources.text.reader import read

FOLDER = Path(__file__).parent / "collected"


@pytest.mark.parametrize(
    ("state", "kind", "first"),
    [
        ("idle", "no_incident", None),
        ("load", "busy", None),
        ("spin", "rank_stuck", "TP1"),
        ("hold_gil", "rank_stuck", "TP1"),
        ("stop", "stopped_process", "TP1"),
        # The child that it forked bears the same title.
        ("sleep_in_kernel", "stuck_in_kernel", "TP1 (pid 8663)"),
        ("detok_spin", "detokenizer_stuck", "detokenizer"),
        ("tok_spin", "tokenizer_stuck", "tokenizer"),
    ],
)
def test_a_state_is_told_by_its_snapshots(state: str, kind: str, first: str | None) -> None:
    verdict = judge(case_of(read(sorted(FOLDER.glob(f"{state}-*.json.gz")))))
    assert (verdict.kind, verdict.first) == (kind, first)


def test_a_torn_snapshot_costs_no_other(tmp_path: Path) -> None:
    whole = sorted(FOLDER.glob("spin-*.json.gz"))
    torn = tmp_path / "torn.json.gz"
    torn.write_bytes(whole[0].read_bytes()[:1000])
    problems: list[CrashkitError] = []
    assert judge(case_of(read([torn, *whole[1:]], problems))).first == "TP1"
    assert "torn.json.gz cannot be read" in str(problems[0])
