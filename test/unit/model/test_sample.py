from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_crashkit.model.sample import Frame, format_threads, parse_pyspy, short_path

FRAME = {"name": "forward", "filename": "/site/sglang/model.py", "short_filename": "sglang/model.py", "line": 7}
THREAD: dict[str, Any] = {
    "pid": 10,
    "thread_id": 140,
    "thread_name": "MainThread",
    "os_thread_id": 10,
    "active": True,
    "owns_gil": True,
    "frames": [FRAME, {**FRAME, "name": "main", "short_filename": None, "line": 3}],
}


def test_threads_and_frames_are_read() -> None:
    (parsed,) = parse_pyspy(json.dumps([THREAD]))
    assert (parsed.name, parsed.native_id, parsed.active, parsed.owns_gil) == ("MainThread", 10, True, True)
    assert parsed.frames == (Frame("forward", "sglang/model.py", 7), Frame("main", "/site/sglang/model.py", 3))


def test_text_that_no_file_takes_is_escaped() -> None:
    frame = {"name": "f\udcff", "filename": 5, "line": 1}
    (parsed,) = parse_pyspy(json.dumps([{**THREAD, "thread_name": "\ud800", "os_thread_id": "x", "frames": [frame]}]))
    assert (parsed.name, parsed.native_id) == ("\\ud800", None)
    assert parsed.frames == (Frame("f\\udcff", "5", 1),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[null]",
        "[[]]",
        '[{"thread_name": "x"}]',
        '[{"frames": [1]}]',
        '[{"frames": [{"name": "x", "filename": "y", "line": "z"}]}]',
        '[{"frames": [{"name": "x", "filename": "y", "line": Infinity}]}]',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_pyspy(text)


def test_a_stack_file_begins_with_its_quote_and_main_thread() -> None:
    (main, unread) = parse_pyspy(
        json.dumps([THREAD, {**THREAD, "thread_name": None, "os_thread_id": None, "active": False}])
    )
    lines = list(format_threads("sglang::scheduler_TP0", 10, [unread, main], ["forward (sglang/model.py:7)"]))
    assert lines == [
        "Process 10: sglang::scheduler_TP0",
        "",
        "What it was doing, innermost first:",
        "    forward (sglang/model.py:7)",
        "",
        'Thread 10 (active+gil): "MainThread"',
        "    forward (sglang/model.py:7)",
        "    main (/site/sglang/model.py:3)",
        "",
        'Thread ? (idle+gil): "unnamed"',
        "    forward (sglang/model.py:7)",
        "    main (/site/sglang/model.py:3)",
    ]
    assert list(format_threads("x", 10, [main]))[:3] == ["Process 10: x", "", lines[5]]


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/opt/v/lib/python3.11/site-packages/sglang/srt/managers/io_struct.py", "sglang/srt/managers/io_struct.py"),
        ("/usr/lib/python3/dist-packages/zmq/sugar/socket.py", "zmq/sugar/socket.py"),
        ("/usr/lib/python3.12/threading.py", "threading.py"),
        ("/sgl-workspace/sglang/python/sglang/srt/server.py", "sglang/srt/server.py"),
        ("/src/kit/python/sglang_crashkit/protocol.py", "sglang_crashkit/protocol.py"),
        ("/home/a/python/mine.py", "/home/a/python/mine.py"),
        ("sglang/srt/x.py", "sglang/srt/x.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ],
)
def test_paths_have_one_form_whoever_took_the_stack(path: str, short: str) -> None:
    assert short_path(path) == short
    # py-spy leaves folders out that have no __init__.py, as many of SGLang's.
    frame = {**FRAME, "filename": path, "short_filename": short.rpartition("/")[2] if short != path else None}
    (parsed,) = parse_pyspy(json.dumps([{**THREAD, "frames": [frame]}]))
    assert parsed.frames[0].file == short
