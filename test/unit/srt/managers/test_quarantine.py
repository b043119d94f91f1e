from __future__ import annotations

import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.incident.quarantine import FILE, add_entry, entry_of
from sglang_crashkit.srt.managers.quarantine import Quarantine, QuarantinedError, guard_requests

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
        self.server_status: Any = None

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        self.seen.append(obj)
        return iter(())


class HTTPException(Exception):  # noqa: N818 - FastAPI's name
    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(detail)
        self.status_code = status_code


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """A tokenizer manager that refuses what was put in quarantine, which is read at once."""
    add_entry(tmp_path, entry_of(POISON, POISON, "any", "It raised.", "1a2b", time.time()))
    fastapi = types.ModuleType("fastapi")
    fastapi.HTTPException = HTTPException  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastapi", fastapi)
    monkeypatch.setenv("SGLANG_CRASHKIT_QUARANTINE", "refuse")
    monkeypatch.setattr(Quarantine, "watch", Quarantine.read)
    made = Manager(tmp_path)
    guard_requests(made)
    return made


def test_a_known_request_is_refused_with_422_and_the_incident(manager: Manager) -> None:
    with pytest.raises(HTTPException, match=r"known to kill a server: .*top_logprobs_num=600.*1a2b") as raised:
        manager.generate_request(Request(**POISON), object())
    assert raised.value.status_code == 422
    assert manager.seen == []


def test_a_stream_gets_a_value_error(manager: Manager) -> None:
    with pytest.raises(QuarantinedError) as raised:
        manager.generate_request(Request(**POISON, stream=True), object())
    assert raised.value.status_code == 422


@pytest.mark.parametrize("case", ["library", "health check", "warm-up", "another input"])
def test_what_must_pass_passes(manager: Manager, case: str) -> None:
    request = Request(**POISON)
    if case == "health check":
        request.rid = "HEALTH_CHECK_1"
    if case == "warm-up":
        manager.server_status = Starting
    if case == "another input":
        add_entry(Path(manager.crash_dump_folder), entry_of({"text": "x"}, (), "content", "", "", time.time()))
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
    monkeypatch.setattr(Quarantine, "check", lambda _self, _request: 1 / 0)
    manager.generate_request(Request(**POISON), object())
    assert len(manager.seen) == 1
    assert "could not be looked up" in caplog.text


def test_observe_lets_it_through_and_counts(tmp_path: Path, manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    quarantine = Quarantine(tmp_path, refuses=False)
    quarantine.read()
    assert [quarantine.check(Request(**POISON)) for _ in range(12)] == [None] * 12
    assert quarantine.hits == 12
    assert caplog.text.count("let through") == 10


def test_a_file_that_cannot_be_believed_refuses_nothing(
    tmp_path: Path, manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text("{")
    quarantine = Quarantine(tmp_path, refuses=True)
    quarantine.read()
    quarantine.read()
    assert quarantine.check(Request(**POISON)) is None
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
