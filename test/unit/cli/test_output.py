"""What a command prints of an incident that somebody filled with control characters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.step import Step, StepRequest
from sglang_crashkit.view.markdown import format_summary
from sglang_crashkit.visible import visible
from unit.support.command import Cli
from unit.support.stored import golden, handler_log, make_incident, poisoned, stacks_of

#: It clears the screen, sets the window's title, goes back to the line's begin, turns the text around; C1, DEL, a tag.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\x08\u202e\x9b31m\x7f\u2066\U000e0041\u200b"
GOLDEN = golden("killed")


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """An incident in which every text ends with them, and so does every text in its files."""
    pid = GOLDEN["verdict"]["first_failure"]["pid"]
    step = Step(1, 1.0, 1.5, "processed", f"decode{HOSTILE}", (StepRequest(f"r{HOSTILE}", 37, 37),), 1, 37)
    request = {"rid": f"r{HOSTILE}", "state": f"unfinished{HOSTILE}", "arrived": "2026-11-23T04:57:27.8Z"}
    request |= {"text": f"a prompt{HOSTILE}", "sampling_params": {f"regex{HOSTILE}": HOSTILE}}
    frame = {"function": f"f{HOSTILE}", "file": f"x.py{HOSTILE}", "line": 3}
    pieces = stacks_of(GOLDEN, frame) | {
        "ranks/scheduler_TP0-11.steps.jsonl": json.dumps(step.to_json()) + "\n",
        "ranks/scheduler_TP1-12.steps.jsonl": json.dumps(step.to_json() | {"mode": f"extend{HOSTILE}"}) + "\n",
        "requests/requests.jsonl": json.dumps(request) + "\n",
        "environment.json": json.dumps(poisoned({"command_line": "python", "versions": {"torch": "2"}}, HOSTILE)),
        f"ranks/scheduler_TP1-{pid}.exception.txt": f"RuntimeError: {HOSTILE}\n",
        "logs/scheduler_TP1.log": f"said {HOSTILE}\n",
    }
    fields = poisoned(GOLDEN, HOSTILE) | {"divergence": {"statement": HOSTILE, "level": HOSTILE, "step": 1}}
    return make_incident(tmp_path / "crash" / "node7" / "incidents", pieces=pieces, **fields)


@pytest.mark.parametrize(
    "command",
    [
        *(f"show {{}} {part}" for part in ("", "--stacks", "--requests", "--steps", "--timeline", "--env", "--json")),
        *("steps {}", "steps {} --json", "steps {} --rank x", "bundle {} --report", "bundle {} --report --json"),
        *("bundle {} -o {}.tar.zst", "bundle {} --no-prompts --report", "incidents {}/..", "incidents {}/.. --json"),
        *(
            "replay {} --url http://127.0.0.1:1",
            f"show {HOSTILE}",
            f"steps {{}} --rank {HOSTILE}",
            f"incidents /nowhere{HOSTILE}",
        ),
    ],
    ids=ascii,
)
def test_nothing_in_an_incident_acts_on_the_terminal(incident: Path, cli: Cli, command: str) -> None:
    printed = cli(*(word.format(incident) for word in command.split(" ") if word), status=None)
    assert printed.status in range(6)
    assert printed.out + printed.err
    acting = {char for char in printed.out + printed.err if not char.isprintable() and char != "\n"}
    assert acting == set()
    if "--json" in command:
        # A program gets all of it.
        assert printed.json


def test_what_others_print_is_visible(tmp_path: Path) -> None:
    # By a logger that no one has set up and by Python of an error that no one expects, and by argparse.
    code = "import logging, sys; from sglang_crashkit.cli import main; from sglang_crashkit.cli.commands import show; "
    code += "show.run = lambda args: (logging.warning(args.incident), int(str(args.incident))); main.main(sys.argv[1:])"
    for words in (["show", HOSTILE], ["show", "x", f"--{HOSTILE}"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert b"owned" in done.stderr
        assert {char for char in done.stderr.decode() if not char.isprintable() and char != "\n"} == set()


def test_a_line_is_one_line_whatever_is_in_it(incident: Path, cli: Cli) -> None:
    step = Step(1, 1.0, 1.5, "processed", "decode", (StepRequest("r\nstep 1 of TP0: request forged", 37, 37),), 1, 37)
    (incident / "ranks" / "scheduler_TP0-11.steps.jsonl").write_text(json.dumps(step.to_json()) + "\n")
    assert "r\\nstep 1 of TP0: request forged" in cli("steps", incident).out


def test_the_summary_shows_what_is_hidden() -> None:
    summary = format_summary(Incident.of(poisoned(GOLDEN, HOSTILE)))
    assert {char for char in summary if not char.isprintable() and char != "\n"} == set()
    assert "\\u202e" in summary


def test_a_record_in_the_crash_handlers_log_acts_on_nothing(tmp_path: Path) -> None:
    assert handler_log(tmp_path, f"request r{HOSTILE}\nforged") == f"request r{visible(HOSTILE)}\n    forged\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n日本 \u3000é\xa0👩\u200d👧", "a\tb\n日本 \u3000é\xa0👩\u200d👧"),
        ("\x1b[31mred\x1b[0m\r\n", "red\n"),
        ("\x1b[2J\x00\x9b\u202e\ud800\U000e0001", "\\x1b[2J\\x00\\x9b\\u202e\\ud800\\U000e0001"),
    ],
)
def test_what_acts_is_escaped_and_the_rest_stays(text: str, shown: str) -> None:
    assert visible(text) == shown
