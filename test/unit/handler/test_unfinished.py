from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler import unfinished
from sglang_crashkit.handler.unfinished import REASON, finish_abandoned
from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import private_files
from unit.support.killing import run_and_kill
from unit.support.stored import NOON, finish_at_once, make_incident
from unit.support.waiting import LONG, child

#: A server, and its spool.
SERVER, SPOOL = {"pid": 77, "start_ticks": 1, "pid_namespace": 5, "hostname": "h"}, ".spool-77-1-5"
REPORT = {"pid": 8, "title": "sglang::scheduler_TP1", "role": "scheduler", "evidence": []}
HOLD = """
from pathlib import Path
from sglang_crashkit.incident.folder import IncidentFolder
folder = IncidentFolder(Path(sys.argv[1]), "killed", "0123abcd", 1.0)
folder.save({"schema_version": 1, "processes": []}, "")
ready(); pause()
"""


def document_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "incident.json").read_text())
    return document


def age(path: Path) -> None:
    os.utime(path, (NOON, NOON))


def abandon(incidents: Path, **options: Any) -> Path:
    """Leave an incident as a killed crash handler does."""
    return make_incident(incidents, publish=False, **options)


def test_missing_pieces_are_named_and_the_folder_is_renamed(tmp_path: Path) -> None:
    other = REPORT | {"pid": 9, "evidence": [{"kind": "stack", "status": "captured", "path": "stacks/x-9.txt"}]}
    partial = abandon(tmp_path, processes=[REPORT, other], pieces={"stacks/x-9.txt": "x"})
    (path,) = finish_abandoned(tmp_path)
    assert path == partial.with_name(partial.name.removeprefix(".partial-"))
    assert [found.path for found in find_incidents(tmp_path)] == [path]
    document = document_of(path)
    assert document["complete"] is False
    (missing,) = document["processes"][0]["evidence"]
    assert (missing["kind"], missing["status"], missing["reason"]) == ("stack", "failed", REASON)
    (there,) = document["processes"][1]["evidence"]
    assert (there["kind"], there["status"], there["path"]) == ("stack", "captured", "stacks/x-9.txt")
    assert document["requests"]["reason"] == REASON
    assert document["verdict"]["level"] == "unknown"
    assert document["verdict"]["text"].endswith(" The crash handler was killed before the incident was complete.")
    assert document["timeline"][-1]["event"] == "finished_by_another_handler"
    assert REASON in (path / "summary.md").read_text()
    assert f"sglang-crashkit show {path} --stacks\n" in (path / "summary.md").read_text()
    assert sorted(each.name for each in path.iterdir()) == ["events.jsonl", "incident.json", "stacks", "summary.md"]
    assert finish_abandoned(tmp_path) == []


def test_who_failed_first_is_told_by_the_log(tmp_path: Path) -> None:
    end = {"code": None, "signal": "SIGKILL", "cause": "signal", "detail": "no OOM kill", "time": "t"}
    failures = [{"pid": 8, "seconds": 1.0, "kind": "exit", "fatal_signal": True}]
    requests = {"path": "/x.pkl", "reason": None, "finished": 1, "unfinished": 2}
    abandon(tmp_path, processes=[REPORT | {"exit": end}], failures=failures, requests=requests)
    (path,) = finish_abandoned(tmp_path)
    document = document_of(path)
    assert document["verdict"]["kind"] == "signal"
    assert document["verdict"]["level"] == "established"
    assert document["verdict"]["text"] == (
        "sglang::scheduler_TP1 (pid 8) was killed by SIGKILL: no OOM kill. "
        "The crash handler was killed before the incident was complete."
    )
    assert document["cause"]["class"] == "killed"
    assert document["requests"].items() >= requests.items()


def test_a_whole_one_gets_its_name_only(tmp_path: Path) -> None:
    partial = abandon(tmp_path, complete=True)
    before = document_of(partial)
    (path,) = finish_abandoned(tmp_path)
    assert document_of(path) == before
    assert (path / "summary.md").read_text() == "words \\udcff\n"


def test_pieces_that_the_last_checkpoint_does_not_list_are_listed(tmp_path: Path) -> None:
    names = ("stacks/scheduler_TP1-8.txt", "ranks/scheduler_TP1-8.exception.json", "stacks/scheduler_TP2-88.txt")
    abandon(tmp_path, processes=[REPORT], pieces=dict.fromkeys(names, "x"))
    (path,) = finish_abandoned(tmp_path)
    pieces = document_of(path)["processes"][0]["evidence"]
    assert [(piece["kind"], piece["status"], piece["path"]) for piece in pieces] == [
        ("stack", "captured", names[0]),
        ("exception", "captured", names[1]),
    ]


