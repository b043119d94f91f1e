from __future__ import annotations

import pytest

from sglang_crashkit.analysis.verdict import BUSY_TOO_LONG, FailureEvent, find_busy, judge
from sglang_crashkit.model.incident import Incident, LastSign, ProcessReport, ServerInfo, Trigger
from sglang_crashkit.model.sample import Sample

WAITS = ("all_reduce (torch/distributed/distributed_c10d.py:3913)",)
COMPILES = ("make_llir (triton/backends/nvidia/compiler.py:400)", "compile (triton/compiler/compiler.py:280)")
LOADS = ("clone (torch/_tensor.py:9)", "load_weights (models/llama.py:700)")
EXPORTS = ("save (torch/profiler/profiler.py:1)", "export_chrome_trace (torch/profiler/profiler.py:212)")
STOPS = ("stop (torch/profiler/profiler.py:1)", "_stop_profile (managers/scheduler_components/profiler_manager.py:361)")
ATTENDS = ("forward_extend (layers/attention/torch_native_backend.py:99)", "run_batch (managers/scheduler.py:9)")
ON_GPU = ("synchronize (torch/cuda/streams.py:231)", "process_batch_result_prefill (managers/x.py:1)")
SPINS = ("spin (sitecustomize.py:12)", "run_batch (managers/scheduler.py:9)")


def rank(
    number: int, frames: tuple[str, ...], *, state: str = "R", cpu: float = 1.0, looks: int = 3, tokens: int = 0
) -> ProcessReport:
    """Return a rank that was seen in the same frames at each look, with so much CPU time a second."""
    report = ProcessReport(10 + number, f"sglang::scheduler_TP{number}", "scheduler", {"tp": number})
    for second in range(looks):
        report.samples.append(Sample(time=1000.0 + second, state=state, cpu_secs=cpu * second, doing=frames))
    report.doing = list(frames)
    report.last_sign = LastSign("batch 20", 20, 1, "extend", tokens, 5.0)
    return report


@pytest.mark.parametrize("frames", [COMPILES, LOADS, EXPORTS, STOPS])
@pytest.mark.parametrize("looks", [1, 3])
def test_a_rank_for_which_the_others_wait_may_be_at_work(frames: tuple[str, ...], looks: int) -> None:
    said = find_busy([rank(0, WAITS, state="S", cpu=0.0, looks=looks), rank(1, frames, looks=looks)])
    assert said.startswith("sglang::scheduler_TP1 (pid 11) ")
    assert said.endswith(": at work, which may take long.")


def test_so_may_all_be() -> None:
    assert "TP0" in find_busy([rank(0, LOADS), rank(1, LOADS)])


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([], id="nobody"),
        pytest.param([rank(0, WAITS), rank(1, SPINS)], id="spins"),
        pytest.param([rank(0, WAITS), rank(1, COMPILES, cpu=0.01)], id="stands still at a compiler"),
        pytest.param([rank(0, WAITS), rank(1, COMPILES, state="T")], id="stopped"),
        pytest.param([rank(0, WAITS), rank(1, COMPILES), rank(2, COMPILES, state="T")], id="another one is stopped"),
        pytest.param([rank(0, WAITS), rank(1, COMPILES), rank(2, SPINS)], id="another one spins"),
        pytest.param([rank(0, WAITS), rank(1, COMPILES), rank(2, ())], id="another one was not seen"),
        pytest.param([rank(0, WAITS), rank(1, WAITS)], id="all wait"),
    ],
)
def test_no_other_is(ranks: list[ProcessReport]) -> None:
    assert find_busy(ranks) == ""


@pytest.mark.parametrize(("tokens", "is_busy"), [(40_000, True), (8_192, False)])
def test_a_long_prompt_in_one_piece_is_work(tokens: int, is_busy: bool) -> None:
    assert bool(find_busy([rank(0, ATTENDS, tokens=tokens), rank(1, WAITS, tokens=tokens)])) is is_busy
    assert bool(find_busy([rank(0, ON_GPU, cpu=0.0, tokens=tokens), rank(1, ON_GPU, tokens=tokens)])) is is_busy
    assert find_busy([rank(0, ATTENDS, cpu=0.0, tokens=tokens), rank(1, WAITS, tokens=tokens)]) == ""


def incident(trigger: str) -> Incident:
    ranks = [rank(0, WAITS), rank(1, COMPILES)]
    return Incident("i", "hang", Trigger(trigger, "t", 10, "TP0"), ServerInfo(1, "0.5.23", "0.1", "h"), processes=ranks)


@pytest.mark.parametrize(
    ("trigger", "kind"),
    [
        ("no_progress", "busy"),
        ("silent_at_sigterm", "busy"),
        (BUSY_TOO_LONG, "hang"),
        # The server ends for it.
        ("watchdog_timeout", "hang"),
    ],
)
def test_the_verdict_says_so_and_blames_nobody(trigger: str, kind: str) -> None:
    found = judge(incident(trigger), [FailureEvent(pid, 1.0, "hang", "made no progress") for pid in (10, 11)])
    assert (found.kind, found.level) == (kind, "supported")
    if kind == "busy":
        assert found.first_failure is None
        assert "compiled a kernel in make_llir" in found.text
        assert "sglang::scheduler_TP0 (pid 10) and sglang::scheduler_TP1 (pid 11) made no progress." in found.text


def test_a_death_is_no_work() -> None:
    events = [FailureEvent(10, 1.0, "hang", "made no progress"), FailureEvent(11, 2.0, "exit", fatal_signal=True)]
    assert judge(incident("no_progress"), events).kind != "busy"
