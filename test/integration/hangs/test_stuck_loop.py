"""A main process, a tokenizer worker or a detokenizer of a real server does not come back to its event loop."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from integration.crashes.test_several_tokenizers import PATIENT
from integration.hangs.hang_story import HANG_SECS, LONG, QUIET_SECS, Hung, ask_later, await_progress, events_of
from integration.import_hook import write_site
from integration.scenario import serving, whole_incidents
from lanelib.servers import Server
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: ``spin`` uses its CPU; ``block`` waits in the kernel, as for a lock; ``rest`` is back in 3 s.
Way = Literal["spin", "block", "rest"]
#: Who hangs, by title: the main process, or a worker, as it takes in a prompt; the detokenizer at the tokens of one.
TOKENIZER, DETOKENIZER = "tokenizer", "detokenizer"

MODULES = ("sglang.srt.managers.tokenizer_manager", "sglang.srt.managers.detokenizer_manager")
CODE = """
import functools
import os
import time

FOLDER = os.path.dirname(__file__)


def stick(place):
    path = os.path.join(FOLDER, place)
    try:
        with open(path) as file:
            way = file.read()
    except OSError:
        return
    if way == "spin":
        while os.path.exists(path):
            pass
    elif way == "block":
        with open(os.path.join(FOLDER, "fifo")):
            pass
    elif way == "rest":
        try:
            os.unlink(path)
        except FileNotFoundError:
            # Another worker came by at the same moment, and rests.
            return
        time.sleep(3)


def change(module):
    if module.__name__.endswith("detokenizer_manager"):
        kind, name = module.DetokenizerManager, "handle_batch_token_id_out"
        handle = getattr(kind, name)

        @functools.wraps(handle)
        def changed(*args, **kwargs):
            stick("detokenizer")
            return handle(*args, **kwargs)
    else:
        kind, name = module.TokenizerManager, "_tokenize_one_request"
        tokenize = getattr(kind, name)

        @functools.wraps(tokenize)
        async def changed(*args, **kwargs):
            stick("tokenizer")
            return await tokenize(*args, **kwargs)
    setattr(kind, name, changed)

"""
WAYS: tuple[tuple[str, Way], ...] = (
    (TOKENIZER, "spin"),
    (TOKENIZER, "block"),
    (DETOKENIZER, "spin"),
    (DETOKENIZER, "block"),
)
HOW = {TOKENIZER: "did not come back to its event loop for ", DETOKENIZER: "worked at one message for "}


class StuckLoop:
    """Makes processes of servers stuck that were started with its environment; it has a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = write_site(folder, CODE, *MODULES)
        os.mkfifo(folder / "fifo")

    def stick(self, place: str, way: Way) -> None:
        """Have the process that comes by next be stuck."""
        scratch = self._folder / "next"
        scratch.write_text(way)
        scratch.rename(self._folder / place)

    def release(self, place: str) -> None:
        """Let it go on, and the process that comes by later."""
        (self._folder / place).unlink(missing_ok=True)
        try:
            os.close(os.open(self._folder / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            # No one waits there.
            return


@dataclass
class Told:
    """What happened to a server, in order."""

    folder: Path
    main: int = 0  # the pid of the main process
    #: of its processes, by pid; the main process's own is not SGLang's
    titles: dict[int, str] = field(default_factory=dict)
    quiet: list[StoredIncident] = field(default_factory=list)  # the incidents of what is no hang
    hung: dict[tuple[str, Way], Hung] = field(default_factory=dict)  # what came of each way to hang


def _be_busy(server: Server, stuck: StuckLoop) -> None:
    """Let each process be away for less than the limit, beside clients that ask one thing after the other."""
    end = time.monotonic() + QUIET_SECS

    def ask() -> None:
        while time.monotonic() < end:
            server.generate("1 2 3 " * 30, max_new_tokens=20, timeout_s=LONG)

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
    for client in clients:
        client.start()
    for place in (TOKENIZER, DETOKENIZER):
        stuck.stick(place, "rest")
        time.sleep(HANG_SECS)
    for client in clients:
        client.join(LONG)


def _hang(server: Server, stuck: StuckLoop, told: Told, place: str, way: Way) -> None:
    known, began = len(whole_incidents(told.folder)), time.monotonic()
    stuck.stick(place, way)
    answer = ask_later(server, max_new_tokens=8)
    stored = wait_until(lambda: whole_incidents(told.folder)[: -known or None], f"{place} {way}", LONG)[0]
    hung = told.hung[place, way] = Hung(stored.document or {}, stored.path, time.monotonic() - began)
    stuck.release(place)
    await_progress(hung, answer)


def _tell(factory: pytest.TempPathFactory, ways: tuple[tuple[str, Way], ...], *arguments: str) -> Told:
    told, stuck = Told(factory.mktemp("crash")), StuckLoop(factory.mktemp("stuck"))
    environ = {"SGLANG_CRASHKIT_HANG_SECS": f"{HANG_SECS:g}", "SGLANG_CRASHKIT_BUDGET_SECS": "60"} | PATIENT
    environ |= stuck.environ
    with serving("0.5.23", told.folder, *arguments, env=environ) as server:
        server.generate("Hello", max_new_tokens=4, timeout_s=LONG)
        told.main, told.titles = server.pid, dict(server.processes())
        time.sleep(QUIET_SECS)
        _be_busy(server, stuck)
        told.quiet = find_incidents(told.folder)
        for place, way in ways:
            _hang(server, stuck, told, place, way)
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return _tell(tmp_path_factory, WAYS)


def test_a_busy_server_and_a_short_absence_are_no_hang(told: Told) -> None:
    assert told.quiet == []


@pytest.mark.parametrize(("place", "way"), WAYS)
def test_a_stuck_loop_is_named_and_nothing_is_killed(told: Told, place: str, way: Way) -> None:
    hung = told.hung[place, way]
    hang, first = hung.document, hung.document["verdict"]["first_failure"]
    assert (hang["kind"], hang["trigger"]["event"]) == ("hang", "no_progress")
    if place == DETOKENIZER:
        assert told.titles[first["pid"]] == "sglang::detokenizer"
    else:
        assert first["pid"] == told.main
    assert HOW[place] in hang["verdict"]["text"]
    assert hang["cause"]["class"] == f"{place}_stuck"
    # The goal is 15 s more than the limit; a machine that is busy with other tests has more.
    assert HANG_SECS < hung.secs < HANG_SECS + 60
    assert "process_exited" not in events_of(hung.over)
    assert len(hung.late_answer) == 8


@pytest.mark.parametrize(("place", "way"), WAYS)
def test_its_stack_is_there_at_three_moments(told: Told, place: str, way: Way) -> None:
    hang = told.hung[place, way].document
    pid = hang["verdict"]["first_failure"]["pid"]
    (report,) = [one for one in hang["processes"] if one["pid"] == pid]
    assert len(report["looks"]) == 3
    # No one stops one that runs for a look, so that frames may be missing in one of them.
    assert any("stick (sitecustomize.py" in frame for look in report["looks"] for frame in look["doing"])
    assert "in stick (" in hang["cause"]["reasons"][0] or way == "spin"


@pytest.mark.matrix
def test_a_tokenizer_worker_that_does_not_come_back_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    told = _tell(tmp_path_factory, ((TOKENIZER, "spin"),), "--tokenizer-worker-num", "2")
    assert told.quiet == []
    hang = told.hung[TOKENIZER, "spin"].document
    assert hang["verdict"]["first_failure"]["title"].startswith("sglang::tokenizer_worker")
    assert hang["cause"]["class"] == "tokenizer_stuck"
