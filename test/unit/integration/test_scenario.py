"""By what live tests know that their requests are in flight, and how they hold a server until all of them are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from integration.scenario import held, journaled_rids, worked_on
from unit.support.targets import state_of
from unit.support.waiting import child, wait_until

FIRST = (
    "[2026-11-23 08:32:10] Prefill batch, #new-seq: 1, #new-token: 22, #cached-token: 0, token usage: 0.00, "
    "#running-req: 1, #queue-req: 1, #pending-token: 22, cpu graph: False, input throughput (token/s): 92.78\n"
)
OLDER = (
    "[2026-11-23 08:32:10 TP0] Prefill batch, #new-seq: 2, #new-token: 1, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, input throughput (token/s): 0.00, cpu graph: False\n"
)
DECODE = (
    "[2026-11-23 08:32:11{rank}] Decode batch, #running-req: {running}, #token: 23, token usage: 0.00, "
    "cpu graph: False, gen throughput (token/s): 4.09, #queue-req: {queued}\n"
)


@pytest.mark.parametrize(
    ("log", "count"),
    [
        ("", 0),
        ("[2026-11-23 08:32:09] INFO:     127.0.0.1:35244 - 'Prefill batch' #new-seq: 1\n", 0),
        (FIRST, 3),
        (OLDER, 2),
        # Of those that there is no room for only a batch that decodes tells.
        (OLDER + DECODE.format(rank=" TP0", running=2, queued=1), 3),
        (DECODE.format(rank=" TP0", running=2, queued=1) + OLDER, 3),
        (DECODE.format(rank=" DP0", running=1, queued=0) + DECODE.format(rank=" DP1", running=2, queued=0), 3),
    ],
)
def test_the_requests_of_all_ranks_are_counted(tmp_path: Path, log: str, count: int) -> None:
    path, earlier = tmp_path / "log", FIRST.encode()
    path.write_bytes(earlier + log.encode())
    server = SimpleNamespace(log_path=path)
    assert worked_on(server, len(earlier)) == count  # type: ignore[arg-type]


JOURNALS = """
from sglang_crashkit.memory.journal import JournalWriter
journals = [JournalWriter(2**20) for _ in range(2)]
journals[0].end(journals[0].begin({"rid": "answered"}), finished=True)
for journal, rid in zip(journals, ("first", "second")):
    journal.begin({"rid": rid})
ready()
pause()
"""


def test_the_unanswered_requests_of_all_journals_are_known() -> None:
    with child(JOURNALS) as process:
        assert journaled_rids(process.pid) == {"first", "second"}
    assert journaled_rids(process.pid) == set()


def test_those_of_a_title_are_held_until_the_block_ends() -> None:
    with child("ready(); pause()", title="sglang::scheduler_TP1") as rank, child("ready(); pause()") as other:
        found = [(rank.pid, "sglang::scheduler_TP1"), (other.pid, "python")]
        server = SimpleNamespace(processes=lambda: found)
        with held(server, "sglang::scheduler"):  # type: ignore[arg-type]
            wait_until(lambda: state_of(rank.pid) == "T", "it is stopped")
            assert state_of(other.pid) != "T"
        wait_until(lambda: state_of(rank.pid) != "T", "it goes on")
