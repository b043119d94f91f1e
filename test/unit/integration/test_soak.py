from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from integration.no_harm.soak import Side, ask, memory_mb, sample
from lanelib.servers import Server
from unit.support.waiting import LONG, wait_until

#: Has two dead children that it does not reap.
PARENT = """
import os, time
for _ in range(2):
    os.posix_spawn("/bin/true", ["true"], {})
print("up", flush=True)
time.sleep(60)
"""


class Answers:
    """Stands in for a server; answers how long the prompt was."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def generate(self, prompt: str, *, max_new_tokens: int, timeout_s: float) -> dict[str, Any]:
        self.asked.append((prompt, max_new_tokens))
        return {"output_ids": [len(prompt)]}


def test_a_request_follows_from_the_seed_and_its_number() -> None:
    server = Answers()
    asked = ((1, 5), (1, 5), (1, 6), (2, 5))
    tokens = [ask(cast(Server, server), seed, number) for seed, number in asked]
    first, again, another, of_another_seed = server.asked
    assert first == again
    assert tokens[0] == tokens[1]
    assert another not in (first, of_another_seed)


def test_growth_is_measured_over_thirds_and_bears_one_peak() -> None:
    memory = [100, 101, 900, 150, 150, 150, 111, 110, 109]
    side = Side("patched", cast(Server, None), samples=[(value, 9.0, 3.0, 0.0) for value in memory])
    assert side.growth(0) == 110 - 101
    assert side.growth(1) == 0
    assert Side("patched", cast(Server, None), samples=[(1.0,), (2.0,)]).growth(0) == 0


def test_a_sample_counts_what_a_server_and_its_children_hold() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wait_until(lambda: sample(process.pid)[3] == 2, "both children are dead")
            memory, descriptors, threads, zombies = sample(process.pid)
            assert (threads, zombies) == (1, 2)
            assert descriptors == len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            assert 1 < memory < 100
        finally:
            process.kill()
            process.wait(LONG)
    assert memory_mb(process.pid) == 0.0
