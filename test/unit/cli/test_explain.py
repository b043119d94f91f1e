"""`sglang-crashkit explain`: what it takes, and the forms of its answer."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from incident_schema import assert_fits
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.kernel.private_files import open_regular
from sglang_crashkit.sources.text import reader
from unit.support.command import Cli
from unit.support.stored import NOON, golden, make_incident

#: What has no end, such as a pipe, is not waited for.
pytestmark = pytest.mark.timeout(60)
CASE = Path(__file__).parents[2] / "corpus" / "22-hbm-of-one-gpu-fails"
SECRET = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cE1gI3k"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    texts = [file.read_text() for file in sorted(CASE.iterdir()) if file.name != "expected.json"]
    copy = tmp_path / "evidence"
    copy.write_text("\n".join(texts) + f"\n[2026-10-05 08:00:00] the token is HF_TOKEN={SECRET}\n")
    return copy


def test_the_first_lines_say_what_happened_and_the_last_where_to_read_on(log: Path, cli: Cli) -> None:
    lines = cli("explain", log).out.splitlines()
    assert lines[0]
    assert any(line.startswith("class    gpu_hardware: ") for line in lines)
    assert lines[-1] == "more     docs/classes.md#gpu_hardware"
    assert max(map(len, lines)) <= 120


def test_the_answer_for_a_program_fits_its_schema(log: Path, cli: Cli) -> None:
    document = cli("explain", log, "--json").json
    assert_fits(document, "explain")
    assert document["verdict"]["class"] in load("classes")


def test_what_is_kept_is_shown_packed_and_free_of_secrets(log: Path, tmp_path: Path, cli: Cli) -> None:
    incident = Path(cli("explain", log, "--save", tmp_path / "kept").out.strip())
    assert incident.parent == tmp_path / "kept"
    assert SECRET not in "".join(file.read_text() for file in incident.rglob("*") if file.is_file())
    assert "(gpu_hardware," in " ".join(cli("show", incident).out.split())
    assert len(cli("incidents", tmp_path / "kept", "--json").json) == 1
    cli("bundle", incident, "--report", "--json")


def test_the_standard_input_is_read(log: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert cli("explain", "-", "--json").json["verdict"]["class"] == "gpu_hardware"


def test_a_missing_file_is_named_and_ends_with_nothing_to_do(tmp_path: Path, cli: Cli) -> None:
    assert "absent.log" in cli("explain", tmp_path / "absent.log", status=ExitCode.NOTHING).err


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Give a folder of what is no regular file, and whose end never comes."""
    folder = tmp_path / "odd"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    (folder / "zero").symlink_to("/dev/zero")
    os.mknod(folder / "socket", stat.S_IFSOCK | 0o600)
    return folder


def verdict_of(cli: Cli, *arguments: object) -> dict[str, Any]:
    verdict: dict[str, Any] = cli("explain", *arguments, "--json").json["verdict"]
    return verdict


@pytest.mark.parametrize("form", [[], ["--json"], ["--save", "kept"], ["--html", "page.html"]])
def test_in_a_folder_regular_files_alone_are_read(
    form: list[str], log: Path, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    log.rename(odd / "server.log")
    monkeypatch.chdir(tmp_path)
    cli("explain", odd, *form)
    assert [file.name for file in (tmp_path / "kept").rglob("logs/*")] == (["0-server.log"] if "kept" in form else [])


def test_of_crash_folders_the_incidents_of_the_last_failure_are_read(tmp_path: Path, cli: Cli) -> None:
    told = golden("exception")
    about = {name: told[name] for name in ("verdict", "processes", "failures", "timeline") if name in told}
    pieces = {"environment.json": '{"arguments": {"hicache_storage_prefetch_policy": "timeout"}}'}
    first, second = (tmp_path / node / "host" / "incidents" for node in ("0", "1"))
    incident = make_incident(first, kind="exception", pieces=pieces, complete=True, **about)
    # GIVEN another node without a word of its own, an older incident, and a file that tells nothing
    make_incident(second, seconds=NOON + 30.0)
    make_incident(second, seconds=NOON - 3600.0)
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    # WHEN both crash folders are read, or what holds them
    expected = verdict_of(cli, incident)
    for paths in ([tmp_path], [tmp_path / "0", tmp_path / "1"]):
        said = cli("explain", *paths, "--json")
        assert said.json["verdict"]["class"] == expected["class"]
        assert "1 older incidents there are not read" in said.err


@pytest.mark.parametrize(
    "name", ["environment.json", "ranks/odd.json", "stacks/odd.json", "logs/odd.log", "incident.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "zero", "socket"])
def test_of_an_incident_regular_files_alone_are_read(
    name: str, kind: str, log: Path, odd: Path, tmp_path: Path, cli: Cli
) -> None:
    incident = tmp_path / "incident"
    for folder in ("ranks", "stacks", "logs"):
        (incident / folder).mkdir(parents=True)
    document = golden("exception")
    for process in document["processes"]:
        process["evidence"] = [
            {"kind": "exception", "status": "captured", "path": "ranks/odd.json"},
            {"kind": "stack", "status": "captured", "path": "stacks/odd.txt"},
        ]
    (incident / "incident.json").write_text(json.dumps(document))
    (incident / "logs" / "server.log").write_bytes(log.read_bytes())
    if name == "incident.json":
        (incident / name).unlink()
    expected = verdict_of(cli, incident)
    (odd / kind).rename(incident / name)
    if kind == "link":
        (odd / "pipe").rename((incident / name).with_name("pipe"))
    assert verdict_of(cli, incident) == expected


def test_a_file_that_turned_into_a_pipe_is_named(log: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    turns = log.with_name("turns.log")
    turns.touch()

    def open_after(path: Path, **options: Any) -> Any:
        if path == turns:
            turns.unlink()
            os.mkfifo(turns)
        return open_regular(path, **options)

    monkeypatch.setattr(reader, "open_regular", open_after)
    shown = cli("explain", log.parent, status=ExitCode.PARTIAL)
    assert "gpu_hardware" in shown.out
    assert f"{turns} cannot be read: it is not a regular file" in shown.err


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_that_is_named_is_read_to_its_end(pack: Callable[[bytes], bytes], log: Path, cli: Cli) -> None:
    # As a shell passes on <(zcat log.gz).
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        file.write(pack(log.read_bytes()))
    expected, told = verdict_of(cli, log), verdict_of(cli, f"/dev/fd/{reading}")
    os.close(reading)
    # What is quoted has the name of its file before it.
    assert {**told, "because": []} == {**expected, "because": []}


@pytest.mark.parametrize("name", ["zero", "socket"])
def test_a_device_or_a_socket_that_is_named_is_refused(name: str, odd: Path, cli: Cli) -> None:
    assert f"{odd / name} is no file and no pipe" in cli("explain", odd / name, status=ExitCode.NOTHING).err


def test_no_file_and_an_unknown_class_are_usage_errors(cli: Cli) -> None:
    cli("explain", status=ExitCode.USAGE)
    cli("explain", "--class", "absent", status=ExitCode.USAGE)
    assert "## gpu_stall" in cli("explain", "--class", "gpu_stall").out
