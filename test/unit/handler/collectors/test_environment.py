from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.handler.collectors import received
from unit.support.server_driver import Server, document_of, report_of


def pieces(report: dict[str, object], kind: str) -> list[dict[str, str]]:
    evidence = report["evidence"]
    assert isinstance(evidence, list)
    return [piece for piece in evidence if piece["kind"] == kind]


@pytest.mark.story
def test_a_killed_rank_leaves_its_log_and_the_servers_environment(start_server: Callable[..., Server]) -> None:
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


def test_a_killed_servers_launch_facts_are_told(start_server: Callable[..., Server]) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_LOG_RECORDS": "0"})
    server.process.kill()
    document = document_of(server)
    assert document["environment"]["model"] == "tiny"
    assert "fake_server.py" in json.loads((Path(document["folder"]) / "environment.json").read_text())["command_line"]
    (piece,) = pieces(report_of(document, "scheduler_TP0"), "log")
    assert (piece["status"], piece["reason"]) == ("skipped", received.OFF)
