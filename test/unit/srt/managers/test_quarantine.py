from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.quarantine import (
    FILE,
    Index,
    Origin,
    add_entry,
    entry_of,
    entry_of_all,
    read_entries,
)
from sglang_crashkit.incident.request_fingerprint import parameters_of
from sglang_crashkit.memory.journal import decode_request, encode_begin, to_json
from sglang_crashkit.redact import REDACTED
from sglang_crashkit.srt.managers.quarantine import MAX_SENT, Quarantine, QuarantinedError, guard_requests
from sglang_crashkit.srt.request_journal import RequestReader

ORIGIN = Origin("It raised.", "1a2b", "/model", "")
POISON = {"return_logprob": True, "top_logprobs_num": 600}


@dataclass
class Request:
    text: Any = "hello"
    input_ids: Any = None
    sampling_params: Any = field(default_factory=dict)
    return_logprob: Any = None
    top_logprobs_num: Any = None
    stream: bool = False
    rid: str = "1"
    image_data: Any = None


class Starting:
    name = "Starting"


class Manager:
    def __init__(self, folder: Path | None) -> None:
        self.crash_dump_folder = str(folder) if folder is not None else ""
        self.seen: list[Any] = []
        self.aborted: list[tuple[str, bool]] = []
        self.answers: Any = lambda: iter(())
        self.server_status: Any = None
        self.server_args = types.SimpleNamespace(model_path="/model")
        self.rid_to_state: dict[str, Any] = {}

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        self.seen.append(obj)
        return self.answers()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append((rid, abort_all))


class HTTPException(Exception):  # noqa: N818 - FastAPI's name
    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(detail)
        self.status_code = status_code


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """A tokenizer manager that refuses what was put in quarantine, which is read at once."""
    add_entry(tmp_path, entry_of(POISON, POISON, "any", ORIGIN, time.time()))
    fastapi = types.ModuleType("fastapi")
    fastapi.HTTPException = HTTPException  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastapi", fastapi)
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "refuse")
    monkeypatch.setattr(Quarantine, "watch", Quarantine.read)
    made = Manager(tmp_path)
    guard_requests(made)
    return made


@pytest.mark.parametrize(("stream", "error"), [(False, HTTPException), (True, QuarantinedError)])
def test_a_known_request_is_refused_with_422_and_the_incident(
    manager: Manager, stream: bool, error: type[HTTPException | QuarantinedError]
) -> None:
    with pytest.raises(error, match=r"known to kill a server: .*top_logprobs_num=600.*1a2b") as raised:
        manager.generate_request(Request(**POISON, stream=stream), object())
    assert raised.value.status_code == 422
    assert manager.seen == []


@pytest.mark.parametrize("case", ["library", "health check", "warm-up", "another input"])
def test_what_must_pass_passes(manager: Manager, case: str) -> None:
    request = Request(**POISON)
    if case == "health check":
        request.rid = "HEALTH_CHECK_1"
    if case == "warm-up":
        manager.server_status = Starting
    if case == "another input":
        add_entry(Path(manager.crash_dump_folder), entry_of({"text": "x"}, (), "content", ORIGIN, time.time()))
        request = Request(text="x", image_data=["i"])
    manager.generate_request(request, None if case == "library" else object())
    assert manager.seen == [request]


@pytest.mark.parametrize(
    "request_of",
    [
        Request(text=["a", "b"], return_logprob=[False, True], top_logprobs_num=[0, 600]),
        Request(text=None, input_ids=[[1], [2]], **POISON),
        Request(text=None, input_ids=[1, 2], **POISON),
    ],
)
def test_one_of_a_batch_is_enough(manager: Manager, request_of: Request) -> None:
    with pytest.raises(HTTPException):
        manager.generate_request(request_of, object())


@pytest.mark.parametrize("request_of", [Request(), Request(return_logprob=True), object(), Request(text=["a"], **{})])
def test_every_other_request_passes(manager: Manager, request_of: Any) -> None:
    manager.generate_request(request_of, object())
    assert manager.seen == [request_of]


