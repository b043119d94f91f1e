from __future__ import annotations

import io
import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sglang_crashkit.cli.commands.bundle import PromptSearch
from sglang_crashkit.cli.main import main
from sglang_crashkit.redact import redact_shared
from unit.support.stored import make_incident

SECRET = "a prompt that nobody else may read"
GOLDEN = json.loads((Path(__file__).parents[2] / "incident" / "data" / "killed.json").read_text())


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    pieces = {
        "requests/requests.jsonl": json.dumps({"rid": "a", "state": "unfinished", "text": SECRET}) + "\n",
        "stacks/scheduler_TP1-8.txt": "Process 8: x\n",
        "environment.json": json.dumps(
            {"command_line": "python -m x --api-key <redacted>", "versions": {"torch": "2"}}
        ),
    }
    fields = {name: value for name, value in GOLDEN.items() if name not in ("id", "kind")}
    path = make_incident(tmp_path / "incidents", pieces=pieces, **fields)
    # A link may lead to anything of the user's.
    (path / "link").symlink_to("/etc/hostname")
    return path


def contents(path: Path) -> dict[str, bytes]:
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name.partition("/")[2]: tar.extractfile(one).read() for one in tar.getmembers()}  # type: ignore[union-attr]


def test_a_bundle_holds_the_folder_and_a_report(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.tar.zst"
    assert main(["bundle", str(incident), "-o", str(path)]) == 0
    assert "with the prompts of its requests" in capsys.readouterr().out
    packed = contents(path)
    inside = {"report.md", "incident.json", "summary.md", "environment.json", "stacks/scheduler_TP1-8.txt"}
    assert packed.keys() == inside | {"requests/requests.jsonl"}
    assert packed["incident.json"] == (incident / "incident.json").read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [left.name for left in tmp_path.iterdir() if left.name.startswith(".x")] == []


CANARY = 'CANARY: "quoted", ünïcode\nand a second line that nobody else may read; CANARY.'
TOKENS = list(range(90_001, 90_040))


def test_a_prompt_that_stands_everywhere_is_nowhere_in_the_bundle(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [
        {"rid": "a", "state": "unfinished", "text": CANARY},
        {"rid": "b", "state": "unfinished", "text": "of which these are the tokens", "input_ids": TOKENS},
        {"rid": "c", "state": "unfinished", "messages": [{"role": "user", "content": f"In a chat: {CANARY}"}]},
    ]
    (incident / "requests" / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    (incident / "requests" / "crash_dump.pkl").write_bytes(b"\x80\x04" + CANARY.encode())
    plain = f"before {CANARY} between {CANARY!r} and {json.dumps(CANARY)}, {TOKENS}, {json.dumps(TOKENS)} after\n"
    document = json.loads((incident / "incident.json").read_text())
    document["verdict"]["text"] = document["timeline"][0]["message"] = f"ValueError: {CANARY}"
    planted = {
        "incident.json": json.dumps(document, indent=2),
        "summary.md": plain,
        "environment.json": json.dumps({"command_line": ["--prompt", CANARY], "versions": {"torch": CANARY}}),
        "logs/scheduler_TP1-8.log": plain * 2000,
        "stacks/scheduler_TP1-8.txt": f"Process 8: x\n    f (x.py:3)\n        prompt: {CANARY!r}\n",
        "stacks/scheduler_TP1-8.json": json.dumps({"threads": [{"name": CANARY, "locals": {"prompt": CANARY}}]}),
        "ranks/scheduler_TP1-8.exception.txt": plain,
        "ranks/scheduler_TP1-8.steps.jsonl": json.dumps({"number": 1, "note": CANARY}) + "\n",
        "gpu/core.cuda.8": f"\0\1{CANARY}",
        "gpu/gloo_flight_recorder_0": "\0 calls",
        "faults.json": json.dumps({"ids": TOKENS, "calls": [1, 2]}),
    }
    for name, text in planted.items():
        (incident / name).parent.mkdir(exist_ok=True)
        (incident / name).write_text(text)
    path = tmp_path / "x.tar.zst"
    assert main(["bundle", str(incident), "--no-prompts", "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    packed = contents(path)
    assert told == {
        "incident": incident.name[-8:],
        "path": str(path),
        "files": len(packed),
        "bytes": path.stat().st_size,
        "prompts": False,
        "left_out": ["gpu/core.cuda.8"],
        "why_left_out": {"gpu/core.cuda.8": "no text, 0.0 MB"},
        "gaps": [],
        "short_prompts": 0,
    }
    assert packed.keys() == {*planted, "report.md"} - {"gpu/core.cuda.8"}
    assert json.loads(packed["faults.json"]) == {"ids": "<redacted>", "calls": [1, 2]}
    signs = [b"CANARY", b"90020", b"nobody else may", "ünïcode".encode(), b"n\\u00efcode"]
    assert [(name, sign) for name, data in packed.items() for sign in signs if sign in data] == []
    for name, data in packed.items():
        if name.endswith(".json"):
            json.loads(data)
    assert packed["summary.md"].startswith(b"before<redacted> between ")
    assert packed["summary.md"].endswith(b" after\n")
    # Without the option nothing is searched.
    assert main(["bundle", str(incident), "-o", str(tmp_path / "y.tar.zst")]) == 0
    assert CANARY.encode() in contents(tmp_path / "y.tar.zst")["gpu/core.cuda.8"]
    assert main(["bundle", str(incident), "--no-prompts", "--report"]) == 0
    assert "CANARY" not in capsys.readouterr().out


def test_a_report_names_its_program_and_no_builders_path(incident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((incident / "incident.json").read_text())
    document["verdict"]["text"] = "TP0 raised: [/pytorch/third_party/gloo/pair.cc:561] Connection closed."
    (incident / "incident.json").write_text(json.dumps(document))
    assert main(["bundle", str(incident), "--report", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["incident"] == incident.name[-8:]
    assert "TP0 raised: Connection closed." in told["report"]
    assert "pair.cc" not in told["report"]


def test_a_report_is_ready_to_paste_and_free_of_markup(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((incident / "incident.json").read_text())
    document["verdict"]["text"] = "It raised <script> and\n```` four ticks."
    (incident / "incident.json").write_text(json.dumps(document))
    before = set(tmp_path.rglob("*"))
    assert main(["bundle", str(incident), "--report"]) == 0
    report = capsys.readouterr().out
    assert report.startswith("### SGLang 0.5.23: TP1 was killed by SIGKILL; exit status 82; 3 requests lost\n")
    assert "`````text\nIt raised <script> and\n```` four ticks.\n`````\n" in report
    assert "x --api-key <redacted>\ntorch 2\n" in report
    # What the user has to do next is not the maintainers' business.
    assert "sglang-crashkit" not in report
    assert SECRET not in report
    assert set(tmp_path.rglob("*")) == before


def test_a_file_that_is_there_stays(incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pipe = tmp_path / "x.tar.zst", tmp_path / "pipe.tar.zst"
    path.write_text("mine")
    os.mkfifo(pipe)
    for there in (path, pipe):
        assert main(["bundle", str(incident), "-o", str(there)]) == 4
    assert path.read_text() == "mine"
    assert pipe.is_fifo()
    assert main(["bundle", str(incident), "-o", str(tmp_path / "x.zip")]) == 2
    assert "-o x.tar.zst" in capsys.readouterr().err
    absent = tmp_path / "absent" / "x.tar.zst"
    assert main(["bundle", str(incident), "-o", str(absent)]) == 1
    assert f"bundle: {absent} cannot be written: No such file or directory\n" in capsys.readouterr().err


def plant(incident: Path, requests: list[dict[str, object]] | None, **pieces: str) -> None:
    """Write requests, none for no such file, and a log and the document, where they are given."""
    path = incident / "requests" / "requests.jsonl"
    path.unlink()
    if requests is not None:
        path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    for name, text in {"logs/a.log": pieces.get("log", ""), "incident.json": pieces.get("document", "")}.items():
        if text:
            (incident / name).parent.mkdir(exist_ok=True)
            (incident / name).write_text(text)


def bundled(incident: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Bundle an incident without prompts, and return what was told, and the files."""
    path = incident.parents[1] / "x.tar.zst"
    assert main(["bundle", str(incident), "--no-prompts", "-o", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out), contents(path)


@pytest.mark.parametrize("place", [0, 30_000, 250_000])
def test_long_prompts_are_searched_for_to_their_end(
    incident: Path, capsys: pytest.CaptureFixture[str], place: int
) -> None:
    filler = "".join(f"{number:x} " for number in range(50_000))
    prompt = f"{filler[:place]}{CANARY}{filler[place:]}"
    plant(incident, [{"rid": "a", "state": "unfinished", "text": prompt}], log=f"it said:{CANARY}\n")
    told, packed = bundled(incident, capsys)
    assert packed["logs/a.log"] == b"it said:<redacted>\n"
    assert (told["left_out"], told["gaps"]) == ([], [])


@pytest.mark.parametrize(
    ("requests", "gap"),
    [
        (None, "there is no requests/requests.jsonl"),
        ([{"rid": "a", "text": "x" * 99, "truncated": {"text": {"of": 999}}}], "a prompt was not kept whole"),
        ([{"rid": name, "omitted": {"text": "withheld"}} for name in "ab"], "a prompt was not kept whole"),
        ([[]], "a request cannot be read"),
        # As of a chat: its messages were made tokens before the request was taken in.
        ([{"rid": "a", "input_ids": TOKENS}], "a prompt is known by its tokens only"),
        ([{"rid": "a", "input_ids": TOKENS, "text": None}], "a prompt is known by its tokens only"),
        ([{"rid": name, "input_ids": [TOKENS]} for name in "ab"], "a prompt is known by its tokens only"),
    ],
)
def test_with_unknown_prompts_the_servers_words_are_left_out(
    incident: Path, capsys: pytest.CaptureFixture[str], requests: list[dict[str, object]] | None, gap: str
) -> None:
    plant(incident, requests, log="a prompt of nobody knows whom\n")
    told, packed = bundled(incident, capsys)
    assert told["gaps"] == [gap]
    assert told["why_left_out"] == {"logs/a.log": "not all prompts are known, 0.0 MB"}
    assert {"incident.json", "summary.md", "report.md", "environment.json", "stacks/scheduler_TP1-8.txt"} == set(packed)
    assert main(["bundle", str(incident), "--no-prompts", "--report"]) == 0
    said = capsys.readouterr()
    assert said.err == f"a message may still hold a prompt, as {gap}: look before you hand it on\n"


@pytest.mark.parametrize(
    ("tokens", "short", "kept"),
    [([7, 8], 1, ["7, 8", "7,8"]), ([101, 102, 103], 1, ["101,102,103"]), ([1001, 1002, 1003], 0, [])],
)
def test_tokens_too_short_to_be_looked_for_are_counted(
    incident: Path, capsys: pytest.CaptureFixture[str], tokens: list[int], short: int, kept: list[str]
) -> None:
    document = json.loads((incident / "incident.json").read_text())
    forms = [", ".join(map(str, tokens)), ",".join(map(str, tokens))]
    document["verdict"]["text"] = f"not [{forms[0]}], and not [{forms[1]}]"
    plant(incident, [{"rid": "a", "input_ids": tokens}], document=json.dumps(document))
    told, packed = bundled(incident, capsys)
    assert told["short_prompts"] == short
    text = json.loads(packed["incident.json"])["verdict"]["text"]
    assert [form for form in forms if f"[{form}]" in text] == kept


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [
        ("_MAX_BYTES", 90_000, "too large to be searched, 0.1 MB"),
        ("_MAX_CHARACTERS", 5, "not all prompts are known, 0.1 MB"),
    ],
)
def test_what_takes_too_much_to_search_is_left_out(
    incident: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    why: str,
) -> None:
    monkeypatch.setattr(f"sglang_crashkit.cli.commands.bundle.{limit}", value)
    plant(incident, [{"rid": "a", "text": "x" * 40}], log="a line of a log\n" * 6000)
    told, packed = bundled(incident, capsys)
    assert told["why_left_out"] == {"logs/a.log": why}
    assert "incident.json" in packed


def test_a_core_is_not_read_to_its_end(incident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (incident / "gpu").mkdir()
    with (incident / "gpu" / "core.cuda.8").open("wb") as core:
        core.truncate(1 << 40)
    told, _packed = bundled(incident, capsys)
    assert told["why_left_out"] == {"gpu/core.cuda.8": "no text, 1,099,511.6 MB"}


@pytest.mark.parametrize("prompt", ["processes", "kind", "incident_id", "schema_version", "sglang::scheduler_TP1"])
def test_a_prompt_equal_to_a_kit_word_leaves_it_readable(
    incident: Path, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    before = json.loads((incident / "incident.json").read_text())
    plant(incident, [{"rid": "a", "text": prompt}])
    told, packed = bundled(incident, capsys)
    after = json.loads(packed["incident.json"])
    assert after.keys() == before.keys()
    assert [one.keys() for one in after["processes"]] == [one.keys() for one in before["processes"]]
    assert (after == before) == (prompt != "sglang::scheduler_TP1")
    assert told["short_prompts"] == (len(prompt) < 12)


@pytest.mark.parametrize(
    ("requests", "lines", "gaps", "kept"),
    [
        ({"reason": "the server had not started to serve"}, None, [], True),
        ({"journal": {"lost": 3}}, [], ["the request journal was not whole"], False),
    ],
)
def test_what_the_incident_says_of_its_requests_tells_of_gaps(
    incident: Path,
    capsys: pytest.CaptureFixture[str],
    requests: dict[str, Any],
    lines: list[dict[str, object]] | None,
    gaps: list[str],
    kept: bool,
) -> None:
    document = json.loads((incident / "incident.json").read_text()) | {"requests": requests}
    plant(incident, lines, document=json.dumps(document), log="loading\n")
    told, packed = bundled(incident, capsys)
    assert (told["gaps"], "logs/a.log" in packed) == (gaps, kept)


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_the_search_of_a_crash_finds(incident: Path, seed: int) -> None:
    chance = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz .,"
    prompts = ["".join(chance.choices(letters, k=chance.randint(12, 400))) for _ in range(30)]
    parts = []
    for _ in range(200):
        prompt = chance.choice(prompts)
        start = chance.randrange(len(prompt))
        parts += [prompt[start : start + chance.randint(1, 60)], "".join(chance.choices(letters, k=5))]
    plant(incident, [{"rid": "a", "text": prompt} for prompt in prompts])
    text = "".join(parts)
    assert PromptSearch(incident, {}).clean("a.log", text.encode()) == redact_shared(text, prompts).encode()
