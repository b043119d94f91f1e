from __future__ import annotations

import sys

import pytest

from sglang_crashkit.cli.reporters.style import bold, columns


@pytest.mark.parametrize(
    ("is_terminal", "environ", "is_bold"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, environ: dict[str, str], is_bold: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert bold("text") == ("\033[1mtext\033[0m" if is_bold else "text")


@pytest.mark.parametrize(("told", "width"), [("200", 200), ("10", 40)])
def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, told: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", told)
    assert columns() == width
