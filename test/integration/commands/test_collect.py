"""``sglang-crashkit collect`` on a real server that knows nothing of the kit: well, hung, and beside another."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.faults import DETOKENIZER, TP0, TP1
from integration.hangs.hang_story import ask_later, frames_of
from integration.scenario import HANDLER, answers_of, run_kit, stopped
from lanelib.lanes import ensure_lane
from lanelib.servers import Server, wait_all_ready
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import parse
from unit.support.targets import make_tool, state_of
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

RANKS = (TP0, TP1)
#: A debugger gets 60 s a process, on a machine that is busy with other tests.
COLLECT_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Collected:
    """What one run of the command left."""

    status: int  # its exit status
    document: dict[str, Any]  # what it printed
    folder: Path  # its files

    def process(self, title: str) -> dict[str, Any]:
        """Return what it printed of the process with that title."""
        (found,) = [process for process in self.document["processes"] if process["title"] == title]
        return found

    def node(self, name: str) -> dict[str, Any]:
        """Return what it printed of one of several hosts."""
        (found,) = [node for node in self.document["nodes"] if node["node"] == name]
        return found

    def text(self, tool: str, title: str) -> str:
        """Return the file of that tool and process."""
        process = self.process(title)
        return (self.folder / f"{tool}_{self.document['host']}_{process['pid']}.txt").read_text()

    def moments(self, title: str) -> list[Sample]:
        """Return what each snapshot has of a process."""
        rounds = [parse((self.folder / name).read_bytes()) for name in self.document["snapshots"]]
        return [one for each in rounds for one in each.processes if one.title == title]


@dataclass(frozen=True)
class Story:
    """One server: collected while idle, under load, then with one rank stopped and a request that waits for it."""

    answers: tuple[Any, Any]
    secs: tuple[list[float], list[float]]  # how long each answer took before, and while it was collected
    debuggers: list[str]  # the calls of a debugger, one of the same name first on PATH, in each of these
    well: Collected
    hung: Collected
    state: str
    late_answer: list[int]


@dataclass(frozen=True)
class Beside:
    """Two servers."""

    refused: tuple[int, str]  # what the command said where it was not told which: its status and its words
    both: Collected  # what it collected of all servers
    servers: tuple[int, int]  # pids of both


def collect(folder: Path, *words: str, **how: Any) -> Collected:
    """Run the command, whose files go to a folder; `how` is for `run_kit`."""
    how = {"timeout_s": COLLECT_TIMEOUT_S} | how
    done = run_kit("collect", "--json", "--output-dir", folder, *words, status=None, **how)
    assert done.stdout, done.stderr
    return Collected(done.returncode, json.loads(done.stdout), folder)


def answer_secs(server: Server, until: Callable[[], bool]) -> list[float]:
    """Ask one request after the other and return how long each answer took, in seconds."""
    found = []
    while not until():
        began = time.monotonic()
        server.generate(max_new_tokens=8, timeout_s=COLLECT_TIMEOUT_S)
        found.append(time.monotonic() - began)
    return found


def tell(server: Server, folder: Path) -> Story:
    server.wait_ready()
    before = answers_of(server)
    which = f"--pid={server.pid}"
    well = collect(folder / "well", which, "--all", "--interval", "1")
    after = answers_of(server)

    for name in ("gdb", "cuda-gdb"):
        make_tool(folder / "bin", f'echo "$0" >> {folder}/bin/called', name)
    env = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    end = time.monotonic() + 8
    usual = answer_secs(server, lambda: time.monotonic() > end)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(collect, folder / "loaded", which, env=env)
        meanwhile = answer_secs(server, loaded.done)
        # Of a server that goes on nothing more is to be known: not even then.
        asked = pool.submit(collect, folder / "asked", which, "--native", env=env)
        meanwhile += answer_secs(server, asked.done)
    assert (loaded.result().status, asked.result().status) == (0, 0)
    called = folder / "bin" / "called"
    debuggers = called.read_text().splitlines() if called.exists() else []
    victim, waiting = server.pid_of(RANKS[1]), server.pid_of(RANKS[0])
    with stopped(victim):
        late = ask_later(server, 16)
        wait_until(
            lambda: any("torch/distributed" in frame.file for frame in frames_of(waiting, COLLECT_TIMEOUT_S)[:1]),
            "the other rank waits for it",
            COLLECT_TIMEOUT_S,
        )
        hung = collect(folder / "hung", which, "--native", "--interval", "1")
        state = state_of(victim)
    return Story(
        answers=(before, after),
        secs=(usual, meanwhile),
        debuggers=debuggers,
        well=well,
        hung=hung,
        state=state,
        late_answer=late(),
    )


#: Each release, and whether it is without the kit.
LANES = (
    pytest.param(("0.5.9", False), marks=pytest.mark.matrix, id="0.5.9"),
    pytest.param(("0.5.12.post1", False), marks=pytest.mark.matrix, id="0.5.12.post1"),
    pytest.param(("0.5.23", True), id="0.5.23-unpatched"),
)


@pytest.fixture(scope="module", params=LANES)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    release, pristine = request.param
    with Server.start(ensure_lane(release, pristine=pristine), tp=2, spins=True) as server:
        return tell(server, tmp_path_factory.mktemp("collected"))


@pytest.fixture(scope="module", params=LANES)
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    (release, pristine), folder = request.param, tmp_path_factory.mktemp("beside")
    with (
        Server.start(ensure_lane(release, pristine=pristine), tp=2, spins=True) as server,
        Server.start(ensure_lane("0.5.23", pristine=True)) as other,
    ):
        wait_all_ready((server, other))
        done = run_kit("collect", "--output-dir", folder / "refused", status=None)
        both = collect(folder / "both", "--all-servers", "--interval", "1")
        return Beside((done.returncode, done.stderr), both, (server.pid, other.pid))


def test_both_ranks_and_the_servers_other_processes_are_found(story: Story) -> None:
    found = {process["title"]: process for process in story.well.document["processes"]}
    assert {*RANKS, DETOKENIZER} <= found.keys()
    assert HANDLER not in found
    assert [found[title]["ranks"] for title in RANKS] == [{"tp": 0}, {"tp": 1}]
    assert {process["role"] for process in found.values()} >= {"scheduler", "detokenizer", "server"}
    assert story.well.status == 0


def test_every_file_is_there_with_the_stacks_of_its_rank(story: Story) -> None:
    for collected in (story.well, story.hung):
        for title in RANKS:
            text = collected.text("pyspy", title)
            assert title in text
            # Of one that runs meanwhile the outer frames may be missing: no one stops it for a snapshot.
            assert text.count("    run_scheduler_process (") >= (3 if collected is story.hung else 1)
            moments = collected.moments(title)
            assert [bool(moment.threads) for moment in moments] == [True] * 3


def test_the_server_serves_as_before(story: Story) -> None:
    before, after = story.answers
    assert before == after
    assert len(story.late_answer) == 16


def test_a_healthy_server_stays_as_fast_and_meets_no_debugger(story: Story) -> None:
    usual, meanwhile = story.secs
    assert len(meanwhile) >= 3
    # A debugger holds an answer up for 16 to 19 s, another test on this machine for some.
    assert max(meanwhile) < 4 * max(usual) + 10, story.secs
    assert story.debuggers == []


@pytest.mark.matrix
def test_of_two_servers_one_has_to_be_named(beside: Beside) -> None:
    status, said = beside.refused
    assert status == 4
    assert "SGLang servers on this host, so name one:" in said
    for pid, ranks in zip(beside.servers, ("2 schedulers", "1 scheduler"), strict=True):
        assert f"  --pid {pid}: {ranks}, port " in said
    assert "  next: sglang-crashkit collect --pid " in said
    assert not (beside.both.folder.parent / "refused").exists()


@pytest.mark.matrix
def test_all_servers_are_taken_where_that_is_said(beside: Beside) -> None:
    # Others may run on this machine.
    found = [process["server"] for process in beside.both.document["processes"]]
    assert [found.count(pid) for pid in beside.servers] == [2, 1]


def test_the_stopped_rank_is_captured_and_left_stopped(story: Story) -> None:
    assert story.hung.process(RANKS[1])["states"] == ["T"] * 3
    assert story.state == "T"


def test_the_verdict_names_it(story: Story) -> None:
    verdict = story.hung.document["verdict"]
    assert verdict["level"] == "established"
    assert (verdict["class"], verdict["first"]) == ("stopped_process", "TP1")
    assert f"`kill -CONT {story.hung.process(RANKS[1])['pid']}` lets TP1 continue" in verdict["next"]
    # It is asked all the while.
    assert story.well.document["verdict"]["class"] in ("no_incident", "busy")
    assert story.well.document["verdict"]["first"] is None


def test_no_rank_is_debugged_for_a_verdict_that_is_established(story: Story) -> None:
    for title in RANKS:
        assert "not run: the verdict is established without it" in story.hung.text("cudagdb", title)
        assert not story.hung.moments(title)[-1].native
    assert story.hung.status == 0
    for moment in story.hung.moments(RANKS[0]):
        assert any("torch/distributed" in frame.file for thread in moment.threads for frame in thread.frames)
