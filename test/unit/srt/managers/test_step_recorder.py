from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_crashkit.memory.steps import LastSteps, StepReader
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
from unit.support.waiting import descriptors

MODES = {str(int(mode)): mode.name.lower() for mode in ForwardMode}
VERIFY, DRAFT, PREBUILT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.PREBUILT
A, B = Req("a", 4), Req("b", 7)


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(step_recorder, "forward_modes", lambda: MODES)
    forget_recorder()
    yield
    forget_recorder()


def read() -> LastSteps:
    return StepReader(step_recorder._recorder.writer.fd, {int(number): name for number, name in MODES.items()}).read()


def last() -> Step:
    return read().steps[-1]


def phases() -> list[tuple[int, str]]:
    return [(step.number, step.phase) for step in read().steps]


@pytest.fixture
def scheduler(listener: Listener) -> Scheduler:
    return Scheduler()


def test_the_first_round_tells_the_handler_where_the_steps_are(listener: Listener, scheduler: Scheduler) -> None:
    scheduler.process_input_requests()
    message = listener.heard()
    assert (message["event"], message["pid"], message["has_descriptor"]) == ("steps", os.getpid(), True)
    assert message["modes"] == MODES
    assert (read().steps, read().current) == ((), None)


def test_a_step_goes_through_its_phases(scheduler: Scheduler) -> None:
    batch = batch_of(EXTEND, [A, B], prefix_lens=[0, 5], extend_lens=[4, 2])
    scheduler.process_input_requests([TokenizedGenerateReqInput("a"), FlushCacheReqInput()])
    assert (last().phase, last().received, [one.rid for one in last().requests]) == ("received", 2, ["a"])
    scheduler.waiting_queue.append(Req("c", 1))
    scheduler.forward_ct += 1
    step_recorder.on_scheduled(scheduler, batch)
    found = last()
    assert (found.number, found.phase, found.mode, found.size, found.tokens) == (1, "scheduled", "extend", 2, 6)
    assert [(one.rid, one.tokens, one.length) for one in found.requests] == [("a", 4, 4), ("b", 2, 7)]
    assert (found.running, found.waiting, found.received, found.retracted) == (0, 1, 2, 0)
    assert (found.kv_free, found.kv_size) == (1024, 8192)
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


def counted(batch: Any, number: int) -> Any:
    """Return the batch with the number that newer releases give it."""
    batch.forward_iter = number
    return batch


@pytest.mark.parametrize("is_counted", [False, True])
def test_with_overlap_a_step_is_processed_after_the_next_launch(scheduler: Scheduler, is_counted: bool) -> None:
    batches = [batch_of(DECODE, [A]) for _ in range(3)]
    if is_counted:
        batches = [counted(batch, number) for number, batch in enumerate(batches, 1)]
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
    inner, outer = batch_of(IDLE, []), batch_of(PREBUILT, [A], inner_idle_batch=object())
    following = batch_of(DECODE, [A])
    if is_counted:
        for number, batch in enumerate((outer, inner, following), 1):
            counted(batch, number)
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
        cache = {"ongoing_prefetch": {}, "ongoing_write_through": {}}
        scheduler.tree_cache = SimpleNamespace(evictable_size=lambda: 0, **cache)
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
        (lambda scheduler: scheduler.retract([A]), "retract"),
        (lambda scheduler: scheduler.grammar_manager.grammar_queue.append(A), "grammar"),
        (lambda scheduler: scheduler.tree_cache.ongoing_prefetch.update(a=1), "prefetch"),
        (lambda scheduler: scheduler.tree_cache.ongoing_write_through.update(a=1), "write_back"),
        (lambda scheduler: scheduler.process_input_requests([TokenizedGenerateReqInput("c")]), None),
        (lambda scheduler: scheduler.process_input_requests([FlushCacheReqInput()]), None),
        (lambda scheduler: scheduler.waiting_queue.append(A), None),
        (lambda scheduler: scheduler.running_batch.reqs.append(A), None),
    ],
)
def test_what_one_rank_decides_alone_is_told_and_hashed(listener: Listener, decide: Any, name: str | None) -> None:
    usual, odd = decisions_of(listener, decide=decide)
    assert usual.agreed_hash != odd.agreed_hash
    told = {key for key in usual.decisions | odd.decisions if usual.decisions.get(key) != odd.decisions.get(key)}
    assert told == ({name} if name else set())
    assert (odd.retracted, usual.retracted) == (int(name == "retract"), 0)


