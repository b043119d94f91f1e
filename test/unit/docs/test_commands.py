"""Every command in the documents is one that the kit takes, and those that read evidence answer as they stand there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanelib import options
from sglang_crashkit.cli.main import build_parser, main
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.model.step import Step, StepRequest
from unit.support.stored import golden, make_incident, stacks_of

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GOLDEN = golden("killed")
LOG = ROOT / "test" / "corpus" / "22-hbm-of-one-gpu-fails"
#: What reads evidence and nothing else; the others have tests of what they do to a server or an installation.
READERS = ("explain", "incidents", "show", "steps", "bundle")
#: Names in the documents that stand for something else than themselves.
STAND_INS = {
    "/var/crash/sglang/node7/incidents/20260102T030405.678Z-hang-0123abcd": "crash/node7/incidents/INCIDENT",
    "/var/crash/sglang": "crash",
    "/shared/crash": "crash",
    "fetched/*": "crash",
    "backtraces/snapshot_*": "server.log",
    "FILE": "server.log",
    "CLASS": "gpu_stall",
}
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
#: Up to what stands behind it: another command, a comment or, in an example of ``--help``, what it is for.
_CALL = re.compile(r"sglang-crashkit +([a-z](?:\"[^\"]*\"|[^\"\n])*?)(?= *(?:\||&|;|#|\s{3}|$))", re.MULTILINE)


def commands_of(text: str) -> Iterator[str]:
    """Yield the words after ``sglang-crashkit`` of each command; in a sentence one without arguments is a name."""
    for block in _FENCED.findall(text):
        yield from _CALL.findall(block.replace("\\\n", " "))
    for code in _CODE.findall(_FENCED.sub("", text)):
        yield from (call for call in _CALL.findall(code) if len(call.split()) > 1)


COMMANDS = sorted({call for page in PAGES for call in commands_of(page.read_text())})


def words_of(call: str) -> list[str]:
    """Return the arguments; dots, as behind a name that may be repeated, say that more may follow."""
    return [word for word in shlex.split(call) if word != "..."]


@pytest.fixture
def crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The incident of a hang in a crash folder, and beside that the log of a server and a list of hosts."""
    step = Step(1, 1.0, 2.0, "processed", "decode", (StepRequest("ab12", 1, 1),), 1, 1, agreed_hash=1)
    lines = json.dumps(step.to_json()) + "\n"
    pieces = {
        **{f"ranks/scheduler_TP{number}-{pid}.steps.jsonl": lines for number, pid in enumerate((11, 12))},
        **stacks_of(GOLDEN),
        "requests/requests.jsonl": json.dumps({"rid": "ab12", "state": "unfinished"}) + "\n",
    }
    fields = {name: value for name, value in GOLDEN.items() if name not in ("id", "kind")}
    folder = tmp_path / "crash" / "node7" / "incidents"
    incident = make_incident(folder, kind="hang", seconds=time.time(), pieces=pieces, **fields)
    text = "".join(file.read_text() for file in sorted(LOG.glob("*.txt")))
    (tmp_path / "logs").mkdir()
    for name in ("server.log", "dmesg.txt", "py-spy.txt", "logs/server.log"):
        (tmp_path / name).write_text(text)
    (tmp_path / "nodes.txt").write_text("node7\n")
    monkeypatch.chdir(tmp_path)
    return incident


@pytest.mark.usefixtures("crash")
@pytest.mark.parametrize("call", COMMANDS)
def test_a_command_in_the_documents_is_taken(call: str) -> None:
    words = words_of(call)
    parsed = build_parser(words[0]).parse_args(words)
    assert parsed.command == words[0]


@pytest.mark.parametrize("call", [call for call in COMMANDS if call.split()[0] in READERS])
def test_a_command_in_the_documents_answers(call: str, crash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in STAND_INS.items():
        call = call.replace(name, other)
    call = re.sub(r"\b(0123abcd|348e5dfc)\b", crash.name[-8:], call.replace("INCIDENT", str(crash)))
    call = call.replace(f"crash/node7/incidents/{crash}", str(crash))
    words = words_of(call)
    if words[0] not in ("explain", "incidents") and "crash" not in call:
        words += ["--folder", "crash"]
    if words[0] == "incidents" and "crash" not in call:
        words.append("crash")
    if words[0] == "explain":
        words = ["server.log" if word == "-" else word for word in words]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(words) == ExitCode.DONE
    assert said.getvalue().strip()


def test_the_page_of_commands_is_what_help_says() -> None:
    assert options.PAGE.read_text() == options.page(), "scripts/options writes it"
