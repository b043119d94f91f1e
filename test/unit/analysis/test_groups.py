from __future__ import annotations

from sglang_crashkit.analysis.groups import judge_group
from sglang_crashkit.analysis.member import Member, Sight
from sglang_crashkit.analysis.states import of_frames
from unit.analysis.real_stacks import ALL_REDUCE, BROADCAST, DECODE, MATMUL, RECEIVE, SPIN, stack


def member(name: str, *looks: tuple[str, ...], cpu: float = 0.0) -> Member:
    sights = [
        Sight("S", cpu * position, of_frames(stack(*frames)), stack(*frames), 5.0 * position)
        for position, frames in enumerate(looks)
    ]
    return Member(name, tuple(sights))


def test_the_rarest_is_told_first() -> None:
    finding = judge_group("PP0", [*(member(f"r{n}", *[ALL_REDUCE] * 2) for n in range(5)), member("odd", *[SPIN] * 2)])
    assert (finding.group, finding.kind) == ("PP0", "outlier")
    assert finding.evidence[0].startswith("odd was in spin")
    assert finding.evidence[1].startswith("r0, r1, r2, r3 and r4 waited in a collective in all_reduce")
    assert len(finding.evidence) == 2


def test_of_many_different_things_some_are_told() -> None:
    finding = judge_group("", [member(f"r{n}", (f"f{n} (x.py:1)",)) for n in range(20)])
    assert (finding.kind, finding.named) == ("unclear", ())
    assert finding.evidence[-1] == "14 more did other things."


def test_one_alone_that_waits_says_not_for_whom() -> None:
    finding = judge_group("", [member("r", ALL_REDUCE)])
    assert (finding.kind, finding.waits, finding.named) == ("waiting", True, ())
    assert finding.statement.endswith("For whom is not seen.")


def test_one_alone_that_takes_in_requests_is_idle() -> None:
    assert judge_group("", [member("r", RECEIVE, RECEIVE)]).kind == "idle"
    assert judge_group("", [member("r", DECODE, DECODE)]).kind == "idle"
    assert judge_group("", [member("r", BROADCAST, BROADCAST)]).kind == "waiting"


def test_work_between_requests_is_no_hang() -> None:
    finding = judge_group("", [member("a", MATMUL, RECEIVE, cpu=4.0), member("b", BROADCAST, MATMUL, cpu=4.0)])
    assert (finding.kind, finding.level) == ("moving", "supported")
