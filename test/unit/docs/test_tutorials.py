"""The tutorials show what the kit says: screens and timelines are made of the kept incidents now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_crashkit.cli.main import COMMANDS
from tutoriallib import pages
from tutoriallib.troubles import TROUBLES

NAMES = sorted(TROUBLES)
KILLED = Path(__file__).parents[1] / "incident" / "data" / "killed.json"


def text_of(name: str) -> str:
    return (pages.PAGES / f"{name}.md").read_text()


def test_there_is_a_linked_page_for_each_trouble() -> None:
    assert sorted(path.stem for path in pages.PAGES.glob("[a-z]*.md")) == NAMES
    assert [name for name in NAMES if f"]({name}.md)" not in text_of("README")] == []


@pytest.mark.parametrize("name", NAMES)
def test_screens_and_timelines_are_what_the_kit_prints_now(name: str) -> None:
    """Where it fails: scripts/tutorials --screens, and look at what changed."""
    text = text_of(name)
    assert pages.SHOW in pages.commands_in(text)
    assert pages.filled(text, pages.told_of(pages.kept_incident(name))) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short_and_every_command_has_its_output(name: str) -> None:
    text = text_of(name)
    assert len(text.splitlines()) < 120
    assert pages.filled(text, dict.fromkeys(pages.commands_in(text), "")).count("\n") < text.count("\n")
    assert "\n```console\n$ " in text
    for block in text.split("```console\n")[1:]:
        assert len(block.partition("\n```")[0].splitlines()) > 1
    assert {command.split()[1] for command in pages.commands_in(text)} <= set(COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_is_left_in_a_page(name: str) -> None:
    for text in (text_of(name), json.dumps(pages.kept_incident(name))):
        assert "/tmp/" not in text
        assert "/.lanes/" not in text


def test_a_renderer_that_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = pages.kept_incident("rank-killed")
    before = pages.screen(kept)
    monkeypatch.setattr("sglang_crashkit.incident.first_screen.WIDTH", 60)
    assert pages.screen(kept) != before


def names(paths: dict[str, str]) -> pages.Names:
    return pages.Names(json.loads(KILLED.read_text()), paths)


PAGE = """\
Words.

```console
$ sglang-crashkit show latest \\
    --steps
old
```

```
$ sglang-crashkit untouched
```
"""


def test_a_command_of_two_lines_gets_its_output() -> None:
    (command,) = pages.commands_in(PAGE)
    assert names({}).words_of(command) == ["show", "latest", "--steps"]
    page = pages.filled(PAGE, {command: "new  \nlines\n"})
    assert page == PAGE.replace("old\n", "new\nlines\n")


def test_a_long_output_is_cut_off() -> None:
    (command,) = pages.commands_in(PAGE)
    page = pages.filled(PAGE, {command: "line\n" * 1000})
    assert page.count("line\n") == pages.MAX_LINES
    assert "line\n...\n```\n" in page


def test_names_of_this_machine_are_replaced_and_found_again() -> None:
    document = json.loads(KILLED.read_text())
    its, pid = names({"/venv/real": "/venv"}), document["server"]["pid"]
    cleaned = its.clean(f"/venv/real {pages.REAL_FOLDER}/x pid {pid} not 1{pid}")
    assert cleaned == f"/venv /var/crash/sglang/x pid 4101 not 1{pid}"
    assert its.words_of("sglang-crashkit steps --pid 4101 /venv/x") == ["steps", "--pid", str(pid), "/venv/real/x"]


def test_lines_break_in_the_shown_folder_as_in_reality() -> None:
    assert len(pages.SHOWN_FOLDER) == len(pages.REAL_FOLDER)
