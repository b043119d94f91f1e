from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_crashkit.analysis.silence import judge_silence
from unit.analysis.real_stacks import DETOKENIZE, process, rounds
from unit.analysis.scenarios import Row, ranks

WAITING = ranks(["ALL_REDUCE", "ALL_REDUCE"], 3)
MOVING = ranks(["ALL_REDUCE/MATMUL", "MATMUL/ALL_REDUCE"], 3)
STOPPED = ranks(["ALL_REDUCE", "ALL_REDUCE"], 3, ["T", "T"])
GONE = ranks(["ALL_REDUCE", "ALL_REDUCE"], 3, ["", "Z"])
UNSEEN = ranks(["-", "-"], 3)
BESIDE = process(9, DETOKENIZE, title="sglang::detokenizer", role="detokenizer", state="T")


@pytest.mark.parametrize(
    ("rows", "how", "expected", "words"),
    [
        ([], {}, ("hang", "unknown"), "nothing is known of its ranks"),
        ([], {"answers": True}, ("excused", "supported"), "it is paused, or updates its weights"),
        ([], {"by_health": False}, ("excused", "unknown"), ""),
        (WAITING, {}, ("hang", "supported"), "no single rank looks responsible"),
        (WAITING[:2], {}, ("patience", "unknown"), ""),
        (WAITING, {"answers": True}, ("excused", "supported"), "it is paused"),
        (WAITING, {"by_health": False}, ("hang", "supported"), ""),
        (MOVING, {}, ("patience", "unknown"), "whether they get on with the batch cannot be seen"),
        (MOVING, {"by_health": False}, ("excused", "supported"), "its ranks go on"),
        (ranks(["SPIN", "SPIN"], 3), {"by_health": False}, ("excused", "supported"), "its ranks go on"),
        (ranks(["RECEIVE", "BROADCAST"], 3), {}, ("patience", "unknown"), "waited for requests"),
        (ranks(["ALL_REDUCE", "COMPILE"], 3), {}, ("patience", "supported"), "TP1 (pid 11) compiled a kernel"),
        (ranks(["ALL_REDUCE", "LOAD"], 3), {"by_health": False}, ("excused", "supported"), "loaded weights"),
        (ranks(["ALL_REDUCE", "SPIN"], 3, ["", "t"]), {}, ("excused", "established"), "TP1 (pid 11) was held by"),
        (STOPPED, {"server_state": "T"}, ("excused", "established"), "the whole server is stopped"),
        (STOPPED, {"answers": True}, ("hang", "established"), "are stopped (state T)"),
        ([[*row, BESIDE] for row in MOVING], {}, ("hang", "established"), "sglang::detokenizer (pid 9) is stopped"),
        (GONE, {}, ("crash", "established"), "TP1 (pid 11) is gone"),
        ([[row[1]] for row in GONE], {}, ("patience", "unknown"), "whether the server ends too cannot be seen"),
        ([[row[1]] for row in GONE], {"by_health": False}, ("crash", "established"), ""),
        (UNSEEN, {}, ("hang", "unknown"), "no stack was seen"),
        (
            [[replace(one, cpu_secs=5.0 * at) for one in row] for at, row in enumerate(UNSEEN)],
            {},
            ("patience", "unknown"),
            "",
        ),
    ],
)
def test_a_server_that_answers_nothing(
    rows: list[Row], how: dict[str, Any], expected: tuple[str, str], words: str
) -> None:
    judged = judge_silence(rounds(*rows), **how)
    assert (judged.outcome, judged.level) == expected
    assert words in judged.reason
