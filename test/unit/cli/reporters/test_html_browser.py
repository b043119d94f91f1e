"""The page in a real browser: it can be used by mouse and by keyboard, and nothing runs in it but its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from sglang_crashkit.cli.reporters.html import write_html
from unit.cli.reporters.browser import NO_BROWSER, Browser, open_browser
from unit.cli.reporters.html_incidents import FAULTY, hostile, many_ranks
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER), pytest.mark.wide]
#: A page of 512 ranks opens in less, in seconds of the browser's own clock.
OPENS_SECS = 2.0
#: A search is this quick on any machine, in seconds.
SEARCHED_SECS = 20.0


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
        "many": lambda: many_ranks(folder / "many", 512),
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
    browser.js("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for box in browser.all("#icicle div")[:5]:
        browser.js("arguments[0].dispatchEvent(new MouseEvent('mouseenter'))", box)
    browser.press("/", "window", Keys.ESCAPE)
    assert browser.js("return window.ran") is None
    assert browser.log() == []
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
    with pytest.raises(Exception, match="TrustedHTML"):
        browser.js("document.body.innerHTML = '<b>x</b>'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600, 3840])
def test_it_fits_every_width_in_both_themes(
    browser: Browser, pages: Callable[[str], Path], width: int, scheme: str
) -> None:
    browser.open(pages("eight"), width, scheme)
    assert browser.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    light = browser.js("return parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]) > 128")
    assert light is (scheme == "light")


def test_searching_keeps_what_has_the_words(browser: Browser, pages: Callable[[str], Path]) -> None:
    browser.open(pages("eight"))
    before, rest = browser.visible(".item"), "main > section:not(#what) .item"
    browser.press("/")
    browser.press("Log Line 19")
    wait_until(lambda: browser.js("return document.getElementById('hits').textContent") == "1", "the one log is found")
    # It was folded.
    assert browser.visible(rest) == browser.visible(".file pre") == 1
    assert browser.js("return CSS.highlights.get('found').size") == 11
    browser.press(Keys.ENTER)
    assert "here" in browser.all(".file:not([hidden])")[0].get_attribute("class")
    browser.press(Keys.ESCAPE)
    assert browser.visible(".item") == before
    browser.press("/")
    browser.press("topk")
    wait_until(lambda: browser.all("#icicle .found"), "the icicle marks it, too")


def test_the_keys_move_open_and_tell(browser: Browser, pages: Callable[[str], Path]) -> None:
    browser.open(pages("eight"))
    names = []
    for key in "jjk":
        browser.press(key)
        names.append(browser.js("return document.activeElement.textContent.split(' ')[0]"))
    assert names == ["TP3", "Ranks", "TP3"]
    browser.press("j", "e")
    assert browser.js("return [...document.querySelectorAll('#ranks details')].every((one) => one.open)")
    assert not browser.js("return document.querySelector('#files .file').open")
    browser.press("e")
    assert not browser.js("return [...document.querySelectorAll('#ranks details')].some((one) => one.open)")
    browser.press("?")
    assert browser.visible("#keys") == 1
    browser.press(Keys.ESCAPE)
    assert browser.visible("#keys") == 0


def test_it_is_copied_as_markdown_whole_and_in_parts(browser: Browser, pages: Callable[[str], Path]) -> None:
    browser.open(pages("eight"))
    browser.press("c")
    wait_until(lambda: browser.visible("#toast.shown"), "it says so")
    assert browser.copied().startswith(
        f"# hang: sglang::scheduler_TP{FAULTY} (pid 1003)\n\n```text\nTP3 decided retract"
    )
    browser.js("document.querySelector('#steps .copy').click()")
    part = browser.copied()
    assert "## Steps\n\nTP3 decided retract on the way to step 38" in part
    assert "| step | TP0-2,4-7 | TP3 |\n| --- | --- | --- |\n" in part
    assert "| 38 | decode, 2 req, 2 tok, 20.0 ms | extend, 2 req, 37 tok, retract, 20.0 ms |\n" in part


def test_a_call_of_the_icicle_is_seen_alone(browser: Browser, pages: Callable[[str], Path]) -> None:
    browser.open(pages("eight"))
    before = browser.all("#icicle div")
    (box,) = [one for one in before if one.text == "topk"]
    assert "c1" in box.get_attribute("class")
    narrow = box.size["width"]
    browser.js("arguments[0].click()", box)
    (box,) = [one for one in browser.all("#icicle div") if one.text == "topk"]
    assert box.size["width"] > 4 * narrow
    assert f"1 stack of TP{FAULTY}" in browser.js("return document.getElementById('icicle-told').textContent")
    browser.js("arguments[0].click()", browser.all("#icicle div")[0])
    assert len(browser.all("#icicle div")) == len(before)
    every, folded = browser.all("#icicle-bar button")[-1], browser.all("#icicle .folded")
    browser.js("arguments[0].click()", every)
    assert len(browser.all("#icicle div")) > len(before)
    assert folded


def test_the_timeline_is_to_scale_and_can_be_drawn_closer(browser: Browser, pages: Callable[[str], Path]) -> None:
    browser.open(pages("eight"))
    places = "return [...document.querySelectorAll('#lanes circle')].map((one) => parseFloat(one.getAttribute('cx')))"
    assert browser.js(places) == pytest.approx([*(rank / 75 for rank in range(8)), 100.0], abs=0.01)
    ticks = "return [...document.querySelectorAll('#axis text')].map((one) => one.textContent)"
    assert browser.js(ticks) == ["0", "+2", "+4", "+6"]
    drag = """
      const lanes = document.getElementById('lanes'), box = document.getElementById('axis').getBoundingClientRect();
      const at = (part) => ({ clientX: box.left + part * box.width, bubbles: true });
      lanes.dispatchEvent(new PointerEvent('pointerdown', at(0)));
      lanes.dispatchEvent(new PointerEvent('pointerup', at(0.5)));
    """
    browser.js(drag)
    assert browser.js(places)[::8] == pytest.approx([0.0, 200.0], abs=1)
    assert browser.visible("#lanes circle") == 8


def opening_ms(browser: Browser, path: Path) -> float:
    """Return how long a page takes to open, in milliseconds of the browser's own clock."""
    browser.open(path)
    timing: float = browser.js("return performance.getEntriesByType('navigation')[0].domComplete")
    return timing


def test_512_ranks_open_at_once_and_stay_readable(browser: Browser, pages: Callable[[str], Path]) -> None:
    path = pages("many")
    # What else runs on this machine makes it slower, and nothing makes it faster.
    assert any(opening_ms(browser, path) < 1000 * OPENS_SECS for _ in range(5))
    assert len(browser.all("#ranks .tiles:not(.other) .tile")) == 512
    # Those that agree are one line.
    assert browser.visible("#ranks tbody tr") == 7
    assert browser.visible("#timeline tbody tr") == 2
    assert [one.text for one in browser.all("#steps .steps th")] == ["step", "TP0-2,4-511", f"TP{FAULTY}"]
    browser.press("/")
    browser.press("TP317")
    hits = "return document.getElementById('hits').textContent"
    wait_until(lambda: browser.js(hits), "it is searched", SEARCHED_SECS)
