"""The handler's reaction to single messages, in this process and in a fixed order."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.collectors import received
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.policy import Mode
from sglang_crashkit.protocol import Message
from unit.support.launching import LAUNCHER, Case, handling
from unit.support.waiting import wait_until


def test_a_time_that_is_no_time_is_now(launching: Case) -> None:
    launching.fail({}, at=10**400)
    assert launching.verdict().first_failure is None


def test_a_message_that_fails_does_not_end_the_handler(
    launching: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(launching.handler, "take", fail)
    message = Message("teardown", {}, launching.titled, None)
    monkeypatch.setattr(launching.handler.mailbox, "receive", lambda **_: [message])
    launching.handler.take_messages()
    assert "message 'teardown'" in caplog.text
    assert "unforeseen" in caplog.text


def test_an_exit_that_fails_does_not_end_the_handler(
    launching: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = launching.handler
    launching.say("stacks_wanted")
    with monkeypatch.context() as patch:
        patch.setattr(handler.session, "take", lambda *_: 1 / 0)
        launching.kill(launching.starting)
    assert f"the exit of process {launching.starting} could not be taken in" in caplog.text
    (noted,) = [entry for entry in handler.session.run.incident.timeline if entry["event"] == "handler_error"]
    assert noted["message"] == "ZeroDivisionError: division by zero"
    # The loop does not wake for it any more, and the next one is taken in.
    handler.tree.ended()
    assert select.select([handler.tree], [], [], 0)[0] == []
    launching.kill(launching.titled)
    assert handler.session.run.incident.kind == "killed"


@pytest.mark.parametrize(("mode", "is_observed"), [(Mode.SERVER, False), (Mode.ELASTIC, True)])
def test_evidence_that_fails_changes_nothing_for_the_server_and_costs_no_other(
    launching: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Mode, is_observed: bool
) -> None:
    session = launching.handler.session
    session.triage.shutdown.mode = mode
    monkeypatch.setattr(procfs, "read_wchan", lambda _pid: 1 / 0)
    monkeypatch.setattr(received, "write_piece", lambda *_: 1 / 0)
    launching.kill(launching.titled)
    stage = session.triage.stage
    assert (stage.observed, stage.sigquit_at is not None) == (is_observed, not is_observed)
    session.finish()
    (stored,) = find_incidents(tmp_path)
    failed = [entry["what"] for entry in stored.document["timeline"] if entry["event"] == "handler_error"]
    assert failed == ["process states", "environment"]
    assert stored.document["verdict"]["kind"] == "signal"
    kinds = {piece["kind"] for process in stored.document["processes"] for piece in process["evidence"]}
    assert {"stack", "gpu_facts", "steps", "log"} <= kinds


def test_an_incident_that_cannot_be_finished_is_left(
    launching: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = launching.handler.session
    launching.kill(launching.titled)
    run = session.run
    monkeypatch.setattr(run, "finish", lambda: 1 / 0)
    for is_over in (False, False, True):
        session.finish()
        assert run.finished is is_over
    assert not launching.handler.session.triage.is_open
    (stored,) = find_incidents(tmp_path)
    assert not stored.finished
    assert [entry["what"] for entry in run.incident.timeline if entry["event"] == "handler_error"] == ["finish"] * 3


@pytest.mark.parametrize(
    ("event", "message"),
    [("exception", "RuntimeError: Connection closed by peer"), ("launch_failed", "died"), ("child_failed", "died")],
)
def test_what_follows_while_the_server_ends_changes_no_verdict(
    launching: Case, tmp_path: Path, event: str, message: str
) -> None:
    current = launching.handler.session
    launching.say("exception", launching.starting, message="ValueError: the first")
    current.finish()
    (before,) = find_incidents(tmp_path)
    launching.say(event, launching.titled, message=message)
    (after,) = find_incidents(tmp_path)
    assert after.document["verdict"] == before.document["verdict"]
    evidence = [[report["evidence"] for report in found.document["processes"]] for found in (before, after)]
    assert evidence[0] == evidence[1]
    assert current.run.incident.timeline[-1]["event"] == event


#: A main process that ends with status 7 when it hears of a death, and a rank.
SERVING = "signal.signal(signal.SIGQUIT, lambda *_: os._exit(7))\n" + LAUNCHER


@pytest.mark.parametrize(
    ("event", "fields", "kind"),
    [("watchdog_timeout", {"name": "Scheduler", "soft": True}, "hang"), ("stacks_wanted", {}, "snapshot")],
)
def test_a_death_as_an_observed_incident_opens_ends_the_server(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, event: str, fields: dict[str, Any], kind: str
) -> None:
    with handling(SERVING, tmp_path, short_folder, own=1) as (handler, process):
        handler.look()
        (rank,) = (one for one in handler.tree if one.title == "sglang::scheduler_TP0")

        def look_and_kill() -> None:
            if not rank.handle.has_exited():
                os.kill(rank.pid, signal.SIGKILL)
                wait_until(rank.handle.has_exited, "the rank is dead")

        monkeypatch.setattr(handler.tree, "refresh", look_and_kill)
        handler.take(Message(event, fields, process.pid, None), handler.tree.root)
        found = {stored.document["kind"]: stored.document for stored in find_incidents(tmp_path) if stored.document}
        assert set(found) == {kind, "killed"}
        assert found["killed"]["verdict"]["first_failure"]["pid"] == rank.pid
        assert found[kind]["complete"] is True
        wait_until(lambda: handler.session.act_on_time() and process.poll() is not None, "the server is told")
        assert process.poll() == 7


def test_the_record_of_a_late_exception_is_kept(launching: Case, tmp_path: Path) -> None:
    launching.say("exception", launching.starting, message="ValueError: the first")
    launching.handler.session.finish()
    record = tmp_path / "spool" / "record.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text("{}")
    launching.say("exception", launching.titled, message="RuntimeError: reset by peer", record=str(record))
    (stored,) = find_incidents(tmp_path)
    assert not record.exists()
    (kept,) = (stored.path / "ranks").iterdir()
    assert kept.read_text() == "{}"


#: A main process with a data-parallel controller, and a rank below that.
REPLICAS = """
import setproctitle, subprocess
code = "import os, setproctitle, signal; setproctitle.setproctitle('sglang::data_parallel_controller'); "
code += "pid = os.fork(); pid or setproctitle.setproctitle('sglang::scheduler_DP0'); "
code += "pid or print(os.getppid(), os.getpid(), flush=True); signal.pause()"
controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
ready(controller.stdout.readline().strip())
sys.stdin.readline()
"""


@pytest.mark.parametrize("event", ["crash_dump_begun", "child_failed"])
def test_an_incident_is_of_the_kind_of_its_first_failure(tmp_path: Path, short_folder: Path, event: str) -> None:
    with handling(REPLICAS, tmp_path, short_folder) as (handler, process):
        handler.look()
        controller, rank = map(handler.tree.get, map(int, process.first_line.split()))
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(controller.handle.has_exited, "the controller has ended")
        handler.take(Message(event, {}, process.pid, None), handler.tree.root)
        handler.session.finish()
        (stored,) = find_incidents(tmp_path)
        assert "-killed-" in stored.name
        trigger = event.removesuffix("_begun")
        assert (stored.document["kind"], stored.document["trigger"]["event"]) == ("killed", trigger)
        assert stored.document["verdict"]["first_failure"]["pid"] == controller.pid
        # It outlives its controller.
        rank.handle.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("step_secs", [-3600.0, 3600.0])
def test_a_clock_that_is_set_between_two_deaths_changes_no_order(
    launching: Case, monkeypatch: pytest.MonkeyPatch, step_secs: float
) -> None:
    real = time.time
    first, second = launching.titled, launching.starting
    launching.kill(first)
    monkeypatch.setattr(time, "time", lambda: real() + step_secs)
    launching.kill(second)
    verdict, run = launching.verdict(), launching.handler.session.run
    assert verdict.first_failure.pid == first
    exits = sorted(
        (entry["time"], entry["pid"]) for entry in run.incident.timeline if entry["event"] == "process_exited"
    )
    assert [pid for _time, pid in exits] == [first, second]
