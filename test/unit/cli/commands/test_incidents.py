from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from sglang_crashkit.incident.fingerprint import Fault, count_fault, read_faults
from unit.support import stored
from unit.support.command import Cli


def make_incident(folder: Path, seconds: float, text: str, **more: Any) -> Path:
    verdict = {"kind": "signal", "level": "established", "text": text}
    return stored.make_incident(folder / "host" / "incidents", seconds=seconds, verdict=verdict, **more)


def test_incidents_are_listed_newest_first(tmp_path: Path, cli: Cli) -> None:
    old = make_incident(tmp_path, 1.0, "TP1 was killed.")
    torn = make_incident(tmp_path, 2.0, "", publish=False, complete=True)
    (torn / "incident.json").unlink()
    rows = [re.split(r"\s{2,}", line) for line in cli("incidents", tmp_path).out.splitlines()]
    assert rows == [
        ["id", "time (UTC)", "kind", "who", "cause", "requests", "seen"],
        [torn.name[-8:], "1970-01-01 00:00:02", "killed (not finished)", "-", "has no incident.json", "-", "-"],
        [old.name[-8:], "1970-01-01 00:00:01", "killed", "-", "TP1 was killed. [established]", "-", "-"],
        [f"newest: {torn}"],
    ]


def test_a_program_reads_the_same(tmp_path: Path, cli: Cli) -> None:
    path = make_incident(tmp_path, 1.0, "TP1 was killed.")
    (found,) = cli("incidents", path, "--json").json
    assert (found["path"], found["finished"], found["problem"]) == (str(path), True, None)
    assert found["verdict"]["text"] == "TP1 was killed."
    assert found.keys() == {
        *("path", "finished", "problem", "headline", "id", "kind", "trigger", "server", "requests", "peers", "verdict"),
        "fault",
    }


def test_how_often_a_fault_was_seen_is_told_once(tmp_path: Path, cli: Cli) -> None:
    incidents, fault = tmp_path / "host" / "incidents", Fault("0.5.23", "signal", "scheduler tp=1", "SIGKILL", ())
    paths = []
    for number in range(3):
        path = make_incident(tmp_path, float(number), "TP1 was killed.")
        document = json.loads((path / "incident.json").read_text())
        occurrence = count_fault(incidents, fault, document["id"], path.name, keep=2)
        assert occurrence is not None
        (path / "incident.json").write_text(json.dumps(document | {"fault": asdict(occurrence)}))
        paths.append(path)
    other = make_incident(tmp_path, 9.0, "Another.")
    said = cli("incidents", tmp_path)
    entry = read_faults(incidents)[fault.key]
    _head, *rows, newest, following = said.out.splitlines()
    assert [row.split()[0] for row in rows] == [path.name[-8:] for path in (other, *paths[::-1])]
    assert [row.split()[-1] for row in rows] == ["-", "3", "3", "3"]
    assert (newest, following) == (f"newest: {other}", f"next: sglang-crashkit show {other}")
    faults = [found["fault"] for found in cli("incidents", tmp_path, "--json").json]
    assert faults[0] is None
    assert [(each["count"], each["total"], each["last"]) for each in faults[1:]] == [
        (number, 3, entry["last"]) for number in (3, 2, 1)
    ]
    (incidents / "faults.json").unlink()
    assert cli("incidents", tmp_path).out.splitlines()[2].endswith(" 3")


def test_without_an_incident_the_status_is_3(tmp_path: Path, cli: Cli) -> None:
    assert "no incident below" in cli("incidents", tmp_path, status=3).err
    assert cli("incidents", tmp_path, "--json", status=3).json == []


def test_without_a_folder_the_status_is_3(tmp_path: Path, cli: Cli) -> None:
    assert cli("incidents", tmp_path / "absent", status=3).err == (
        f"sglang-crashkit incidents: {tmp_path}/absent is not a folder\n"
        "  next: sglang-crashkit incidents DIR   # DIR: what the server was given as --crash-dump-folder\n"
    )
    assert cli("incidents", tmp_path / "absent", "--json", status=3).json["exit_code"] == 3