def test_what_breaks_in_it_refuses_nothing(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Quarantine, "find", lambda _self, _request: 1 / 0)
    manager.generate_request(Request(**POISON), object())
    assert len(manager.seen) == 1
    assert "could not be looked up" in caplog.text


def test_observe_lets_it_through_and_logs_a_few(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "observe")
    observed = Manager(Path(manager.crash_dump_folder))
    guard_requests(observed)
    for _ in range(12):
        observed.generate_request(Request(**POISON), object())
    assert len(observed.seen) == 12
    assert caplog.text.count("let through") == 10


@pytest.mark.parametrize(("model", "release"), [("/other", ""), ("/model", "0.5.9")])
def test_what_another_server_proved_refuses_nothing_here(manager: Manager, model: str, release: str) -> None:
    folder = Path(manager.crash_dump_folder)
    quarantine = Quarantine(folder, "/model", "")
    quarantine.read()
    assert quarantine.find(Request(**POISON)) is not None
    quarantine = Quarantine(folder, model, release)
    quarantine.read()
    assert quarantine.find(Request(**POISON)) is None


@dataclass
class Clock:
    now: float = 1000.0

    def tick(self, secs: float) -> None:
        self.now += secs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made, began = Clock(), time.time()
    monkeypatch.setattr("time.monotonic", lambda: made.now)
    monkeypatch.setattr("time.time", lambda: began + made.now)
    return made


def test_what_still_comes_is_kept_out_beyond_its_day(tmp_path: Path, clock: Clock) -> None:
    quarantine = Quarantine(tmp_path, "/model", "")
    add_entry(tmp_path, entry_of(POISON, POISON, "any", ORIGIN, time.time()))
    quarantine.read()
    for _hour in range(30):
        entry = quarantine.find(Request(**POISON))
        assert entry is not None
        quarantine.note(entry, "refused")
        clock.tick(3600)
        quarantine.read()
    (entry,) = read_entries(tmp_path)
    assert entry.last - entry.first > 86400
    clock.tick(86400)
    quarantine.read()
    assert quarantine.find(Request(**POISON)) is None


def test_when_it_came_is_written_once_a_minute(tmp_path: Path, clock: Clock) -> None:
    quarantine = Quarantine(tmp_path, "/model", "")
    add_entry(tmp_path, entry_of(POISON, POISON, "any", ORIGIN, time.time()))
    stamps = set()
    for _second in range(60):
        quarantine.read()
        entry = quarantine.find(Request(**POISON))
        assert entry is not None
        quarantine.note(entry, "refused")
        clock.tick(1)
        stamps.add((tmp_path / FILE).stat().st_ino)
    assert len(stamps) == 2


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine, reads = Quarantine(tmp_path, "/model", ""), []
    real = read_entries
    monkeypatch.setattr(
        "sglang_crashkit.srt.managers.quarantine.read_entries", lambda path: reads.append(1) or real(path)
    )
    add_entry(tmp_path, entry_of(POISON, POISON, "any", ORIGIN, time.time()))
    for _ in range(3):
        quarantine.read()
    assert len(reads) == 1
    (tmp_path / FILE).chmod(0o640)
    quarantine.read()
    assert len(reads) == 2
    # Entries expire.
    clock.tick(60)
    quarantine.read()
    assert len(reads) == 3
    (tmp_path / FILE).unlink()
    quarantine.read()
    assert quarantine.find(Request(**POISON)) is None


