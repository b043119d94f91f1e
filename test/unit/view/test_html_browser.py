"""The page in a real browser: its own style is applied, nothing runs in it, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.view.html import write_html
from unit.view.browser import NO_BROWSER, open_browser
from unit.view.html_incidents import hostile

pytestmark = [pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER), pytest.mark.wide]
INJECTED = "<script>window.ran = 1</script><img src='https://example.invalid/x' onerror='window.ran = 2'>"


def test_nothing_runs_fails_or_leaves_even_where_a_script_got_in(tmp_path: Path) -> None:
    page, broken = tmp_path / "page.html", tmp_path / "broken.html"
    write_html(hostile(tmp_path / "incidents"), page)
    broken.write_text(page.read_text().replace("<main>", f"<main>{INJECTED}"))
    with open_browser(tmp_path / "profile") as browser:
        browser.requests()
        browser.open(page)
        assert browser.log() == []
        assert browser.js("return window.ran") is None
        assert browser.js("return getComputedStyle(document.querySelector('header')).position") == "sticky"
        assert browser.js("return document.querySelectorAll('img, iframe, script').length") == 0
        assert {url.partition(":")[0] for url in browser.requests()} == {"file"}
        browser.open(broken)
        assert browser.js("return window.ran") is None
        assert sum("Content Security Policy" in line for line in browser.log()) >= 2
