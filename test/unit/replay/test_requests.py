from __future__ import annotations

import json
import pickle
import sys
import types
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.errors import CrashkitError, NothingToDoError
from sglang_crashkit.incident.store import find_one
from sglang_crashkit.replay.requests import StoredRequest, read_requests
from unit.support.stored import make_incident

LINE = {
    "rid": "a",
    "state": "unfinished",
    "arrived": "2026-01-01T00:00:02.000000Z",
    "ended": None,
    "pid": 7,
    "text": "Hello",
    "sampling_params": {"max_new_tokens": 4},
    "stream": True,
    "bootstrap_room": 9,
}


def read(folder: Path, *lines: object, **fields: Any) -> list[StoredRequest]:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    make_incident(folder, pieces={"requests/requests.jsonl": text} if lines else None, **fields)
    return read_requests(find_one(str(folder)))


def test_a_journal_line_is_a_request_as_it_came(tmp_path: Path) -> None:
    earlier = {**LINE, "rid": "b", "state": "finished", "arrived": "2026-01-01T00:00:01.000000Z"}
    first, second = read(tmp_path, LINE, earlier)
    assert (first.rid, second.rid, second.arrived - first.arrived) == ("b", "a", 1.0)
    assert (first.was_running, second.was_running) == (False, True)
    assert second.body == {
        "rid": "a",
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 4},
        "stream": True,
    }
    assert second.is_complete


def test_one_whose_client_had_gone_is_sent_as_it_came(tmp_path: Path) -> None:
    (gone,) = read(tmp_path, {**LINE, "state": "dropped", "aborted": "2026-01-01T00:00:06.500000Z"})
    assert (gone.is_complete, gone.was_running, gone.was_given_up) == (True, False, True)
    assert "aborted" not in gone.body


@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        ({"omitted": {"image_data": "3 images"}}, ("its image_data (3 images)",)),
        ({"truncated": {"text": {"first": 1}}}, ("the middle of its text",)),
        ({"text": None}, ("its prompt",)),
    ],
)
def test_what_the_journal_does_not_keep_is_said(tmp_path: Path, more: dict[str, Any], lacks: tuple[str]) -> None:
    (request,) = read(tmp_path, LINE | more)
    assert request.lacks == lacks
    assert not request.is_complete


def test_what_may_be_a_secret_is_not_sent_and_said(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 4, "custom_params": {"trigger_token": "<redacted>", "x": 1}}
    (request,) = read(tmp_path, LINE | {"sampling_params": sampling})
    assert request.lacks == ("its sampling_params.custom_params.trigger_token, as it may be a secret,",)
    assert request.body["sampling_params"] == {"max_new_tokens": 4, "custom_params": {"x": 1}}


def test_a_number_outside_json_is_sent_as_it_came(tmp_path: Path) -> None:
    came = {"temperature": float("-inf"), "logit_bias": {"5": float("inf")}, "stop": "NaN", "top_k": 5}
    line = LINE | {"sampling_params": {**came, "temperature": "-Infinity", "logit_bias": {"5": "Infinity"}}}
    (request,) = read(tmp_path, line)
    assert request.body["sampling_params"] == came


def test_one_that_wants_several_answers_is_sent_once(tmp_path: Path) -> None:
    several = LINE | {"sampling_params": {"n": 3}}
    done = [several | {"rid": f"warm-{number}", "state": "finished"} for number in range(4)]
    running = [several | {"rid": f"run-{number}"} for number in range(6)]
    other = several | {"rid": "other", "text": "else", "state": "finished"}
    found = read(tmp_path, LINE, *done, *running, other)
    assert [one.rids for one in found] == [
        ("a",),
        ("run-0", "run-1", "run-2", "run-3"),
        ("run-4", "run-5"),
        ("other",),
    ]
    assert found[1].body["sampling_params"] == {"n": 3}


@pytest.mark.parametrize("wanted", [2, 3, 8])
@pytest.mark.parametrize("at", ["warm-up", "answers", "end"])
def test_one_with_several_answers_is_one_at_any_time(tmp_path: Path, wanted: int, at: str) -> None:
    several = LINE | {"sampling_params": {"n": wanted}}
    first = [several | {"state": "unfinished" if at == "warm-up" else "finished"}] * (wanted + 1)
    then = [several | {"state": "finished" if at == "end" else "unfinished"}] * (0 if at == "warm-up" else wanted)
    assert len(read(tmp_path, *first, *then)) == 1


@pytest.mark.parametrize("line", ["{", "[]\n", "\n", "{" * 100_000])
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: str) -> None:
    broken, whole = read(tmp_path, LINE, line)
    assert (broken.rid, broken.is_complete, whole.is_complete) == ("line 2", False, True)


def test_an_embedding_is_asked_for_where_it_was(tmp_path: Path) -> None:
    (request,) = read(tmp_path, LINE | {"kind": "EmbeddingReqInput"})
    assert (request.path, "kind" in request.body) == ("/encode", False)


def test_an_incident_without_requests_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToDoError, match=r"holds no requests\n  next: sglang-crashkit show \S+ --requests "):
        read(tmp_path)


@dataclass
class GenerateReqInput:
    rid: str
    text: str
    sampling_params: dict[str, int] = field(default_factory=dict)
    image_data: object = None


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("it ran",))


def test_upstreams_pickle_is_read_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("sglang_io_struct")
    for kind in (GenerateReqInput, Evil):
        setattr(module, kind.__name__, kind)
        kind.__module__ = module.__name__
    sys.modules[module.__name__] = module
    try:
        asked = GenerateReqInput("a", "Hello", {"max_new_tokens": 4}, Evil())
        entry = (asked, {"meta_info": {"finish_reason": None}}, 12.5, 13.0)
        dump = pickle.dumps({"server_args": Evil(), "requests": [entry, deque([1]), ("short",)]})
    finally:
        del sys.modules[module.__name__]
    path = tmp_path / "crash_dump.pkl"
    path.write_bytes(dump)
    (request,) = read(tmp_path / "crash", requests={"path": str(path)})
    assert (request.rid, request.arrived, request.was_running) == ("a", 12.5, True)
    assert request.body == {"rid": "a", "text": "Hello", "sampling_params": {"max_new_tokens": 4}}
    assert request.lacks == ("its image_data",)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps([1])[:-2]])
def test_a_file_that_is_no_pickle_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "crash_dump.pkl"
    path.write_bytes(data)
    with pytest.raises(CrashkitError, match=r"crash_dump.pkl is no crash dump"):
        read(tmp_path / "crash", requests={"path": str(path)})
