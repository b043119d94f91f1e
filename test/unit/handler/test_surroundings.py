"""What surrounded a stand-in server, and what its processes logged last, in its incident."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.handler.collectors import logs
from sglang_crashkit.handler.collectors.logs import format_log
from sglang_crashkit.memory.log_ring import LogRecord
from unit.handler.driver import Server, document_of, report_of

PROMPT = "once upon a time there was a mine in the hills"


def pieces(report: dict[str, object], kind: str) -> list[dict[str, str]]:
    evidence = report["evidence"]
    assert isinstance(evidence, list)
    return [piece for piece in evidence if piece["kind"] == kind]


@pytest.mark.story
def test_a_killed_rank_leaves_its_log_and_what_surrounded_the_server(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.kill("scheduler_TP1")
    document = document_of(server)
    folder = Path(document["folder"])
    for title in ("scheduler_TP0", "scheduler_TP1", "detokenizer"):
        (piece,) = pieces(report_of(document, title), "log")
        assert piece["path"] == f"logs/{title}-{server.ranks[title]}.log"
        assert (folder / piece["path"]).read_text().endswith(f"Z INFO sglang.srt: sglang::{title} is ready\n")
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["model"], environment["parallel"]) == ("tiny", {"tp": 2})
    assert environment["arguments"]["api_key"] == "<redacted>"
    assert "fake_server.py" in environment["command_line"]
    assert {"sglang-crashkit", "python", "kernel"} <= set(environment["versions"])
    open_files = {one["title"]: one["open_files"] for one in environment["processes"]}
    assert open_files["sglang::scheduler_TP0"] > 0
    assert document["environment"]["path"] == "environment.json"
    assert "- model tiny, tp 2\n" in (folder / "summary.md").read_text()
    written = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any("canary-api-key" in text for text in written)


def test_a_killed_server_is_told_of_from_what_it_said_at_its_launch(start_server: Callable[..., Server]) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_LOG_RECORDS": "0"})
    server.process.kill()
    document = document_of(server)
    assert document["environment"]["model"] == "tiny"
    assert "fake_server.py" in json.loads((Path(document["folder"]) / "environment.json").read_text())["command_line"]
    (piece,) = pieces(report_of(document, "scheduler_TP0"), "log")
    assert (piece["status"], piece["reason"]) == ("skipped", logs.OFF)


def record(text: str, level: int = logging.ERROR) -> LogRecord:
    return LogRecord(0.0, level, "sglang", text)


@pytest.mark.parametrize(
    ("text", "level", "expected"),
    [
        ("Authorization: Bearer abcdef123456", logging.INFO, "Authorization: <redacted>"),
        ("the token is canary-of-the-environment", logging.INFO, "the token is <redacted>"),
        (f"ValueError: no {PROMPT}!", logging.ERROR, "ValueError: no <redacted>!"),
        (f"got {PROMPT}", logging.INFO, "got <redacted>"),
        ("Decode batch, #running-req: 3", logging.INFO, "Decode batch, #running-req: 3"),
    ],
)
def test_a_log_is_told_without_secrets_and_prompts(
    monkeypatch: pytest.MonkeyPatch, text: str, level: int, expected: str
) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "canary-of-the-environment")
    (line,) = format_log([record(text, level)], [PROMPT], time.monotonic() + 60)
    assert line == f"1970-01-01T00:00:00.000000Z {logging.getLevelName(level)} sglang: {expected}\n"


def test_many_records_are_searched_for_prompts_in_parts() -> None:
    records = [record(f"{number} {'x' * 2000} {PROMPT}") for number in range(30)]
    lines = format_log(records, [PROMPT], time.monotonic() + 60)
    assert [int(line.split()[3]) for line in lines] == list(range(30))
    assert not any("mine in the hills" in line for line in lines)


def test_what_could_not_be_searched_in_time_is_withheld() -> None:
    assert "withheld" in format_log([record("text")], [], time.monotonic() - 1)[0]


def test_the_prompts_are_those_of_the_incidents_requests(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [{"rid": "a", "text": "one"}, {"rid": "b", "input_ids": [1]}, {"rid": "c", "text": ["two", "three"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "torn")
    assert logs._prompts_in(path) == ["one", "two", "three"]
    assert logs._prompts_in(tmp_path / "absent") == []
