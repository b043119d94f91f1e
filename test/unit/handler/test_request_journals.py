"""Journals beside a stand-in server: read for an incident, removed with the server, found when left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.core import journal_place
from sglang_crashkit.core.incident_folder import IncidentFolder, new_id
from sglang_crashkit.core.incident_store import StoredIncident, find_incidents
from sglang_crashkit.core.journal import JournalWriter
from sglang_crashkit.handler import request_journals
from sglang_crashkit.handler.request_journals import take_in_left_behind
from unit.handler.driver import HOST, Server
from unit.small_disk import fill, mounted
from unit.waiting import wait_until

Start = Callable[..., Server]


def rings(server: Server) -> list[Path]:
    assert server.crash_folder is not None
    return list((server.crash_folder / HOST / "journal").glob("*/*"))


def told(server: Server) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Wait for the end; return what the incident says of the requests, and the requests."""
    stored = server.wait_for_the_end()
    assert stored is not None
    assert stored.document is not None
    requests = stored.document["requests"]
    path = stored.path / requests["journal"]["path"]
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    return requests, [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(stored: StoredIncident) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stored.path / "requests/requests.jsonl").read_text().splitlines()]


def test_a_killed_server_leaves_its_requests_in_the_incident(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask first one two three")
    server.ask("ask second hello")
    server.ask("answer first")
    assert len(rings(server)) == 1
    server.process.kill()
    requests, lines = told(server)
    assert (requests["source"], requests["finished"], requests["unfinished"]) == ("journal", 1, 1)
    assert (requests["path"], requests["reason"]) == (None, "the server did not report its requests")
    kept = [{name: line[name] for name in ("rid", "state", "text", "pid")} for line in lines]
    assert kept == [
        {"rid": "second", "state": "unfinished", "text": "hello", "pid": server.pid},
        {"rid": "first", "state": "finished", "text": "one two three", "pid": server.pid},
    ]
    assert rings(server) == []


def test_what_the_server_saved_itself_counts_and_the_journal_is_there_too(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    server.kill("scheduler_TP1")
    requests, lines = told(server)
    assert (requests["source"], requests["finished"], requests["unfinished"]) == ("pickle", 3, 1)
    assert [line["rid"] for line in lines] == ["only"]
    assert rings(server) == []


def test_a_server_that_is_killed_while_it_saves_its_requests_leaves_them(start_server: Start) -> None:
    server = start_server(journals=True, dump_secs=60)
    server.ask("ask only hello")
    server.kill("scheduler_TP1")
    assert server.line() == "sigquit"
    server.process.kill()
    requests, lines = told(server)
    assert requests["source"] == "journal"
    assert [(line["rid"], line["state"]) for line in lines] == [("only", "unfinished")]


def ring_of_a_dead_worker(server: Server) -> JournalWriter:
    (own,) = rings(server)
    writer = JournalWriter(own.parent / "4194305-1.ring", 2**20)
    writer.begin({"rid": "of the worker"})
    writer.close()
    return writer


def test_what_a_dead_worker_had_under_way_is_told_of_once(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    writer = ring_of_a_dead_worker(server)
    assert server.ask("tell scheduler_TP1 watchdog soft") == "the handler"
    first = server.incident()
    assert {line["rid"] for line in lines_of(first)} == {"only", "of the worker"}
    wait_until(lambda: not writer.path.exists(), "what was taken in is removed")
    assert len(rings(server)) == 1, "that of the living server stays"
    server.process.kill()
    server.process.wait()
    server.wait_for_handler()
    (second,) = (found for found in server.incidents() if found.name != first.name)
    assert [line["rid"] for line in lines_of(second)] == ["only"]


def test_the_ring_of_a_dead_worker_stays_when_the_incident_cannot_be_written(
    start_server: Start, tmp_path: Path
) -> None:
    with mounted(tmp_path / "crash", "size=8m,mode=700") as folder:
        server = start_server(journals=True, crash_folder=folder, environ={"SGLANG_CRASHKIT_JOURNAL_MB": "1"})
        writer = ring_of_a_dead_worker(server)
        fill(folder)
        (server.fallback / "incidents").write_text("in the way")
        server.process.kill()
        server.process.wait()
        server.wait_for_handler()
        assert server.incidents() == []
        assert writer.path.exists()


def test_the_journal_of_a_server_that_ended_well_is_removed(start_server: Start) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    assert len(rings(server)) == 1
    server.say("leave 0")
    assert server.wait_for_the_end() is None
    assert rings(server) == []


def test_without_a_crash_folder_or_with_its_flag_there_is_no_journal(start_server: Start, tmp_path: Path) -> None:
    for options in ({"crash_folder": None}, {"environ": {"SGLANG_CRASHKIT_JOURNAL": "false"}}):
        server = start_server(journals=True, **options)  # type: ignore[arg-type]
        server.ask("ask only hello")
        assert not list(tmp_path.rglob("*.ring"))
        assert not list(server.temp.rglob("*.ring"))


def test_a_journal_whose_handler_was_killed_too_is_an_incident_at_the_next_start(start_server: Start) -> None:
    first = start_server(journals=True)
    first.ask("ask lost hello")
    assert first.handler is not None
    first.handler.send_signal(signal.SIGKILL)
    first.wait_for_handler()
    first.process.kill()
    first.process.wait()
    assert len(rings(first)) == 1
    assert first.incidents() == []
    second = start_server(journals=True)
    stored = second.incident()
    assert stored.document is not None
    assert stored.document["kind"] == "left_behind"
    assert stored.document["server"]["pid"] == first.pid
    assert stored.document["requests"]["unfinished"] == 1
    assert f"server {first.pid} and its crash handler ended" in stored.document["verdict"]["text"]
    (line,) = (stored.path / "requests/requests.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "hello"
    wait_until(lambda: [ring.parent.name.split("-")[0] for ring in rings(second)] == [str(second.pid)], "it is removed")


def test_a_server_that_outlives_its_handler_keeps_its_journal(start_server: Start, tmp_path: Path) -> None:
    server = start_server(journals=True)
    server.ask("ask only hello")
    assert server.handler is not None
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    assert server.crash_folder is not None
    assert take_in_left_behind(server.crash_folder / HOST) == []
    assert len(rings(server)) == 1


def leave_behind(host_folder: Path) -> JournalWriter:
    folder = journal_place.journal_folder(host_folder, 4194305, 1)
    folder.mkdir(parents=True)
    return JournalWriter(folder / "4194305-1.ring", 2**20)


def test_an_empty_journal_that_was_left_behind_is_removed(tmp_path: Path) -> None:
    leave_behind(tmp_path).close()
    assert take_in_left_behind(tmp_path) == []
    assert not (tmp_path / "journal").exists()
    assert find_incidents(tmp_path) == []


def make_incident_of(host_folder: Path, journal: Path, rids: list[str], kind: str = "killed") -> Path:
    """Publish an incident of the server of that journal, in which there are these requests."""
    pid, start_ticks = map(int, journal.parent.name.split("-"))
    folder = IncidentFolder(host_folder / "incidents", kind, new_id(), 1.0)
    folder.write_text("requests/requests.jsonl", "".join(json.dumps({"rid": rid}) + "\n" for rid in rids))
    folder.save({"kind": kind, "server": {"pid": pid, "start_ticks": start_ticks}}, "")
    return folder.publish()


@pytest.mark.parametrize("kind", ["hang", "peer_lost", "snapshot"])
def test_a_journal_is_told_of_although_an_incident_has_its_requests_after_which_the_server_went_on(
    tmp_path: Path, kind: str
) -> None:
    writer = leave_behind(tmp_path)
    writer.begin({"rid": "a"})
    writer.close()
    make_incident_of(tmp_path, writer.path, ["a"], kind)
    assert len(take_in_left_behind(tmp_path)) == 1


@pytest.mark.parametrize(("in_incident", "is_news"), [(["a", "b"], False), (["b"], True), ([], True)])
def test_of_a_journal_whose_requests_an_incident_has_there_is_no_other_one(
    tmp_path: Path, in_incident: list[str], is_news: bool
) -> None:
    writer = leave_behind(tmp_path)
    writer.begin({"rid": "a"})
    writer.close()
    told = make_incident_of(tmp_path, writer.path, in_incident)
    made = take_in_left_behind(tmp_path)
    assert len(made) == is_news
    assert {found.path for found in find_incidents(tmp_path)} == {told, *made}
    assert not (tmp_path / "journal").exists()


def test_a_damaged_journal_that_was_left_behind_is_kept_in_the_incident(tmp_path: Path) -> None:
    writer = leave_behind(tmp_path)
    writer.close()
    writer.path.write_bytes(b"rubbish")
    (path,) = take_in_left_behind(tmp_path)
    assert (path / "requests" / writer.path.name).read_bytes() == b"rubbish"
    (stored,) = find_incidents(tmp_path)
    assert stored.document is not None
    assert "is no ring" in stored.document["requests"]["journal"]["reason"]


def test_a_journal_stays_where_it_is_when_no_incident_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = leave_behind(tmp_path)
    writer.begin({"rid": "a"})
    writer.close()
    (tmp_path / "incidents").write_text("in the way")
    assert take_in_left_behind(tmp_path) == []
    assert writer.path.is_file()
    assert "was left behind and stays" in caplog.text


def test_a_journal_that_cannot_be_moved_into_the_incident_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = leave_behind(tmp_path)
    writer.close()
    writer.path.write_bytes(b"rubbish")

    def no_space(_path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(request_journals, "create_private", no_space)
    (path,) = take_in_left_behind(tmp_path)
    assert writer.path.read_bytes() == b"rubbish"
    assert "could not be moved" in caplog.text
    assert not list((path / "requests").glob("*.ring"))


def test_what_was_left_on_another_file_system_goes_to_the_incidents_of_the_crash_folder(tmp_path: Path) -> None:
    writer = leave_behind(tmp_path / "local")
    writer.begin({"rid": "a"})
    writer.close()
    (path,) = take_in_left_behind(tmp_path / "local", tmp_path / "crash" / "incidents")
    assert path.parent == tmp_path / "crash" / "incidents"
    assert not (tmp_path / "local" / "journal").exists()
