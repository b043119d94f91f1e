"""The user's command: what it is given, how it ends, and the scripts of docs/on_incident as they are."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kubernetes_validate import latest_version, validate
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.notices import Commands
from sglang_crashkit.handler.on_incident import COMMAND, COMMAND_SECS, OUTCOME, run_command
from sglang_crashkit.kernel.private_files import FolderLock
from unit.support.server_driver import Server
from unit.support.stored import make_incident
from unit.support.targets import is_gone
from unit.support.waiting import LONG, wait_until

SCRIPTS = Path(__file__).parents[3] / "docs" / "on_incident"


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    return tmp_path / "incidents"


@pytest.fixture
def incident(incidents: Path) -> Path:
    verdict = {"kind": "killed", "text": "scheduler_TP1 was killed by SIGKILL"}
    return make_incident(incidents, verdict=verdict, cause={"class": "killed"})


@pytest.fixture
def outcome_of(incident: Path) -> Callable[..., dict[str, Any]]:
    """Run a command for the incident, and return what is noted of it."""

    def run(command: str, **environ: str) -> dict[str, Any]:
        outcome = run_command(incident, dict(os.environ) | {COMMAND_SECS: str(LONG), COMMAND: command} | environ)
        assert outcome == json.loads((incident / OUTCOME).read_text())
        return outcome

    return run


def test_it_gets_the_folder_as_last_argument_and_the_summary(
    outcome_of: Callable[..., dict[str, Any]], incident: Path, tmp_path: Path
) -> None:
    code = "import json, os, sys; json.dump([sys.argv[1:], sys.stdin.read()], open(os.environ['TO'], 'w'))"
    # There is no shell: what it would expand stays as it is.
    outcome = outcome_of(f"{sys.executable} -c {shlex.quote(code)} 'two words' $HOME", TO=str(tmp_path / "read"))
    assert outcome["done"] is True
    assert json.loads((tmp_path / "read").read_text()) == [
        ["two words", "$HOME", str(incident)],
        (incident / "summary.md").read_text(errors="surrogateescape"),
    ]
    assert stat.S_IMODE((incident / OUTCOME).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("false", "ended with status 1"),
        ("/nonexistent/command", "No such file"),
        ("page 'half", "cannot be split"),
        (f"{sys.executable} -c \"while True: print('x' * 9999)\"", "printed more than 1 MiB"),
    ],
)
def test_a_command_that_fails_is_noted(outcome_of: Callable[..., dict[str, Any]], command: str, reason: str) -> None:
    outcome = outcome_of(command)
    assert outcome["done"] is False
    assert reason in outcome["reason"]


@pytest.mark.wide
def test_at_its_deadline_it_is_killed_with_all_that_it_started(
    outcome_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    waits = (
        "import os, subprocess; p = subprocess.Popen(['sleep', '600']); open(os.environ['TO'], 'w').write(str(p.pid))"
    )
    command = f"{sys.executable} -c {shlex.quote(waits + '; p.wait()')}"
    outcome = outcome_of(command, TO=str(tmp_path / "pid"), **{COMMAND_SECS: "5"})
    assert "did not end within 5 s" in outcome["reason"]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(pid), "its child is gone")


def test_a_secret_that_it_prints_is_not_kept(outcome_of: Callable[..., dict[str, Any]]) -> None:
    outcome = outcome_of(f"{sys.executable} -c \"raise SystemExit('api_key=hunter2hunter2')\"")
    assert "api_key" in outcome["reason"]
    assert "hunter2" not in outcome["reason"]


def test_it_is_run_once_and_by_one_process(outcome_of: Callable[..., dict[str, Any]], incident: Path) -> None:
    lock = FolderLock(incident)
    assert lock.acquire() == "held"
    assert not run_command(incident, {COMMAND: "true"})
    lock.release()
    outcome_of("true")
    assert not run_command(incident, {COMMAND: "true"})


@pytest.mark.parametrize(("kind", "verdict"), [("snapshot", None), ("hang", {"kind": "busy"})])
def test_it_is_not_run_where_nothing_failed(incidents: Path, kind: str, verdict: object) -> None:
    quiet = make_incident(incidents, kind=kind, verdict=verdict)
    assert not run_command(quiet, {COMMAND: "true"})
    assert not (quiet / OUTCOME).exists()


def test_an_incident_that_was_withdrawn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, CrashkitError)):
        run_command(tmp_path / "gone", {COMMAND: "true"})


# -- when the crash handler runs it


def notes(path: Path) -> str:
    """Return a command that appends the name of each incident to a file."""
    return f"{sys.executable} -c \"import sys; open('{path}', 'a').write(sys.argv[1] + chr(10))\""


def work_off(commands: Commands, is_done: Callable[[], object]) -> None:
    def act() -> object:
        commands.act_on_time()
        return is_done()

    wait_until(act, "all have ended")


def test_the_last_hours_incidents_are_caught_up_once_and_the_newest_first(
    incidents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_crashkit.handler.notices.MAX_AT_ONCE", 1)
    monkeypatch.setenv(COMMAND, notes(tmp_path / "told"))
    make_incident(incidents)
    older, newer = (make_incident(incidents, seconds=time.time() - secs) for secs in (60, 30))
    make_incident(incidents, seconds=time.time() - 20, publish=False)
    make_incident(incidents, seconds=time.time() - 10, kind="snapshot")
    for _start in range(2):
        commands = Commands()
        commands.catch_up(incidents)
        work_off(commands, (older / OUTCOME).exists)
    assert (tmp_path / "told").read_text().split() == [str(newer), str(older)]


def test_a_crash_runs_it_and_waits_for_nothing(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(environ={COMMAND: notes(tmp_path / "told")})
    server.kill("scheduler_TP1")
    incident = server.incident()
    wait_until((incident.path / OUTCOME).exists, "the command was run")
    assert json.loads((incident.path / OUTCOME).read_text())["done"] is True
    assert (tmp_path / "told").read_text().split() == [str(incident.path)]


@pytest.mark.parametrize(
    ("python", "reason"),
    [(sys.executable, "ended with status 7; no route"), ("/nonexistent", "/nonexistent: No such file or directory")],
)
def test_a_failure_is_said_in_the_handlers_log(
    incident: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, python: str, reason: str
) -> None:
    monkeypatch.setenv(COMMAND, "sh -c 'echo no route; exit 7'")
    monkeypatch.setattr("sys.executable", python)
    commands = Commands()
    commands.begin(incident)
    work_off(commands, lambda: reason in caplog.text)
    assert f"{COMMAND} for incident {incident}: " in caplog.text


# -- the scripts


class Hook(ThreadingHTTPServer):
    """A web hook that answers one status after the other, the last one for ever; `bodies` is what it was sent."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.bodies = list(statuses), list[bytes]()
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.statuses[0] if len(self.server.statuses) == 1 else self.server.statuses.pop(0))
        self.end_headers()


