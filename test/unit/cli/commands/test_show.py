from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.model.incident import Incident
from sglang_crashkit.view.first_screen import first_screen
from unit.support.command import Cli
from unit.support.stored import NOON, golden, make_incident, stacks_of

SUSPECT = "bbb2806ce0da4c099796b96369187b3e"
GOLDEN = golden("killed")
GOLDEN["suspects"] = [{"rid": SUSPECT, "level": "unknown", "reasons": ["it was in the step"]}]
SECRET = "a prompt that no one else may read"
REQUESTS = [
    {"rid": SUSPECT, "state": "unfinished", "arrived": "2026-11-23T04:57:27.805000Z"}
    | {"text": SECRET, "sampling_params": {"max_new_tokens": 2000}},
    {"rid": "done", "state": "finished", "arrived": "2026-11-23T04:57:27.000000Z", "input_ids": [1, 2, 3]},
]
#: As OpenAI's API writes them.
DEFAULTS = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "n": 1, "stop": [], "regex": None, "no_stop_trim": False},
    **{"frequency_penalty": 0.0, "skip_special_tokens": True, "json_schema": ""},
}


@pytest.fixture
def crash_dir(tmp_path: Path) -> Path:
    """A crash folder with a real incident, and an older one."""
    incidents = tmp_path / "node7" / "incidents"
    make_incident(incidents, seconds=NOON - 60)
    frames = [{"function": function, "file": "sglang/x.py", "line": 3} for function in ("waits", "runs")]
    pieces = stacks_of(GOLDEN, *frames)
    pieces["requests/requests.jsonl"] = "".join(json.dumps(one) + "\n" for one in REQUESTS) + "{torn"
    pieces["environment.json"] = json.dumps({"command_line": "python", "cgroup": {"memory": {"used_bytes": 7}}})
    dead = GOLDEN["verdict"]["first_failure"]["pid"]
    pieces[f"ranks/scheduler_TP1-{dead}.exception.txt"] = "Traceback (most recent call last):\nRuntimeError: x\n"
    make_incident(incidents, pieces=pieces, **GOLDEN)
    return tmp_path


def test_the_newest_incident_is_shown_on_one_screen(crash_dir: Path, cli: Cli) -> None:
    lines = cli("show", "--folder", crash_dir).out.splitlines()
    assert lines[0] == first_screen(Incident.of(GOLDEN))[0]
    assert len(lines) <= 20
    path = Path(lines[-1].split()[1])
    assert path.is_dir()
    assert any(line.endswith(f"show {path.name[-8:]} --folder {crash_dir} --stacks") for line in lines)
    # By its path, the commands name that.
    assert f"sglang-crashkit show {path} --stacks" in cli("show", path).out
    # A crash folder may have a later one by then.
    assert f"show {path.name[-8:]} --folder {crash_dir} --stacks" in cli("show", crash_dir).out


def test_ranks_that_agree_have_one_stack(crash_dir: Path, cli: Cli) -> None:
    text = cli("show", crash_dir, "--stacks").out
    assert text.startswith("TP1 raised:\n    Traceback (most recent call last):\n    RuntimeError: x\n")
    assert text.index("TP1: dead") < text.index("TP0: raised an exception")
    assert "detokenizer, the main process: alive then\n    waits (sglang/x.py:3)\n    runs (sglang/x.py:3)\n" in text
    # Of one that raised it is where it raised, and not the kit's own hook.
    assert "TP0: raised an exception\n    all_" in text


def test_requests_are_shown_without_prompts(crash_dir: Path, cli: Cli) -> None:
    text = cli("show", crash_dir, "--requests").out
    first, second = [line for line in text.splitlines() if "04:57:27" in line]
    assert first.startswith("* unfinished")
    assert first.endswith(f"{len(SECRET)} characters, max_new_tokens 2000")
    assert second.startswith("  finished")
    assert second.endswith("3 tokens")
    assert SECRET not in text


@pytest.mark.parametrize(
    ("levels", "mark"),
    [
        (["supported", "unknown"], "* suspect; "),
        (["unknown", "unknown"], "* none of the 2 requests in that step is likelier than the others; "),
        ([], ""),
    ],
)
def test_the_likeliest_suspect_stands_first_and_the_rest_is_counted(
    tmp_path: Path, cli: Cli, levels: list[str], mark: str
) -> None:
    suspects = [{"rid": f"r{1200 - n}", "level": level, "reasons": ["it was new"]} for n, level in enumerate(levels)]
    lines = "".join(json.dumps({"rid": f"r{number}", "state": "unfinished"}) + "\n" for number in range(1201))
    path = make_incident(tmp_path, pieces={"requests/requests.jsonl": lines}, suspects=suspects)
    _head, first, second, *_others, last = cli("show", path, "--requests").out.splitlines()
    assert [line.split()[-1] for line in (first, second)] == (["r1200", "r1199"] if levels else ["r0", "r1"])
    assert first.startswith("*" if levels else " ")
    assert last == f"{mark}201 more, and the whole of each, with its prompt: {path}/requests/requests.jsonl"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling_params": DEFAULTS, "return_logprob": False, "logprob_start_len": -1}, ""),
        ({"sampling_params": DEFAULTS | {"top_k": 10**12}}, ", top_k 1000000000000"),
        ({"return_logprob": True, "top_logprobs_num": 600}, ", return_logprob true, top_logprobs_num 600"),
        ({"sampling_params": {"regex": "a" * 99}}, f", regex {'a' * 51}..."),
        ({"sampling_params": {"stop": ["\x1b[2J"]}}, ', stop ["\\u001b[2J"]'),
        ({"sampling_params": {"regex": "\x1b[2J"}}, ', regex "\\u001b[2J"'),
        ({"sampling_params": 5}, ""),
    ],
)
def test_all_that_a_request_asks_for_is_shown(crash_dir: Path, cli: Cli, fields: dict[str, Any], words: str) -> None:
    (path,) = crash_dir.rglob("requests.jsonl")
    path.write_text(json.dumps(REQUESTS[1] | fields) + "\n")
    line = next(line for line in cli("show", crash_dir, "--requests").out.splitlines() if "done" in line)
    assert line.endswith(f" 3 tokens{words}")


