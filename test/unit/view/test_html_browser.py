"""The page in a real browser: its own style is applied, nothing runs in it, and nothing is fetched."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from sglang_crashkit.view.html import write_html
from unit.view.html_incidents import hostile

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium and chromium-driver"),
    pytest.mark.wide,
]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
INJECTED = "<script>window.ran = 1</script><img src='https://example.invalid/x' onerror='window.ran = 2'>"


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """Run a headless browser with a profile of its own until the end of the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        # What the browser shows at its start is of its own.
        driver.get("about:blank")
        yield driver
    finally:
        driver.quit()


def test_nothing_runs_fails_or_leaves_even_where_a_script_got_in(tmp_path: Path) -> None:
    page, broken = tmp_path / "page.html", tmp_path / "broken.html"
    write_html(hostile(tmp_path / "incidents"), page)
    broken.write_text(page.read_text().replace("<main>", f"<main>{INJECTED}"))
    with open_browser(tmp_path / "profile") as browser:
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(page.as_uri())
        # Neither an error nor what the policy forbade is on the console.
        assert browser.get_log("browser") == []
        assert browser.execute_script("return window.ran") is None
        sticks = "return getComputedStyle(document.querySelector('header')).position"
        assert browser.execute_script(sticks) == "sticky"
        assert browser.execute_script("return document.querySelectorAll('img, iframe, script').length") == 0
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
        assert {url.partition(":")[0] for url in asked} == {"file"}
        browser.get(broken.as_uri())
        assert browser.execute_script("return window.ran") is None
        assert sum("Content Security Policy" in entry["message"] for entry in browser.get_log("browser")) >= 2
