"""Secrets of every form, planted wherever a server tells something: none reaches the disk or a terminal."""

from __future__ import annotations

import io
import json
import logging
import pickle
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sglang_crashkit import redact
from sglang_crashkit.handler.collectors.received import format_log
from sglang_crashkit.handler.collectors.requests import export_requests
from sglang_crashkit.incident.exit_status import write_termination_message
from sglang_crashkit.incident.folder import IncidentFolder, new_id
from sglang_crashkit.memory.journal import JournalWriter
from sglang_crashkit.memory.ring import LogRecord
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.srt.redaction import redact_dump
from sglang_crashkit.view.markdown import format_summary, format_termination_message
from unit.secret_forms import FORMS, PLANTED, holds_secret
from unit.support.command import Cli
from unit.support.stored import NOON, golden, handler_log

ALL = "\n".join(FORMS)
STAMP = "[2026-10-05 08:00:00 TP0]"


def planted() -> dict[str, Any]:
    """Return an incident whose messages, reasons and events hold them."""
    document = golden("exception")
    for number, form in enumerate(FORMS):
        document["timeline"].append(document["timeline"][0] | {"event": "exception", "message": form})
        document["timeline"][number % 3].setdefault("more", []).append([{"words": form}, ["api_key", PLANTED]])
    document["verdict"]["text"] = document["verdict"]["basis"] = document["requests"]["reason"] = ALL
    document["processes"][0]["doing"] = FORMS
    for piece in document["processes"][0]["evidence"]:
        piece["reason"] = ALL
    document["environment"]["arguments"] = {"api_key": PLANTED, "headers": [["X-Api-Key", PLANTED]], "all": FORMS}
    return document


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An incident that the crash handler's own parts wrote."""
    incidents = tmp_path_factory.mktemp("crash") / "node7" / "incidents"
    document = planted()
    folder = IncidentFolder(incidents, "exception", document["id"], NOON)
    frame = {"function": f"f(api_key={PLANTED!r})", "file": "x.py", "line": 3}
    folder.write_text("stacks/scheduler_TP0-11.txt", ALL)
    folder.write_json("stacks/scheduler_TP0-11.json", {"threads": [{"name": ALL, "frames": [frame]}]})
    folder.write_text("ranks/scheduler_TP0-11.exception.txt", ALL)
    folder.write_text("ranks/scheduler_TP0-11.steps.jsonl", "".join(json.dumps({"rid": form}) + "\n" for form in FORMS))
    folder.write_text("gpu/native-11.txt", "x" * 300_000 + ALL)
    folder.write_json("environment.json", {"command_line": ALL, "arguments": document["environment"]["arguments"]})
    source = incidents / "record.json"
    source.write_text(json.dumps({"message": ALL, "printed": ALL, "batch": {"headers": [["cookie", PLANTED]]}}))
    folder.adopt(source, "ranks/scheduler_TP0-11.exception.json")
    records = [LogRecord(NOON, logging.INFO, "sglang", form) for form in FORMS]
    folder.write_text("logs/scheduler_TP0-11.log", "".join(format_log(records, [], time.monotonic() + 600)))
    with_journal(folder)
    folder.save(document, format_summary(Incident.of(document)))
    return folder.publish()


def with_journal(folder: IncidentFolder) -> None:
    journal = JournalWriter(1 << 20)
    # As the hook may leave it: what is below a list is not its to search.
    params = {"custom_params": [{"api_key": PLANTED}, ["Authorization", PLANTED], {"deep": [[{"all": FORMS}]]}]}
    journal.begin({"rid": "r1", "sampling_params": params, "token": PLANTED}, f"a prompt of {PLANTED[:5]}", None)
    export_requests([(11, journal.fd)], folder.path, 600.0, folder.charge, time.time(), {})
    journal.close()


def test_no_file_of_an_incident_holds_one(incident: Path) -> None:
    files = [path for path in incident.rglob("*") if path.is_file()]
    assert {path.relative_to(incident).parts[0] for path in files} == {
        *("environment.json", "incident.json", "summary.md", "gpu", "logs", "ranks", "requests", "stacks")
    }
    for path in files:
        text = path.read_text()
        assert redact.REDACTED in text
        assert [line for line in text.splitlines() if holds_secret(line)] == [], path.name
    # What users of the server wrote is theirs, and stays.
    (request,) = map(json.loads, (incident / "requests" / "requests.jsonl").read_text().splitlines())
    assert request["text"] == f"a prompt of {PLANTED[:5]}"
    for path in incident.rglob("*.json"):
        json.loads(path.read_text())


