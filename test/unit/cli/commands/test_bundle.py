from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from sglang_crashkit.judge.finding import steps_of
from unit.support.command import Cli
from unit.support.stored import golden, make_incident

SECRET = "a prompt that no one else may read"
GOLDEN = golden("killed")


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    pieces = {
        "requests/requests.jsonl": json.dumps({"rid": "a", "state": "unfinished", "text": SECRET}) + "\n",
        "stacks/scheduler_TP1-8.txt": "Process 8: x\n",
        "environment.json": json.dumps(
            {"command_line": "python -m x --api-key <redacted>", "versions": {"torch": "2"}}
        ),
    }
    path = make_incident(tmp_path / "incidents", pieces=pieces, **GOLDEN)
    # A link may lead to anything of the user's.
    (path / "link").symlink_to("/etc/hostname")
    return path


def contents(path: Path) -> dict[str, bytes]:
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name.partition("/")[2]: tar.extractfile(one).read() for one in tar.getmembers()}  # type: ignore[union-attr]


def test_a_bundle_holds_the_folder_and_a_report(incident: Path, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "x.tar.zst"
    assert "with the prompts of the incident's requests" in cli("bundle", incident, "-o", path).out
    packed = contents(path)
    inside = {"report.md", "incident.json", "summary.md", "environment.json", "stacks/scheduler_TP1-8.txt"}
    assert packed.keys() == inside | {"requests/requests.jsonl"}
    assert packed["incident.json"] == (incident / "incident.json").read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [left.name for left in tmp_path.iterdir() if left.name.startswith(".x")] == []


LOGGED = "a line of a log with words of a request"
CANARY = 'CANARY: "quoted", ünïcode and a second line that no one else may read; CANARY.'


def test_without_prompts_nothing_that_may_hold_one_is_in_the_bundle(incident: Path, tmp_path: Path, cli: Cli) -> None:
    document = json.loads((incident / "incident.json").read_text())
    pid = document["verdict"]["first_failure"]["pid"]
    document["timeline"][0]["message"] = f"ValueError: {CANARY}"
    document["verdict"]["text"] = f"TP1 raised ValueError: {CANARY} TP0 is well."
    document["verdict"]["basis"] = [f"TP1 raised ValueError: {CANARY[:50]}..."]
    # As explain has its words in an address.
    query = "https://github.com/sgl-project/sglang/issues?q=ValueError+CANARY+quoted+and+second"
    steps = [f"search upstream's issues: {query}"]
    for name in ("before", "led", "beside", "engine", "loudest", "unexplained"):
        steps += steps_of(name, line=LOGGED, text=LOGGED)
    document["cause"] = {"class": "exception", "next_steps": ["wait", *steps]}
    kept = {
        "environment.json": json.dumps({"command_line": "python -m x", "versions": {"torch": "2"}}),
        "stacks/scheduler_TP1-8.txt": "Process 8: x\n",
        f"ranks/scheduler_TP1-{pid}.steps.jsonl": "{}\n",
        "gpu/facts.json": "{}",
        "gpu/gloo_flight_recorder_0": "\0 calls",
    }
    left_out = {
        "requests/requests.jsonl": json.dumps({"rid": "a", "text": CANARY}),
        "requests/crash_dump.pkl": CANARY,
        "logs/scheduler_TP1-8.log": CANARY,
        f"ranks/scheduler_TP1-{pid}.exception.txt": f'  File "a.py", line 1, in f\n    f(x)\nValueError: {CANARY}',
        "gpu/core.cuda.8": f"\0\1{CANARY}",
        "incident.html": CANARY,
        "summary.md": CANARY,
        "unknown": CANARY,
    }
    for name, text in (kept | left_out | {"incident.json": json.dumps(document)}).items():
        (incident / name).parent.mkdir(exist_ok=True)
        (incident / name).write_text(text)
    os.mkfifo(incident / "stacks" / "pipe")
    path = tmp_path / "x.tar.zst"
    told = cli("bundle", incident, "--no-prompts", "-o", path, "--json").json
    packed = contents(path)
    assert packed.keys() == {*kept, "incident.json", "report.md"}
    assert told == {
        "incident": incident.name[-8:],
        "path": str(path),
        "files": len(packed),
        "bytes": path.stat().st_size,
        "prompts": False,
        "left_out": sorted({*left_out, "link", "stacks/pipe"}),
    }
    signs = [b"words of a request", b"CANARY", b"no one else may", b"quoted", "ünïcode".encode(), b"n\\u00efcode"]
    assert [(name, sign) for name, data in packed.items() for sign in signs if sign in data] == []
    assert json.loads(packed["incident.json"])["verdict"]["text"] == "TP1 raised ValueError: <redacted> TP0 is well."
    assert b'File "a.py", line 1, in f' in packed["report.md"]
    assert "CANARY" not in cli("bundle", incident, "--no-prompts", "--report").out
    # Without the option all of it is there.
    cli("bundle", incident, "-o", tmp_path / "y.tar.zst")
    assert contents(tmp_path / "y.tar.zst").keys() == {*kept, *left_out, "incident.json", "report.md"}


def test_a_report_is_ready_to_paste_and_free_of_markup(incident: Path, tmp_path: Path, cli: Cli) -> None:
    document = json.loads((incident / "incident.json").read_text())
    builders = "[/pytorch/third_party/gloo/pair.cc:561]"
    document["verdict"]["text"] = f"It raised: {builders} <script> and\n```` four ticks."
    (incident / "incident.json").write_text(json.dumps(document))
    before = set(tmp_path.rglob("*"))
    report = cli("bundle", incident, "--report").out
    assert report.startswith("### SGLang 0.5.23: TP1 was killed by SIGKILL; exit status 82; 3 requests lost\n")
    assert "`````text\nIt raised: <script> and\n```` four ticks.\n`````\n" in report
    assert "x --api-key <redacted>\ntorch 2\n" in report
    # What the user has to do next is not the maintainers' business.
    assert "sglang-crashkit" not in report
    assert SECRET not in report
    told = cli("bundle", incident, "--report", "--json").json
    assert told == {"incident": incident.name[-8:], "report": report}
    assert set(tmp_path.rglob("*")) == before


def test_a_file_that_is_there_stays(incident: Path, tmp_path: Path, cli: Cli) -> None:
    path, pipe = tmp_path / "x.tar.zst", tmp_path / "pipe.tar.zst"
    path.write_text("mine")
    os.mkfifo(pipe)
    for there in (path, pipe):
        cli("bundle", incident, "-o", there, status=4)
    assert path.read_text() == "mine"
    assert pipe.is_fifo()
    assert "-o x.tar.zst" in cli("bundle", incident, "-o", tmp_path / "x.zip", status=2).err
    absent = tmp_path / "absent" / "x.tar.zst"
    why = f"bundle: {absent} cannot be written: No such file or directory\n"
    assert why in cli("bundle", incident, "-o", absent, status=1).err


@pytest.mark.parametrize("command", ["bundle", "explain", "show"])
def test_one_that_is_not_whole_is_taken_from_its_log(tmp_path: Path, cli: Cli, command: str) -> None:
    fields = {name: value for name, value in GOLDEN.items() if name not in ("complete", "verdict")}
    failure = {"pid": GOLDEN["verdict"]["first_failure"]["pid"], "seconds": 1.0, "kind": "exit", "fatal_signal": True}
    path = make_incident(tmp_path / "incidents", publish=False, failures=[failure], **fields)
    output = tmp_path / ("x.tar.zst" if command == "bundle" else "x.html")
    options = {"bundle": ["-o"], "explain": ["--html"], "show": ["--html"]}[command]
    cli(command, path, *options, output)
    if command == "bundle":
        assert json.loads(contents(output)["incident.json"])["verdict"]["kind"] == "signal"
    else:
        assert "SIGKILL" in output.read_text()
        assert "incident.json cannot be read" not in output.read_text()
