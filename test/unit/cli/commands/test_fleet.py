from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_crashkit.cli.main import main
from unit.support.stored import make_incident

HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture
def crash_folder(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"h{number}" / "incidents").mkdir(parents=True)
    for number in range(3):
        make_incident(tmp_path / f"h{number}" / "incidents", cause={"class": HOSTILE}, environment={"model": HOSTILE})
    return tmp_path


def test_a_table_has_the_faults_and_their_hosts(crash_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", str(crash_folder)]) == 0
    text = capsys.readouterr().out
    assert "seen on 3 of 4 hosts" in text
    assert "\x1b" not in text


def test_a_program_gets_json(crash_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", str(crash_folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["hosts"], told["incidents"], len(told["faults"])) == (4, 3, 1)


def test_a_page_holds_text_alone_and_loads_nothing(crash_folder: Path, tmp_path: Path) -> None:
    assert main(["fleet", str(crash_folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "seen on 3 of 4 hosts" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")


def test_what_cannot_be_read_is_told_and_the_rest_shown(crash_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next((crash_folder / "h0" / "incidents").glob("*/incident.json")).write_text("{")
    assert main(["fleet", str(crash_folder)]) == 5
    assert "1 incidents could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--since", "1h"], []])
def test_nothing_is_nothing(
    crash_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    folder = crash_folder if arguments else tmp_path / "empty"
    assert main(["fleet", str(folder), *arguments]) == 3
    told = "no incident that is new enough for --since of 4 hosts" if arguments else "is not a folder; no incident of 0"
    assert told in capsys.readouterr().err


def test_a_missing_folder_is_named_and_the_others_are_shown(
    crash_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent"
    assert main(["fleet", str(absent), str(crash_folder), "--json"]) == 5
    captured = capsys.readouterr()
    assert captured.err == f"{absent} is not a folder\n"
    assert json.loads(captured.out)["unreadable"] == [str(absent)]
    assert main(["fleet", str(absent)]) == 3
    assert f"{absent} is not a folder; no incident" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_names_its_path_once(
    crash_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "absent" / "page.html"
    assert main(["fleet", str(crash_folder), "--html", str(page)]) == 1
    assert f"fleet: {page} cannot be written: No such file or directory\n" in capsys.readouterr().err


def test_without_its_kind_an_incident_has_that_of_its_folder(
    crash_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next((crash_folder / "h0" / "incidents").glob("*/incident.json")).write_text("{}")
    assert main(["fleet", str(crash_folder), "--json"]) == 0
    assert {one["kind"] for one in json.loads(capsys.readouterr().out)["faults"]} == {"killed"}


def test_a_page_is_written_to_a_device_as_it_is(crash_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", str(crash_folder), "--html", "/dev/full"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()
