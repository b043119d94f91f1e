"""Which ends of threads a process tells the crash handler of."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sglang_crashkit.srt.dead_threads import watch_threads
from sglang_crashkit.srt.hooks import notify
from unit.srt.conftest import CONTEXT, Listener
from unit.support.waiting import LONG


def end_by(error: BaseException) -> None:
    raise error


def lose(error: BaseException, name: str) -> None:
    thread = threading.Thread(target=end_by, args=(error,), name=name)
    thread.start()
    thread.join(LONG)


def serve(printed: int, *, of_all: bool) -> None:
    """Be a process of a server that loses threads; an earlier hook writes their names."""

    def before(args: threading.ExceptHookArgs) -> None:
        os.write(printed, f"{args.thread.name} ".encode())

    threading.excepthook = before
    watch_threads(of_all=of_all)
    watch_threads(of_all=of_all)
    lose(SystemExit(1), "leaves")
    lose(ValueError("no such page"), "first")
    lose(ValueError("no such page"), "again")
    lose(KeyError("room"), "another")
    notify("draining")


@pytest.mark.parametrize(("of_all", "told"), [(True, ["first", "another"]), (False, [])])
def test_each_way_to_die_is_told_once_and_the_hook_before_is_called(
    listener: Listener, short_folder: Path, of_all: bool, told: list[str]
) -> None:
    read, write = os.pipe()
    process = CONTEXT.Process(target=serve, args=(write,), kwargs={"of_all": of_all})
    process.start()
    os.close(write)
    heard = []
    while (message := listener.heard())["event"] != "draining":
        heard.append(message)
    process.join(LONG)
    assert [message["thread"] for message in heard] == told
    assert [message["message"] for message in heard] == ["ValueError: no such page", "KeyError: 'room'"][: len(told)]
    assert {Path(message["record"]) for message in heard} == set((short_folder / "spool").iterdir())
    with os.fdopen(read) as printed:
        assert printed.read().split() == ["leaves", "first", "again", "another"]
