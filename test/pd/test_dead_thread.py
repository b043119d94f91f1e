"""A thread that moves KV caches raises, on either side of a real pair: later requests hang, both sides look well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.import_hook import write_site
from integration.scenario import whole_incidents
from lanelib.lanes import ensure_lane
from lanelib.servers import Server, greedy
from pd.pairs import NEEDED, serving
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(600), NEEDED]

#: By the side that loses it: the thread's function, and what it calls.
THREADS = {"decode": ("decode_thread", "update_status"), "prefill": ("transfer_worker", "send_kvcache")}
#: Of no prompt the beginning is cached: what a prefill server then does needs a GPU.
PROMPTS = {"decode": "Once upon a time", "prefill": "The quick brown fox"}
CODE = """
import functools
import os
import threading

FOLDER = os.path.dirname(__file__)


def change(module):
    for thread, name in (("decode_thread", "update_status"), ("transfer_worker", "send_kvcache")):
        method = getattr(module.MooncakeKVManager, name)

        @functools.wraps(method)
        def changed(*args, thread=thread, method=method, **kwargs):
            if thread in threading.current_thread().name and os.path.exists(os.path.join(FOLDER, thread)):
                raise ValueError("no such page")
            return method(*args, **kwargs)

        setattr(module.MooncakeKVManager, name, changed)
"""
TOLD_S = 60.0


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, pd_release: str, pd_device: str
) -> Iterator[dict[str, tuple[Server, dict[str, Any]]]]:
    """The server and the incident of each side."""
    folder, site = tmp_path_factory.mktemp("crash"), tmp_path_factory.mktemp("site")
    environ = write_site(site, CODE, "sglang.srt.disaggregation.mooncake.conn")
    with serving(ensure_lane(pd_release), pd_device, folder, env=environ) as pair:
        found = {}
        for side, (thread, _called) in THREADS.items():
            server: Server = getattr(pair, side)
            (site / thread).touch()
            pair.ask_later("generate", greedy(PROMPTS[side], 8, rid=f"waits-for-{side}"), 120.0)
            document = wait_until(lambda pid=server.pid: incident_of(folder, pid), f"{side}'s incident", TOLD_S)
            (site / thread).unlink()
            found[side] = (server, document)
        time.sleep(2.0)
        yield found


def incident_of(folder: Path, pid: int) -> dict[str, Any]:
    """Return the incident of a server; empty if absent."""
    found = [one.document or {} for one in whole_incidents(folder)]
    return next((one for one in found if one["server"]["pid"] == pid), {})


@pytest.mark.parametrize("side", THREADS)
def test_a_transfer_thread_that_dies_is_told(told: dict[str, tuple[Server, dict[str, Any]]], side: str) -> None:
    server, document = told[side]
    thread, _called = THREADS[side]
    verdict = document["verdict"]
    assert (document["kind"], verdict["kind"], verdict["level"]) == ("thread_died", "thread_died", "established")
    assert f"({thread})" in verdict["text"]
    assert "no such page" in verdict["text"]
    assert document["cause"]["class"] in ("thread_died", "transfer_failed")
    assert document["suspects"] == []
    assert document["requests"]["journal"]["unfinished"] >= 1
    assert server.popen.poll() is None
    assert server.poll_ready()
