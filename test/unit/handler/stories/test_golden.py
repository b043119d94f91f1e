"""The whole incident.json of scripted crashes and hangs, every field, against what is on file.

What differs from run to run, or between machines, has a name in its place, such as ``<time>``.
``SGLANG_CRASHKIT_TEST_GOLDEN=write`` puts on file what the handler writes now.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.kernel.procfs import read_wchan
from unit.support.server_driver import Server, Start
from unit.support.targets import state_of
from unit.support.waiting import wait_until

Document = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
IS_WRITTEN = os.environ.get("SGLANG_CRASHKIT_TEST_GOLDEN") == "write"
RANKS = ("scheduler_TP0", "scheduler_TP1")
#: Of a line on file, in characters.
WIDTH = 120
#: Not every machine has a GPU.
ENVIRON = {"SGLANG_CRASHKIT_GPU_FACTS": "0"}
#: Fields that the machine decides: its kernel, its C library, its memory; and what has to be alike on all ranks only.
OF_MACHINE = {"SigCgt", "Threads", "VmHWM", "VmRSS", "voluntary_ctxt_switches"}
OF_MACHINE |= {"hostname", "kernel", "memory", "pid_namespace", "python", "shared_memory", "start_ticks"}
OF_MACHINE |= {"agreed_hash", "key", "kit_version", "sglang-crashkit"}
#: What only a process that sleeps at that moment has.
OF_SLEEP = {"wchan"}
#: Events of a timeline that come in any order.
ENDS = {"process_exited", "server_exited"}
#: Whether the server is still at what the test asked it for, here or deeper, as its stack is read is chance.
BUSY = "obey (fake_server.py:"
IN_TEXTS = {
    r"\d{4}-\d\d-\d\dT[\d:.]+Z": "<time>",
    r"/\S*/(?=crash/test-host|sglang-crashkit-\d)": "<folder>/",
    r"sglang-crashkit-\d+/run/\S+?/": "<runtime>/",
    r"(?<=<runtime>/)[^.]+": "<process>",
    r"(?<=/corepipe\.cuda\.)[^:]+": "<process>",
    r"(?<=\.py):\d+": ":<line>",
    r"\b\d+(\.\d+)? (?=s\b|seconds\b)": "<seconds> ",
    r"its memory cgroup counts no OOM kill|no OOM counter could be read": "<OOM counter>",
    r"^[RSD]( \(.*\))?$": "<alive>",
}


#: The variables of a server whose ranks are in their second step, how the second rank fails, and what is asked then.
STORIES: dict[str, tuple[dict[str, str], str, tuple[str, ...]]] = {
    "killed": ({}, "SIGKILL", ()),
    "exception": ({}, "raise CUDA out of memory", ()),
    "hang": ({"SGLANG_CRASHKIT_HANG_SECS": "2"}, "SIGSTOP", ()),
    "asked_to_end": ({}, "SIGSTOP", ("draining unhealthy", "dump_begun", "dump_ended")),
}


def fail(start_server: Start, name: str) -> Server:
    """Return a server that failed as the story of that name has it."""
    if name == "failed_start":
        server = start_server(environ=ENVIRON, launching=True)
        server.say("tell scheduler_TP0 raise no such model")
        return server
    environ, fault, commands = STORIES[name]
    server = start_server(environ=ENVIRON | environ)
    for rank in RANKS:
        assert server.ask(f"tell {rank} step 1 a b") == "in a step"
    for rank in RANKS if environ else ():
        assert server.ask(f"tell {rank} beat") == "beating"
    # To sleep is not enough: a thread sleeps while it waits for the interpreter's lock too.
    wait_until(lambda: all("pipe" in read_wchan(pid) for pid in server.ranks.values()), "the ranks wait for more")
    # Only one: who of several is silent first is chance.
    server.strike("scheduler_TP1", fault)
    if fault == "SIGSTOP":
        wait_until(lambda: state_of(server.ranks["scheduler_TP1"]) == "T", "it is stopped")
    for command in commands:
        server.ask(command)
    return server


def normalised(document: Document, names: dict[int, str]) -> Document:
    """Return an incident with a name in the place of what is another in each run."""
    names = names | {document["handler"]["pid"]: "<handler>"}
    patterns = {rf"(?<!\.py:)(?<![\d.]){pid}(?!\d)": name for pid, name in names.items()} | IN_TEXTS
    patterns |= {document["id"]: "<id>"}

    def text_of(text: str) -> str:
        for pattern, name in patterns.items():
            text = re.sub(pattern, name, text)
        return text

    def value_of(value: Any, field: str) -> Any:
        if field in OF_MACHINE and value is not None:
            return f"<{field}>"
        if isinstance(value, dict):
            return {name: value_of(each, name) for name, each in value.items() if name not in OF_SLEEP}
        if isinstance(value, list):
            busy = max((number for number, each in enumerate(value, 1) if str(each).startswith(BUSY)), default=0)
            return [value_of(each, "") for each in value[busy:]]
        if isinstance(value, str):
            return text_of(value)
        if isinstance(value, float):
            return "<seconds>"
        return names.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    made: Document = value_of(document, "")
    # Who of those that are killed together is seen to end first is chance.
    made["timeline"] = [
        entry
        for is_end, entries in groupby(made["timeline"], key=lambda entry: entry["event"] in ENDS)
        for entry in (sorted(entries, key=str) if is_end else entries)
    ]
    return made


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in a document with the way to it, so that a test names what differs."""
    if isinstance(value, dict | list):
        yield path, type(value).__name__
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves_of(each, f"{path}/{name}")
    else:
        yield path, value


def lines_of(value: Any, head: str = "") -> Iterator[str]:
    """Yield a document as JSON for a reader: what has room for it stands in one line, such as a piece of evidence."""
    indent, text = head[: len(head) - len(head.lstrip())], head + json.dumps(value)
    if len(text) < WIDTH or not isinstance(value, dict | list) or not value:
        yield text
        return
    is_dict = isinstance(value, dict)
    yield f"{head}{'{' if is_dict else '['}"
    names = [f"{json.dumps(name)}: " for name in value] if is_dict else [""] * len(value)
    for number, (name, each) in enumerate(zip(names, value.values() if is_dict else value, strict=True), 1):
        *lines, last = lines_of(each, f"{indent} {name}")
        yield from lines
        yield last if number == len(value) else f"{last},"
    yield f"{indent}{'}' if is_dict else ']'}"


@pytest.mark.parametrize("name", [*STORIES, "failed_start"])
def test_every_field_is_as_on_file(start_server: Start, name: str) -> None:
    server = fail(start_server, name)
    if name in ("killed", "exception", "failed_start"):
        server.wait_for_the_end()
    document = server.incident().document
    names = {pid: f"<{rank}>" for rank, pid in server.ranks.items()} | {server.pid: "<server>"}
    made, file = normalised(document, names), GOLDEN / f"{name}.json"
    if IS_WRITTEN:
        file.write_text("\n".join(lines_of(made)) + "\n")
    on_file, now = (dict(leaves_of(each)) for each in (json.loads(file.read_text()), made))
    differing = [path for path in on_file | now if on_file.get(path, "nothing") != now.get(path, "nothing")]
    assert {path: now.get(path) for path in differing} == {path: on_file.get(path) for path in differing}
