"""An incident's folder at every moment: its writer is killed at each step, and a fault comes a hundred times."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_crashkit.handler import incident_run, unfinished
from sglang_crashkit.handler.collectors.gpu import Driver
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.evidence import collectors_of
from sglang_crashkit.handler.incident_run import Awaited, Collector, IncidentRun, Moment
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.unfinished import REASON, finish_abandoned
from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.folder import IncidentFolder, new_id
from sglang_crashkit.incident.judging import read_log
from sglang_crashkit.incident.retention import NoRoomError, size_of
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.model.incident import (
    Trigger,
    iso_time,
)
from sglang_crashkit.policy import Capture
from sglang_crashkit.settings import MB, DiskLimits, Settings
from unit.support.killing import run_and_kill
from unit.support.launching import STARTS
from unit.support.server_driver import Server
from unit.support.targets import start_ticks
from unit.support.tracked import begin_incident
from unit.support.waiting import LONG, child, wait_until

#: At least as many file operations as one incident takes.
MAX_STEPS = 1000
TIMES = ("before anything", "opened", "stacks_captured", "told of an exception", "reported the requests", "finished")


def gather(root_pid: int, incidents: Path, record: Path, reached: Callable[[str], object]) -> None:
    """Do what the crash handler does in one incident."""
    tree = ProcessTree(root_pid)
    reached("before anything")
    collectors = collectors_of(Received(tree, Settings.from_environ({})), Driver(is_on=False))
    run = begin_incident(tree, incidents, collectors=collectors)
    reached("opened")
    run.permit(Capture.OBSERVE)
    run.take(Moment.CAPTURE)
    reached("stacks_captured")
    run.add_exception(tree.root, time.time(), "ValueError: x", record, caught=False)
    reached("told of an exception")
    run.set_requests({"path": "/crash.pkl", "finished": 1, "unfinished": 2})
    reached("reported the requests")
    run.finish()
    reached("finished")
    run.checkpoint()
    run.refresh()


def check(folder: Path, pid: int, reached: str) -> None:
    """Check what a killed crash handler left, before and after it is finished."""
    incidents = folder / "incidents"
    for found in find_incidents(incidents):
        assert found.document is not None or found.problem == "has no incident.json"
        assert found.document is not None or reached == "before anything"
    left = find_incidents(incidents)
    before = left[0].document if left else None
    finish_abandoned(incidents)
    records = [*incidents.glob(".spool-*/*"), *incidents.glob("*/ranks/*")]
    assert len(records) == 1, "a rank's own record is lost, or there twice"
    assert json.loads(records[0].read_text()) == {"traceback": ["forward (model.py:7)"]}
    if before is None:
        # It held nothing.
        assert find_incidents(incidents) == []
        return
    (after,) = find_incidents(incidents)
    assert after.finished
    assert finish_abandoned(incidents) == []
    document = after.document
    for process in document["processes"]:
        assert process["pid"] == pid
        assert [piece["kind"] for piece in process["evidence"]].count("stack") == 1
        for piece in process["evidence"]:
            assert piece["reason"] or piece["status"] == "captured"
            assert piece["path"] is None or (after.path / piece["path"]).is_file()
    is_whole = before["complete"]
    # A kill while the server's end is added to a finished one leaves a copy that no one reads.
    hidden = [path.name for path in after.path.rglob("*") if path.name.startswith(".")]
    assert hidden == [] or reached == "finished"
    assert document["complete"] is is_whole
    assert is_whole or REASON in json.dumps(document).lower()
    stages = TIMES.index(reached)
    if stages >= TIMES.index("stacks_captured"):
        (process,) = document["processes"]
        assert "stack" in {piece["kind"] for piece in process["evidence"] if piece["status"] == "captured"}
    if stages >= TIMES.index("told of an exception"):
        assert document["verdict"]["first_failure"]["pid"] == pid
        assert "ValueError: x" in document["verdict"]["text"]
    if stages >= TIMES.index("reported the requests"):
        assert document["requests"]["path"] == "/crash.pkl"


@pytest.mark.wide
def test_a_kill_at_any_step_leaves_what_can_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "AGE_SECS", 0.0)
    reached = ""
    with child("ready(); pause()", title="sglang::scheduler_TP0") as process:
        key = server_key(process.pid, start_ticks(process.pid))
        for step in range(MAX_STEPS):
            folder = tmp_path / str(step)
            spool = folder / "incidents" / f".spool-{key}"
            spool.mkdir(parents=True)
            record = spool / f"exception-{process.pid}.json"
            record.write_text('{"traceback": ["forward (model.py:7)"]}')
            note = (folder / "reached").write_text
            work = functools.partial(gather, process.pid, folder / "incidents", record, note)
            was_killed, reached = run_and_kill(work, folder / "incidents", step), (folder / "reached").read_text()
            check(folder, process.pid, reached)
            if not was_killed:
                break
            shutil.rmtree(folder)
    assert reached == "finished"
    assert step > 25


def test_what_was_left_in_the_fallback_is_finished_later(start_server: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "crash").write_text("in the way")
    begun = start_server(journals=True, dump_secs=LONG)
    begun.ask("ask only hello")
    begun.kill("scheduler_TP1")
    assert begun.line() == "sigquit"
    wait_until(lambda: [found for found in begun.incidents(begun.fallback) if found.document], "the incident is begun")
    for pid in (begun.handler.pid, begun.pid):
        os.kill(pid, signal.SIGKILL)
    begun.wait_for_handler()
    begun.process.wait(LONG)

    (tmp_path / "crash").unlink()
    start_server(journals=True)
    finished = begun.incident(begun.fallback)
    assert finished.document["server"]["pid"] == begun.pid
    # They were in the memory of the two that were killed.
    assert (finished.document["requests"]["journal"], finished.document["requests"]["reason"]) == (None, REASON)


THREE_RANKS = STARTS + "[start_titled(f'sglang::scheduler_TP{number}') for number in range(3)]; ready(); pause()"


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    with child(THREE_RANKS, title="sglang::server") as process:
        tree = ProcessTree(process.pid)
        for rank in tree.refresh():
            tree.register(rank.pid, 0)
        yield tree


@pytest.mark.wide
def test_a_hundred_crashes_are_a_hundred_incidents_within_the_limits(tree: ProcessTree, tmp_path: Path) -> None:
    max_use = MB
    limits = DiskLimits(max_use=max_use, keep_free=0)
    settings = replace(Settings.from_environ({}), disk=limits, capture_secs=LONG)
    collectors = collectors_of(Received(tree, settings), Driver(is_on=False))
    made = []
    (rank,) = (process for process in tree if process.title == "sglang::scheduler_TP1")
    for _ in range(100):
        # As if it had just been killed.
        rank.exited_at = time.time()
        folder = IncidentFolder(tmp_path, "killed", new_id(), time.time(), limits, server=tree.root.pid)
        trigger = Trigger("process_exited", iso_time(time.time()), rank.pid, rank.title)
        run = IncidentRun("killed", trigger, tree, folder, tmp_path, settings, collectors)
        run.take(Moment.CAPTURE)
        run.add_exit(rank)
        made.append(run.finish())
        assert made[-1].is_dir()
        assert size_of(tmp_path) <= max_use
    assert len(set(made)) == 100
    found = find_incidents(tmp_path)
    assert {each.path for each in found} == {path for path in made if path.is_dir()}
    assert all(each.finished and each.document and each.document["complete"] for each in found)
    (entry,) = read_faults(tmp_path).values()
    assert entry["count"] == 100
    assert [each.document["fault"]["count"] for each in found] == list(range(100, 100 - len(found), -1))
    short = [each for each in found if each.document["fault"]["repeats"] is not None]
    # One that gave up its room for others is made up for by one more in full.
    assert len(found) - len(short) <= settings.full_per_fault
    assert len(short) > 10
    for each in short:
        assert not list(each.path.glob("stacks/*"))
        assert (each.path / "summary.md").is_file()


def test_what_could_not_be_logged_is_logged_later_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin_incident(ProcessTree(os.getpid()), tmp_path)

    def refuse(name: str, lines: Sequence[str]) -> None:
        raise NoRoomError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(run.folder, "append", refuse)
        run.incident.note(1.0, "first")
        run.checkpoint()
    run.incident.note(2.0, "second")
    run.checkpoint()
    found = read_log(run.folder.path)
    run.discard()
    assert [entry.event for entry in found.timeline] == ["first", "second"]


@pytest.mark.parametrize("again", [False, True])
def test_an_incident_that_cannot_be_judged_says_who_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    with child("ready(); pause()", title="sglang::scheduler_TP0") as process:
        tree = ProcessTree(process.pid)
        run = begin_incident(tree, tmp_path)
        run.add_exception(tree.root, time.time(), "ValueError: x", None, caught=False)
        if again:
            run.finish()
        monkeypatch.setattr(incident_run, "conclude", lambda *_: os._exit(3))
        if again:
            run.add_remark("It went on.")
            run.refresh()
        else:
            run.finish()
    (stored,) = find_incidents(tmp_path)
    verdict = stored.incident.verdict
    assert verdict.text.endswith("raised ValueError: x.")
    # A judgement that was reached stands.
    assert (stored.incident.cause is not None) == again
    assert "It went on." in (stored.path / "events.jsonl").read_text() or not again


def test_one_that_stands_still_is_named_though_nothing_could_be_collected(tmp_path: Path) -> None:
    with child("ready(); pause()", title="sglang::detokenizer") as process:
        run = begin_incident(ProcessTree(process.pid), tmp_path, "hang")
        run.add_silence(run.tree.root, None, 7.0, "answered no health check")
        run.finish()
    (stored,) = find_incidents(tmp_path)
    text = f"sglang::detokenizer (pid {process.pid}) answered no health check for 7.0 s."
    assert stored.incident.verdict.text == text


class Broken(Awaited):
    """Evidence that breaks as it is looked at."""

    is_done = False

    def look(self) -> None:
        raise KeyError(7)

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)


def test_evidence_that_breaks_as_it_is_looked_at_is_not_waited_for(tmp_path: Path) -> None:
    failed: list[str] = []
    row = Collector("broken", Moment.ASK, lambda *_: Broken())
    note_error = lambda name, _error: failed.append(name)  # noqa: E731
    run = begin_incident(ProcessTree(os.getpid()), tmp_path, collectors=(row,), note_error=note_error)
    run.take(Moment.ASK)
    assert run.is_waiting
    run.look()
    assert (run.is_waiting, failed) == (False, ["the answer to Broken"])
    run.discard()
