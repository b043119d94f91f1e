from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.analysis.collectives import CollectiveFinding, RankRecord, judge_collectives
from sglang_crashkit.model.flight_dump import parse_dump
from unit.support.flight_dumps import BEGAN, document, entry, pickled

LATER = BEGAN + 10_000
Entries = Sequence[dict[str, Any]]


def record(
    rank: int,
    entries: Entries,
    ranks: Sequence[int] = (0, 1),
    *,
    world: str = "",
    seconds: float = LATER,
    **groups: Any,
) -> RankRecord:
    dump = parse_dump(pickled(document(entries, ranks, **groups)))
    return RankRecord(rank, f"rank{rank}{world}", world, dump, seconds)


def done(count: int, first: int = 1) -> list[dict[str, Any]]:
    """So many collectives that are over."""
    return [entry(number - 1, number) for number in range(first, first + count)]


def judge(*records: RankRecord) -> CollectiveFinding:
    (finding,) = judge_collectives(records)
    return finding


def test_who_has_not_begun_the_awaited_collective_is_named() -> None:
    frames = [("all_reduce", "/lib/torch/distributed/distributed_c10d.py", 9), ("forward", "sglang/model.py", 7)]
    waiting = [*done(41), entry(42, 42, state="started", frames=frames)]
    ranks = (0, 1, 2, 3)
    finding = judge(*(record(rank, done(41) if rank == 2 else waiting, ranks) for rank in ranks))
    assert (finding.kind, tuple(finding.named), tuple(finding.processes), finding.level) == (
        "behind",
        (2,),
        ("rank2",),
        "established",
    )
    assert finding.statement == (
        "rank2 had not begun all_reduce of 4x3 of process group 0 (default_pg, ranks 0-3), number 42, which rank0, "
        "rank1 and rank3 had begun 9958.0 s before and not finished; it was begun in forward (sglang/model.py:7)."
    )


PENDING = [*done(3), entry(4, 4, state="scheduled")]


