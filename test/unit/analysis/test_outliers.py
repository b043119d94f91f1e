from __future__ import annotations

from sglang_crashkit.analysis.member import Member, Sight
from sglang_crashkit.analysis.outliers import Odd, find_astray, find_odd
from sglang_crashkit.analysis.states import of_frames, of_state
from unit.analysis.real_stacks import ALL_REDUCE, BROADCAST, MATMUL, SPIN, stack


def member(name: str, *looks: tuple[str, ...], state: str = "S", is_gone: bool = False) -> Member:
    sights = [
        Sight(state, 0.0, of_state(state, "rpc_wait") or of_frames(stack(*frames)), stack(*frames)) for frames in looks
    ]
    return Member(name, tuple(sights), is_gone=is_gone)


def told(*members: Member) -> tuple[list[str], str, str] | None:
    odd: Odd | None = find_odd(members)
    return ([one.name for one in odd.members], odd.statement, odd.level) if odd else None


def test_one_that_is_gone_comes_before_one_that_is_stopped() -> None:
    gone, stopped = member("a", ALL_REDUCE, is_gone=True), member("b", ALL_REDUCE, state="T")
    assert told(member("c", ALL_REDUCE), stopped, gone) == (
        ["a"],
        "a is gone: there before, and not at the last look.",
        "established",
    )


def test_all_that_are_stopped_are_named() -> None:
    found = told(member("a", ALL_REDUCE, state="T"), member("b", ALL_REDUCE, state="T"), member("c", ALL_REDUCE))
    assert found is not None
    assert (found[0], found[2]) == (["a", "b"], "established")


def test_what_one_look_shows_is_not_sure() -> None:
    once, twice = (
        told(member("a", ALL_REDUCE), member("b", SPIN)),
        told(member("a", *[ALL_REDUCE] * 2), member("b", *[SPIN] * 2)),
    )
    assert once is not None
    assert twice is not None
    assert (once[0], once[2], twice[0], twice[2]) == (["b"], "unknown", ["b"], "supported")


def test_the_odd_one_of_three_that_do_not_wait_is_named() -> None:
    found = told(member("a", MATMUL), member("b", SPIN), member("c", MATMUL))
    assert found is not None
    assert found[0] == ["b"]
    assert "while a and c were all in linear" in found[1]


def test_nobody_is_named_where_nobody_stands_out() -> None:
    assert told() is None
    assert told(member("a", ALL_REDUCE), member("b", ALL_REDUCE)) is None
    assert told(member("a", SPIN), member("b", MATMUL)) is None
    assert told(member("a", SPIN), member("b", MATMUL), member("c", ALL_REDUCE)) is None
    assert told(member("a"), member("b")) is None


def astray(*members: Member) -> list[str]:
    odd = find_astray(members)
    return [one.name for one in odd.members] if odd else []


def test_who_waits_elsewhere_than_most_is_astray() -> None:
    most = [member(name, *[ALL_REDUCE] * 2) for name in "abc"]
    few = [member(name, *[BROADCAST] * 2) for name in "xyz"]
    assert astray(*most, few[0]) == ["x"]
    assert astray(*most, *few[:2]) == ["x", "y"]
    assert astray(*most, *few) == []
    assert astray(most[0], few[0]) == []
    assert astray(*most, few[0], member("unseen")) == ["x"]
    assert astray(*most, member("x", *[SPIN] * 2)) == []
    assert astray() == []