@pytest.mark.parametrize(("aborted", "is_before"), [("1970-01-01T00:00:01Z", True), ("2100-01-01T00:00:00Z", False)])
def test_what_was_aborted_before_the_failure_is_marked(
    crash_dir: Path, aborted: str, is_before: bool, cli: Cli
) -> None:
    (path,) = crash_dir.rglob("requests.jsonl")
    path.write_text(json.dumps(REQUESTS[1] | {"aborted": aborted}) + "\n")
    assert ("aborted before, 3 tokens" in cli("show", crash_dir, "--requests").out) is is_before
    cli("show", crash_dir, "--html", crash_dir / "x.html")
    assert ("aborted before" in (crash_dir / "x.html").read_text()) is is_before


def test_the_timeline_counts_from_the_incident(crash_dir: Path, cli: Cli) -> None:
    first, *rest = cli("show", crash_dir, "--timeline").out.splitlines()
    assert first == "   +0.000 s  process_exited TP1: signal SIGKILL"
    assert rest[-1].endswith(
        "shared_memory_left: 2 segments left, 25 kB: sgl_shm_mq_27323_13bd8015 (what process 1 maps cannot be read), "
        "sglang_loads_0448488d1936_01b7d292.shm (its name does not say whose it is)"
    )
    assert any("exception TP0: RuntimeError: Connection closed by peer" in line for line in rest)


def test_the_surroundings_are_shown_value_by_value(crash_dir: Path, cli: Cli) -> None:
    text = cli("show", crash_dir, "--env").out
    assert text.startswith("model     /models/tiny-model, tp 2\n")
    assert "\ncgroup.memory.used_bytes  7\n" in text


def test_a_program_gets_the_document(crash_dir: Path, cli: Cli) -> None:
    assert cli("show", crash_dir, "--json").json["verdict"] == GOLDEN["verdict"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("--steps", "no steps in {}: it was dead\n"),
        ("--requests", "no requests in {}: the server did not report its requests\n"),
        ("--env", "no environment in {}\n"),
    ],
)
def test_a_missing_part_is_said_to_be_missing_and_why(tmp_path: Path, cli: Cli, part: str, words: str) -> None:
    evidence = [{"kind": "steps", "status": "skipped", "reason": "it was dead"}]
    path = make_incident(tmp_path, processes=[{"pid": 7, "evidence": evidence}])
    told = f"sglang-crashkit show: {words.format(path)}  next: sglang-crashkit show {path} --timeline\n"
    assert cli("show", path, part, status=3).err == told


def test_without_its_file_the_environment_is_told_in_short(tmp_path: Path, cli: Cli) -> None:
    assert cli("show", make_incident(tmp_path, environment={"model": "m"}), "--env").out == "model     m\n"


def test_prompts_are_for_a_page_alone(tmp_path: Path, cli: Cli) -> None:
    assert "--html FILE --prompts" in cli("show", make_incident(tmp_path), "--prompts", status=2).err


@pytest.mark.parametrize("target", ["", ".", "/", "folder"])
def test_a_page_replaces_no_folder(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    path = make_incident(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    why = "cannot be written: it is not a regular file\n  next: --html FILE, another one\n"
    assert cli("show", path, "--html", target, status=1).err.endswith(why)
    assert (tmp_path / "folder").is_dir()


@pytest.mark.parametrize("command", ["show", "bundle", "steps"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_document_is_told_once_with_what_to_do(tmp_path: Path, cli: Cli, command: str, text: str) -> None:
    path = make_incident(tmp_path)
    (path / "incident.json").write_text(text)
    line, following = cli(command, path, status=1).err.splitlines()
    assert line.startswith(f"sglang-crashkit {command}: {path}: incident.json ")
    assert line.count(str(path)) == 1
    assert following.startswith("  next: ")


def test_without_any_known_folder_the_next_command_is_named(nothing_known: Path, cli: Cli) -> None:
    for command in (["show"], ["incidents"], ["bundle"]):
        assert "next: sglang-crashkit incidents DIR" in cli(*command, status=3).err


def test_what_a_newer_kit_wrote_is_shown_with_a_warning(tmp_path: Path, cli: Cli) -> None:
    assert "schema_version 99" in cli("show", make_incident(tmp_path, schema_version=99)).err


@pytest.mark.parametrize(("name", "value"), [(None, ""), ("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_is_for_terminals_that_want_it(
    crash_dir: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str | None, value: str
) -> None:
    head = first_screen(Incident.of(GOLDEN))[0]
    assert cli("show", crash_dir).out.splitlines()[0] == head
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for each in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(each, raising=False)
    if name is not None:
        monkeypatch.setenv(name, value)
    assert cli("show", crash_dir).out.splitlines()[0] == (head if name else f"\033[1m{head}\033[0m")
