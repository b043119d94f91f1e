"""One rank of a real server goes another way than the others: the verdict says in which step, in what, and whose."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.hangs import astray_rank, cpu_kernels
from integration.hangs.hang_story import LONG
from integration.import_hook import write_site
from integration.scenario import run_kit, serving, wait_for_incident
from lanelib.servers import Server, greedy, opener
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

HANG_SECS = 5.0
#: A server is under mixed load for so long, in seconds.
LOAD_SECS = float(os.environ.get("SGLANG_CRASHKIT_TEST_LOAD_SECS", "40"))
CLIENTS = 4
#: A hierarchical cache, and one request at a time.
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-storage-backend", "file"),
    *("--hicache-io-backend", "direct", "--max-running-requests", "1"),
)


@dataclass
class Story:
    """What became of one server."""

    #: what ``collect`` said of the steps while it served, and once it was idle
    well: list[dict[str, Any]] = field(default_factory=list)
    rids: tuple[str, str] = ("", "")  # of the requests that it worked at when one of its ranks went astray
    document: dict[str, Any] = field(default_factory=dict)  # the incident of that
    folder: Path = Path()  # its folder
    steps: str = ""  # what ``sglang-crashkit steps`` prints of it


def collect(server: Server, folder: Path) -> dict[str, Any]:
    """Return what ``collect`` says of the server's steps."""
    done = run_kit("collect", "--json", f"--pid={server.pid}", "--snapshots=1", "--output-dir", folder, timeout_s=LONG)
    found: dict[str, Any] = json.loads(done.stdout)["divergence"]
    return found


class Asked(threading.Thread):
    """A request, sent, and its answer as it comes."""

    def __init__(self, server: Server, rid: str, tokens: int, prompt: str = "Hello") -> None:
        super().__init__(daemon=True)
        self.rid, self.chunks, self.is_whole = rid, 0, False
        body = json.dumps(greedy(prompt, tokens, rid=rid, stream=True)).encode()
        self._request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
        self.start()

    def run(self) -> None:
        """Read the answer to its end."""
        try:
            with opener.open(self._request, timeout=LONG) as answer:
                for line in answer:
                    self.chunks += line.startswith(b"data: {")
                    self.is_whole = self.is_whole or line.startswith(b"data: [DONE]")
        except OSError:
            # The server ended meanwhile.
            return


def load(server: Server, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Let clients ask for much that differs, some of it aborted, and look at the steps meanwhile and after.

    Each request is over when this returns.
    """
    chance, end = random.Random(1), time.monotonic() + seconds

    def be_client(number: int) -> None:
        count = 0
        while time.monotonic() < end:
            count += 1
            asked = Asked(server, f"load-{number}-{count}", chance.randint(1, 60), "1 " * chance.randint(1, 200))
            if chance.random() < 0.2:
                time.sleep(chance.random() / 4)
                server.ask("abort_request", {"rid": asked.rid}, LONG)
            asked.join(LONG)
            assert asked.is_whole, f"{asked.rid} was not answered after {asked.chunks} pieces"

    looks = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(be_client, number) for number in range(CLIENTS)]
        while time.monotonic() < end:
            time.sleep(min(seconds / 4, 60.0))
            looks.append(collect(server, folder))
        # Where a step takes long, no one waits for what is left.
        while wait(clients, timeout=1.0).not_done:
            server.ask("abort_request", {"abort_all": True}, LONG)
        for client in clients:
            client.result()
    return [*looks, collect(server, folder)]


def go_astray(server: Server, way: str, tokens: int, prompt: str) -> tuple[str, str]:
    """Let a rank go astray at a request of that prompt, which is beside another one; return the ids of both."""
    steady = Asked(server, "steady-1", tokens)
    wait_until(lambda: steady.chunks > 1, "the steady request decodes", LONG)
    odd = Asked(server, f"{way}-1", 3000, prompt)
    return steady.rid, odd.rid


def tell(
    way: str,
    factory: pytest.TempPathFactory,
    *,
    load_secs: float = 0.0,
    more: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    tokens: int = 4000,
    prompt: str = "1 2 3",
) -> Story:
    """Have a server go astray in a way of `astray_rank`, and return what became of it.

    `tokens` is of the answer beside the outlier, `prompt` of the outlier.
    """
    told, crash = Story(), factory.mktemp("crash")
    environ = {"SGLANG_CRASHKIT_HANG_SECS": f"{HANG_SECS:g}", "SGLANG_CRASHKIT_BUDGET_SECS": "60"}
    site = factory.mktemp("site")
    environ |= write_site(site, *cpu_kernels.SITE) | write_site(site, *astray_rank.SITE) | dict(env or {})
    with serving("0.5.23", crash, *more, tp=2, env=environ) as server:
        if load_secs:
            told.well = load(server, load_secs, factory.mktemp("collected"))
        told.rids = go_astray(server, way, tokens, prompt)
        stored = wait_for_incident(crash, LONG)
        told.document, told.folder = stored.document or {}, stored.path
    told.steps = run_kit("steps", told.folder, "--last", "5").stdout
    return told


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell("drop", tmp_path_factory, load_secs=LOAD_SECS)


def check(told: Story, kind: str, statement: str) -> None:
    """Check that the incident says so wherever a person looks."""
    found = told.document["divergence"]
    assert (found["kind"], found["ranks"]) == (kind, "TP1"), found
    assert statement.format(step=f"{found['step']:,}") in found["statement"]
    assert found["statement"] in told.document["verdict"]["text"]
    assert found["statement"] in (told.folder / "summary.md").read_text()
    assert [line for line in told.steps.splitlines() if line.startswith(f"> {found['step']:,} ")]


def test_a_server_under_mixed_load_has_no_divergence(dropped: Story) -> None:
    assert len(dropped.well) > 3
    assert {(found["kind"], found["level"]) for found in dropped.well} == {("none", "established")}
    assert max(found["compared"] for found in dropped.well) > 20


def test_a_rank_that_dropped_a_request_is_named_with_both(dropped: Story) -> None:
    found, (steady, odd) = dropped.document["divergence"], dropped.rids
    ran = f"TP1 ran decode of request {steady} (1 token) in step {{step}} where TP0 ran extend of request {odd}"
    check(dropped, "mode", ran)
    assert (found["level"], found["request"], found["against"]) == ("established", odd, "TP0")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("way", "kind", "decision", "statement"),
    [
        # What one rank's clock decides alone passes no broadcast.
        ("abort", "requests", None, "(request abort-1 is TP0's only)"),
        (
            "retract",
            "decision",
            "retract",
            "TP1 decided retract of request retract-1 on the way to step {step} where TP0 did not",
        ),
    ],
)
def test_a_rank_that_decided_alone_is_named_with_its_request(
    tmp_path_factory: pytest.TempPathFactory, way: str, kind: str, decision: str | None, statement: str
) -> None:
    told = tell(way, tmp_path_factory)
    check(told, kind, statement)
    assert told.document["divergence"]["decision"] == decision
    assert told.document["divergence"]["request"] in told.rids


@pytest.mark.matrix
def test_a_rank_that_alone_did_not_prefetch_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    # The cache's events hold the ranks together once it is the outlier's turn; until then the steady one runs alone.
    storage = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path_factory.mktemp("storage"))}
    told = tell("prefetch", tmp_path_factory, more=HICACHE, env=storage, tokens=150, prompt="1 " * 400)
    check(told, "decision", "TP0 decided prefetch on the way to step {step} where TP1 did not")
    assert told.document["divergence"]["decision"] == "prefetch"
