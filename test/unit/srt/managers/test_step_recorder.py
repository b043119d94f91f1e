from __future__ import annotations

import logging
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.memory.steps import NAME, LastSteps, StepReader, StepWriter
from sglang_crashkit.model.step import Step
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt.managers import step_recorder
from unit.srt.conftest import Listener
from unit.srt.managers.stepping import (
    DECODE,
    EXTEND,
    IDLE,
    MIXED,
    AbortReq,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqInput,
    ForwardMode,
    Lengths,
    Req,
    Scheduler,
    TokenizedGenerateReqInput,
    batch_of,
    forget_recorder,
)
from unit.support.waiting import descriptors, memory_named

MODES = {str(int(mode)): mode.name.lower() for mode in ForwardMode}
VERIFY, DRAFT, PREBUILT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.PREBUILT
A, B = Req("a", 4), Req("b", 7)


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_recorder()
    upstream = SimpleNamespace(ForwardMode=ForwardMode)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.forward_batch_info", upstream)
    yield
    forget_recorder()


def read() -> LastSteps:
    return StepReader(memory_named(NAME), {int(number): name for number, name in MODES.items()}).read()


def last() -> Step:
    return read().steps[-1]


def phases() -> list[tuple[int, str]]:
    return [(step.number, step.phase) for step in read().steps]


@pytest.fixture
def scheduler(listener: Listener) -> Scheduler:
    return Scheduler()


@pytest.mark.parametrize("gone", [("last_batch",), ("waiting_queue", "forward_ct")])
def test_attributes_that_are_gone_change_nothing(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, gone: tuple[str, ...]
) -> None:
    batch = batch_of(DECODE, [A])
    for name in gone:
        delattr(scheduler, name)
    for number in range(1, 4):
        scheduler.process_input_requests()
        # The batch before was the last thing that it did.
        assert number == 1 or phases()[-1] == (number, "received")
        if "forward_ct" not in gone:
            scheduler.forward_ct += 1
        step_recorder.on_scheduled(scheduler, batch)
        scheduler.process_batch_result(batch)
        assert phases()[-1] == (number, "processed")
    for _ in range(2):
        scheduler.process_input_requests()
    # It has nothing to do.
    assert read().current is None
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(told) == sorted(
        f"crash kit: the scheduler of this SGLang has no {name}, and the kit does without it" for name in gone
    )