EVENTS = ("arrive", "finish", "wait", "abort", "control", "retract", "idle", "other", "verify", "stop")
EVENTS += len(EVENTS) * ("decode",)


def steps_of(events: Sequence[str], listener: Listener) -> list[Step]:
    """Return the steps of a server to which these things happen."""
    forget_recorder()
    scheduler = Scheduler()
    scheduler.running_batch = scheduler.last_batch = batch = batch_of(DECODE, [Req("a", 4), Req("b", 7)])
    for number, event in enumerate(events):
        received: list[Any] = []
        if event == "arrive":
            new = Req(f"r{number}", 5)
            scheduler.step(batch_of(EXTEND, [new]), [TokenizedGenerateReqInput(new.rid)])
            batch.reqs.append(new)
            batch.seq_lens_cpu.append(5)
        elif event == "finish" and len(batch.reqs) > 1:
            batch.reqs, batch.seq_lens_cpu = batch.reqs[1:], Lengths(batch.seq_lens_cpu[1:])
        elif event == "wait":
            scheduler.waiting_queue.append(A)
        elif event == "abort":
            received = [AbortReq("a")]
        elif event == "control":
            received = [FlushCacheReqInput()]
        elif event == "retract":
            scheduler.retract([A])
        elif event == "idle":
            scheduler.step(batch_of(IDLE, []))
        elif event == "other":
            batch.seq_lens_cpu = Lengths(one + 1 for one in batch.seq_lens_cpu)
            scheduler.running_batch = batch_of(DECODE, batch.reqs, seq_lens_cpu=batch.seq_lens_cpu)
            scheduler.step(scheduler.running_batch)
            scheduler.running_batch = batch
        elif event == "stop":
            scheduler.last_batch = None
            scheduler.process_input_requests()
        for one in batch.reqs:
            one.output_ids.append(number)
        batch.seq_lens_cpu = Lengths(one + 1 for one in batch.seq_lens_cpu)
        batch.forward_mode = VERIFY if event == "verify" else DECODE
        scheduler.step(batch, received)
    listener.heard()
    return [replace(step, began=0.0, ended=0.0, kv_free=None) for step in read().steps]


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=80))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_repeated_step_is_told_as_a_whole_one(listener: Listener, events: list[str]) -> None:
    found, again = steps_of(events, listener), steps_of(events, listener)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_recorder, "_WHOLE_EVERY", 1)
        whole = steps_of(events, listener)
    assert found == again
    assert [replace(step, agreed_hash=0) for step in found] == [replace(step, agreed_hash=0) for step in whole]


def test_one_decode_in_sixteen_is_whole(scheduler: Scheduler) -> None:
    asked = []
    scheduler.token_to_kv_pool_allocator.available_size = lambda: asked.append(scheduler.forward_ct) or 1000
    scheduler.running_batch = batch = batch_of(DECODE, [A, B])
    for _ in range(40):
        scheduler.step(batch)
    assert asked == [0, 1, 16, 32]
    assert [(step.number, step.kv_free) for step in read().steps] == [(number, 1024) for number in range(1, 41)]


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
    ["\ud800", "", "x" * 1_000_000, "\0", "é\udcff"],
    ids=["lone surrogate", "empty", "long", "zero byte", "not UTF-8"],
)
def test_no_id_of_a_users_switches_it_off(scheduler: Scheduler, caplog: pytest.LogCaptureFixture, rid: str) -> None:
    request = TokenizedGenerateReqInput(rid)
    scheduler.step(batch_of(EXTEND, [Req(rid, 4)]), [request, BatchTokenizedGenerateReqInput([request]), AbortReq(rid)])
    scheduler.retract([Req(rid, 4)])
    scheduler.step(batch_of(DECODE, [Req(rid, 5)]))
    assert (phases(), caplog.text) == ([(1, "processed"), (2, "processed")], "")
    assert last().requests[0].tokens == 1


