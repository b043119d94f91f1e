from __future__ import annotations

import pytest

from sglang_crashkit.doctor.findings import Finding, format_findings, has_problem, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b é", "a b é"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r", "a\\nb\\r"),
        ("\u202egpj", "\\u202egpj"),
        ("\udcff", "\\udcff"),
    ],
)
def test_nothing_printed_is_a_command_to_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_finding_has_its_reason_and_what_mends_it() -> None:
    lines = format_findings([Finding("warning", "disk", "is \x07full", "no room", ("rm a", "rm b"))])
    assert [line.split(":")[0].strip() for line in lines] == [
        "warning  disk",
        "why",
        "next",
        "next",
        "result   1 warning",
    ]
    assert "\x07" not in "".join(lines)


def test_what_is_wrong_is_counted_at_the_end() -> None:
    found = [Finding("problem", "a", "b"), Finding("ok", "a", "b"), Finding("warning", "a", "b")]
    assert format_findings(found)[-1] == "result   1 problem, 1 warning"
    assert format_findings([*found, *found])[-1] == "result   2 problems, 2 warnings"
    assert format_findings(found[1:2])[-1] == "result   nothing is wrong"


def test_a_warning_is_no_problem() -> None:
    assert not has_problem([Finding("warning", "a", "b")])
    assert has_problem([Finding("ok", "a", "b"), Finding("problem", "a", "b")])
