from __future__ import annotations

import sys
import tracemalloc
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_crashkit.memory.journal import JournalReader, JournalWriter
from sglang_crashkit.memory.ring import NAME, RingReader
from sglang_crashkit.settings import SOCKET_VARIABLE, Prompts
from sglang_crashkit.srt.managers.tokenizer_manager import on_request_states
from sglang_crashkit.srt.request_journal import (
    JournaledStates,
    read_request,
    retire_journals,
)
from unit.srt.conftest import Listener, told
from unit.support.waiting import descriptors, memory_named


@dataclass
class GenerateReqInput:
    """Fields of SGLang's own that tell the cases apart."""

    rid: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    image_data: Any = None
    sampling_params: dict[str, Any] | None = None
    token_ids_logprob: list[int] | None = None
    stream: bool = False
    log_metrics: bool = True
    no_logs: bool = False
    routed_experts_start_len: int = 0
    bootstrap_room: Any = None
    external_trace_header: dict[str, str] | None = None
    watermark: Any = None
    custom_logit_processor: str | None = None
    is_single: Any = None
    cache_salt: Any = None
    brand_new: Any = field(default=None)


@dataclass
class State:
    """A request's state, which something may hold."""

    obj: GenerateReqInput
    finished: bool = False


class SamplingParams(msgspec.Struct):
    """Of a request for a scheduler."""

    max_new_tokens: int | None = 128
    stop_strs: list[str] | None = None
    stop_token_ids: set[int] | None = None
    is_normalized: bool = False


class OldSamplingParams:
    """As releases before 0.5.20 or so have it."""

    def __init__(self, max_new_tokens: int = 128, stop: list[str] | None = None, stop_token_ids: Any = None) -> None:
        self.max_new_tokens, self.stop_strs = max_new_tokens, stop
        self.stop_token_ids = set(stop_token_ids) if stop_token_ids else None


class TokenizedGenerateReqInput(msgspec.Struct, kw_only=True):
    """What a scheduler is sent."""

    rid: str | None = None
    input_text: str | None
    input_ids: Any
    sampling_params: Any
    stream: bool
    no_logs: bool = False
    brand_new: Any = None


@dataclass
class OldTokenizedGenerateReqInput:
    """The same, of an older release."""

    input_text: str
    input_ids: Any
    sampling_params: Any
    stream: bool
    rid: str | None = None


