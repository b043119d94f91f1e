"""The page in a real browser: nothing runs in it, fails or is fetched, and its own style is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.view.html import write_html
from unit.view.browser import NO_BROWSER, Browser, open_browser
from unit.view.html_incidents import hostile, many_ranks

pytestmark = [pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER), pytest.mark.wide]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a page of each kind, once."""
    folder = tmp_path_factory.mktemp("pages")
    makers = {
        "eight": lambda: many_ranks(folder / "eight", 8),
        "hostile": lambda: hostile(folder / "hostile"),
    }

    def page(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            write_html(makers[name](), path)
        return path

    return page


@pytest.mark.parametrize("name", ["eight", "hostile"])
def test_nothing_runs_fails_or_leaves(browser: Browser, pages: Callable[[str], Path], name: str) -> None:
    browser.requests()
    browser.open(pages(name))
    assert browser.js("return window.ran") is None
    assert browser.log() == []
    assert browser.js("return getComputedStyle(document.querySelector('header')).position") == "sticky"
    assert {url.partition(":")[0] for url in browser.requests()} == {"file"}
    assert browser.js("return document.querySelectorAll('main img, main iframe, main script').length") == 0


def test_a_script_that_got_in_would_not_run(browser: Browser, pages: Callable[[str], Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    injected = "<script>window.ran = 1</script><img src='https://example.invalid/x' onerror='window.ran = 2'>"
    broken.write_text(pages("eight").read_text().replace("<main>", f"<main>{injected}"))
    browser.requests()
    browser.open(broken)
    assert browser.js("return window.ran") is None
    assert sum("Content Security Policy" in line for line in browser.log()) >= 2