def refuse() -> int:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("changed", "kv_free"),
    [
        ({"token_to_kv_pool_allocator": None, "tree_cache": None, "grammar_manager": None}, None),
        ({"tree_cache": SimpleNamespace(evictable_size=refuse)}, 1000),
        # As the cache of newer releases, which has the fields in any case.
        (
            {
                "enable_hierarchical_cache": False,
                "tree_cache": SimpleNamespace(evictable_size=lambda: 0, ongoing_prefetch={}, ongoing_write_through={}),
            },
            1000,
        ),
    ],
)
@pytest.mark.usefixtures("listener")
def test_what_a_release_does_not_have_is_absent(changed: dict[str, Any], kv_free: int | None) -> None:
    scheduler = Scheduler(**changed)
    del scheduler.max_total_num_tokens
    scheduler.step(batch_of(DECODE, [A]))
    assert (last().kv_free, last().kv_size, last().decisions) == (kv_free, None, {})


def test_nothing_that_is_noted_grows(scheduler: Scheduler) -> None:
    for number in range(3000):
        requests = [TokenizedGenerateReqInput(f"{number}-{place}") for place in range(10)]
        scheduler.process_input_requests(requests)
        # Results that are never processed.
        if number % 2:
            scheduler.run_batch(batch_of(DECODE, [Req(f"{number}", 3)]))
    recorder = step_recorder._recorder
    assert len(recorder._rids) <= step_recorder._MAX_RECEIVED
    assert len(recorder._pending) <= step_recorder._MAX_PENDING
    assert len(recorder.writer._known) < 5000
    assert last().phase == "forward_begun"


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [({}, True), ({"SGLANG_CRASHKIT_STEPS": "0"}, False), ({"SGLANG_CRASHKIT_ENABLED": "0"}, False)],
)
def test_it_is_switched_off(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], is_on: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = len(descriptors())
    scheduler.step(batch_of(DECODE, [A]))
    assert (step_recorder._recorder is not None) is is_on
    assert (len(descriptors()) > before) is is_on


def test_without_a_handler_nothing_is_noted_but_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "nobody"))
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
def test_what_breaks_switches_it_off_with_one_warning(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    scheduler.step(batch_of(DECODE, [A]))
    recorder = step_recorder._recorder
    with caplog.at_level(logging.WARNING):
        spoil(scheduler)
        scheduler.step(batch_of(DECODE, [A]))
        spoil(scheduler)
    assert [record.message for record in caplog.records] == [step_recorder._OFF_WARNING]
    assert step_recorder._recorder is None
    # What was noted before stays, and says nothing of now.
    found = StepReader(recorder.writer.fd).read()
    assert (found.steps[0].phase, found.current) == ("processed", None)
    recorder.writer.close()


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
def test_a_control_request_is_called_as_its_route(kind: str, name: str) -> None:
    assert step_recorder.name_of_control(kind) == name


def test_a_control_request_is_noted_until_what_comes_next(listener: Listener) -> None:
    scheduler = Scheduler()
    step_recorder.on_received(scheduler, [TokenizedGenerateReqInput("a"), FlushCacheReqInput()])
    assert read().control == "flush_cache"
    # What only reads, as a router does again and again, is none.
    for requests in ([], [type("GetLoadsReqInput", (), {})()]):
        step_recorder.on_received(scheduler, requests)
        assert read().control == ""
    step_recorder.on_received(scheduler, [FlushCacheReqInput()])
    scheduler.forward_ct = 1
    step_recorder.on_scheduled(scheduler, batch_of(EXTEND, [A], prefix_lens=[0], extend_lens=[4]))
    assert read().control == ""


class OnGpu:
    """A tensor; whoever asks for its value waits for the GPU."""

    def __index__(self) -> int:
        raise AssertionError("it was asked for its value")

    __int__ = __bool__ = __len__ = __index__  # type: ignore[assignment]


def answers_of(steps: Sequence[Sequence[tuple[str, Sequence[int]]]], *, overlap: bool = False) -> list[bytes]:
    """Return what is noted of steps, each of which appends tokens to the answers of its requests."""
    forget_recorder()
    scheduler, reqs, launched = Scheduler(), dict[str, Req](), list[Any]()

    def process() -> None:
        batch, tokens = launched.pop(0)
        step_recorder.on_results(batch, None)
        for req, more in zip(batch.reqs, tokens, strict=True):
            req.output_ids.extend(more)
        step_recorder.on_processed()

    for step in steps:
        batch = batch_of(DECODE, [reqs.setdefault(rid, Req(rid, 4)) for rid, _tokens in step])
        scheduler.process_input_requests()
        scheduler.run_batch(batch)
        launched.append((batch, [tokens for _rid, tokens in step]))
        scheduler.last_batch = batch
        while len(launched) > overlap:
            process()
    while launched:
        process()
    return [step.sampled for step in read().steps]


_answers = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2**31 - 1), max_size=3)), max_size=3),
    min_size=1,
    max_size=9,
)


