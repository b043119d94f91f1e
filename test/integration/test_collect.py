"""``sglang-crashkit collect`` on a real server that knows nothing of the kit, well and hung."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.scenario import answers_of
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.core import procfs
from sglang_crashkit.core.pyspy import photograph_all
from sglang_crashkit.core.snapshot import ProcessSnapshot, parse
from sglang_crashkit.core.stacks import main_thread
from unit.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = ("sglang::scheduler_TP0", "sglang::scheduler_TP1")
#: A debugger gets 60 s a process, on a machine that is busy with other tests.
COLLECT_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Collected:
    """What one run of the command left.

    Attributes:
        status: its exit status.
        document: what it printed.
        folder: its files.
    """

    status: int
    document: dict[str, Any]
    folder: Path

    def process(self, title: str) -> dict[str, Any]:
        """Return what it printed of the process with that title."""
        (found,) = [process for process in self.document["processes"] if process["title"] == title]
        return found

    def text(self, tool: str, title: str) -> str:
        """Return the file of that tool and process."""
        process = self.process(title)
        return (self.folder / f"{tool}_{self.document['host']}_{process['pid']}.txt").read_text()

    def moments(self, title: str) -> list[ProcessSnapshot]:
        """Return what each snapshot has of a process."""
        rounds = [parse((self.folder / name).read_bytes()) for name in self.document["snapshots"]]
        return [one for each in rounds for one in each.processes if one.title == title]


@dataclass(frozen=True)
class Story:
    """One server: collected while it is idle, then with one rank stopped and a request that waits for it."""

    answers: tuple[Any, Any]
    well: Collected
    hung: Collected
    state: str
    late_answer: list[int]


def collect(server: Server, folder: Path, *arguments: str) -> Collected:
    command = [sys.executable, "-m", "sglang_crashkit", "collect", "--json", "--pid", str(server.pid)]
    done = subprocess.run(
        [*command, "--output-dir", str(folder), *arguments],
        stdout=subprocess.PIPE,
        timeout=COLLECT_TIMEOUT_S,
        check=False,
    )
    return Collected(done.returncode, json.loads(done.stdout), folder)


def tell(server: Server, folder: Path) -> Story:
    server.wait_ready()
    before = answers_of(server)
    well = collect(server, folder / "well", "--all", "--no-debugger", "--interval", "1")
    after = answers_of(server)
    victim, late = server.pid_of(RANKS[1]), []
    os.kill(victim, signal.SIGSTOP)
    asking = threading.Thread(
        target=lambda: late.extend(server.generate(max_new_tokens=16, timeout_s=900)["output_ids"]), daemon=True
    )
    asking.start()
    waiting = server.pid_of(RANKS[0])
    wait_until(lambda: _waits(waiting), "the other rank waits for it", COLLECT_TIMEOUT_S)
    hung = collect(server, folder / "hung", "--interval", "1")
    stat = procfs.read_stat(victim)
    os.kill(victim, signal.SIGCONT)
    asking.join(COLLECT_TIMEOUT_S)
    return Story((before, after), well, hung, stat.state if stat else "", late)


def _waits(pid: int) -> bool:
    (photograph,) = photograph_all([pid], COLLECT_TIMEOUT_S)
    thread = main_thread(photograph.threads or (), pid)
    return thread is not None and bool(thread.frames) and "torch/distributed" in thread.frames[0].file


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("0.5.9", False), marks=pytest.mark.matrix, id="0.5.9"),
        pytest.param(("0.5.12.post1", False), marks=pytest.mark.matrix, id="0.5.12.post1"),
        pytest.param(("0.5.23", True), id="0.5.23-unpatched"),
    ],
)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    release, pristine = request.param
    with Server.start(ensure_lane(release, pristine=pristine), tp=2) as server:
        return tell(server, tmp_path_factory.mktemp("collected"))


def test_both_ranks_and_the_servers_other_processes_are_found(story: Story) -> None:
    found = {process["title"]: process for process in story.well.document["processes"]}
    assert {*RANKS, "sglang::detokenizer"} <= found.keys()
    assert "sglang::crash_handler" not in found
    assert [found[title]["ranks"] for title in RANKS] == [{"tp": 0}, {"tp": 1}]
    assert {process["role"] for process in found.values()} >= {"scheduler", "detokenizer", "server"}
    assert story.well.status == 0


def test_every_file_is_there_with_the_stacks_of_its_rank(story: Story) -> None:
    for collected in (story.well, story.hung):
        for title in RANKS:
            text = collected.text("pyspy", title)
            assert title in text
            # Of one that runs meanwhile the outer frames may be missing: nobody stops it for a snapshot.
            assert text.count("    run_scheduler_process (") >= (3 if collected is story.hung else 1)
            moments = collected.moments(title)
            assert [bool(moment.threads) for moment in moments] == [True] * 3


def test_the_server_serves_as_before(story: Story) -> None:
    before, after = story.answers
    assert before == after
    assert len(story.late_answer) == 16


def test_the_stopped_rank_is_photographed_and_left_stopped(story: Story) -> None:
    assert story.hung.process(RANKS[1])["states"] == ["T"] * 3
    assert story.state == "T"
    tool = story.hung.process(RANKS[1])["debugger"]["tool"]
    assert f"# {tool}: not run: it is stopped, and must stay as it was found" in story.hung.text("cudagdb", RANKS[1])


def test_the_verdict_names_it(story: Story) -> None:
    verdict = story.hung.document["verdict"]
    assert verdict["level"] == "established"
    assert f"{RANKS[1]} (pid {story.hung.process(RANKS[1])['pid']}) is stopped (state T)" in verdict["statement"]
    assert story.well.document["verdict"]["named"] == []


def test_the_rank_that_waits_has_native_stacks_or_says_why_not(story: Story) -> None:
    debugger, text = story.hung.process(RANKS[0])["debugger"], story.hung.text("cudagdb", RANKS[0])
    assert story.hung.moments(RANKS[0])[-1].native or "did not end within 60 s" in debugger["problem"], text
    # One that the debugger stopped goes on: it has answered a request since.
    assert story.hung.status == 0
    for moment in story.hung.moments(RANKS[0]):
        assert any("torch/distributed" in frame.file for thread in moment.threads for frame in thread.frames)
