"""Journals beside a stand-in server: held in memory, read for an incident, gone with the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.handler.collectors.requests import RequestJournals
from sglang_crashkit.memory.journal import JournalWriter
from sglang_crashkit.model.incident import JournaledRequests
from unit.handler.driver import Server
from unit.waiting import wait_until

Start = Callable[..., Server]


def rings(server: Server) -> list[str]:
    """Return the journals that the crash handler holds."""
    assert server.handler is not None
    found = []
    for link in Path(f"/proc/{server.handler.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(link.readlink().name)
    return [name for name in found if name.startswith("memfd:sglang-crashkit-journal")]


def holding(text: str, *folders: Path) -> list[Path]:
    """Return the files in which a text is."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def told(server: Server) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Wait for the end; return what the incident says of the requests, and the requests."""
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    requests = stored.document["requests"]
    path = stored.path / requests["journal"]["path"]
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    return requests, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_server_leaves_its_requests_in_the_incident(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask first one two three")
    server.ask("ask second hello")
    server.ask("answer first")
    wait_until(lambda: len(rings(server)) == 1, "the handler has the journal")
    server.process.kill()
    requests, lines = told(server)
    assert (requests["source"], requests["finished"], requests["unfinished"]) == ("journal", 1, 1)
    assert (requests["path"], requests["reason"]) == (None, "the server did not report its requests")
    kept = [{name: line[name] for name in ("rid", "state", "text", "pid")} for line in lines]
    assert kept == [
        {"rid": "second", "state": "unfinished", "text": "hello", "pid": server.pid},
        {"rid": "first", "state": "finished", "text": "one two three", "pid": server.pid},
    ]


def test_what_the_server_saved_itself_counts_and_the_journal_is_there_too(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    server.kill("scheduler_TP1")
    requests, lines = told(server)
    assert (requests["source"], requests["finished"], requests["unfinished"]) == ("pickle", 3, 1)
    assert [line["rid"] for line in lines] == ["only"]


def test_a_server_that_is_killed_while_it_saves_its_requests_leaves_them(start_server: Start) -> None:
    server = start_server(journals=True, dump_secs=60)
    server.ask("ask only hello")
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    server.process.kill()
    requests, lines = told(server)
    assert requests["source"] == "journal"
    assert [(line["rid"], line["state"]) for line in lines] == [("only", "unfinished")]


class Run:
    """What the journals use of an incident."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = time.monotonic()
        self.told: JournaledRequests | None = None

    def charge(self, _name: str, _size: int) -> None:
        return

    def set_journal(self, told: JournaledRequests) -> None:
        self.told = told

    def rids(self) -> set[str]:
        return {json.loads(line)["rid"] for line in (self.path / "requests/requests.jsonl").read_text().splitlines()}


def process(pid: int, exited_at: float | None = None) -> Any:
    return SimpleNamespace(pid=pid, title="sglang::tokenizer_worker", exited_at=exited_at)


def passed_on(journals: RequestJournals, sender: Any) -> JournalWriter:
    """Have a process pass on a journal, of a request that is called as the process is."""
    writer = JournalWriter(2**20)
    writer.begin({"rid": str(sender.pid)})
    journals.follow(sender, writer.fd)
    return writer


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_a_dead_worker_had_under_way_is_told_of_once(tmp_path: Path) -> None:
    journals, dead, living = RequestJournals(), process(7), process(8)
    for sender in (dead, living):
        passed_on(journals, sender).close()
    dead.exited_at = 1.0
    first, failed, second = (Run(tmp_path / name) for name in ("first", "failed", "second"))
    journals.add_to(failed)  # type: ignore[arg-type]
    journals.keep()
    journals.add_to(first)  # type: ignore[arg-type]
    journals.remove_taken()
    journals.add_to(second)  # type: ignore[arg-type]
    assert (failed.rids(), first.rids(), second.rids()) == ({"7", "8"}, {"7", "8"}, {"8"})
    journals.close()


def test_workers_that_come_and_go_do_not_make_it_grow(tmp_path: Path) -> None:
    journals, before, living = RequestJournals(), descriptors(), process(1)
    for _ in range(3):
        passed_on(journals, living).close()
    for pid in range(10, 60):
        passed_on(journals, process(pid, exited_at=1.0)).close()
        assert descriptors() <= before + 3 + 4
    run = Run(tmp_path)
    journals.add_to(run)  # type: ignore[arg-type]
    assert run.rids() == {"1", "56", "57", "58", "59"}
    assert run.told is not None
    assert run.told.reason == "the journals of 46 processes that had ended before were dropped"
    for _ in range(20):
        passed_on(journals, living).close()
    assert descriptors() <= before + 4 + 4
    journals.close()
    assert descriptors() == before


def test_what_is_no_journal_is_not_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journals, before = RequestJournals(), descriptors()
    journals.follow(process(7), None)
    with (tmp_path / "file").open("wb") as file:
        journals.follow(process(7), file.fileno())
    assert descriptors() == before
    assert caplog.text.count("passed on no request journal") == 2


def test_while_a_server_serves_its_prompts_are_in_no_file(start_server: Start, tmp_path: Path) -> None:
    server = start_server(journals=True)
    server.ask("ask only canary-prompt-81c0")
    wait_until(lambda: len(rings(server)) == 1, "the handler has the journal")
    assert holding("canary-prompt-81c0", tmp_path, server.temp) == []
    server.process.kill()
    _requests, lines = told(server)
    assert [line["text"] for line in lines] == ["canary-prompt-81c0"]
    (found,) = holding("canary-prompt-81c0", tmp_path, server.temp)
    assert found.name == "requests.jsonl"


def test_when_all_processes_of_a_server_are_killed_at_once_its_requests_are_in_the_incident(
    start_server: Start,
) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    for pid in (server.pid, *server.ranks.values()):
        os.kill(pid, signal.SIGKILL)
    requests, lines = told(server)
    assert requests["source"] == "journal"
    assert [line["rid"] for line in lines] == ["only"]


def test_a_server_that_ended_well_leaves_nothing_of_its_requests(start_server: Start, tmp_path: Path) -> None:
    server = start_server(journals=True)
    server.ask("ask only canary-prompt-81c0")
    server.say("leave 0")
    assert server.wait_for_the_end() is None
    assert holding("canary-prompt-81c0", tmp_path, server.temp) == []


def test_without_a_crash_folder_or_with_its_flag_there_is_no_journal(start_server: Start) -> None:
    for options in ({"crash_folder": None}, {"environ": {"SGLANG_CRASHKIT_JOURNAL": "false"}}):
        server = start_server(journals=True, **options)  # type: ignore[arg-type]
        server.ask("ask only hello")
        server.settle()
        assert rings(server) == []