@contextlib.contextmanager
def hook(*statuses: int) -> Iterator[Hook]:
    with Hook(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(LONG)


def test_the_script_for_slack_posts_the_summary(
    outcome_of: Callable[..., dict[str, Any]], incident: Path, tmp_path: Path
) -> None:
    with hook(200) as server:
        (tmp_path / "hook.curl").write_text(f'url = "{server.url}"\n')
        assert outcome_of(f"{SCRIPTS}/tell-slack {tmp_path}/hook.curl")["done"]
    (body,) = server.bodies
    assert json.loads(body) == {"text": (incident / "summary.md").read_text(errors="replace")}


def test_the_script_for_alertmanager_posts_one_alert(outcome_of: Callable[..., dict[str, Any]], incident: Path) -> None:
    with hook(503, 200) as server:
        assert outcome_of(f"{SCRIPTS}/tell-alertmanager {server.url}")["done"]
    # A busy Alertmanager is asked again.
    assert len(server.bodies) == 2
    (alert,) = json.loads(server.bodies[-1])
    labels = {"alertname": "SGLangIncident", "severity": "critical", "instance": "h", "kind": "killed"}
    assert alert["labels"] == labels | {"cause": "killed"}
    assert alert["annotations"] == {"summary": "scheduler_TP1 was killed by SIGKILL", "path": str(incident)}


def test_the_script_for_kubernetes_makes_an_event_of_the_pod(
    outcome_of: Callable[..., dict[str, Any]], incident: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/event\n')
    kubectl.chmod(0o755)
    variables = {"PATH": f"{kubectl.parent}:{os.environ['PATH']}", "POD_NAME": "pod-1", "POD_NAMESPACE": "inference"}
    assert outcome_of(str(SCRIPTS / "tell-kubernetes"), **variables)["done"]
    assert (tmp_path / "arguments").read_text() == "create --namespace inference --filename -\n"
    event = json.loads((tmp_path / "event").read_text())
    validate(event, latest_version(), strict=True)
    assert (event["kind"], event["involvedObject"]["name"], event["metadata"]["namespace"]) == (
        "Event",
        "pod-1",
        "inference",
    )
    assert event["message"] == f"killed; scheduler_TP1 was killed by SIGKILL; {incident}"


def test_the_script_for_a_collector_posts_one_log_record(
    outcome_of: Callable[..., dict[str, Any]], incident: Path
) -> None:
    with hook(200) as server:
        assert outcome_of(f"{SCRIPTS}/tell-collector {server.url}")["done"]
    (body,) = server.bodies
    # OpenTelemetry's own schema: a field that it does not know is an error.
    request = json_format.Parse(body, ExportLogsServiceRequest())
    (record,) = request.resource_logs[0].scope_logs[0].log_records
    told = {each.key: each.value.string_value for each in record.attributes}
    assert (record.severity_text, record.body.string_value) == ("FATAL", "scheduler_TP1 was killed by SIGKILL")
    assert told == {"id": incident.name[-8:], "kind": "killed", "cause": "killed", "path": str(incident)}