@pytest.mark.parametrize("part", ["", "--stacks", "--requests", "--timeline", "--env", "--json"])
def test_no_part_that_is_shown_holds_one(incident: Path, cli: Cli, part: str) -> None:
    assert not holds_secret(cli("show", incident, *filter(None, [part])).out)


def test_neither_page_report_nor_bundle_holds_one(incident: Path, tmp_path: Path, cli: Cli) -> None:
    for command in (("show", "--html", tmp_path / "x.html", "--prompts"), ("bundle", "--report")):
        assert not holds_secret(cli(command[0], incident, *command[1:]).out)
    assert not holds_secret(cli("bundle", incident, "-o", tmp_path / "x.tar.zst").out)
    assert not holds_secret((tmp_path / "x.html").read_text())
    with (tmp_path / "x.tar.zst").open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as unpacked:
        data = unpacked.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        texts = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        assert len(texts) > 8
        assert [name for name, file in texts.items() if file and holds_secret(file.read().decode())] == []


def test_neither_the_pods_status_nor_the_crash_handlers_log_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    message = format_termination_message(Incident.of(planted()), "/x")
    write_termination_message(message, {"SGLANG_CRASHKIT_TERMINATION_LOG": str(path)})
    assert not holds_secret(message + path.read_text())
    log = handler_log(tmp_path, ALL)
    assert redact.REDACTED in log
    assert not holds_secret(log)


def test_the_configuration_in_the_dump_of_the_requests_holds_none() -> None:
    configuration = {"all": FORMS, "bytes": ALL.encode(), "api_keys": [PLANTED], "headers": {"cookie": (PLANTED,)}}
    data: dict[str, Any] = {"server_args": configuration, "launch_command": ALL, "requests": [(f"said {PLANTED}",)]}
    redact_dump(data)
    assert data["requests"] == [(f"said {PLANTED}",)]
    assert not holds_secret(pickle.dumps(data | {"requests": []}).decode("latin-1"))


def test_what_cannot_be_searched_is_withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_crashkit.incident import folder as module

    monkeypatch.setattr(module, "SEARCH_SECS", 0.05)
    monkeypatch.setattr(module, "redact_text", lambda _text: time.sleep(60))
    folder = IncidentFolder(tmp_path, "hang", new_id(), NOON)
    began = time.monotonic()
    folder.write_text("logs/x.log", "x" * 300_000 + PLANTED)
    assert time.monotonic() - began < 30
    assert (folder.path / "logs" / "x.log").read_text().startswith("<withheld")
    folder.discard()


def test_a_secret_of_the_server_is_found_by_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "learned", set())
    redact.learn(redact.secrets_of_arguments(["x", "--api-key", "plain words"]) | {"short"})
    folder = IncidentFolder(tmp_path, "hang", new_id(), NOON)
    folder.write_text("x.txt", "it said plain words, short")
    assert (folder.path / "x.txt").read_text() == f"it said {redact.REDACTED}, short"
    folder.discard()


@pytest.mark.parametrize("output", ["", "--json", "--markdown"])
def test_what_explain_says_of_a_log_holds_none(tmp_path: Path, cli: Cli, output: str) -> None:
    # What is told is cut, wrapped and put into a link: words before it move each form to another place of its line.
    shown = []
    for number, form in enumerate(FORMS):
        log = tmp_path / "server.log"
        text = f"RuntimeError: {'words ' * (5 * number % 17)}{form}"
        lines = [f"{STAMP} server_args=ServerArgs(tp_size=1, api_key='{PLANTED}')"]
        lines += [
            f"{STAMP} Scheduler hit an exception: Traceback (most recent call last):",
            '  File "x.py", line 3, in f',
        ]
        log.write_text("\n".join([*lines, text, ""]))
        if holds_secret(cli("explain", log, *filter(None, [output])).out):
            shown.append(form)
    assert shown == []