@pytest.mark.parametrize("verdict", [None, [], "text", {}, {"text": None}])
def test_a_verdict_of_another_shape_is_listed(tmp_path: Path, cli: Cli, verdict: Any) -> None:
    path = make_incident(tmp_path, 1.0, "")
    (path / "incident.json").write_text(json.dumps({"verdict": verdict}))
    assert str(path) in cli("incidents", tmp_path).out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kind", "hang"], ["new"]),
        (["--kind", "killed"], ["old"]),
        (["--since", "2h"], ["new"]),
        (["--last", "1"], ["new"]),
        (["--kind", "absent"], []),
    ],
)
def test_some_of_them_may_be_asked_for(tmp_path: Path, cli: Cli, arguments: list[str], expected: list[str]) -> None:
    incidents = tmp_path / "host" / "incidents"
    now = time.time()
    names = {
        stored.make_incident(incidents, seconds=now - 86400): "old",
        stored.make_incident(incidents, seconds=now - 60, kind="hang"): "new",
    }
    status = 0 if expected else 3
    said = cli("incidents", tmp_path, "--json", *arguments, status=status)
    assert [names[Path(one["path"])] for one in said.json] == expected
    cli("incidents", tmp_path, *arguments, status=status)


AS_NOBODY = """
import os, sys
import sglang_crashkit.kernel.guarded_read, sglang_crashkit.view.by_fault
import sglang_crashkit.cli.crash_folder, sglang_crashkit.view.terminal
from sglang_crashkit.cli import main
for name in ("incidents", "show", "bundle", "steps"):
    main.build_parser(name)
os.setuid(65534)
for arguments in sys.argv[1:]:
    status = main.main(arguments.split())
    print(status, file=sys.stderr)
"""


