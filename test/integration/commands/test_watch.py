"""``sglang-crashkit watch`` on a real server that knows nothing of the kit: much that is no hang, then one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.hangs.hang_story import CHUNK, HANG_SECS, LONG, QUIET_SECS, VICTIM, WAITING, ask_later, post
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import parse
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

KEY = "sk-of-a-test-1f2e3d"


@dataclass
class Watch:
    """The command while it runs, with its output in a file."""

    said: Path
    popen: subprocess.Popen[bytes]

    def events(self) -> list[dict[str, Any]]:
        """Return what it told so far."""
        whole, _newline, _rest = self.said.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def await_event(self, kind: str, after: int = 0) -> dict[str, Any]:
        """Wait for an event of that kind, beyond the first so many events."""

        def found() -> list[dict[str, Any]]:
            assert self.popen.poll() is None, self.said.read_text()
            return [event for event in self.events()[after:] if event["event"] == kind]

        return wait_until(found, f"it tells of {kind}", 2 * LONG)[0]


@dataclass
class Story:
    """What happened to one server, and what the command told of it."""

    quiet: dict[str, list[str]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    hang: dict[str, Any] = field(default_factory=dict)
    hang_secs: float = 0.0
    snapshots: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    late_answer: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None

    def moments(self, title: str) -> list[Sample]:
        """Return what each snapshot has of a process."""
        folder = Path(self.snapshots["output_dir"])
        rounds = [parse(path.read_bytes()) for path in sorted(folder.glob("snapshot_*.json"))]
        return [one for each in rounds for one in each.processes if one.title == title]


@contextlib.contextmanager
def _watching(server: Server, folder: Path, *arguments: str) -> Iterator[Watch]:
    command = [sys.executable, "-m", "sglang_crashkit", "watch", "--json", "--pid", str(server.pid), *arguments]
    command += ["--hang-secs", f"{HANG_SECS:g}", "--interval", "0.5", "--output-dir", str(folder / "stacks")]
    said = folder / "said"
    with said.open("wb") as out:
        popen = subprocess.Popen(command, stdout=out)
    try:
        yield Watch(said, popen)
    finally:
        popen.kill()
        popen.wait(LONG)


def _pass_by(told: Story, watch: Watch, name: str, before: int) -> int:
    told.quiet[name] = [event["event"] for event in watch.events()[before:]]
    return len(watch.events())


def _tell(server: Server, watch: Watch, told: Story) -> None:
    server.wait_ready()
    watch.await_event("serving")
    told.pids = {title: server.pid_of(title) for title in (VICTIM, WAITING)}
    count = _pass_by(told, watch, "loading", 0)
    time.sleep(QUIET_SECS)
    count = _pass_by(told, watch, "idle", count)

    post(server, "/slow_down", forward_sleep_time=HANG_SECS / 3)
    server.generate("1 " * (2 * CHUNK), max_new_tokens=1, timeout_s=LONG)
    post(server, "/slow_down", forward_sleep_time=0)
    count = _pass_by(told, watch, "long prefill", count)

    post(server, "/pause_generation", mode="in_place")
    # Those of a paused server do not take health checks in, but answer this, again and again.
    wait_until(lambda: server.log_path.read_text().count("GET /server_info") >= 3, "the schedulers are asked", LONG)
    post(server, "/continue_generation")
    count = _pass_by(told, watch, "paused", count)

    began = time.monotonic()
    os.kill(told.pids[VICTIM], signal.SIGSTOP)
    answer = ask_later(server, max_new_tokens=16)
    told.hang = watch.await_event("hang", count)
    told.hang_secs = time.monotonic() - began
    told.snapshots = watch.await_event("snapshots", count)
    stat = procfs.read_stat(told.pids[VICTIM])
    told.state = stat.state if stat else ""
    os.kill(told.pids[VICTIM], signal.SIGCONT)
    told.progress = watch.await_event("progress", count)
    told.late_answer = answer()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    told = Story()
    arguments = ["--chunked-prefill-size", str(CHUNK)]
    lane = ensure_lane("0.5.23", pristine=True)
    folder = tmp_path_factory.mktemp("watch")
    with (
        Server.start(lane, tp=2, extra_args=arguments, spins=True) as server,
        _watching(server, folder) as watch,
    ):
        _tell(server, watch, told)
        server.popen.terminate()
        server.popen.wait(timeout=LONG)
        told.status = watch.popen.wait(timeout=LONG)
        told.events = watch.events()
    return told


def test_nothing_that_is_no_hang_is_taken_for_one(story: Story) -> None:
    assert {name for name, kinds in story.quiet.items() if "hang" in kinds} == set()
    assert story.quiet.keys() == {"loading", "idle", "long prefill", "paused"}
    kinds = [event["event"] for event in story.events]
    assert (kinds.count("hang"), kinds.count("crash")) == (1, 0)


def test_the_hang_is_seen_in_time_with_the_stopped_rank(story: Story) -> None:
    # The goal is 15 s more than the limit; a machine that is busy with other tests has more.
    assert HANG_SECS < story.hang_secs < HANG_SECS + 60
    assert f"{VICTIM} (pid {story.pids[VICTIM]}) is stopped (state T)" in story.hang["text"]
    assert WAITING not in story.hang["text"]
    assert story.hang["level"] == "supported"
    assert {rank["title"]: rank["manner"] for rank in story.hang["ranks"]}[VICTIM] == "stopped"


def test_all_ranks_have_three_stacks_and_the_rank_stays_stopped(story: Story) -> None:
    assert story.snapshots["missing"] == []
    for title in (VICTIM, WAITING):
        moments = story.moments(title)
        assert len(moments) == 3
        assert all("run_scheduler_process" in str(moment.threads) for moment in moments)
    assert story.state == "T"


def test_it_tells_of_progress_and_ends_with_the_server(story: Story) -> None:
    assert story.progress["secs"] >= HANG_SECS
    assert len(story.late_answer) == 16
    assert story.events[-1]["event"] == "gone"
    assert story.status == 3


@dataclass
class Keyed:
    """What two of the command told of a server with an API key, of which one had the key.

    Attributes:
        victim: pid of the rank that was stopped.
        calm: what the one with the key told before the rank was stopped: while the server was paused.
        hang: what each told of the hang, by whether it had the key.
        events: all that each told.
        written: all that the two printed and wrote.
    """

    victim: int
    calm: list[str]
    hang: dict[bool, dict[str, Any]]
    events: dict[bool, list[dict[str, Any]]]
    written: bytes


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    folders = {has_key: tmp_path_factory.mktemp("key" if has_key else "no-key") for has_key in (True, False)}
    key = tmp_path_factory.mktemp("secret") / "key"
    key.write_text(f"{KEY}\n")
    lane = ensure_lane("0.5.23", pristine=True)
    with Server.start(lane, tp=2, extra_args=["--api-key", KEY], spins=True) as server, contextlib.ExitStack() as stack:
        server.wait_ready()
        with_key = stack.enter_context(_watching(server, folders[True], "--api-key-file", str(key)))
        with_key.await_event("serving")
        post(server, "/pause_generation", key=KEY, mode="in_place")
        answered = '"GET /server_info HTTP/1.1" 200'
        wait_until(lambda: server.log_path.read_text().count(answered) >= 2, "the schedulers are asked", LONG)
        post(server, "/continue_generation", key=KEY)
        calm = [event["event"] for event in with_key.events()]
        without = stack.enter_context(_watching(server, folders[False]))
        without.await_event("serving")

        victim = server.pid_of(VICTIM)
        os.kill(victim, signal.SIGSTOP)
        watches = {True: with_key, False: without}
        hang = {has_key: watch.await_event("hang") for has_key, watch in watches.items()}
        for watch in watches.values():
            watch.await_event("verdict")
        without.await_event("problem")
        os.kill(victim, signal.SIGCONT)
        events = {has_key: watch.events() for has_key, watch in watches.items()}
    files = [path for folder in folders.values() for path in folder.rglob("*") if path.is_file()]
    return Keyed(victim, calm, hang, events, b"".join(path.read_bytes() for path in files))


@pytest.mark.matrix
def test_with_its_key_a_paused_server_is_no_hang(keyed: Keyed) -> None:
    assert keyed.calm == ["watching", "serving"]
    kinds = [event["event"] for event in keyed.events[True]]
    assert kinds == [*keyed.calm, "hang", "snapshots", "verdict"]
    assert f"{VICTIM} (pid {keyed.victim}) is stopped (state T)" in keyed.hang[True]["text"]


@pytest.mark.matrix
def test_without_its_key_the_option_is_named_and_hangs_told(keyed: Keyed) -> None:
    (problem,) = [event["text"] for event in keyed.events[False] if event["event"] == "problem"]
    assert "/server_info is answered with 401" in problem
    assert problem.endswith("next: give its key with --api-key-file")
    assert f"{VICTIM} (pid {keyed.victim}) is stopped (state T)" in keyed.hang[False]["text"]


@pytest.mark.matrix
def test_the_key_is_in_nothing_that_is_told_or_written(keyed: Keyed) -> None:
    assert keyed.written
    assert KEY.encode() not in keyed.written
