"""The documents name what is there: variables, packages, and the pages that they link to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import sglang_crashkit
from lanelib import figures
from sglang_crashkit import settings
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.view.verdict import page_of_classes

KIT = Path(sglang_crashkit.__file__).parent
ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_VARIABLE = re.compile(r"SGLANG_CRASHKIT_[A-Z_]*[A-Z]\b")


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_to_what_is_there(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if not link[0].startswith("http")]
    targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert [target for target in targets if not target[0].exists()] == []
    assert [target for target in targets if target[1] and target[1] not in anchors_of(target[0])] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = {path for path, _anchor in _LINK.findall((ROOT / "README.md").read_text())}
    assert {str(page.relative_to(ROOT)) for page in PAGES[1:]} <= linked


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_shows_an_incident_as_it_is_shown() -> None:
    shown = (ROOT / "test" / "unit" / "incident" / "data" / "killed.txt").read_text()
    assert shown in (ROOT / "README.md").read_text()


def test_every_variable_of_the_kit_is_documented_and_no_other() -> None:
    read = {name for path in KIT.rglob("*.py") for name in _VARIABLE.findall(path.read_text())}
    assert set(_VARIABLE.findall(CONFIGURATION)) == read == settings.VARIABLES.keys() | settings.OWN_VARIABLES


def test_the_design_lists_every_package() -> None:
    rows = re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == {
        path.parent.name for path in KIT.glob("*/__init__.py")
    }


def test_the_documents_say_what_the_last_run_measured() -> None:
    document, text = json.loads(figures.DATA.read_text()), figures.README.read_text()
    assert figures.PAGE.read_text() == figures.page(document)
    assert figures.BEGIN in text
    assert figures.with_costs(text, document) == text


def test_the_page_of_classes_is_what_explain_prints() -> None:
    page = (ROOT / "docs" / "classes.md").read_text()
    assert page.splitlines() == list(page_of_classes(load("classes")))


def test_the_pages_that_are_written_by_hand_are_short() -> None:
    written = [page for page in PAGES[2:] if page.stem not in ("benchmarks", "classes", "commands")]
    assert sum(len(page.read_text().splitlines()) for page in written) <= 1800