def test_a_failing_ranks_own_record_is_taken_in(tmp_path: Path) -> None:
    theirs = [f".spool-{key}/exception-8.json" for key in ("77-2-5", "78-1-5", "77-1-6")]
    for name in (f"{SPOOL}/exception-8.json", f"{SPOOL}/exception-99.json", *theirs):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"message": "mine", "api_key": "verysecret1234"}')
    abandon(tmp_path, processes=[REPORT], server=SERVER)
    (path,) = finish_abandoned(tmp_path)
    (_stack, piece) = document_of(path)["processes"][0]["evidence"]
    assert (piece["kind"], piece["status"]) == ("exception", "captured")
    record = json.loads((path / piece["path"]).read_text())
    assert record["message"] == "mine"
    assert "verysecret" not in record["api_key"]
    assert not (tmp_path / SPOOL / "exception-8.json").exists()
    assert (tmp_path / SPOOL / "exception-99.json").exists()
    assert all((tmp_path / name).exists() for name in theirs)


@pytest.fixture
def last_record(tmp_path: Path) -> None:
    """Leave what a rank wrote of the exception that ended it."""
    (tmp_path / SPOOL).mkdir()
    (tmp_path / SPOOL / "exception-8.json").write_text('{"message": "the last one"}')


@pytest.mark.usefixtures("last_record")
def test_the_record_that_ended_a_rank_stays_beside_one_that_sglang_caught(tmp_path: Path) -> None:
    caught = {"ranks/x-8.exception.json": '{"message": "caught"}'}
    abandon(tmp_path, processes=[REPORT], server=SERVER, pieces=caught)
    (path,) = finish_abandoned(tmp_path)
    said = sorted(json.loads(each.read_text())["message"] for each in path.glob("ranks/*.exception*.json"))
    assert said == ["caught", "the last one"]


@pytest.mark.usefixtures("last_record")
def test_what_is_no_file_beside_a_record_holds_nothing_up(tmp_path: Path) -> None:
    partial = abandon(tmp_path, processes=[REPORT], server=SERVER, pieces={"ranks/y-9.txt": "y"})
    os.mkfifo(partial / "ranks" / "x-8.exception.json")
    (path,) = finish_abandoned(tmp_path)
    assert json.loads((path / "ranks" / "rank-8.exception1.json").read_text()) == {"message": "the last one"}


@pytest.mark.usefixtures("last_record")
def test_a_link_in_the_place_of_a_record_holds_nothing_up(tmp_path: Path) -> None:
    record = tmp_path / SPOOL / "exception-8.json"
    record.symlink_to(record.rename(tmp_path / "theirs.json"))
    abandon(tmp_path, processes=[REPORT], server=SERVER)
    (path,) = finish_abandoned(tmp_path)
    assert not list(path.glob("ranks/*.exception*.json"))


def test_one_that_holds_nothing_is_removed(tmp_path: Path) -> None:
    folder = IncidentFolder(tmp_path, "killed", "0123abcd", NOON)
    folder.ownership.release()
    assert finish_abandoned(tmp_path) == []
    # Its owner may be about to lock it.
    assert folder.path.exists()
    age(folder.path)
    assert finish_abandoned(tmp_path) == []
    assert not folder.path.exists()