def test_a_decode_goes_on_until_its_requests_change(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step says is the same whether it was written out or goes on, however SGLang changes the batch."""
    batch = batch_of(DECODE, [A, B])
    written_out = []
    write = StepWriter.schedule

    def noting(writer: StepWriter, number: int, *given: Any) -> None:
        written_out.append(number)
        write(writer, number, *given)

    monkeypatch.setattr(StepWriter, "schedule", noting)

    def step(lengths: list[int], **changed: Any) -> None:
        vars(batch).update({"seq_lens_cpu": Lengths(lengths), "forward_mode": DECODE, **changed})
        scheduler.step(batch)
        known = zip(batch.reqs, lengths, strict=True)
        assert [(one.rid, one.length) for one in last().requests] == [(req.rid, length) for req, length in known]
        assert last().mode == batch.forward_mode.name.lower()

    step([4, 7])
    step([5, 8])
    step([6, 9])
    batch.reqs.append(Req("c", 3))
    step([7, 10, 3])
    step([8, 11, 4])
    step([9, 12], reqs=batch.reqs[:2])
    step([9, 12], forward_mode=VERIFY)
    step([9, 12], spec_algorithm=SimpleNamespace(is_none=lambda: False), reqs=[Req("d", 9), Req("e", 12)])
    step([9, 12], spec_algorithm=None)
    step([10, 13])
    scheduler.last_batch = None
    for _ in range(2):
        scheduler.process_input_requests()
    step([11, 14])
    assert written_out == [1, 4, 6, 7, 8, 9, 11]


def test_a_step_goes_through_its_phases(scheduler: Scheduler) -> None:
    batch = batch_of(EXTEND, [A, B], prefix_lens=[0, 5], extend_lens=[4, 2])
    scheduler.process_input_requests([TokenizedGenerateReqInput("a"), FlushCacheReqInput()])
    assert (last().phase, [one.rid for one in last().requests]) == ("received", ["a"])
    scheduler.forward_ct += 1
    step_recorder.on_scheduled(scheduler, batch)
    found = last()
    assert (found.number, found.phase, found.mode, found.size, found.tokens) == (1, "scheduled", "extend", 2, 6)
    assert [(one.rid, one.tokens, one.length) for one in found.requests] == [("a", 4, 4), ("b", 2, 7)]
    step_recorder.on_forward(SimpleNamespace(forward_mode=EXTEND))
    assert last().phase == "forward_begun"
    step_recorder.on_results(batch, None)
    assert last().phase == "forward_done"
    step_recorder.on_processed()
    assert (last().phase, last().forward) == ("processed", "extend")
    assert (last().ended or 0) >= last().began


@pytest.mark.parametrize(
    ("changed", "phase"),
    [
        ({}, "forward_begun"),
        ({"copy_done": None}, "forward_begun"),
        ({"copy_done": SimpleNamespace(query=lambda: False)}, "forward_begun"),
        ({"copy_done": SimpleNamespace(query=lambda: 1 / 0)}, "forward_begun"),
        ({"copy_done": SimpleNamespace(query=lambda: True)}, "forward_done"),
    ],
)
def test_a_gpus_pass_is_done_when_its_results_arrive(scheduler: Scheduler, changed: dict[str, Any], phase: str) -> None:
    scheduler.device = "cuda"
    scheduler.process_input_requests()
    batch = batch_of(DECODE, [A])
    scheduler.run_batch(batch)
    step_recorder.on_results(batch, SimpleNamespace(**changed))
    assert last().phase == phase
    step_recorder.on_processed()
    assert last().phase == "processed"


@pytest.mark.parametrize("is_counted", [False, True])
def test_with_overlap_a_step_is_processed_after_the_next_launch(scheduler: Scheduler, is_counted: bool) -> None:
    batches = [batch_of(DECODE, [A], forward_iter=number if is_counted else None) for number in (1, 2, 3)]
    for number in (1, 2, 3):
        scheduler.process_input_requests()
        scheduler.run_batch(batches[number - 1])
        if number > 1:
            scheduler.process_batch_result(batches[number - 2])
        assert phases()[-1] == (number, "forward_begun")
        assert phases()[:-1] == [(before, "processed") for before in range(1, number)]
        assert (read().current or last()).number == number
        scheduler.last_batch = batches[number - 1]


@pytest.mark.parametrize("is_counted", [False, True])
def test_an_idle_batch_within_a_prefilled_one_ends_with_it(scheduler: Scheduler, is_counted: bool) -> None:
    numbers = (1, 2, 3) if is_counted else (None,) * 3
    outer = batch_of(PREBUILT, [A], inner_idle_batch=object(), forward_iter=numbers[0])
    inner, following = batch_of(IDLE, [], forward_iter=numbers[1]), batch_of(DECODE, [A], forward_iter=numbers[2])
    scheduler.process_input_requests()
    scheduler.run_batch(outer)
    outer.inner_idle_batch = None
    scheduler.run_batch(inner)
    scheduler.process_batch_result(outer)
    assert phases() == [(1, "processed"), (2, "processed")]
    scheduler.step(following)
    assert phases()[-1] == (3, "processed")


def test_passes_of_speculative_decoding_are_told_apart(scheduler: Scheduler) -> None:
    speculating = SimpleNamespace(is_none=lambda: False)
    request = Req("a", 4)
    request.output_ids = [1, 2, 3]
    scheduler.process_input_requests()
    # What the CPU knows of lengths comes late from the GPU there.
    batch = batch_of(DECODE, [request], spec_algorithm=speculating, seq_lens_cpu=Lengths([99]))
    scheduler.run_batch(batch, DRAFT)
    assert (last().mode, last().forward) == ("decode", "draft_extend_v2")
    step_recorder.on_forward(SimpleNamespace(forward_mode=VERIFY))
    assert (last().mode, last().forward) == ("decode", "target_verify")
    assert [one.length for one in last().requests] == [7]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (batch_of(IDLE, []), ("idle", 0, [])),
        (batch_of(MIXED, [A, B], prefix_lens=[0, 6], extend_lens=[4, 1]), ("mixed", 5, [(4, 4), (1, 7)])),
        (batch_of(DECODE, [A, B], seq_lens_cpu=None), ("decode", 2, [(1, 4), (1, 7)])),
        (batch_of(DECODE, [A, B], seq_lens_cpu=Lengths([5, 8])), ("decode", 2, [(1, 5), (1, 8)])),
        (batch_of(DECODE, [A, B], seq_lens_cpu=Lengths([5, 8, 8])), ("decode", 2, [(1, 4), (1, 7)])),
        (batch_of(EXTEND, [A], extend_lens=[1, 2], extend_num_tokens=3), ("extend", 3, [(1, 4)])),
        (batch_of(None, []), ("", 0, [])),  # type: ignore[arg-type]
    ],
)
def test_batches_of_each_kind(scheduler: Scheduler, batch: Any, expected: tuple[str, int, list[Any]]) -> None:
    scheduler.step(batch)
    found = last()
    assert (found.mode, found.tokens, [(one.tokens, one.length) for one in found.requests]) == expected
    assert found.phase == "processed"


def test_a_scheduler_without_anything_to_do_is_in_no_step(scheduler: Scheduler) -> None:
    scheduler.step(batch_of(DECODE, [A]))
    scheduler.process_input_requests()
    current = read().current
    assert (current.number, current.phase) == (2, "received")
    scheduler.last_batch = None
    scheduler.process_input_requests()
    assert read().current is None
    scheduler.process_input_requests([BatchTokenizedGenerateReqInput([TokenizedGenerateReqInput(rid) for rid in "xy"])])
    # It is not scheduled, as it waits for a grammar or for other servers.
    scheduler.process_input_requests()
    current = read().current
    assert [one.rid for one in current.requests] == ["x", "y"]


def decisions_of(listener: Listener, *, decide: Any) -> tuple[Step, Step]:
    """Return the steps of two ranks, the second of which decided something else on its own."""
    found = []
    for odd in (False, True):
        forget_recorder()
        scheduler = Scheduler()
        scheduler.tree_cache = SimpleNamespace(ongoing_prefetch={}, ongoing_write_through={})
        scheduler.step(batch_of(DECODE, [A, B]))
        if odd:
            decide(scheduler)
        scheduler.step(batch_of(DECODE, [A, B]))
        first, second = read().steps
        scheduler.step(batch_of(DECODE, [A, B]))
        found.append((first, second, last()))
    assert found[0][0].agreed_hash == found[1][0].agreed_hash
    # And never again after that.
    assert found[0][2].agreed_hash != found[1][2].agreed_hash
    return found[0][1], found[1][1]


@pytest.mark.parametrize(
    ("decide", "name"),
    [
        (lambda scheduler: scheduler.process_input_requests([AbortReq("a")]), "abort"),
        # From 0.5.23 on one rank decides on timeouts, and tells all.
        (
            lambda scheduler: scheduler.process_input_requests([AbortReq("a", "Request waiting timeout reached.")]),
            "timeout",
        ),
        (lambda scheduler: scheduler.retract([A]), "retract"),
        (lambda scheduler: scheduler.grammar_manager.grammar_queue.append(A), "grammar"),
        (lambda scheduler: scheduler.tree_cache.ongoing_prefetch.update(a=1), "prefetch"),
        (lambda scheduler: scheduler.tree_cache.ongoing_write_through.update(a=1), "write_back"),
        (lambda scheduler: scheduler.process_input_requests([TokenizedGenerateReqInput("c")]), None),
        (lambda scheduler: scheduler.process_input_requests([FlushCacheReqInput()]), None),
    ],
)
def test_what_one_rank_decides_alone_is_told_and_hashed(listener: Listener, decide: Any, name: str | None) -> None:
    usual, odd = decisions_of(listener, decide=decide)
    assert usual.agreed_hash != odd.agreed_hash
    told = {key for key in usual.decisions | odd.decisions if usual.decisions.get(key) != odd.decisions.get(key)}
    assert told == ({name} if name else set())


def test_only_the_order_of_requests_matters_not_their_grouping(listener: Listener) -> None:
    hashes = []
    one, two = TokenizedGenerateReqInput("one"), TokenizedGenerateReqInput("two")
    for rounds in ([[one, two]], [[one], [], [two]], [[two, one]]):
        forget_recorder()
        scheduler = Scheduler()
        for requests in rounds:
            scheduler.process_input_requests(requests)
        scheduler.step(batch_of(EXTEND, [Req("one", 4), Req("two", 4)]))
        hashes.append(last().agreed_hash)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    "rid",
    ["\ud800", "", "x" * 1_000_000, "\0", "é\udcff", "HEALTH_CHECK_1", None, 7, ["a"]],
    ids=["lone surrogate", "empty", "long", "zero byte", "not UTF-8", "health check", "none", "number", "list"],
)
def test_no_id_of_a_users_switches_it_off(scheduler: Scheduler, caplog: pytest.LogCaptureFixture, rid: Any) -> None:
    request = TokenizedGenerateReqInput(rid)
    scheduler.step(batch_of(EXTEND, [Req(rid, 4)]), [request, BatchTokenizedGenerateReqInput([request]), AbortReq(rid)])
    scheduler.retract([Req(rid, 4)])
    scheduler.step(batch_of(DECODE, [Req(rid, 5)]))
    assert (phases(), caplog.text) == ([(1, "processed"), (2, "processed")], "")
    assert last().requests[0].tokens == 1


def test_nothing_that_is_noted_grows(scheduler: Scheduler) -> None:
    tracemalloc.start()
    for number in range(1000):
        requests = [TokenizedGenerateReqInput(f"{number}-{place}") for place in range(20)]
        scheduler.process_input_requests(requests)
        # Results that are never processed.
        if number % 2:
            scheduler.run_batch(batch_of(DECODE, [Req(f"{number}", 3)]))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # All of the ids alone would take four times as much.
    assert peak < 1 << 20
    assert last().phase == "forward_begun"


def test_without_a_handler_nothing_is_noted_but_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "no one"))
    before = len(descriptors())
    for _round in range(3):
        Scheduler().step(batch_of(DECODE, [A]))
    assert len(caplog.records) == 1
    assert "the steps of this scheduler are not recorded: " in caplog.text
    assert len(descriptors()) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scheduler: scheduler.process_input_requests([BatchTokenizedGenerateReqInput(None)]),  # type: ignore[arg-type]
        lambda scheduler: scheduler.run_batch(SimpleNamespace(forward_mode=DECODE)),
        lambda scheduler: scheduler.run_batch(batch_of(EXTEND, [A], extend_lens=None)),
        lambda scheduler: scheduler.run_batch(batch_of(DECODE, [A], seq_lens_cpu=Lengths([-1]))),
        lambda _scheduler: step_recorder.on_forward(None),
        lambda scheduler: scheduler.retract([None]),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_noted_is_left_out_and_in_the_end_switches_it_off(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    scheduler.step(batch_of(DECODE, [A]))
    memory = memory_named(NAME)
    with caplog.at_level(logging.WARNING):
        spoil(scheduler)
        scheduler.step(batch_of(DECODE, [B]))
        assert [one.rid for one in last().requests] == ["b"]
        assert last().phase == "processed"
        for _ in range(16):
            spoil(scheduler)
            scheduler.forward_ct += 1
    first, second = (record.message for record in caplog.records)
    assert first.endswith("is not recorded")
    assert second == "crash kit: the steps of this scheduler are not recorded any more"
    # What was noted before stays, and says nothing of now.
    scheduler.step(batch_of(DECODE, [A]))
    found = StepReader(memory).read()
    assert (found.steps[0].phase, found.current) == ("processed", None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
        ("LoadLoRAAdapterReqInput", "load_lora_adapter"),
        ("SetInternalStateReq", "set_internal_state"),
        ("ReleaseMemoryOccupationReqInput", "release_memory_occupation"),
        ("ProfileReq", "profile"),
        ("_odd", "_odd"),
    ],
)
def test_a_control_request_is_called_as_its_route(scheduler: Scheduler, kind: str, name: str) -> None:
    scheduler.process_input_requests([type(kind, (), {})()])
    assert read().control == name


def test_a_control_request_is_noted_until_what_comes_next(listener: Listener) -> None:
    scheduler = Scheduler()
    step_recorder.on_received(scheduler, [TokenizedGenerateReqInput("a"), FlushCacheReqInput()])
    assert read().control == "flush_cache"
    # What only reads, as a router does again and again, does not count.
    for requests in ([], [type("GetLoadsReqInput", (), {})()]):
        step_recorder.on_received(scheduler, requests)
        assert read().control == ""
    step_recorder.on_received(scheduler, [FlushCacheReqInput()])
    scheduler.forward_ct = 1
    step_recorder.on_scheduled(scheduler, batch_of(EXTEND, [A], prefix_lens=[0], extend_lens=[4]))
    assert read().control == ""


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.usefixtures("listener")
def test_a_stage_with_nothing_to_do_processes_another_batch(is_counted: bool) -> None:
    scheduler = Scheduler(pp_size=2)
    batch = batch_of(DECODE, [Req("a", 4, [7])], forward_iter=1 if is_counted else None)
    scheduler.process_input_requests()
    scheduler.run_batch(batch)
    scheduler.last_batch = None
    scheduler.process_input_requests()
    assert read().current is None
    step_recorder.on_results(batch, None)
    assert [one.rid for one in read().current.requests] == ["a"]
    step_recorder.on_processed()
    assert (last().phase, read().current) == ("processed", None)
