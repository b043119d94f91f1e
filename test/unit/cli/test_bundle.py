from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from sglang_crashkit.cli.main import main
from unit.stored import make_incident

SECRET = "a prompt that nobody else may read"
GOLDEN = json.loads((Path(__file__).parents[1] / "incident" / "data" / "killed.json").read_text())


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
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name.partition("/")[2]: tar.extractfile(one).read() for one in tar.getmembers()}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["x.tar.zst", "x.tar.gz"])
def test_a_bundle_holds_the_folder_and_a_report(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    assert main(["bundle", str(incident), "-o", str(path)]) == 0
    assert "with the prompts of its requests" in capsys.readouterr().out
    packed = contents(path)
    inside = {"report.md", "incident.json", "summary.md", "environment.json", "stacks/scheduler_TP1-8.txt"}
    assert packed.keys() == inside | {"requests/requests.jsonl"}
    assert packed["incident.json"] == (incident / "incident.json").read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [left.name for left in tmp_path.iterdir() if left.name.startswith(".x")] == []


def test_without_prompts_no_file_holds_one(incident: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.zst"
    assert main(["bundle", str(incident), "--no-prompts", "--out", str(path)]) == 0
    packed = contents(path)
    assert "requests/requests.jsonl" not in packed
    assert [name for name, data in packed.items() if SECRET.encode() in data] == []


def test_a_report_is_ready_to_paste_and_nothing_in_it_is_markup(
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
    path = tmp_path / "x.tar.zst"
    path.write_text("mine")
    assert main(["bundle", str(incident), "-o", str(path)]) == 4
    assert path.read_text() == "mine"
    assert main(["bundle", str(incident), "-o", str(tmp_path / "x.zip")]) == 2
    assert "-o x.tar.zst" in capsys.readouterr().err
    assert main(["bundle", str(incident), "-o", str(tmp_path / "absent" / "x.tar.gz")]) == 1


def test_where_zstandard_is_missing_the_way_out_is_named(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert main(["bundle", str(incident), "-o", str(tmp_path / "x.tar.zst")]) == 1
    assert "pip install zstandard, or -o FILE.tar.gz" in capsys.readouterr().err
    assert list(tmp_path.glob("*x.tar*")) == []


def test_a_pipe_of_that_name_stays(incident: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar.gz")
    assert main(["bundle", str(incident), "-o", str(tmp_path / "x.tar.gz")]) == 4
    assert (tmp_path / "x.tar.gz").is_fifo()
