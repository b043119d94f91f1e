from __future__ import annotations

import argparse

import pytest

from sglang_crashkit.cli import main
from sglang_crashkit.cli.argument_types import duration, positive, seconds


def test_numbers_are_read() -> None:
    assert (positive("3"), seconds("0"), seconds("2.5")) == (3, 0.0, 2.5)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_what_is_no_number_of_times_is_told_in_words(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{text}' is not a whole number of 1 or more$"):
        positive(text)


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "1e7", ""])
def test_what_is_no_time_is_told_in_words(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{text}' is not a number of seconds from 0 to 10000000$"):
        seconds(text)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--wait-seconds=soon"], "--wait-seconds: 'soon' is not a number of seconds"),
        (["--snapshots=0"], "--snapshots: '0' is not a whole number of 1 or more"),
        (["--interval=-1"], "--interval: '-1' is not a number of seconds"),
        (["--fan-out=x"], "--fan-out: 'x' is not a whole number of 1 or more"),
    ],
)
def test_the_command_names_the_argument(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["collect", *arguments])
    assert f"error: argument {why}" in capsys.readouterr().err


def test_a_duration_has_a_unit() -> None:
    assert [duration(text) for text in ("90", "30s", "90m", "12h", "2d")] == [90.0, 30.0, 5400.0, 43200.0, 172800.0]


@pytest.mark.parametrize("text", ["", "d", "-1h", "2w", "soon"])
def test_what_is_no_duration_is_told_in_words(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{text}' is no time such as 30s, 90m, 12h or 2d$"):
        duration(text)