def state(rid: str, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(finished=False, obj=GenerateReqInput(rid=rid, **fields))


@pytest.fixture
def journal() -> Iterator[JournalWriter]:
    writer = JournalWriter(2**20)
    yield writer
    writer.close()


@pytest.fixture
def states(journal: JournalWriter) -> JournaledStates:
    return JournaledStates({}, journal)


def end_of(journal: JournalWriter) -> int:
    """Return where the last record of a ring that has not turned ends."""
    return max((one.offset + len(one.payload) for one in RingReader(journal.fd).records()), default=0)


@pytest.mark.parametrize(
    ("kind", "sampling", "ids"),
    [
        (TokenizedGenerateReqInput, SamplingParams(7, ["."], {9, 8}, is_normalized=True), array("q", [1, 2])),
        (OldTokenizedGenerateReqInput, OldSamplingParams(7, ["."], [9, 8]), [1, 2]),
    ],
)
def test_a_request_for_a_scheduler_is_kept_by_the_names_that_a_client_gives(kind: Any, sampling: Any, ids: Any) -> None:
    request = kind(rid="a", input_text="Hello", input_ids=ids, sampling_params=sampling, stream=True)
    fields, text, input_ids = read_request(request)
    assert (text, [*input_ids]) == ("Hello", [1, 2])
    sampling_params = {"max_new_tokens": 7, "stop": ["."], "stop_token_ids": [8, 9]}
    assert fields == {"kind": kind.__name__, "rid": "a", "sampling_params": sampling_params, "stream": True}


def test_no_more_of_a_long_request_is_looked_at_than_is_kept() -> None:
    ids = array("q", range(10**6))
    sampling = SamplingParams(7, [], set(range(10**5)))
    request = TokenizedGenerateReqInput(rid="a", input_text=None, input_ids=ids, sampling_params=sampling, stream=True)
    fields, _text, input_ids = read_request(request)
    # Not a number of it was made anew.
    assert input_ids is ids
    assert fields["sampling_params"]["stop_token_ids"] == "set of 100000"


def test_an_engine_kept_after_its_end_has_no_journal(caplog: pytest.LogCaptureFixture) -> None:
    before = len(descriptors())
    # As SGLang keeps each engine that a program ever made.
    engines = [JournaledStates({}, JournalWriter(2**20)) for _ in range(3)]
    for states in engines:
        states["a"] = state("a")
    del engines[0]
    retire_journals()
    assert len(descriptors()) == before
    states["b"] = state("b")
    assert states.pop("a").obj.rid == "a"
    assert (list(states), caplog.text) == (["b"], "")


def test_what_enters_has_begun_and_what_leaves_has_ended(states: JournaledStates, journal: JournalWriter) -> None:
    for rid in "abcdefg":
        states[rid] = state(rid)
    states["a"].finished = True
    del states["a"]
    assert states.pop("b").obj.rid == "b"
    assert states.pop("no one", None) is None
    with pytest.raises(KeyError):
        states.pop("no one")
    with pytest.raises(KeyError):
        del states["no one"]
    states.update({"h": state("h"), "i": state("i")})
    assert states.setdefault("j", state("j")) is states["j"]
    assert states.setdefault("j", state("k")).obj.rid == "j"
    assert list(states) == ["c", "d", "e", "f", "g", "h", "i", "j"]
    assert told(journal) == dict.fromkeys("cdefghij", "under way") | {"a": "finished", "b": "dropped"}
    states.clear()
    assert states == {}
    assert set(told(journal).values()) == {"finished", "dropped"}


def test_a_journal_that_breaks_is_switched_off_with_one_warning(
    states: JournaledStates, journal: JournalWriter, caplog: pytest.LogCaptureFixture
) -> None:
    states["a"] = state("a")
    journal.close()
    for rid in "bcd":
        states[rid] = state(rid)
    del states["a"]
    assert list(states) == ["b", "c", "d"]
    assert caplog.text.count("the request journal is switched off") == 1


def test_two_requests_of_one_id_are_two(states: JournaledStates, journal: JournalWriter) -> None:
    # As 0.5.9 has it: the first is not found by its id any more, and runs on.
    first, second = State(GenerateReqInput(rid="a", text="1")), State(GenerateReqInput(rid="a", text="2"))
    states["a"], states["a"] = first, second

    assert told(journal, by="text") == {"1": "under way", "2": "under way"}
    second.finished = True
    del states["a"]
    assert told(journal, by="text") == {"1": "under way", "2": "finished"}
    del first
    states["b"] = State(GenerateReqInput(rid="b", text="3"))
    assert told(journal, by="text") == {"1": "dropped", "2": "finished", "3": "under way"}


def test_requests_that_are_gone_leave_nothing(states: JournaledStates) -> None:
    def serve(count: int) -> None:
        for _ in range(count):
            # The second takes the first one's place.
            states["a"], states["a"] = State(GenerateReqInput(rid="a")), State(GenerateReqInput(rid="a"))
            del states["a"]

    serve(100)
    tracemalloc.start()
    serve(2000)
    grown, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 50_000


def test_a_request_of_another_shape_does_not_hide_the_others(states: JournaledStates, journal: JournalWriter) -> None:
    states["a"] = object()
    states["b"] = state("b", routed_experts_start_len=10**5000, sampling_params={"seed": 10**5000})
    states["c"] = state("c")
    assert told(journal) == dict.fromkeys("abc", "under way")


def test_requests_without_room_are_warned_of_once(
    states: JournaledStates, journal: JournalWriter, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(200):
        states[str(number)] = state(str(number), text="x" * 10_000)
    assert journal.lost > 1
    assert caplog.text.count("SGLANG_CRASHKIT_JOURNAL_MB") == 1


SAMPLING = {"sampling_params": {"max_new_tokens": 3, "watermark_key": "s3cret"}}
PRIVATE = {"text": "private", "input_ids": [1, 2], "token_ids_logprob": [3]} | SAMPLING
NO_LOGS, FLAG = "withheld: the request asks for no logs", "withheld by SGLANG_CRASHKIT_PROMPTS="
PROGRAM = "custom_logit_processor"


def case(given: dict[str, Any], prompts: Prompts = "full", *prompt: object, **told: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row: what was given, what is kept, what is described, and the prompt that is kept."""
    return given, prompts, told.get("kept", {}), told.get("omitted", {}), prompt or (None, None)


LIMITED = SAMPLING | {"token_ids_logprob": [3]}
MANY = list(range(100_000))


@pytest.mark.parametrize(
    ("given", "prompts", "kept", "omitted", "prompt"),
    [
        # Defaults, and what the server itself adds, say nothing.
        case(
            {"text": "a", "stream": True, "is_single": True, "cache_salt": "b"},
            "full",
            "a",
            None,
            kept={"stream": True},
        ),
        case({"log_metrics": False}, kept={"log_metrics": False}),
        # Large, or of no known name.
        case({"image_data": ["x" * 50_000] * 2}, omitted={"image_data": "list of 2, 100000 characters"}),
        case({"brand_new": {"a": 1}}, omitted={"brand_new": "dict"}),
        # What is empty does not count.
        case({"image_data": [], "brand_new": {}, "watermark": 0}, omitted={"watermark": "int"}),
        case(
            {"sampling_params": {"logit_bias": dict.fromkeys(map(str, MANY), 1.0)}}, omitted={"sampling_params": "dict"}
        ),
        case({"token_ids_logprob": MANY}, omitted={"token_ids_logprob": "list of 100000"}),
        # Secrets are left to the reader, but for those that are described.
        case({"watermark": {"k": "s3cret"}} | SAMPLING, kept=SAMPLING, omitted={"watermark": "dict"}),
        case({"external_trace_header": {"x": "s3cret"}}),
        # The user says what is kept of prompts.
        case(PRIVATE, "full", "private", [1, 2], kept=LIMITED),
        case(PRIVATE, "ids", None, [1, 2], kept=LIMITED, omitted={"text": f"{FLAG}ids: str, 7 characters"}),
        case({"text": "private"}, "none", omitted={"text": f"{FLAG}none: str, 7 characters"}),
        case({"text": ["private", "b"]}, "none", omitted={"text": f"{FLAG}none: list of 2, 8 characters"}),
        case({"input_ids": [1, 2]}, "none", omitted={"input_ids": f"{FLAG}none: list of 2"}),
        case({"token_ids_logprob": [3]}, "none", omitted={"token_ids_logprob": f"{FLAG}none: list of 1"}),
        # So does the request itself.
        case({"text": "private", "no_logs": True}, kept={"no_logs": True}, omitted={"text": NO_LOGS}),
        case({"input_ids": [1], "no_logs": True}, kept={"no_logs": True}, omitted={"input_ids": NO_LOGS}),
        case({PROGRAM: "8" * 4096}, "ids", kept={PROGRAM: "8" * 4096}),
        case({PROGRAM: "8", "no_logs": True}, kept={"no_logs": True}, omitted={PROGRAM: NO_LOGS}),
        case({PROGRAM: "8" * 9}, "none", omitted={PROGRAM: f"{FLAG}none: str, 9 characters"}),
    ],
)
def test_what_is_kept_of_a_request_and_what_is_described(
    given: dict[str, Any], prompts: Prompts, kept: dict[str, Any], omitted: dict[str, str], prompt: tuple[object, ...]
) -> None:
    fields, *found = read_request(GenerateReqInput(rid="a", **given), prompts)
    described = {"omitted": omitted} if omitted else {}
    assert fields == {"kind": "GenerateReqInput", "rid": "a", **kept, **described}
    assert tuple(found) == prompt


def test_what_a_client_sizes_costs_a_bounded_number_of_steps_and_bytes(
    states: JournaledStates, journal: JournalWriter
) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    odd: dict[str, dict[str, Any]] = {
        "names": {"sampling_params": {f"api_key_{number}": 1 for number in range(100_000)}},
        "a name": {"sampling_params": {"aB" * 500_000: 1}},
        "numbers": {"sampling_params": {str(number): 10**4000 for number in range(500)}},
        "a number": {"routed_experts_start_len": 10**5000, "sampling_params": {"seed": 10**5000}},
        "deep": {"sampling_params": {"custom_params": deep}},
        "text": {"text": "\N{SNOWMAN}" * 1_000_000},
        "ids": {"input_ids": list(range(1_000_000))},
        "no ids": {"input_ids": [deep]},
        "r" * 1_000_000: {},
    }
    steps = 0

    def count(frame: Any, event: str, _argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = False
        steps += event == "line"
        return count

    for rid, fields in odd.items():
        made, before = state(rid, **fields), (end_of(journal), steps)
        sys.settrace(count)
        try:
            states[rid] = made
        finally:
            sys.settrace(None)
        # Lines of Python, and bytes in the ring: of a request of a million parts as of any.
        assert steps - before[1] < 25_000
        assert end_of(journal) - before[0] <= journal.max_payload + 96
    reader = JournalReader(journal.fd)
    kept = [reader.load(request) or {} for request in reader.requests]
    assert reader.lost + len(kept) == len(odd)
    assert kept[-1]["rid"] == f"{'r' * 96}...{'r' * 16}/1000000"


@pytest.mark.parametrize(
    ("environ", "folder", "is_on"),
    [
        ({}, True, True),
        ({"SGLANG_CRASHKIT_JOURNAL": "0"}, True, False),
        ({"SGLANG_CRASHKIT_ENABLED": "0"}, True, False),
        ({}, False, False),
        # Without a crash handler, and with one that is gone.
        ({SOCKET_VARIABLE: ""}, True, False),
        ({SOCKET_VARIABLE: "/gone/sock"}, True, False),
    ],
)
def test_the_manager_passes_a_wanted_journal_on(
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    folder: bool,
    is_on: bool,
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_JOURNAL_MB", "2")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before: dict[str, Any] = {"a": state("a")}
    manager = SimpleNamespace(crash_dump_folder="/crash" if folder else None, rid_to_state=before)
    on_request_states(manager)
    assert manager.rid_to_state == before
    assert isinstance(manager.rid_to_state, JournaledStates) == is_on
    assert ("crash kit: no request journal: " in caplog.text) == ("/gone/sock" in environ.values())
    if is_on:
        heard = listener.heard()
        assert (heard["event"], heard["has_descriptor"]) == ("journal", True)


@pytest.mark.usefixtures("listener")
def test_what_the_manager_aborts_is_noted_and_aborted(caplog: pytest.LogCaptureFixture) -> None:
    aborted, before = list[object](), descriptors()
    manager: Any = SimpleNamespace(crash_dump_folder="/crash", rid_to_state={})
    manager.abort_request = lambda *args, **kwargs: aborted.append((args, kwargs))
    on_request_states(manager)
    for rid in "abc":
        manager.rid_to_state[rid] = state(rid)

    def given_up() -> set[str]:
        reader = JournalReader(memory_named(NAME, before))
        return {(reader.load(one) or {})["rid"] for one in reader.requests if one.aborted is not None}

    manager.abort_request("a")
    manager.abort_request(rid="no one")
    # As a client may send it to 0.5.9.
    manager.abort_request(["b", "c"])
    assert given_up() == {"a"}
    manager.abort_request(abort_all=True)
    assert given_up() == {"a", "b", "c"}
    assert aborted == [(("a",), {}), ((), {"rid": "no one"}), ((["b", "c"],), {}), ((), {"abort_all": True})]
    assert "failed" not in caplog.text