@pytest.mark.usefixtures("listener")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_answers, st.booleans())
def test_ranks_that_sampled_the_same_note_the_same(steps: Any, overlap: bool) -> None:
    # Of a prompt in pieces, of an end and of a speculation there is no token, or several.
    usual = answers_of(steps, overlap=overlap)
    assert usual == answers_of(steps, overlap=overlap)
    assert all(map(bool, usual)) == all(steps)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("listener")
def test_one_other_token_is_noted_in_its_step_alone(overlap: bool) -> None:
    steps = [[("a", [number]), ("b", [50 + number])] for number in range(6)]
    other = [*steps[:3], [("a", [3]), ("b", [9999])], *steps[4:]]
    usual, odd = answers_of(steps, overlap=overlap), answers_of(other, overlap=overlap)
    assert [ours == theirs for ours, theirs in zip(usual, odd, strict=True)] == [True] * 3 + [False] + [True] * 2


@pytest.mark.parametrize("answer", [[OnGpu()], OnGpu(), None, [7, OnGpu()]])
@pytest.mark.usefixtures("listener")
def test_what_is_no_number_stops_no_record(answer: Any) -> None:
    scheduler, odd = Scheduler(), Req("a", 4)
    odd.output_ids = answer
    batch = batch_of(DECODE, [])
    batch.reqs, batch.seq_lens_cpu = [odd], Lengths([5])
    scheduler.step(batch)
    scheduler.step(batch_of(DECODE, [Req("b", 4, [1])]))
    assert [(step.phase, step.sampled) for step in read().steps] == [("processed", b"")] * 2


@pytest.mark.usefixtures("listener")
def test_what_is_no_number_may_follow_no_token() -> None:
    scheduler, odd, new = Scheduler(), Req("a", 4), Req("b", 4)
    batch = batch_of(DECODE, [new, odd])
    odd.output_ids = None
    scheduler.step(batch)
    assert (last().phase, last().sampled) == ("processed", b"")


@pytest.mark.usefixtures("listener")
def test_what_a_prefill_server_sent_was_not_sampled_here() -> None:
    scheduler = Scheduler()
    batches = [batch_of(PREBUILT, [Req(rid, 4, [7])]) for rid in "ab"]
    for batch in batches:
        scheduler.process_input_requests()
        scheduler.run_batch(batch)
        scheduler.last_batch = batch
    for batch in batches:
        scheduler.process_batch_result(batch)
    assert [(step.phase, step.sampled) for step in read().steps] == [("processed", b"")] * 2


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.usefixtures("listener")
def test_a_stage_with_nothing_to_do_processes_another_batch(is_counted: bool) -> None:
    scheduler, batch = Scheduler(pp_size=2), batch_of(DECODE, [Req("a", 4, [7])])
    if is_counted:
        counted(batch, 1)
    scheduler.process_input_requests()
    scheduler.run_batch(batch)
    scheduler.last_batch = None
    scheduler.process_input_requests()
    assert read().current is None
    step_recorder.on_results(batch, None)
    assert [one.rid for one in read().current.requests] == ["a"]
    step_recorder.on_processed()
    assert (last().phase, read().current) == ("processed", None)


