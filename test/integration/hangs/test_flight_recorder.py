"""What PyTorch's own flight recorder writes is read and compared, and the names by which it is asked are its own.

Without a GPU there is no NCCL and no pipe; gloo's recorder has the same form.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanelib.lanes import Lane
from sglang_crashkit.analysis.collectives import RankRecord, judge_collectives
from sglang_crashkit.capture.flight_request import (
    BUFFER_SIZE,
    DUMP_STEMS,
    OLD_BUFFER_SIZE,
    PIPE_STEM,
    Received,
    parse_answer,
)
from sglang_crashkit.model.flight_dump import load_plain
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("gloo_rank.py")
RANKS = (0, 1)
#: Collectives of their own group that both do, see the program.
COMMON = 3
START_SECS = 240.0


@contextlib.contextmanager
def dumping_ranks(lane: Lane, folder: Path) -> Iterator[list[Path]]:
    """Have two ranks of which the first waits for the second, and the files with what they answered."""
    environ = lane.serve_env() | {BUFFER_SIZE: "100"}
    log = folder / "log"
    with log.open("wb") as output:
        ranks = [
            subprocess.Popen(
                [lane.python, PROGRAM, folder, str(rank), str(COMMON)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environ,
                cwd=folder,
            )
            for rank in RANKS
        ]
    try:
        paths = [folder / f"answer{rank}" for rank in RANKS]
        wait_until(
            lambda: all(path.exists() for path in paths) or any(rank.poll() is not None for rank in ranks),
            "both ranks wrote their dumps",
            START_SECS,
        )
        assert all(path.exists() for path in paths), log.read_text()[-4000:]
        yield paths
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(60)
            rank.stdin.close()


@pytest.fixture(scope="module")
def answers(end_lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Received]]:
    """The dumps of two ranks of which the first waits for the second."""
    with dumping_ranks(end_lane, tmp_path_factory.mktemp("ranks")) as paths:
        yield [parse_answer(path.read_bytes()) for path in paths]


def test_a_real_dump_is_plain_data_and_is_read_whole(answers: list[Received]) -> None:
    for answer in answers:
        assert repr(load_plain(answer.data)) == repr(pickle.loads(answer.data))


def test_its_entries_are_what_the_rank_did(answers: list[Received]) -> None:
    for rank, answer in enumerate(answers):
        dump = answer.dump
        assert answer.rank == rank
        assert dump.is_from_the_start
        assert [(group.description, group.ranks) for group in dump.groups.values()] == [
            ("default_pg", RANKS),
            ("tp", RANKS),
        ]
        group = [entry for entry in dump.entries if entry.group == "1"]
        assert [entry.operation for entry in group] == ["all_reduce"] * (COMMON + 1 - rank)
        assert [entry.sequence for entry in group] == list(range(1, len(group) + 1))
        assert [entry.is_done for entry in group] == [True] * COMMON + [False] * (1 - rank)
        assert {(entry.input_sizes, entry.dtypes) for entry in group} == {(((4, 3),), ("Float",))}
        assert all(any(frame.function == "main" for frame in entry.frames) for entry in group)
        assert abs(group[0].created - time.time()) < 2 * START_SECS


def test_the_rank_that_has_not_begun_the_collective_is_named(answers: list[Received]) -> None:
    later = time.time() + 10
    records = [RankRecord(one.rank, f"rank {one.rank}", "", one.dump, later, "gloo") for one in answers]
    (first,) = judge_collectives(records)
    assert (first.kind, first.named, first.level) == ("behind", [1], "established")
    assert f"all_reduce of 4x3 of process group tp (gloo 1, ranks 0-1), number {COMMON + 1}" in first.statement
    assert f"begun in main ({PROGRAM.name}:" in first.statement


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("libtorch_cuda.so", (BUFFER_SIZE, OLD_BUFFER_SIZE, PIPE_STEM, ".pipe")),
        ("libtorch_cpu.so", (BUFFER_SIZE, OLD_BUFFER_SIZE, *DUMP_STEMS)),
    ],
)
def test_pytorch_reads_the_variables_that_are_set_for_it(end_lane: Lane, library: str, names: tuple[str, ...]) -> None:
    # PyTorch 2.9, 2.11 or 2.14.
    (path,) = end_lane.python.parent.parent.glob(f"lib/python*/site-packages/torch/lib/{library}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert [name for name in names if content.find(name.encode()) < 0] == []
