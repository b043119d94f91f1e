from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sglang_crashkit.cli.main import main
from sglang_crashkit.incident.quarantine import Origin, entry_of
from sglang_crashkit.replay.bisect import Result

ORIGIN = Origin("It raised.", "1a2b3c4d", "/model", "0.5.23")
PROVEN = Result(
    "1a2b3c4d",
    "It raised.",
    reproduced=True,
    requests=[{"text": "a", "n": 7}],
    parameters=["n"],
    prompt="nothing",
    is_confirmed=True,
    entry=asdict(entry_of({"text": "a", "n": 7}, ["n"], "any", ORIGIN, 0.0)),
)


BISECT = "sglang-crashkit bisect INCIDENT --serve"


def reproducer(folder: Path, result: Result = PROVEN) -> str:
    path = folder / "reproducer.json"
    path.write_text(json.dumps(asdict(result)))
    return str(path)


def test_an_entry_is_added_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quarantine", "add", reproducer(tmp_path), "--folder", str(tmp_path)]) == 0
    line = capsys.readouterr().out
    assert "  proven  n=7  (incident 1a2b3c4d, " in line
    assert "counts for /model on SGLang 0.5.23" in line
    assert main(["quarantine", "list", "--folder", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["key"] == line.split(maxsplit=1)[0]
    assert main(["quarantine", "remove", "other", "--folder", str(tmp_path)]) == 3
    assert main(["quarantine", "remove", entry["key"], "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing is in quarantine\n"
    main(["quarantine", "add", reproducer(tmp_path), "--folder", str(tmp_path)])
    assert main(["quarantine", "clear", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("nothing is in quarantine\n")


@pytest.mark.parametrize(
    ("arguments", "status", "following"),
    [
        (["remove", "x"], 3, "sglang-crashkit quarantine list --folder"),
        (["add", "{folder}/none"], 1, BISECT),
        (["add", "{unproven}"], 1, BISECT),
        *((["add", f"{{folder}}/{number}.json"], 1, BISECT) for number in range(3)),
        (["list", "--folder={folder}/none"], 3, "--folder DIR"),
    ],
)
def test_what_cannot_be_done_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, following: str
) -> None:
    unproven = reproducer(tmp_path, Result("1a2b3c4d", "It raised.", requests=[{"text": "a"}]))
    for number, foreign in enumerate(('{"requests": 1}', "{}", '{"schema_version": 1')):
        (tmp_path / f"{number}.json").write_text(foreign)
    words = [word.format(folder=tmp_path, unproven=unproven) for word in arguments]
    assert main(["quarantine", words[0], f"--folder={tmp_path}", *words[1:]]) == status
    assert f"next: {following}" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["list", "add", "remove", "clear"])
def test_the_help_of_an_action_has_an_example(capsys: pytest.CaptureFixture[str], action: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["quarantine", action, "--help"])
    assert f"example:\n  sglang-crashkit quarantine {action} " in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_broken_list_has_a_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "quarantine.json").write_text(text)
    (tmp_path / "quarantine.json").chmod(0o600)
    assert main(["quarantine", "list", "--folder", str(tmp_path)]) == 1
    assert f"next: sglang-crashkit quarantine clear --folder {tmp_path}" in capsys.readouterr().err
