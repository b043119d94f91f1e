from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.view.first_screen import first_screen
from sglang_crashkit.view.html import render, write_html
from sglang_crashkit.view.markdown import format_summary
from unit.support.stored import make_incident
from unit.view.html_incidents import ALL_HOSTILE, FAULTY, PROMPT, hostile, many_ranks

#: What a page of an incident may be made of.
ELEMENTS = frozenset(
    {"html", "head", "meta", "title", "style", "body", "header", "main", "footer", "nav", "section", "div", "span", "p"}
    | {"h1", "h2", "h3", "a", "b", "i", "small", "code", "pre", "ul", "ol", "li", "dl", "dt", "dd", "table", "thead"}
    | {"tbody", "tr", "th", "td", "details", "summary", "svg", "line", "circle", "rect", "text"}
)


class Page(HTMLParser):
    """The elements of a page, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_ranks(tmp_path_factory.mktemp("ranks"), 8)


def test_each_part_of_the_incident_is_on_the_page(ranks: Path) -> None:
    text = Page(render(ranks)).text
    for words in (
        "TP3 decided retract on the way to step 38",
        "a rank went another way than the others",
        "#12345 Ranks disagree (fixed in 0.5.24)",
        "TP0,4",
        "stopped (T)",
        "topk (sglang/topk.py:7)",
        "7.500 s to scale",
        "no progress",
        "extend, 2 req, 37 tok, retract, 20.0 ms",
        "it was in the step; it was retracted",
        "log line 199",
        "all stacks , 8 stacks of TP0-7",
        f"1 stack of TP{FAULTY}",
        "2.14.1",
        "incident.json",
    ):
        assert words in text, words


def test_prompts_are_there_only_where_they_are_asked_for(ranks: Path) -> None:
    assert PROMPT not in render(ranks)
    asked = render(ranks, prompts=True)
    assert PROMPT in asked
    assert "with their prompts" in asked


def test_what_others_wrote_becomes_text_and_nothing_else(tmp_path: Path) -> None:
    text = render(hostile(tmp_path), prompts=True)
    page = Page(text)
    assert {tag for tag, _attrs in page.elements} <= ELEMENTS
    for tag, attrs in page.elements:
        assert not [name for name in attrs if name.startswith("on") or name in ("style", "src", "srcdoc", "action")]
        href = attrs.get("href")
        assert href is None or href.startswith("#"), (tag, href)
    assert "<script" not in text
    assert "670592745" not in page.text
    assert "javascript:window.ran" in ALL_HOSTILE
    assert "javascript:window.ran" in page.text
    assert "{{ 12345 * 54321 }}" in page.text
    assert {char for char in text if not char.isprintable() and char not in "\n\t"} == set()
    assert "\\u202egnp.exe\\u202c" in page.text
    assert "escape red" not in page.text
    assert "escapered" in page.text
    assert "more characters left out" in page.text


def test_the_policy_names_what_the_page_has_by_its_hash(ranks: Path) -> None:
    text = render(ranks)
    (policy,) = [attrs["content"] for tag, attrs in Page(text).elements if attrs.get("http-equiv")]
    parts = dict(part.strip().split(" ", 1) for part in str(policy).split(";"))
    assert (parts["default-src"], parts["base-uri"], parts["form-action"]) == ("'none'",) * 3
    assert "unsafe" not in str(policy)
    (own,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert (parts["style-src"], "script-src" in parts) == (f"'sha256-{digest}'", False)


def test_a_link_or_a_pipe_is_never_opened(ranks: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("it is secret")
    path = make_incident(
        tmp_path / "incidents",
        processes=[
            {"pid": 1, "role": "scheduler", "evidence": [{"kind": "exception", "path": "../../secret"}]},
            {"pid": 2, "role": "scheduler", "evidence": [{"kind": "stack", "path": str(secret)}]},
        ],
    )
    (path / "logs").mkdir()
    (path / "logs" / "link.log").symlink_to(secret)
    (path / "stacks").symlink_to(tmp_path)
    os.mkfifo(path / "logs" / "pipe.log")
    text = render(path)
    assert "it is secret" not in text
    assert "link.log" not in text
    assert "pipe.log" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "incident.json cannot be read"),
        ("", "incident.json cannot be read"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "incident.json is nested too deeply"),
        ('{"processes": 7, "verdict": [], "cause": "x", "timeline": {}, "requests": 1e999}', "incident: who failed"),
    ],
    ids=["missing", "empty", "cut off", "deep", "odd"],
)
def test_of_a_broken_folder_the_rest_is_shown(tmp_path: Path, content: str | None, words: str) -> None:
    path = make_incident(tmp_path, pieces={"logs/x.log": "the last words"})
    (path / "incident.json").unlink()
    if content is not None:
        (path / "incident.json").write_text(content)
    text = Page(render(path)).text
    assert words in text
    assert "the last words" in text


def test_what_is_too_much_is_left_out_and_counted(tmp_path: Path) -> None:
    requests = "".join(json.dumps({"rid": f"r{number}", "state": "unfinished"}) + "\n" for number in range(700))
    path = make_incident(
        tmp_path,
        pieces={"requests/requests.jsonl": requests, "logs/x.log": "early\n" + "x" * 80_000 + "\nlate"},
        timeline=[{"time": f"2026-01-02T03:04:05.{number:06d}Z", "event": str(number)} for number in range(1500)],
        processes=[{"pid": pid, "title": f"p{pid}", "role": "helper", "doing": [f"f{pid}"]} for pid in range(150)],
        verdict={"text": "v" * 100_000},
        suspects=[{"rid": "r1", "level": "supported", "reasons": ["it was alone"]}],
        suspects_left_out=1200,
    )
    text = Page(render(path)).text
    for words in (
        "200 more requests",
        "1,200 more suspects left out",
        "500 more events",
        "50 more sets of processes",
        "96,000 more characters left out",
    ):
        assert words in text
    assert "its end only" in text
    assert "late" in text
    assert "early" not in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_ranks(tmp_path_factory.mktemp("scratch"), 2, steps=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_document_whatever_its_form_is_too_odd(scratch: Path, data: st.DataObject) -> None:
    document = json.loads((scratch / "incident.json").read_text())
    for _ in range(data.draw(st.integers(1, 4))):
        node: Any = document
        while isinstance(node, (dict, list)) and node:
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
                node[key] = data.draw(JSON)
                break
            node = node[key]
    folder = scratch.parent / "odd"
    folder.mkdir(exist_ok=True)
    (folder / "incident.json").write_text(json.dumps(document))
    assert Page(render(folder)).text
    assert first_screen(Incident.of(document))
    assert format_summary(Incident.of(document)).startswith("# ")


def test_the_file_is_for_its_owner_alone(ranks: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    output.write_text("old")
    write_html(ranks, output, prompts=True)
    assert PROMPT in output.read_text()
    assert output.stat().st_mode & 0o777 == 0o600
    assert output.read_text().startswith("<!doctype html>")
    with pytest.raises(CrashkitError, match=r"nowhere/page\.html cannot be written: No such file"):
        write_html(ranks, tmp_path / "nowhere" / "page.html")
