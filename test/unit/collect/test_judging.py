"""What the judge says of snapshots that `collect` alone sees: who is gone, one look, one side of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.collect.collection import judged
from sglang_crashkit.model.event import Arguments
from sglang_crashkit.model.sample import Frame, Sample, Thread
from sglang_crashkit.model.snapshot import NodeSnapshot
from sglang_crashkit.view.collected import summary
from sglang_crashkit.view.markdown import section_lines

LOOP = Frame("event_loop_normal", "sglang/srt/managers/scheduler.py", 2000)
WAITS = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3913), LOOP)
RUNS = (Frame("step", "sglang/srt/managers/schedule_batch.py", 7), LOOP)
ASKS = (Frame("recv_requests", "sglang/srt/managers/scheduler.py", 90), LOOP)
FORWARD = (
    Frame("LlamaModel.forward", "sglang/srt/models/llama.py", 487),
    Frame("EagerRunner._execute_decode", "sglang/srt/model_executor/runner/eager_runner.py", 268),
    Frame("EagerRunner.execute", "sglang/srt/model_executor/runner/eager_runner.py", 222),
    Frame("Scheduler.run_batch", "sglang/srt/managers/scheduler.py", 4704),
    LOOP,
)
#: Where a rank may be at any moment of a batch, and of what comes between two batches.
EMBEDS = (
    WAITS[0],
    Frame("VocabParallelEmbedding.forward", "sglang/srt/layers/vocab_parallel_embedding.py", 9),
    *FORWARD,
)
SUMS = (WAITS[0], Frame("sum_output", "sglang/srt/layers/layer_boundary/ops.py", 243), *FORWARD)
COMPUTES = (Frame("UnquantizedLinearMethod.apply", "sglang/srt/layers/quantization/unquant.py", 614), *FORWARD)
PREPARES = (Frame("StageBoundary.prepare", "sglang/srt/layers/layer_boundary/stage.py", 193), *FORWARD)
TAKES_IN = (
    Frame("broadcast", "torch/distributed/distributed_c10d.py", 3787),
    Frame("_broadcast_reqs_across_ranks", "sglang/srt/managers/scheduler_components/request_receiver.py", 206),
    LOOP,
)
ANYWHERE = st.sampled_from([EMBEDS, SUMS, COMPUTES, PREPARES, TAKES_IN])
SYNCHRONIZES = (Frame("synchronize", "torch/cuda/streams.py", 231), LOOP)


def rank(number: int, frames: tuple[Frame, ...], **fields: Any) -> Sample:
    thread = Thread("MainThread", 10 + number, False, False, frames)
    fields = {"state": "S", "server": 1, "title": f"sglang::scheduler_TP{number}", "role": "scheduler"} | fields
    return Sample("n1", 10 + number, 1, ranks={"tp": number}, threads=(thread,), **fields)


def rounds(*looks: Sequence[Sample]) -> list[NodeSnapshot]:
    return [
        NodeSnapshot("n1", 5.0 * at, tuple(Sample(**{**vars(one), "time": 5.0 * at}) for one in look))
        for at, look in enumerate(looks, start=1)
    ]


def test_who_was_there_before_is_named_as_gone() -> None:
    verdict, _case = judged(rounds([rank(0, WAITS), rank(1, WAITS)], [rank(0, WAITS)]))
    assert (verdict.kind, verdict.level, verdict.first) == ("exited", "established", "TP1")
    assert verdict.headline.startswith("TP1 has ended (state X), while TP0 waits in all_reduce")


def test_a_helper_that_ended_is_nobody() -> None:
    helper = rank(5, (), title="cc1plus", role="helper")
    verdict, _case = judged(rounds([rank(0, ASKS), helper], [rank(0, ASKS)], [rank(0, ASKS)]))
    assert (verdict.kind, verdict.first) == ("no_incident", None)


def test_one_look_does_not_tell_work_from_a_hang() -> None:
    verdict, _case = judged(rounds([rank(0, RUNS)]))
    assert (verdict.kind, verdict.level) == ("busy", "unknown")
    assert verdict.headline.endswith("one sample cannot distinguish work from a hang")
    assert judged(rounds([rank(0, RUNS)], [rank(0, RUNS)]))[0].kind == "rank_stuck"


@given(
    walk=st.tuples(ANYWHERE, ANYWHERE).filter(lambda two: two[0] != EMBEDS),
    other=st.tuples(ANYWHERE, ANYWHERE, ANYWHERE),
    rank_of_walk=st.sampled_from([0, 1]),
)
def test_ranks_that_come_through_a_collective_are_busy_wherever_they_are(
    walk: tuple[Any, ...], other: tuple[Any, ...], rank_of_walk: int
) -> None:
    both = zip((EMBEDS, *walk), other, strict=True)
    looks = [[rank(rank_of_walk, one), rank(1 - rank_of_walk, two)] for one, two in both]
    verdict, _case = judged(rounds(*looks))
    assert verdict.kind in ("busy", "no_incident"), verdict.headline
    assert verdict.level == "supported"


@pytest.mark.parametrize(
    ("stuck", "kind", "first"),
    [
        ((COMPUTES, COMPUTES, COMPUTES), "gpu_stall", None),
        ((COMPUTES, PREPARES, COMPUTES), "gpu_stall", None),
        ((RUNS, RUNS, RUNS), "rank_stuck", "TP1"),
    ],
    ids=["computes", "goes round in one batch", "in the loop"],
)
def test_a_rank_for_which_another_waits_all_the_time_is_stuck(
    stuck: tuple[Any, ...], kind: str, first: str | None
) -> None:
    verdict, _case = judged(rounds(*([rank(0, SUMS), rank(1, one)] for one in stuck)))
    assert (verdict.kind, verdict.first) == (kind, first)
    assert "TP1" in verdict.headline


def test_a_broadcast_that_the_sender_left_tells_nothing_of_the_others() -> None:
    sends = (TAKES_IN[0], *RUNS)
    verdict, _case = judged(rounds(*([rank(0, one), rank(1, RUNS)] for one in (sends, TAKES_IN, TAKES_IN))))
    assert verdict.kind not in ("busy", "no_incident")


@pytest.mark.parametrize(("has_other", "level"), [(False, "unknown"), (True, "supported")])
def test_one_side_of_a_pair_alone_is_told(has_other: bool, level: str) -> None:
    decode = rank(0, ASKS, side="decode")
    prefill = [rank(1, ASKS, side="prefill", server=2)] if has_other else []
    verdict, _case = judged(rounds(*[[decode, *prefill]] * 2))
    assert (verdict.kind, verdict.level) == ("no_incident", level)
    assert ("prefill side" in verdict.headline) != has_other


@pytest.mark.parametrize(("used", "device", "kind"), [(4.0, "cpu", "busy"), (0.1, "cpu", ""), (4.0, "cuda", "")])
def test_a_server_on_a_cpu_that_computes_between_its_waits_does_not_hang(used: float, device: str, kind: str) -> None:
    looks = [[rank(number, WAITS, cpu_secs=1.0 + used * at) for number in (0, 1)] for at in range(3)]
    verdict, _case = judged(rounds(*looks), [Arguments(values={"device": device, "tp_size": 2})])
    assert verdict.kind == (kind or "symmetric_stall")


def test_a_rank_without_a_stack_is_named_where_the_others_gpus_wait() -> None:
    known = [Arguments(values={"tp_size": 3})]
    verdict, _case = judged(rounds(*[[rank(0, SYNCHRONIZES), rank(1, SYNCHRONIZES)]] * 2), known)
    assert (verdict.kind, verdict.first) == ("rank_stuck", "TP2")


def test_a_summary_begins_with_the_verdict_and_ranks_that_agree_are_one() -> None:
    detokenizer = Sample("n1", 9, 1, "sglang::detokenizer", "detokenizer", server=1, state="S", problem="no")
    look = [*(rank(number, WAITS) for number in (0, 1, 3)), rank(2, RUNS, state="T"), detokenizer]
    seen = rounds(look, look)
    lines = list(section_lines(summary(seen, judged(seen)[0], None, "verdict.json")))
    assert lines[0] == "# stopped_process (established)"
    assert lines[2].startswith("**TP2 is stopped (state T, until somebody sends SIGCONT)")
    assert lines[4] == "- 2 snapshots on n1, 1970-01-01T00:00:05.000000Z to 1970-01-01T00:00:10.000000Z"
    text = "\n".join(lines)
    assert "### TP0-1,3: sleeping (S)\n- all_reduce (torch/distributed/distributed_c10d.py:3913)\n" in text
    assert "### TP2: stopped (T)\n- step (sglang/srt/managers/schedule_batch.py:7)\n" in text
    assert "### sglang::detokenizer (pid 9): sleeping (S)\n- no" in text