@pytest.fixture
def crash() -> Iterator[Path]:
    """A crash folder that another user may reach, and read but for the incidents."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        make_incident(Path(name) / "crash", 1.0, "")
        for folder in (name, f"{name}/crash", f"{name}/crash/host", f"{name}/crash/host/incidents"):
            Path(folder).chmod(0o755)
        yield Path(name) / "crash"


def as_nobody(*commands: str) -> tuple[str, list[str]]:
    """Return what some commands print for another user, and the lines that they tell, their statuses among them."""
    command = [sys.executable, "-c", AS_NOBODY, *commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize("closed", ["", "host", "host/incidents"])
def test_a_folder_of_another_user_is_said_to_be_unreadable(crash: Path, closed: str) -> None:
    (path,) = (crash / "host" / "incidents").glob("1970*")
    (crash / closed).chmod(0o700)
    commands = [f"incidents {crash}", f"show {crash}", f"bundle {path.parent}", f"steps latest --folder {crash}"]
    commands += [f"show {path}", f"incidents --by fault {crash}", f"incidents {path.parent}"]
    printed, told = as_nobody(*commands)
    assert printed == ""
    for first, following, status in zip(told[::3], told[1::3], told[2::3], strict=True):
        assert first.endswith(" cannot be read: Permission denied")
        assert f"{crash}/{closed}".rstrip("/") in first
        assert (following[:16], status) == ("  next: ls -ld /", "1")
    assert len(told) == 3 * len(commands)


def test_a_closed_host_is_named_among_the_open_ones(crash: Path) -> None:
    (path,) = (crash / "host" / "incidents").glob("1970*")
    for each in crash.rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    (crash / "other").mkdir(0o700)
    commands = [f"incidents {crash}", f"incidents {crash} --json", f"show {crash}"]
    commands += [f"steps latest --folder {crash}", f"show {path}"]
    commands += [f"show {path.name[-8:]} --folder {crash}", f"show 00000000 --folder {crash}"]
    why = f"{crash}/other/incidents cannot be read: Permission denied"
    left_out = f"{why}; what is in it is left out"
    steps = [left_out, f"sglang-crashkit steps: no steps in {path}", "  next: sglang-crashkit show ", "3"]
    absent = [f"sglang-crashkit show: no incident 00000000 below {crash}; {why}", "  next: ", "3"]
    expected = [left_out, "5", left_out, "5", left_out, "0", *steps, "0", "0", *absent]
    _printed, told = as_nobody(*commands)
    assert [line for line, start in zip(told, expected, strict=True) if not line.startswith(start)] == []


# -- by fault

HOSTILE = "<b>\x1b[2J"


def make_fault(folder: Path, host: str, signal: str, **attributes: str) -> Path:
    """Leave the incident of a scheduler that died of a signal; `attributes` as the environment has them."""
    rank = {"pid": 9, "role": "scheduler", "rank": {"tp": len(host)}, "exit": {"signal": signal}}
    doing = [f"forward (sglang/srt/x.py:{len(host)})"]
    verdict = {"kind": "signal", "first_failure": {"pid": 9}, "text": "", "level": "established"}
    (folder / host / "incidents").mkdir(parents=True, exist_ok=True)
    return stored.make_incident(
        folder / host / "incidents",
        server={"hostname": host, "sglang_version": attributes.pop("release", "0.5.23")},
        verdict=verdict,
        processes=[rank | {"doing": doing}],
        cause={"class": HOSTILE},
        environment={"model": attributes.pop("model", "m"), "versions": attributes},
    )


def test_the_same_fault_is_counted_over_hosts_ranks_and_lines(tmp_path: Path, cli: Cli) -> None:
    for host in ("a", "aa", "aaa"):
        make_fault(tmp_path / "fetched", host, "SIGSEGV", driver="580")
    for host in ("b", "bb", "bbb", "bbbb", "a"):
        make_fault(tmp_path / "other", host, "SIGBUS", driver="580" if host == "a" else "570")
    told = cli("incidents", "--by", "fault", tmp_path / "fetched", tmp_path / "other").out
    assert "\x1b" not in told
    head, *rows = told.splitlines()
    assert head.split() == ["fault", "hosts", "times", "first", "last", "what"]
    assert rows[0].endswith("5      5  2023-11-14  2023-11-14  signal scheduler SIGBUS forward (sglang/srt/x.py)")
    assert rows[2].split()[1:3] == ["3", "3"]
    assert rows[3].strip() == "driver 580 on 3 of 3 hosts, and on 0 of 4 others"
    first, second = cli("incidents", "--by", "fault", "--json", tmp_path / "fetched", tmp_path / "other").json
    assert (first["count"], first["hosts"]) == (5, ["a", "b", "bb", "bbb", "bbbb"])
    assert (second["what"][2], second["causes"]) == ("SIGSEGV", {HOSTILE: 3})


def test_what_all_hosts_have_or_one_host_has_is_not_named(tmp_path: Path, cli: Cli) -> None:
    for host in ("a", "aa", "b", "bb", "bbb"):
        make_fault(tmp_path, host, "SIGSEGV" if "a" in host else "SIGBUS", driver="580")
    make_fault(tmp_path, "c", "SIGILL", driver="590")
    document = cli("incidents", "--by", "fault", "--json", tmp_path).json
    assert [one["common"] for one in document] == [[], [], []]


def test_one_that_cannot_be_read_is_named_and_the_others_are_counted(tmp_path: Path, cli: Cli) -> None:
    torn, _whole = make_fault(tmp_path, "a", "SIGSEGV"), make_fault(tmp_path, "aa", "SIGSEGV")
    (torn / "incident.json").write_text("[" * 100_000)
    captured = cli("incidents", "--by", "fault", "--json", tmp_path, status=5)
    assert str(torn) in captured.err
    assert [one["hosts"] for one in captured.json] == [["aa"]]
