from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.cli.commands import watch as watch_command
from sglang_crashkit.cli.main import main
from sglang_crashkit.model.snapshot import parse
from sglang_crashkit.settings import fallback_folder
from sglang_crashkit.watch.watching import Observation
from unit.support.stored import make_incident
from unit.support.targets import settle, state_of
from unit.support.waiting import LONG, child, wait_until
from unit.watch.http_server import answering
from unit.watch.served import RANKS, Served, served

# Each waits for a hang, which takes its time.
pytestmark = pytest.mark.wide

HANG_SECS = "2"
#: Of no interface, so that it is taken for another host's: this process and its children are no server.
ELSEWHERE = "127.0.0.2"


class Watch:
    """The command while it runs, with its output in a file."""

    def __init__(self, said: Path, popen: subprocess.Popen[bytes]) -> None:
        self.said, self.popen = said, popen

    def events(self) -> list[dict[str, Any]]:
        whole, _newline, _rest = self.said.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def await_event(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for that many events of that kind, and return the last."""

        def found() -> list[dict[str, Any]]:
            events = [event for event in self.events() if event["event"] == kind]
            return events if len(events) >= count else []

        try:
            return wait_until(found, f"it tells {count} times of {kind}", 3 * LONG)[-1]
        except AssertionError as error:
            raise AssertionError(f"{error}; it told {self.events()}") from None

    def end(self) -> int:
        return self.popen.wait(LONG)


@contextlib.contextmanager
def watching(folder: Path, *arguments: str, hang_secs: str = HANG_SECS) -> Iterator[Watch]:
    said = folder / "said"
    command = [sys.executable, "-m", "sglang_crashkit", "watch", "--json"]
    command += ["--hang-secs", hang_secs] if hang_secs else []
    command += ["--interval", "0.1", "--output-dir", str(folder / "stacks"), *arguments]
    with said.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE) as popen:
        try:
            yield Watch(said, popen)
        finally:
            popen.kill()


def hang(server: Served) -> None:
    """Stop the second rank, and answer no more health checks."""
    os.kill(server.ranks[RANKS[1]], signal.SIGSTOP)
    server.mode.write_text("hang")


def test_a_hang_is_seen_captured_and_its_progress_told(tmp_path: Path) -> None:
    with served(tmp_path) as server, watching(tmp_path, "--pid", str(server.ranks[RANKS[0]])) as watch:
        assert f"server {server.popen.pid} at {server.url}" in watch.await_event("watching")["text"]
        watch.await_event("serving")
        hang(server)
        text = watch.await_event("hang")["text"]
        assert f"{RANKS[1]} (pid {server.ranks[RANKS[1]]}) is stopped (state T)" in text
        snapshots = watch.await_event("snapshots")
        assert snapshots["missing"] == []
        watch.await_event("verdict")
        assert state_of(server.ranks[RANKS[1]]) == "T"
        paths = sorted(Path(snapshots["output_dir"]).glob("snapshot_*.json"))
        rounds = [parse(path.read_bytes()) for path in paths]
        assert len(rounds) == 3
        assert all({process.title for process in one.processes} >= set(RANKS) for one in rounds)

        os.kill(server.ranks[RANKS[1]], signal.SIGCONT)
        server.mode.write_text("200")
        assert watch.await_event("progress")["secs"] >= float(HANG_SECS)
        server.end()
        assert watch.end() == 3
        assert watch.events()[-1]["event"] == "gone"


def test_a_crash_names_who_failed_first_and_hides_later_hangs(tmp_path: Path) -> None:
    with served(tmp_path) as server, watching(tmp_path, "--pid", str(server.popen.pid)) as watch:
        watch.await_event("serving")
        pid = server.ranks[RANKS[1]]
        os.kill(pid, signal.SIGKILL)
        server.mode.write_text("hang")
        crash = watch.await_event("crash")
        assert crash["text"] == f"{RANKS[1]} (pid {pid}) was killed by SIGKILL; the others went on"
        assert (crash["level"], crash["first"]["pid"], crash["first"]["signal"]) == ("established", pid, "SIGKILL")
        snapshots = watch.await_event("snapshots")
        (path,) = Path(snapshots["output_dir"]).glob("snapshot_*.json")
        assert {process.pid for process in parse(path.read_bytes()).processes} >= {server.ranks[RANKS[0]]}
        server.mode.write_text("200")
        server.end()
        assert watch.end() == 3
    assert [event["event"] for event in watch.events()] == ["watching", "serving", "crash", "snapshots", "gone"]


def test_the_incident_of_a_patched_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with served(tmp_path) as server, watching(tmp_path, "--pid", str(server.popen.pid), "--once") as watch:
        watch.await_event("serving")
        pid = server.ranks[RANKS[1]]
        # It is there before the crash: who finds none then does not wait for its incident.
        handler = fallback_folder() / "run" / f"{server.popen.pid}-1"
        handler.mkdir(parents=True)
        os.kill(pid, signal.SIGKILL)
        watch.await_event("crash")
        verdict = {"text": "It was killed.", "level": "established", "first_failure": {"pid": pid, "title": RANKS[1]}}
        make_incident(fallback_folder() / "host" / "incidents", server={"pid": 1})
        made = make_incident(
            fallback_folder() / "host" / "incidents", server={"pid": server.popen.pid}, verdict=verdict, kind="killed"
        )
        handler.rmdir()
        incident = watch.await_event("incident")
        assert watch.end() == 0
    assert incident["text"] == f"It was killed. Incident: {made}"
    assert (incident["headline"], incident["path"]) == (f"killed: {RANKS[1]} (pid {pid})", str(made))


def test_a_crash_only_the_handler_saw_has_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with served(tmp_path) as server, watching(tmp_path, "--pid", str(server.popen.pid)) as watch:
        watch.await_event("serving")
        pid = server.ranks[RANKS[1]]
        verdict = {"text": "It was killed.", "level": "established", "first_failure": {"pid": pid, "title": RANKS[1]}}
        ended = [{"pid": pid, "title": RANKS[1], "exit": {"code": None, "signal": "SIGKILL"}}]
        folder = fallback_folder() / "host" / "incidents"
        make_incident(folder, server={"pid": server.popen.pid}, verdict=verdict, processes=ended)
        # It looks again when all have ended.
        os.kill(watch.popen.pid, signal.SIGSTOP)
        server.end()
        os.kill(watch.popen.pid, signal.SIGCONT)
        assert watch.end() == 3
    crash, snapshots, incident, _gone = watch.events()[2:]
    assert crash["text"] == f"{RANKS[1]} (pid {pid}) was killed by SIGKILL; the whole server has ended"
    assert (crash["level"], crash["first"]["pid"], crash["first"]["signal"]) == ("established", pid, "SIGKILL")
    assert (snapshots["event"], snapshots["files"]) == ("snapshots", [])
    assert incident["event"] == "incident"


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_in_order_when_it_is_asked_to(tmp_path: Path, signum: int, status: int) -> None:
    with served(tmp_path) as server, watching(tmp_path, "--pid", str(server.popen.pid)) as watch:
        watch.await_event("serving")
        watch.popen.send_signal(signum)
        assert watch.end() == status
        assert watch.popen.stderr is not None
        assert watch.popen.stderr.read() == b""


def test_without_local_processes_the_health_check_alone_tells(tmp_path: Path) -> None:
    with answering(ELSEWHERE) as server, watching(tmp_path, "--url", server.url) as watch:
        watch.await_event("serving")
        server.statuses |= {"/health_generate": 0, "/server_info": 0}
        told = watch.await_event("hang")
        assert (told["level"], told["ranks"]) == ("unknown", [])
        assert watch.await_event("snapshots")["files"] == []
        server.release()
        watch.await_event("progress")
        assert server.max_open == 2  # the health check, and the question whether the schedulers answer that


def test_without_json_each_event_is_a_line(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        hang(server)
        command = [sys.executable, "-m", "sglang_crashkit", "watch", "--pid", str(server.popen.pid), "--once"]
        command += ["--hang-secs", HANG_SECS, "--start-secs", "2", "--interval", "0", "-o", str(tmp_path / "o")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LONG, check=False)
    assert done.returncode == 0
    kinds = [line.split()[1] for line in done.stdout.splitlines()]
    assert kinds == ["watching:", "hang:", "snapshots:", "verdict:"]
    assert done.stderr == ""


def test_stacks_that_cannot_be_written_do_not_end_the_watch(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("no folder")
    with served(tmp_path) as server, watching(tmp_path, "--pid", str(server.popen.pid)) as watch:
        watch.await_event("serving")
        hang(server)
        assert "next: name another folder with --output-dir" in watch.await_event("problem")["text"]
        os.kill(server.ranks[RANKS[1]], signal.SIGCONT)
        server.mode.write_text("200")
        watch.await_event("progress")


@pytest.mark.parametrize(("value", "secs"), [("0", "60 s"), ("rubbish", "60 s"), ("0.5", "2 s"), ("90", "90 s")])
def test_the_time_is_the_handlers_or_else_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, secs: str
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_HANG_SECS", value)
    with answering(ELSEWHERE) as server, watching(tmp_path, "--url", server.url, hang_secs="") as watch:
        assert watch.await_event("watching")["text"].endswith(f"; {secs} without an answer are a hang")


def test_a_paused_server_behind_a_key_is_seen_paused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("top secret\n")
    with (
        answering(ELSEWHERE) as server,
        watching(tmp_path, "--url", server.url, "--api-key-file", str(key)) as watch,
    ):
        server.key = "top secret"
        watch.await_event("serving")
        server.statuses["/health_generate"] = 0
        assert "its schedulers answer other questions" in watch.await_event("excused")["text"]
    assert "secret" not in watch.said.read_text()
    assert "secret" not in " ".join(map(str, watch.popen.args))  # type: ignore[arg-type]


def test_one_of_two_ways_to_name_the_server_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch"]) == 2
    assert "neither --pid nor --url" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--hang-secs", "0.5"), ("--hang-secs", "nan"), ("--snapshots", "0")])
def test_numbers_that_make_no_sense_are_refused(arguments: tuple[str, ...]) -> None:
    assert main(["watch", "--url", "http://127.0.0.1:1", *arguments]) == 2


def test_a_process_that_is_no_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with child("ready(); pause()") as process:
        assert main(["watch", "--pid", str(process.pid)]) == 3
        settle(process.pid, "S")
    assert f"process {process.pid} is no SGLang server" in capsys.readouterr().err
    assert main(["watch", "--pid", str(process.pid)]) == 3
    assert f"there is no process {process.pid}" in capsys.readouterr().err


class FakeTime:
    """A clock that nobody waits for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def watch_of_another_host() -> watch_command._Watch:
    parser = argparse.ArgumentParser()
    watch_command.configure(parser)
    return watch_command._Watch(parser.parse_args(["--url", f"http://{ELSEWHERE}:1"]), 60.0)


@pytest.mark.parametrize("columns", [60, 200])
def test_on_a_terminal_what_is_seen_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    watch_of_another_host()._overview(Observation(1.0, "refused " * 30))
    line = capsys.readouterr().err
    assert line.startswith("\r\033[Kstarting: health refused")
    assert len(line.removeprefix("\r\033[K")) == columns - 1


def test_what_it_waits_for_is_said_every_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeTime()
    monkeypatch.setattr(watch_command, "time", clock)
    watch = watch_of_another_host()
    said = []
    for _ in range(13):
        watch._overview(Observation(clock.now, "refused"))
        said += [(clock.now - 1000.0, line) for line in capsys.readouterr().err.splitlines()]
        clock.now += 10.0
    line = "waiting for the server to get ready; starting: health refused"
    assert said == [(60.0, line), (120.0, line)]