@pytest.mark.parametrize(
    ("records", "expected", "ending"),
    [
        # Without all dumps it is less sure who is behind.
        (
            [record(0, PENDING, (0, 1, 2)), record(1, done(3), (0, 1, 2))],
            ("behind", (1,), "supported"),
            "There is no dump of rank 2.",
        ),
        ([record(0, [entry(0, 1, state="scheduled")]), record(1, [])], ("behind", (1,), "established"), ""),
        # A wait of a moment is what work looks like.
        (
            [record(0, PENDING, seconds=BEGAN + 4.2), record(1, done(3), seconds=BEGAN + 4.2)],
            ("behind", (1,), "unknown"),
            "",
        ),
        # Of two that differ neither is blamed.
        (
            [record(0, [entry(0, 1, "broadcast")]), record(1, [entry(0, 1, "all_reduce")])],
            ("mismatch", (), "established"),
            "",
        ),
    ],
)
def test_what_is_seen_of_one_group(
    records: list[RankRecord], expected: tuple[str, tuple[int, ...], str], ending: str
) -> None:
    finding = judge(*records)
    assert (finding.kind, tuple(finding.named), finding.level) == expected
    assert finding.statement.endswith(ending)
    assert set(finding.processes) <= {one.name for one in records}


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0, [entry(0, 1)], (0,))],
        [record(0, []), record(1, [])],
        [record(0, done(4)), record(1, done(5))],
        # All that gave a dump have begun what they wait in.
        [record(0, PENDING, (0, 1, 2)), record(1, PENDING, (0, 1, 2))],
        [record(0, done(4)), record(1, PENDING)],
        [record(0, [entry(0, 0, "send 0->1", is_message=True, state="scheduled")]), record(1, [])],
    ],
)
def test_nothing_is_said_where_no_rank_is_behind(records: list[RankRecord]) -> None:
    assert judge_collectives(records) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (entry(4, 4, "broadcast", state="scheduled"), "broadcast of 4x3"),
        (entry(4, 4, state="scheduled", sizes=((4, 4),)), "all_reduce of 4x4"),
        (entry(4, 4, state="scheduled", dtype="Half"), "all_reduce of 4x3"),
    ],
)
def test_something_else_in_the_same_place_is_named(other: dict[str, Any], words: str) -> None:
    same = [*done(3), entry(4, 4, state="scheduled")]
    ranks = (0, 1, 2)
    finding = judge(record(0, same, ranks), record(1, [*done(3), other], ranks), record(2, same, ranks))
    assert (finding.kind, tuple(finding.named), finding.level) == ("mismatch", (1,), "established")
    assert finding.statement == (
        "The ranks of process group 0 (default_pg, ranks 0-2) did not do the same: as number 4, "
        f"rank0 and rank2 began all_reduce of 4x3 and rank1 began {words}."
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # NCCL counts numbers, not shapes.
        (entry(0, 1, sizes=((4, 3),)), entry(0, 1, sizes=((12,),))),
        # The root alone has what is scattered, or gets what is gathered; parts may differ in size.
        (entry(0, 1, "scatter", sizes=((8,),)), entry(0, 1, "scatter", sizes=())),
        (entry(0, 1, "all_to_all", sizes=((8,), (1,))), entry(0, 1, "all_to_all", sizes=((3,), (2,)))),
        (entry(0, 1, "all_gather", sizes=((8,),)), entry(0, 1, "all_gather", sizes=((9,),))),
        (entry(0, 1, "all_reduce", outputs=((12,),)), entry(0, 1, "all_reduce", outputs=((4, 3),))),
    ],
)
def test_what_may_differ_between_ranks_is_no_mismatch(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert judge_collectives([record(0, [one]), record(1, [other])]) == []


def test_several_carried_out_as_one_are_compared_as_one() -> None:
    both = [entry(0, 1, "all_reduce"), entry(1, 1, "broadcast")]
    assert judge_collectives([record(0, both), record(1, both)]) == []
    finding = judge(record(0, both), record(1, both[:1]))
    assert finding.kind == "mismatch"
    assert "rank0 began all_reduce of 4x3 with broadcast of 4x3" in finding.statement


def test_what_fell_out_of_a_recorder_counts_as_begun() -> None:
    old = [entry(number, number - 50) for number in range(60, 70)]
    elsewhere = [entry(number, number, group=("1", "")) for number in range(60, 70)]
    waiting = record(0, [*old, entry(70, 20, state="scheduled")], _1=(0, 1))
    assert judge_collectives([waiting, record(1, elsewhere)]) == []


def test_replicas_are_not_compared_with_one_another() -> None:
    records = [record(rank, its, world=world) for world, its in (("DP0", done(3)), ("DP1", PENDING)) for rank in (0, 1)]
    assert judge_collectives(records) == []
    finding = judge(*records[1:], record(0, done(3), world="DP1"))
    assert finding.group == "process group 0 (DP1, default_pg, ranks 0-1)"


def test_nccl_and_gloo_are_one_account_by_sglangs_names() -> None:
    # Only the dumps of gloo know the names, also of the groups of NCCL.
    names = {"4": ("tp", (0, 1)), "5": ("tp", (0, 1))}
    over_nccl = [entry(0, 7, group=("4", "undefined"), state="scheduled")]
    over_gloo = [entry(0, 3, "broadcast", group=("5", "undefined"), backend="gloo", state="scheduled")]
    records = []
    for rank, its in ((0, over_nccl), (1, [])):
        records.append(record(rank, its, _4=(0, 1)))
        gloo = document(over_gloo if rank == 0 else [], (0, 1))
        gloo["pg_config"] |= {
            name: {"name": name, "desc": text, "ranks": str(its)} for name, (text, its) in names.items()
        }
        dump = parse_dump(pickled(gloo))
        records.append(RankRecord(rank, f"rank{rank}", "", dump, LATER, "gloo"))
    found = judge_collectives(records)
    assert [(one.kind, one.group, tuple(one.named), tuple(one.waiting)) for one in found] == [
        ("behind", "process group tp (gloo 5, ranks 0-1)", (1,), ("rank0",)),
        ("behind", "process group tp (nccl 4, ranks 0-1)", (1,), ("rank0",)),
    ]


def at_step(rank: int, ranks: Sequence[int], finished: int, *, waits: bool, kept: int) -> RankRecord:
    """A rank that finished so many, and waits in the next one; its recorder keeps the last few."""
    entries = done(finished) + ([entry(finished + 1, finished + 1, state="scheduled")] if waits else [])
    for number, one in enumerate(entries):
        one["record_id"] = number
    return record(rank, entries[-kept:], ranks)


@given(
    ranks=st.sets(st.integers(0, 30), min_size=2, max_size=8),
    finished=st.integers(2, 40),
    kept=st.integers(2, 50),
    data=st.data(),
)
def test_whoever_stops_is_named_and_nobody_else(ranks: set[int], finished: int, kept: int, data: st.DataObject) -> None:
    # GIVEN ranks of which one stops before a collective, and the dumps of some of them
    order = sorted(ranks)
    stopped = data.draw(st.sampled_from(order))
    given_ = data.draw(st.sets(st.sampled_from(order), min_size=1))
    records = [at_step(rank, order, finished, waits=rank != stopped, kept=kept) for rank in sorted(given_)]
    # WHEN they are compared
    found = judge_collectives(records)
    # THEN the one that stopped is named where its dump is there and one that waits, otherwise nothing is said
    absent = tuple(rank for rank in order if rank not in given_)
    if stopped not in given_ or given_ == {stopped}:
        assert found == []
    else:
        ((kind, named, level),) = [(one.kind, tuple(one.named), one.level) for one in found]
        assert (kind, named, level) == ("behind", (stopped,), "supported" if absent else "established")