def test_one_whose_log_is_gone_stays_for_an_hour(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    partial = abandon(tmp_path, processes=[REPORT], pieces={"stacks/x-8.txt": "x"})
    (partial / "events.jsonl").unlink()
    os.utime(partial, (time.time() - 60.0,) * 2)
    assert finish_abandoned(tmp_path) == []
    assert (partial / "stacks/x-8.txt").exists()
    assert "its log cannot be read" in caplog.text
    # Then it counts, and goes, like any other.
    os.utime(partial, (time.time() - 4000.0,) * 2)
    (finished,) = finish_abandoned(tmp_path)
    assert (finished / "stacks/x-8.txt").exists()


def test_one_that_is_still_written_is_left_alone(tmp_path: Path) -> None:
    with child(HOLD, str(tmp_path)) as writer:
        (partial,) = tmp_path.iterdir()
        age(partial)
        before = sorted(each.name for each in partial.iterdir())
        assert finish_abandoned(tmp_path) == []
        assert sorted(each.name for each in partial.iterdir()) == before
        writer.kill()
        writer.wait(LONG)
        assert len(finish_abandoned(tmp_path)) == 1


def test_foreign_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    incidents, elsewhere = tmp_path / "incidents", tmp_path / "elsewhere"
    elsewhere.mkdir()
    incidents.mkdir()
    (incidents / ".partial-notes").mkdir()
    (incidents / ".removing-notes").mkdir()
    (incidents / ".partial-20231114T221320.250Z-killed-0123abcd").symlink_to(elsewhere)
    (incidents / ".partial-20231114T221320.250Z-killed-0123abce").write_text("a file")
    theirs = incidents / ".partial-20231114T221320.250Z-killed-0123abcf"
    if os.geteuid() == 0:
        theirs.mkdir()
        os.chown(theirs, 65534, 65534)
        age(theirs)
    before = sorted(incidents.iterdir())
    assert finish_abandoned(incidents) == []
    assert sorted(incidents.iterdir()) == before
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"\xff", b'{"schema_version": 2}'],
)
def test_one_that_cannot_be_read_is_named_and_stays(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    partial = abandon(tmp_path)
    (partial / "incident.json").write_bytes(content)
    assert finish_abandoned(tmp_path) == []
    assert (partial / "incident.json").read_bytes() == content
    assert str(partial) in caplog.text
    good = abandon(tmp_path, seconds=NOON - 1)
    assert [path.name for path in finish_abandoned(tmp_path)] == [good.name.removeprefix(".partial-")]


def test_two_at_a_time_finish_each_incident_once(tmp_path: Path) -> None:
    for number in range(12):
        abandon(tmp_path, seconds=NOON + number)
    assert finish_at_once(tmp_path) == 12
    assert all(found.finished and found.document for found in find_incidents(tmp_path))


def test_what_one_of_them_holds_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # GIVEN the log of a hang that is cut off before its processes, and one with too many odd parts to look at each
    failure = {"pid": 7, "seconds": 1.0, "kind": "hang", "message": "made no progress for 60 s"}
    logs = [{"kind": "hang"}, {"failures": [failure]}], [{"kind": "killed"}, {"suspects": [{}] * 200_000}]
    for number, log in enumerate(logs):
        folder = abandon(tmp_path, processes=[REPORT], seconds=NOON + number)
        lines = [{"id": folder.name[-8:]}, {"schema_version": 1}, *log]
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        age(folder)
    began = time.monotonic()
    finish_abandoned(tmp_path)
    assert time.monotonic() - began < LONG / 2
    assert [found.finished for found in find_incidents(tmp_path)] == [True, True]
    assert caplog.text == ""


def test_recovery_that_is_killed_itself_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "AGE_SECS", 0.0)
    # The process that is killed is the one that writes.
    monkeypatch.setattr(unfinished, "call_within", lambda _secs, work, keep: work())
    step = 0
    while True:
        incidents = tmp_path / str(step)
        abandon(incidents, processes=[REPORT], pieces={"stacks/x-8.txt": "x"})
        if not run_and_kill(lambda folder=incidents: finish_abandoned(folder), incidents, step):
            break
        finish_abandoned(incidents)
        (found,) = find_incidents(incidents)
        assert found.finished
        assert found.document["processes"][0]["evidence"][0]["path"] == "stacks/x-8.txt"
        step += 1
    assert step > 5


def test_pipes_in_place_of_files_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "AGE_SECS", 0.0)
    incidents = tmp_path / "host" / "incidents"
    folder = abandon(incidents)
    (folder / "events.jsonl").unlink()
    for path in (folder / "incident.json", folder / "events.jsonl", incidents / "faults.json"):
        os.mkfifo(path)
    assert finish_abandoned(incidents) == []
    assert read_faults(incidents) == {}
    assert folder.exists()


@pytest.mark.parametrize(("age_secs", "is_finished"), [(200.0, False), (400.0, True)])
def test_without_locks_a_writer_is_given_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_secs: float, is_finished: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(private_files.fcntl, "flock", refuse)
    folder = abandon(tmp_path / "host" / "incidents")
    os.utime(folder, (time.time() - age_secs,) * 2)
    assert bool(finish_abandoned(folder.parent)) is is_finished


def test_a_log_that_says_that_it_is_whole_is_rendered_all_the_same(tmp_path: Path) -> None:
    partial = abandon(tmp_path, processes=[REPORT])
    with (partial / "events.jsonl").open("ab") as log:
        log.write(b'{"complete": true}\n')
    (path,) = finish_abandoned(tmp_path)
    assert document_of(path)["complete"] is False
    assert (path / "summary.md").exists()
