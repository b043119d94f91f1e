"""Answers of PyTorch's recorder of gloo; `gloo_answers` are those of ``integration/gloo_rank.py`` with PyTorch 2.14."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from pathlib import Path

import pytest

from sglang_crashkit.analysis.collectives import RankRecord, judge_collectives
from sglang_crashkit.capture.flight_request import Received
from sglang_crashkit.capture.gloo_request import GlooRequest, NoRecorderError, parse_answer
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.model.flight_dump import FlightDumpError
from unit.capture.test_responder import impostor as impostor
from unit.flight_dumps import document, entry, pickled
from unit.targets import LOCK_HOLDER, SLEEPER, armed, settle
from unit.targets import runtime as runtime
from unit.waiting import descriptors, wait_until

ANSWERS = [(Path(__file__).parent / "gloo_answers" / f"rank{rank}").read_bytes() for rank in (0, 1)]
HEAD = b"1 1795300000.5\n"
DUMP = pickled(document([entry(0, 1, backend="gloo")]))


def received(request: GlooRequest) -> Received:
    found: list[Received] = []

    def look() -> bool:
        found.extend(one for one in [request.look()] if one is not None)
        return bool(found)

    wait_until(look, "the whole answer")
    return found[0]


def test_of_two_real_ranks_the_one_is_named_that_has_not_entered_what_the_other_waits_in() -> None:
    told = [parse_answer(answer) for answer in ANSWERS]
    records = [RankRecord(one.rank, f"rank {one.rank}", "", one.dump, told[0].seconds + 7, "gloo") for one in told]
    first, second = judge_collectives(records)
    assert (first.kind, first.named, first.waiting, first.level) == ("behind", (1,), ("rank 0",), "established")
    assert re.fullmatch(
        r"rank 1 had not begun all_reduce of 4x3 of process group tp \(gloo 1, ranks 0-1\), number 4, which rank 0 "
        r"had begun \d\.\d s before and not finished; it was begun in main \(gloo_rank.py:\d+\)\.",
        first.statement,
    )
    assert (second.kind, second.group) == ("in_step", "process group 0 (default_pg, ranks 0-1)")


def test_an_answer_that_comes_bit_by_bit_is_taken_when_it_is_whole(impostor) -> None:
    open_before = descriptors()
    request = GlooRequest(os.getpid(), impostor(HEAD + DUMP))
    with contextlib.closing(request):
        request.send()
        told = received(request)
    assert (told.rank, told.seconds, told.data) == (1, 1795300000.5, DUMP)
    assert len(descriptors()) <= len(open_before) + 1  # the impostor's own


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "it had no answer"),
        (b"\xff\xfe" * 1000, r"^(\\xff\\xfe){100}$"),
        (b"-1 1.0\n" + DUMP, "^-1 1.0$"),
        (b"1" * 5000 + b" 1.0\n" + DUMP, "^1{200}$"),
        (b"1 nan\n" + DUMP, "^1 nan$"),
        (HEAD, "cut off"),
        (HEAD + DUMP[:-9], "cut off"),
        (HEAD + DUMP + b"more", "bytes follow its end"),
        (HEAD + b'{"version": "2.10"}', "no pickle"),
        (HEAD + b"\x80\x02cos\nsystem\n.", "builds no plain data"),
        (HEAD + pickle.dumps([1], 2), "a list stands in it where a dict belongs"),
        (HEAD + pickled(document([]) | {"version": "9.1"}), "nothing is known"),
        (HEAD + b"x" * (17 << 20), "more than 16 MiB"),
    ],
    ids=range(13),
)
def test_what_is_no_answer_is_named_within_bounds(impostor, answer: bytes, words: str) -> None:
    request = GlooRequest(os.getpid(), impostor(answer))
    request.send()
    with contextlib.closing(request), pytest.raises(FlightDumpError, match=words):
        received(request)


def test_a_process_without_pytorch_says_so_and_one_that_holds_the_gil_says_nothing(runtime: Path) -> None:
    with armed(runtime, SLEEPER) as free, armed(runtime, LOCK_HOLDER) as held:
        free_request, held_request = (
            GlooRequest(one.pid, HookFiles.of(runtime, one.pid, one.start_ticks).socket) for one in (free, held)
        )
        settle(held.pid, "S")
        for request in (held_request, free_request):
            request.send()
        with pytest.raises(NoRecorderError, match=r"^it has no process group$"):
            received(free_request)
        assert held_request.look() is None
        assert held_request.leftover() == "no answer, the GIL is not to be had"
        for request in (free_request, held_request):
            request.close()


def test_where_nobody_listens_it_is_said(runtime: Path) -> None:
    with pytest.raises(FlightDumpError, match="no thread of it answers: No such file or directory"):
        GlooRequest(os.getpid(), runtime / "absent.sock").send()
