"""A real server that knows nothing of the kit hangs while its ranks look for each other: ``collect`` says who waits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from integration.faults import TP0, TP1
from integration.hangs.hang_story import frames_of
from integration.import_hook import write_site
from integration.scenario import rank_that_starts, run_kit
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

RANKS = (TP0, TP1)
#: Until the ranks are where they stay, on a busy machine.
START_S = 300.0
COLLECT_S = 120.0
#: Runs in every Python process of the server and changes, in `CHANGED`, what the second rank does with torch's groups.
CHANGED = "torch.distributed.distributed_c10d"
SITECUSTOMIZE = """
import os
import time


def hold():
    held = os.path.join(os.path.dirname(__file__), "held")
    with open(held, "w"):
        pass
    while os.path.exists(held):
        time.sleep(0.1)


def change(c10d):
    init = c10d.init_process_group

    def init_process_group(*args, **kwargs):
        if kwargs["rank"] == 1:
            hold()
        init(*args, **kwargs)
        if kwargs["rank"] == 1:
            # Groups are found in the store by their number: it waits for the other one in another place.
            c10d._world.group_count += 1

    c10d.init_process_group = init_process_group
"""


def is_in(pid: int, function: str) -> bool:
    """Say whether a process is in a function of torch's groups."""
    time.sleep(0.1)
    return any("torch/distributed" in leaf.file and leaf.function == function for leaf in frames_of(pid)[:1])


def verdict_on(server: Server, folder: Path) -> dict[str, Any]:
    argv = ("collect", "--json", f"--pid={server.pid}", "--interval=1", f"--output-dir={folder}")
    done = run_kit(*argv, timeout_s=COLLECT_S)
    verdict: dict[str, Any] = json.loads(done.stdout)["verdict"]
    return verdict


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``collect`` says of a server that does not get ready, the first time and the second.

    First the second rank has not come to the store; then both are there and look for each other in different places.
    """
    folder, output = tmp_path_factory.mktemp("hook"), tmp_path_factory.mktemp("collected")
    environ = write_site(folder, SITECUSTOMIZE, CHANGED)
    lane = ensure_lane("0.5.23", pristine=True)
    with Server.start(lane, tp=2, env=environ) as server:
        first, second = (rank_that_starts(server, rank, START_S) for rank in RANKS)
        wait_until((folder / "held").exists, "the second rank is held", START_S)
        wait_until(lambda: is_in(first, "_create_c10d_store"), "the first one waits in the store", START_S)
        held = verdict_on(server, output)
        (folder / "held").unlink()
        for pid in (first, second):
            wait_until(lambda pid=pid: is_in(pid, "_create_gloo_process_group"), "both wait in the store", START_S)
        return held, verdict_on(server, output)


def test_the_rank_awaited_in_the_store_is_named(verdicts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    held, _apart = verdicts
    assert (held["class"], held["level"], held["first"]) == ("rank_stuck", "supported", "TP1")
    assert "TP0 waits for the other ranks through the store" in held["headline"]


def test_nobody_is_blamed_where_ranks_wait_for_each_other(verdicts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _held, apart = verdicts
    assert (apart["class"], apart["level"], apart["first"]) == ("startup_timeout", "supported", None)
    assert "TP0 and TP1" in apart["headline"]
    assert any("--dist-init-addr" in step for step in apart["next"])
