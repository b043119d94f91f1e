"""`sglang-crashkit explain`: what it takes, and the forms of its answer."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from sglang_crashkit.cli.main import main
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.judge.knowledge import load

CASE = Path(__file__).parents[2] / "corpus" / "22-hbm-of-one-gpu-fails"
SECRET = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cE1gI3k"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    texts = [file.read_text() for file in sorted(CASE.iterdir()) if file.name != "expected.json"]
    copy = tmp_path / "evidence"
    copy.write_text("\n".join(texts) + f"\n[2026-10-05 08:00:00] the token is HF_TOKEN={SECRET}\n")
    return copy


def test_the_first_lines_say_what_happened_and_the_last_where_to_read_on(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(log)]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0]
    assert any(line.startswith("class    gpu_hardware: ") for line in lines)
    assert lines[-1] == "more     docs/classes.md#gpu_hardware"
    assert max(map(len, lines)) <= 120


def test_the_answer_for_a_program_has_the_keys_of_a_verdict(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log), "--json"]) == ExitCode.DONE
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict.keys() == {
        *("class", "level", "first", "component", "restart_helps", "headline", "cause", "because", "next"),
        "known_issues",
    }
    assert verdict["class"] in load("classes")


@pytest.mark.parametrize("form", [[], ["--json"], ["--markdown"]])
def test_no_form_shows_a_secret(form: list[str], log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log), *form]) == ExitCode.DONE
    assert SECRET not in capsys.readouterr().out


def test_what_is_kept_is_shown_packed_and_free_of_secrets(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(log), "--save", str(tmp_path / "kept")]) == ExitCode.DONE
    incident = Path(capsys.readouterr().out.strip())
    assert incident.parent == tmp_path / "kept"
    assert SECRET not in "".join(file.read_text() for file in incident.rglob("*") if file.is_file())
    assert main(["show", str(incident)]) == ExitCode.DONE
    assert "(gpu_hardware," in " ".join(capsys.readouterr().out.split())
    assert main(["incidents", str(tmp_path / "kept"), "--json"]) == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main(["bundle", str(incident), "--report", "--json"]) == ExitCode.DONE


def test_the_page_holds_the_verdict(log: Path, tmp_path: Path) -> None:
    assert main(["explain", str(log), "--html", str(tmp_path / "page.html")]) == ExitCode.DONE
    assert "gpu_hardware" in (tmp_path / "page.html").read_text()


def test_the_standard_input_is_read(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert main(["explain", "-", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["verdict"]["class"] == "gpu_hardware"


def test_a_missing_file_is_named_and_ends_with_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tmp_path / "absent.log")]) == ExitCode.NOTHING
    assert "absent.log" in capsys.readouterr().err


def test_no_file_and_an_unknown_class_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == ExitCode.USAGE
    assert main(["explain", "--class", "absent"]) == ExitCode.USAGE
    assert main(["explain", "--class", "gpu_stall"]) == ExitCode.DONE
    assert "## gpu_stall" in capsys.readouterr().out


def test_long_reading_shows_how_far_it_is_on_a_terminal_alone(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = b"[2026-10-05 08:00:00 TP0] Decode batch. #running-req: 1, #token: 100\n"
    log.write_bytes(line * (9_000_000 // len(line)))
    assert main(["explain", str(log), "--json"]) == ExitCode.DONE
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["explain", str(log), "--json"]) == ExitCode.DONE
    shown = capsys.readouterr().err
    assert f"\r{log.name}: " in shown
    assert shown.endswith("\r\033[K")