@pytest.mark.parametrize("is_beside_another", [False, True])
@pytest.mark.usefixtures("listener")
def test_no_request_is_kept_without_work(is_beside_another: bool) -> None:
    scheduler, request = Scheduler(), Req("a", 4, [7])
    gone = weakref.ref(request)
    scheduler.step(batch_of(DECODE, [request]))
    assert last().sampled
    scheduler.last_batch = request = None  # type: ignore[assignment]
    if is_beside_another:
        scheduler.step(batch_of(IDLE, []))
    else:
        scheduler.process_input_requests()
    assert gone() is None


class OfOwnClock(Scheduler):
    """A scheduler of a release in which each rank ends requests that are over their time by its own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.late = set[str]()

    def _abort_on_waiting_timeout(self) -> str:
        left = [one for one in self.waiting_queue if one.rid not in self.late]
        # As SGLang does: another list only where it ended somebody.
        if len(left) < len(self.waiting_queue):
            self.waiting_queue = left
        return "done"

    def _abort_on_running_timeout(self) -> None:
        for one in self.running_batch.reqs:
            if one.rid in self.late:
                one.to_finish = object()


@pytest.mark.parametrize("place", ["waiting", "running"])
@pytest.mark.parametrize("limit", ["", "5"])
@pytest.mark.usefixtures("listener")
def test_a_timeout_by_the_own_clock_is_a_decision(monkeypatch: pytest.MonkeyPatch, place: str, limit: str) -> None:
    monkeypatch.setenv(f"SGLANG_REQ_{place.upper()}_TIMEOUT", limit)
    scheduler = OfOwnClock()
    requests = [Req("a", 4), Req("b", 7)]
    is_waiting = place == "waiting"
    scheduler.waiting_queue = requests if is_waiting else []
    scheduler.running_batch = batch_of(DECODE, [] if is_waiting else requests)

    def decided() -> set[str]:
        scheduler.forward_ct += 1
        step_recorder.on_received(scheduler, [])
        assert scheduler._abort_on_waiting_timeout() == "done"
        scheduler._abort_on_running_timeout()
        step_recorder.on_scheduled(scheduler, batch_of(DECODE, [A]))
        return set(last().decisions)

    assert decided() == set()
    scheduler.late = {"b"}
    assert decided() == ({"timeout"} if limit else set())
    assert decided() == set()


class Counted(list[Req]):
    """Requests that count how often somebody goes through them."""

    times = 0

    def __iter__(self) -> Iterator[Req]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("place", "late", "is_on", "times"),
    [("waiting", "", True, 1), ("waiting", "b", True, 2), ("waiting", "b", False, 1), ("running", "b", False, 1)],
)
@pytest.mark.usefixtures("listener")
def test_only_sglang_goes_through_requests_that_wait(
    monkeypatch: pytest.MonkeyPatch, place: str, late: str, is_on: bool, times: int
) -> None:
    monkeypatch.setenv(f"SGLANG_REQ_{place.upper()}_TIMEOUT", "5")
    scheduler, requests = OfOwnClock(), Counted([Req("a", 4), Req("b", 7)])
    step_recorder.on_received(scheduler, [])
    recorder = step_recorder._recorder
    if not is_on:
        step_recorder._switch_off()
    scheduler.late = {late}
    if place == "waiting":
        scheduler.waiting_queue = requests
        assert scheduler._abort_on_waiting_timeout() == "done"
    else:
        scheduler.running_batch = SimpleNamespace(reqs=requests)
        scheduler._abort_on_running_timeout()
    assert requests.times == times
    recorder.writer.close()
    step_recorder._recorder = None


@pytest.mark.parametrize(("message", "name"), [("Request waiting timeout reached.", "timeout"), (None, "abort")])
@pytest.mark.usefixtures("listener")
def test_a_timeout_that_all_are_told_is_one(message: str | None, name: str) -> None:
    scheduler, abort = Scheduler(), AbortReq("a")
    abort.abort_message = message  # type: ignore[attr-defined]
    step_recorder.on_received(scheduler, [abort])
    scheduler.forward_ct = 1
    step_recorder.on_scheduled(scheduler, batch_of(DECODE, [A]))
    assert set(last().decisions) == {name}