def test_a_file_that_cannot_be_believed_refuses_nothing(
    tmp_path: Path, manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text("{")
    quarantine = Quarantine(tmp_path, "/model", "")
    quarantine.read()
    quarantine.read()
    assert quarantine.find(Request(**POISON)) is None
    assert caplog.text.count("no request is in quarantine") == 1


@pytest.mark.parametrize(("mode", "warned"), [("", 0), ("refuse ", 1), ("rubbish", 0)])
def test_without_a_crash_folder_or_a_mode_nothing_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, warned: int
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", mode)
    plain = Manager(None)
    guard_requests(plain)
    assert "generate_request" not in vars(plain)
    assert caplog.text.count("needs --crash-dump-folder") == warned


# -- what comes and what an incident has of it


SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_infinity=True, allow_nan=False)
SAMPLING = st.dictionaries(
    st.sampled_from(["max_new_tokens", "temperature", "stop", "n", "api_key", "custom_params"]),
    SCALARS
    | st.lists(st.text(max_size=3), max_size=3)
    | st.dictionaries(st.sampled_from(["token", "x"]), SCALARS, max_size=2),
)


@dataclass
class AsSglang:
    """A request, and its defaults filled in as ``GenerateReqInput.normalize_batch_and_arguments`` does."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    return_logprob: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = False
    lora_path: Any = None
    stream: bool = False
    rid: Any = None
    no_logs: bool = False

    def normalised(self, number: int | None) -> AsSglang:
        def one(value: Any) -> Any:
            return value[number] if number is not None and isinstance(value, list) else value

        ids = self.token_ids_logprob
        return AsSglang(
            *(one(self.text), one(self.input_ids), one(self.sampling_params) or {}),
            *(one(self.return_logprob) or False, -1 if (start := one(self.logprob_start_len)) is None else start),
            *(one(self.top_logprobs_num) or 0, (one(ids) if ids and isinstance(ids[0], list) else ids) or None),
            *(one(self.return_hidden_states), one(self.lora_path), self.stream, f"{number}"),
        )


@st.composite
def requests(draw: st.DrawFn) -> tuple[AsSglang, int | None]:
    """Draw a request as it comes, and which of its batch counts."""
    count = draw(st.none() | st.integers(1, 3))

    def each(values: Any) -> Any:
        one = draw(values)
        is_list = count is not None and draw(st.booleans())
        return [one, *(draw(values) for _ in range(count - 1))] if is_list and count is not None else one

    prompts = st.text(max_size=5) if draw(st.booleans()) else st.lists(st.integers(0, 9), min_size=1, max_size=5)
    prompt = draw(prompts) if count is None else [draw(prompts) for _ in range(count)]
    is_text = isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], str))
    made = AsSglang(
        prompt if is_text else None,
        None if is_text else prompt,
        each(st.none() | SAMPLING) if draw(st.booleans()) else None,
        each(st.booleans()) if draw(st.booleans()) else None,
        each(st.integers(-1, 3)) if draw(st.booleans()) else None,
        each(st.integers(0, 3)) if draw(st.booleans()) else None,
        draw(st.none() | st.lists(st.integers(0, 9), max_size=2)),
        each(st.booleans()),
        draw(st.none() | st.just("lora")),
        draw(st.booleans()),
    )
    return made, None if count is None else draw(st.integers(0, count - 1))


@given(requests())
def test_a_returning_request_is_recognised_by_its_journal_record(drawn: tuple[AsSglang, int | None]) -> None:
    request, number = drawn
    whole = request.normalised(number)
    fields, text, input_ids = RequestReader().read(whole)
    line = decode_request(encode_begin(1, 1.0, fields, text, input_ids, 1 << 20))
    entry = entry_of_all(json.loads(json.dumps(line)), ORIGIN, time.time())
    if REDACTED in json.dumps(line):
        # Others may differ from it in that alone.
        assert entry is None
        return
    assert entry is not None
    quarantine = Quarantine(Path("none"), "/model", "")
    quarantine._index = Index([entry])
    assert quarantine.find(request) == entry
    # So is one by any of its parameters, whatever value that has.
    for name in parameters_of(line):
        with contextlib.suppress(CrashkitError):
            quarantine._index = Index([entry_of(line, [name], "any", ORIGIN, time.time())])
            assert quarantine.find(request) is not None
    # Upstream's pickle has the filled-in one as it is.
    pickled = {name: value for name, value in vars(whole).items() if value is not None}
    assert entry_of_all(json.loads(to_json(pickled)), ORIGIN, entry.first) is not None


class Unlike:
    """Compares with nothing."""


def test_what_the_journal_left_out_is_no_entry() -> None:
    fields, text, input_ids = RequestReader().read(AsSglang("x", sampling_params={}, return_hidden_states=Unlike()))
    assert entry_of_all({**fields, "text": text, "input_ids": input_ids, "omitted": {"x": "y"}}, ORIGIN, 0.0) is None


# -- suspects


@pytest.fixture
def suspected(manager: Manager) -> Manager:
    """A tokenizer manager that has one suspect."""
    entry = entry_of_all({"text": "hello"}, ORIGIN, time.time(), "suspected")
    assert entry is not None
    add_entry(Path(manager.crash_dump_folder), entry)
    made = Manager(Path(manager.crash_dump_folder))
    guard_requests(made)
    return made


async def answers() -> Any:
    yield {"meta_info": {"finish_reason": {"type": "stop"}}}


def test_a_suspect_is_sent_alone_until_it_was_answered(
    suspected: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> Any:
        return [one async for one in suspected.generate_request(Request(), object())]

    suspected.answers = answers
    assert len(asyncio.run(ask())) == 1
    assert caplog.text.count("sent alone") == 1
    assert len(asyncio.run(ask())) == 1
    assert caplog.text.count("sent alone") == 1
    quarantine = Quarantine(Path(suspected.crash_dump_folder), "/model", "")
    quarantine.read()
    (entry,) = [one for one in read_entries(quarantine._folder) if one.level == "suspected"]
    quarantine.clear_suspicion(entry)
    quarantine.read()
    assert not [one for one in read_entries(quarantine._folder) if one.level == "suspected"]


async def fail() -> Any:
    raise RuntimeError("status 500")
    yield


async def stream() -> Any:
    while True:
        yield {"meta_info": {"finish_reason": None}}


@pytest.mark.parametrize("becomes", [fail, stream], ids=["the server fails it", "its client leaves"])
def test_a_suspect_that_is_never_answered_delays_others_seldom(
    suspected: Manager, caplog: pytest.LogCaptureFixture, becomes: Any
) -> None:
    async def ask() -> None:
        responses = suspected.generate_request(Request(), object())
        with contextlib.suppress(RuntimeError):
            await responses.__anext__()
        await responses.aclose()

    suspected.answers = becomes
    for _ in range(MAX_SENT + 2):
        asyncio.run(ask())
    assert caplog.text.count("sent alone") == MAX_SENT
    (entry,) = [one for one in read_entries(Path(suspected.crash_dump_folder)) if one.level == "suspected"]
    # Suspected again, of another crash, it is sent alone again.
    quarantine = Quarantine(Path(suspected.crash_dump_folder), "/model", "")
    again = replace(entry, origin=replace(entry.origin, incident="another"))
    told = [quarantine.may_isolate(each) for each in (*[entry] * (MAX_SENT + 1), again)]
    assert told == [*[True] * MAX_SENT, False, True]


@pytest.mark.parametrize("case", ["library", "warm-up", "one of a pair"])
def test_who_must_not_wait_does_not(suspected: Manager, caplog: pytest.LogCaptureFixture, case: str) -> None:
    if case == "warm-up":
        suspected.server_status = Starting
    if case == "one of a pair":
        suspected.disaggregation_mode = types.SimpleNamespace(value="decode")  # type: ignore[attr-defined]
    suspected.generate_request(Request(), None if case == "library" else object())
    assert len(suspected.seen) == 1
    assert "sent alone" not in caplog.text


def test_an_abort_reaches_sglang_too(suspected: Manager) -> None:
    suspected.abort_request("a")
    suspected.abort_request(abort_all=True)
    assert suspected.aborted == [("a", False), ("", True)]
