from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_crashkit.analysis.groups import doubt_alone, judge_group, judge_untitled, name_untitled, untitled_role
from sglang_crashkit.analysis.member import Member, Moment
from sglang_crashkit.analysis.waits import of_frames
from sglang_crashkit.model.sample import Frame
from unit.analysis.real_stacks import ALL_REDUCE, MATMUL, RECEIVE, SPIN, member


def waiting(*numbers: int) -> list[Member]:
    return [member(ALL_REDUCE, ALL_REDUCE, number=number) for number in numbers]


@pytest.mark.parametrize(
    ("one", "level"),
    [
        (member(SPIN, SPIN), "supported"),
        (member(SPIN, SPIN, state="T"), "established"),
        (member(ALL_REDUCE, is_gone=True), "established"),
    ],
    ids=["elsewhere", "stopped", "gone"],
)
def test_the_one_that_does_not_wait_is_named(one: Member, level: str) -> None:
    found = judge_group("tp", [one, *waiting(1, 2)])
    assert (found.group, found.kind, [each.name for each in found.named]) == ("tp", "outlier", ["TP0 (pid 10)"])
    assert found.level == level


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        (waiting(0, 1), "waiting"),
        ([member(RECEIVE, RECEIVE, number=number) for number in range(2)], "idle"),
        ([member(SPIN, MATMUL, number=number) for number in range(2)], "moving"),
        ([member(SPIN, SPIN), member(MATMUL, MATMUL, number=1)], "unclear"),
    ],
)
def test_nobody_is_named_where_no_one_stands_out(members: list[Member], kind: str) -> None:
    found = judge_group("tp", members)
    assert (found.kind, found.named, found.waits) == (kind, (), kind == "waiting")


def test_one_without_a_stack_makes_it_less_certain() -> None:
    members = [member(SPIN, SPIN), *waiting(1, 2, 3)]
    known, unseen = judge_group("", members), judge_group("", [*members, member((), (), number=4)])
    assert (known.level, unseen.level) == ("supported", "unknown")
    assert len(unseen.evidence) > len(known.evidence)


@pytest.mark.parametrize(
    ("entry", "role"), [("run_scheduler_process", "rank"), ("run_detokenizer_process", "worker"), ("wait", "rank")]
)
def test_what_runs_in_a_process_tells_its_role(entry: str, role: str) -> None:
    frames = (Frame("poll", "x.py", 1), Frame(entry, "y.py", 2))
    one = Member("python (pid 9)", (Moment("S", 0.0, of_frames(frames), frames),))
    assert untitled_role(one) == role
    named = name_untitled(replace(one, source=SimpleNamespace(title="python")))
    assert named.name == ("untitled scheduler (pid 9)" if entry.startswith("run_s") else "python (pid 9)")


def test_ranks_without_titles_may_be_of_several_groups() -> None:
    found = judge_untitled("", [member(SPIN, SPIN), *waiting(1, 2)])
    assert (found.kind, found.level) == ("outlier", "supported")
    assert "different groups" in found.evidence[-1]


def test_one_side_of_a_pair_alone_says_less() -> None:
    members = [member(RECEIVE, RECEIVE, number=number) for number in range(2)]
    found = doubt_alone(judge_group("prefill", members), members, "decode")
    assert (found.kind, found.level) == ("unclear", "unknown")
    assert "No process of the decode side was found" in found.statement
