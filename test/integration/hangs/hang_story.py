"""What happens to one real two-rank server: much that only looks like a hang, then hangs of several kinds."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.faults import TP0 as WAITING
from integration.faults import TP1 as VICTIM
from integration.hangs.stuck_rank import StuckRank
from integration.scenario import answers_of, handler_pid, rank_that_starts, stopped, whole_incidents, worked_on
from lanelib.servers import Server
from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.judge.activity import bare
from sglang_crashkit.model.sample import Frame, main_thread
from unit.support.server_driver import events_of
from unit.support.targets import state_of
from unit.support.waiting import wait_until

HANG_SECS = 5.0
#: A hang would be noticed in this time, in seconds.
QUIET_SECS = HANG_SECS + 1.5
#: A busy machine takes its time for everything.
LONG = 120.0
#: So many tokens are a batch of a prompt.
CHUNK = 64
#: An answer that takes some seconds, so that a rank gets stuck in the middle of it.
LONG_ANSWER = 100
#: A caller that waits for an answer waits for the end of a hang first, in seconds.
ANSWER_S = 400.0
WAYS = ("spin", "hold_gil", "sleep_in_kernel", "collect")


@dataclass
class Hung:
    """One hang that ended well."""

    document: dict[str, Any]  # the incident, as it was when it was finished
    folder: Path  # its folder
    secs: float  # from what made a process hang to the whole incident, in seconds
    late_answer: list[int] = field(default_factory=list)  # what the request that waited was answered in the end
    over: dict[str, Any] = field(default_factory=dict)  # the incident as it was when the process had gone on


@dataclass
class Story:
    """What happened to one server, in order."""

    folder: Path  # its crash folder
    pids: dict[str, int] = field(default_factory=dict)  # of the ranks, by title
    #: incidents after each of the things that are no hang
    quiet: dict[str, list[StoredIncident]] = field(default_factory=dict)
    answers: list[list[list[int]]] = field(default_factory=list)  # what the server answered before and after
    hung: dict[str, Hung] = field(default_factory=dict)  # what came of each way to hang
    state: str = ""  # state of the rank that was stopped when its incident was whole
    second: dict[str, Any] = field(default_factory=dict)  # the incident of the rank stopped in the middle of a batch
    killed: dict[str, Any] = field(default_factory=dict)  # the incident of that rank killed then
    log: str = ""  # what the server printed

    def report_on(self, title: str, document: dict[str, Any]) -> dict[str, Any]:
        (found,) = [process for process in document["processes"] if process["pid"] == self.pids[title]]
        report: dict[str, Any] = found
        return report


def load_slowly(server: Server, told: Story) -> None:
    """Let one rank take longer to get ready than a hang would."""
    with stopped(rank_that_starts(server, VICTIM, 2 * LONG)):
        time.sleep(QUIET_SECS)
    server.wait_ready()
    told.quiet["loading"] = find_incidents(told.folder)


def prefill_slowly(server: Server, told: Story) -> None:
    """Take in a prompt whose chunks together, but not one by one, take longer than a hang would."""
    server.ask("slow_down", {"forward_sleep_time": HANG_SECS / 3}, LONG)
    began = time.monotonic()
    answer = server.generate("1 " * (3 * CHUNK), max_new_tokens=1, timeout_s=LONG)
    secs = time.monotonic() - began
    server.ask("slow_down", {"forward_sleep_time": 0}, LONG)
    assert answer["meta_info"]["prompt_tokens"] > 5 * CHUNK
    assert secs > 1.5 * HANG_SECS
    told.quiet["long prefill"] = find_incidents(told.folder)


def pause(server: Server, told: Story, *, in_request: bool) -> None:
    """Pause the server, in the middle of a request or before it, and let it go on."""
    answer = ask_later(server, max_new_tokens=50) if in_request else None
    server.ask("pause_generation", {"mode": "in_place"}, LONG)
    answer = answer or ask_later(server, max_new_tokens=50)
    time.sleep(QUIET_SECS)
    server.ask("continue_generation", {}, LONG)
    assert len(answer()) == 50
    told.quiet["paused"] = find_incidents(told.folder)


def stop_as_a_whole(server: Server, told: Story) -> None:
    """Stop all processes, and the handler too for the first half, to which it is as if the clock had jumped."""
    stopped, handler = [pid for pid, _title in server.processes()], handler_pid(server)
    for pid in {handler, *stopped}:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(QUIET_SECS)
    os.kill(handler, signal.SIGCONT)
    time.sleep(QUIET_SECS)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    server.generate("Hello", max_new_tokens=4, timeout_s=LONG)
    told.quiet["stopped as a whole"] = find_incidents(told.folder)


def hang_while_idle(server: Server, told: Story) -> None:
    """Stop one rank of an idle server, send a request, and let the rank go on when the hang was noticed."""
    began = time.monotonic()
    with stopped(told.pids[VICTIM]):
        answer = ask_later(server, max_new_tokens=16)
        hung = told.hung["stop"] = await_hang(told, began)
        told.state = state_of(told.pids[VICTIM])
    await_progress(hung, answer)


def hang_by(server: Server, told: Story, stuck: StuckRank, way: str) -> None:
    """Let one rank be stuck while it works at a request, and let it go on when the hang was noticed."""
    pid = told.pids[VICTIM]
    answer = have_answered(server, max_new_tokens=LONG_ANSWER)
    began = time.monotonic()
    stuck.stick(pid, way)
    hung = told.hung[way] = await_hang(told, began)
    stuck.release(pid, way)
    await_progress(hung, answer)


def stop_in_all_reduce(told: Story) -> bool:
    """Stop the rank; unless the other one waits for it in an all-reduce then, let it go on."""
    os.kill(told.pids[VICTIM], signal.SIGSTOP)
    time.sleep(0.5)
    if any(bare(frame.function) == "all_reduce" for frame in frames_of(told.pids[WAITING])):
        return True
    os.kill(told.pids[VICTIM], signal.SIGCONT)
    time.sleep(0.3)
    return False


def hang_in_a_batch_and_die(server: Server, told: Story) -> None:
    """Stop the rank while it works at a batch, and kill it when that was noticed."""
    have_answered(server, max_new_tokens=4000)
    wait_until(lambda: stop_in_all_reduce(told), "the other rank waits in an all-reduce", LONG)
    _path, told.second = next_incident(told.folder, len(told.hung) + 1)
    os.kill(told.pids[VICTIM], signal.SIGKILL)
    server.popen.wait(timeout=LONG)
    _path, told.killed = next_incident(told.folder, len(told.hung) + 2)


def tell(server: Server, told: Story, stuck: StuckRank, *, full: bool) -> None:
    """Let everything happen to a server that starts with the environment of `stuck`.

    With `full` do all that is no hang, also what is the same in all releases.
    """
    if full:
        load_slowly(server, told)
    server.wait_ready()
    told.pids = {title: server.pid_of(title) for title in (VICTIM, WAITING)}
    told.answers.append(answers_of(server))
    time.sleep(QUIET_SECS)
    told.quiet["idle"] = find_incidents(told.folder)
    # Older releases work at the last batch as they pause, which is theirs to get right.
    pause(server, told, in_request=full)
    if full:
        prefill_slowly(server, told)
        stop_as_a_whole(server, told)
    hang_while_idle(server, told)
    for way in WAYS:
        hang_by(server, told, stuck, way)
    told.answers.append(answers_of(server))
    hang_in_a_batch_and_die(server, told)
    told.log = server.log_path.read_text(errors="replace")


def await_hang(told: Story, began: float) -> Hung:
    """Return the next hang when its incident is whole."""
    path, document = next_incident(told.folder, len(told.hung) + 1)
    return Hung(document, path, time.monotonic() - began)


def await_progress(hung: Hung, answer: Callable[[], list[int]]) -> None:
    """Wait until the request is answered and the incident says that the hang is over."""
    hung.late_answer = answer()

    def is_over() -> bool:
        hung.over = json.loads((hung.folder / "incident.json").read_text())
        # It is written after the document.
        summary = (hung.folder / "summary.md").read_text()
        return "progress_returned" in events_of(hung.over) and "Progress returned after " in summary

    wait_until(is_over, "the incident says that the hang is over", LONG)


def next_incident(folder: Path, count: int) -> tuple[Path, dict[str, Any]]:
    """Wait until there are so many incidents, and return the newest."""

    def newest() -> list[StoredIncident]:
        found = whole_incidents(folder)
        assert len(found) <= count, found
        return found if len(found) == count else []

    stored = wait_until(newest, f"incident {count}", LONG)[0]
    return stored.path, stored.document or {}


def ask_later(server: Server, max_new_tokens: int) -> Callable[[], list[int]]:
    """Send a request, and return what waits for its answer."""
    got: list[list[int]] = []

    def ask() -> None:
        try:
            got.append(server.generate("Hello", max_new_tokens=max_new_tokens, timeout_s=ANSWER_S)["output_ids"])
        except (OSError, ValueError, http.client.HTTPException):
            # The server that ends meanwhile answers nothing.
            got.append([])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()

    def answer() -> list[int]:
        thread.join(ANSWER_S)
        assert got, "no answer"
        return got[0]

    return answer


def have_answered(server: Server, max_new_tokens: int) -> Callable[[], list[int]]:
    """Send a request, wait until the ranks work on it, and return what waits for its answer."""
    log_from = server.log_path.stat().st_size
    answer = ask_later(server, max_new_tokens)
    wait_until(lambda: worked_on(server, log_from), "the ranks work on the request", LONG)
    return answer


def frames_of(pid: int, timeout_s: float = LONG) -> Sequence[Frame]:
    """Return what is on the stack of a process's main thread now, innermost first, as py-spy sees it."""
    (sample,) = sample_all([pid], timeout_s)
    thread = main_thread(sample.threads, pid)
    return thread.frames if thread is not None else ()
