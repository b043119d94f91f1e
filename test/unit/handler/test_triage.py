"""What is decided about what happens to a server: stories on a fake clock, in which nothing is read or written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_crashkit.handler.triage import Action, Seen, Triage
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.policy import Event, Mode

ROOT, RANK, OTHER, WORKER, HELPER = 1, 10, 11, 20, 30
BUDGET = 30.0
ROLES = {ROOT: "server", RANK: "scheduler", OTHER: "scheduler", WORKER: "tokenizer_worker", HELPER: "helper"}
Step = tuple[float, Seen, str]


def seen(what: str, pid: int, **facts: Any) -> Seen:
    return Seen(what, pid, ROLES[pid], **facts)


def ended(pid: int, how: int | str, **facts: Any) -> Seen:
    """A process ended by a status or a signal."""
    status = ExitStatus(code=how) if isinstance(how, int) else ExitStatus(signal=how)
    return seen("exited", pid, status=status, matters=pid != HELPER, **facts)


def told(event: str, pid: int = ROOT, **facts: Any) -> Seen:
    return seen(event, pid, **facts)


def torn_down(*members: int, by: int = ROOT, tree_of: int = ROOT) -> Seen:
    return told("teardown", by, tree_of=tree_of, members=frozenset(members))


def observed(**facts: Any) -> Seen:
    facts = {"kind": "hang", "trigger": "no_progress", "secs": BUDGET} | facts
    return seen("observed", RANK, **facts)


def in_words(action: Action) -> str:
    said = action.kind or (action.captures.value if action.do == "permit" else action.words)
    return f"{action.do}:{said}" if said else action.do


class Story:
    """A server and its triage; what the handler does in return is taken in at once."""

    def __init__(self, mode: Mode = Mode.SERVER) -> None:
        self.triage = Triage(ROOT, BUDGET)
        self.see(0.0, Seen("launch", mode=mode, members=frozenset()))

    def see(self, now: float, what: Seen) -> str:
        actions = self.triage.take(what, now)
        for action in actions:
            self.triage.done(action.do, now)
        return " ".join(in_words(action) for action in actions)

    def tell(self, steps: list[Step]) -> None:
        for now, what, expected in steps:
            assert self.see(now, what) == expected, (now, what)


TICK = Seen("tick")
LAST = Seen("tick", workers_left=False, any_left=False)
HELPERS_LEFT = Seen("tick", workers_left=False)
KILLED = "mark_exited open:killed permit:full add_exit capture"
LEFT = "mark_exited open:exited permit:full add_exit capture"
UNSAVED = "set_requests:the server did not begin to save them within 5 s"
WENT_ON = "set_requests:the server went on"
HUNG = "open:hang permit:observe add_hang capture answer_stacks"
AT_END = "open:hang permit:full add_silence capture"
UNSTARTED = "set_requests:the server had not started to serve answer_when_finished finish"
OBSERVED_DEATH = "mark_exited open:killed permit:observe add_exit capture"
CAUGHT = "open:exception permit:observe add_exception capture answer_captured"
RAISED = "open:exception permit:full add_exception capture answer_captured"
ENDS_DUMP = "permit:full add_requests answer_when_finished finish"

STORIES: dict[str, list[Step]] = {
    "a killed rank is told to the server at once, which saves its requests": [
        (1.0, ended(RANK, "SIGKILL"), KILLED),
        (1.0, TICK, "send_sigquit"),
        (2.0, told("crash_dump_begun"), "permit:full note:crash_dump_begun"),
        (9.0, TICK, ""),
        (9.0, told("crash_dump_ended"), ENDS_DUMP),
        (9.1, ended(ROOT, "SIGKILL"), "mark_exited add_exit"),
        (9.2, TICK, ""),
    ],
    "a server that does not answer has 5 s": [
        (1.0, ended(RANK, "SIGSEGV"), KILLED),
        (1.0, TICK, "send_sigquit"),
        (5.9, TICK, ""),
        (6.0, TICK, f"{UNSAVED} finish"),
        (6.1, ended(OTHER, "SIGKILL"), "mark_exited add_exit"),
    ],
    "the budget is the longest that an incident takes": [
        (1.0, ended(RANK, "SIGKILL"), KILLED),
        (1.0, TICK, "send_sigquit"),
        (2.0, told("crash_dump_begun"), "permit:full note:crash_dump_begun"),
        (30.9, TICK, ""),
        (31.0, TICK, "note:budget_spent finish"),
    ],
    "a main process that raises is told nothing, and ends by itself": [
        (1.0, told("exception"), RAISED),
        (1.6, TICK, ""),
        (1.7, torn_down(ROOT, RANK, OTHER), "note:teardown"),
        (1.8, ended(RANK, "SIGKILL"), "mark_exited add_exit"),
        (1.9, ended(ROOT, 1), "mark_exited add_exit"),
        (2.5, LAST, "finish"),
    ],
    "a soft exit waits a second for the word that it was a shutdown": [
        (1.0, ended(RANK, 0), LEFT),
        (1.5, torn_down(ROOT, RANK, OTHER), "discard"),
        (1.6, ended(OTHER, "SIGKILL"), "mark_exited forget_process"),
        (1.7, ended(ROOT, "SIGTERM"), "mark_exited"),
    ],
    "no one is told while it may be one": [
        (1.0, ended(RANK, 3), LEFT),
        (1.9, TICK, ""),
        (2.0, TICK, "send_sigquit"),
        (2.1, torn_down(ROOT), "note:teardown"),
    ],
    "draining makes the orderly exits before it a shutdown": [
        (1.0, ended(RANK, 0), LEFT),
        (1.2, told("draining"), "discard note:draining"),
        (1.3, ended(OTHER, 0), "mark_exited forget_process"),
        (1.4, ended(ROOT, 0), "mark_exited"),
    ],
    "but not a crash before it": [
        (1.0, ended(RANK, 3), LEFT),
        (1.2, told("draining"), "note:draining"),
        (2.0, TICK, "send_sigquit"),
    ],
    "nor one after it": [
        (1.0, told("draining"), "note:draining"),
        (1.1, ended(RANK, 1), LEFT),
    ],
    "so does the main process's own orderly end": [
        (1.0, ended(RANK, "SIGTERM"), LEFT),
        (1.1, ended(ROOT, "SIGTERM"), "mark_exited discard"),
    ],
    "a crash stays one, whatever ends the main process": [
        (1.0, ended(RANK, 3), LEFT),
        (1.1, ended(ROOT, "SIGTERM"), "mark_exited add_exit"),
        (1.5, HELPERS_LEFT, ""),
        (1.6, HELPERS_LEFT, "finish"),
    ],
    "a main process's end waits for its workers up to 4 s": [
        (1.0, ended(ROOT, "SIGKILL"), KILLED),
        (1.0, TICK, "send_sigquit"),
        (4.9, TICK, ""),
        (5.0, TICK, "finish"),
    ],
    "and no longer than until all are gone": [
        (1.0, ended(ROOT, "SIGKILL"), KILLED),
        (1.1, ended(RANK, "SIGKILL"), "mark_exited add_exit"),
        (1.1, LAST, "send_sigquit finish"),
    ],
    "what outlives a main process that ended well is killed by the kernel": [
        (1.0, ended(ROOT, 0), "mark_exited"),
        (1.1, ended(RANK, "SIGKILL"), "mark_exited forget_process"),
    ],
    "what was announced is no incident": [
        (1.0, torn_down(RANK, tree_of=RANK), ""),
        (1.0, told("exception", RANK, soft=True), "drop_record answer_captured"),
        (1.1, ended(RANK, "SIGKILL"), "mark_exited forget_process"),
        (1.2, ended(OTHER, "SIGKILL"), KILLED),
    ],
    "nor is what ends after the main process says that it ends": [
        (1.0, told("exiting", members=frozenset({ROOT, RANK})), ""),
        (1.1, ended(RANK, "SIGKILL"), "mark_exited forget_process"),
    ],
    "a helper's end is no one's matter": [(1.0, ended(HELPER, "SIGKILL"), "mark_exited forget_process")],
    "a child that failed before it said what it is is kept": [
        (1.0, ended(HELPER, 1, is_unknown=True), "mark_exited keep_process"),
        (1.0, ended(HELPER, 0, is_unknown=True), "mark_exited forget_process"),
    ],
    "another server's processes are no one's matter in an incident": [
        (1.0, ended(RANK, "SIGKILL"), KILLED),
        (1.1, ended(HELPER, 1, is_foreign=True), "mark_exited forget_process"),
    ],
    "a rank that raised has half a second to tell the server itself": [
        (1.0, told("exception", RANK), RAISED),
        (1.4, TICK, ""),
        (1.5, TICK, "send_sigquit"),
    ],
    "a rank goes on without its thread, and no one is told": [
        (1.0, told("thread_died", RANK), "open:thread_died permit:observe add_dead_thread capture"),
        (1.1, told("thread_died", OTHER), "add_dead_thread"),
        (6.0, TICK, f"{WENT_ON} finish"),
        (7.0, told("thread_died", RANK), "write forget open:thread_died permit:observe add_dead_thread capture"),
        (8.0, ended(RANK, "SIGKILL"), f"write forget {KILLED}"),
    ],
    "threads end with a server that ends, and those of its helpers do not matter": [
        (1.0, told("thread_died", HELPER, matters=False), "drop_record"),
        (2.0, torn_down(RANK, tree_of=RANK), ""),
        (2.1, told("thread_died", RANK), "drop_record"),
        (3.0, told("draining"), "note:draining"),
        (3.1, told("thread_died", OTHER), "drop_record"),
    ],
    "what SGLang caught is an incident of its own, and no one is told": [
        (1.0, told("exception", RANK, caught=True), CAUGHT),
        (1.1, told("exception", OTHER, caught=True), "permit:observe add_exception answer_captured"),
        (6.0, TICK, f"{WENT_ON} finish"),
        (7.0, told("exception", RANK), f"write forget {RAISED}"),
    ],
    "what a rank catches as a peer shuts down is no incident": [
        (1.0, ended(RANK, "SIGTERM"), LEFT),
        (1.3, told("exception", OTHER, caught=True), "permit:observe add_exception answer_captured"),
        (1.5, torn_down(ROOT, RANK, OTHER), "discard"),
    ],
    "nor as the server drains": [
        (1.0, told("draining"), "note:draining"),
        (1.1, ended(RANK, 0), "mark_exited forget_process"),
        (1.2, told("exception", OTHER, caught=True), "drop_record answer_captured"),
        # One that exits as it was asked to.
        (1.3, told("exception", OTHER, soft=True), "drop_record answer_captured"),
    ],
    "its later exit joins it": [
        (1.0, told("exception", RANK), RAISED),
        (1.1, ended(RANK, 1), "mark_exited add_exit"),
        (1.2, told("exception", OTHER), "permit:full add_exception answer_captured"),
    ],
    "what follows in a server that ends is a consequence": [
        (1.0, told("exception", RANK), RAISED),
        (1.2, told("crash_dump_begun"), "permit:full note:crash_dump_begun"),
        (1.3, told("crash_dump_ended"), ENDS_DUMP),
        (1.4, told("launch_failed"), "note:launch_failed answer"),
        (1.4, told("child_failed"), "note:child_failed answer"),
        (1.5, told("await_incident"), "answer"),
    ],
    "a server that lives on for a minute after its incident may have another one": [
        (1.0, ended(RANK, "SIGKILL"), KILLED),
        (31.0, TICK, "send_sigquit note:budget_spent finish"),
        (90.9, TICK, ""),
        (91.0, TICK, "forget"),
        (92.0, ended(OTHER, "SIGKILL"), KILLED),
    ],
    "a tokenizer worker that is killed is started anew, and observed": [
        (1.0, ended(WORKER, "SIGKILL"), OBSERVED_DEATH),
        (5.9, TICK, ""),
        (6.0, TICK, f"{WENT_ON} finish"),
        (7.0, ended(RANK, "SIGKILL"), f"write forget {KILLED}"),
    ],
    "one that raises and saves its requests is one incident": [
        (1.0, told("exception", WORKER), "open:exception permit:observe add_exception capture answer_captured"),
        (1.1, told("crash_dump_begun", WORKER), "permit:observe note:crash_dump_begun"),
        (1.2, told("crash_dump_ended", WORKER), "permit:observe add_requests answer_when_finished finish"),
        (1.3, ended(RANK, "SIGKILL"), f"write forget {KILLED}"),
    ],
    "several that save their requests are waited for": [
        (1.0, told("crash_dump_begun"), "open:child_failure permit:full capture note:crash_dump_begun"),
        (1.1, told("crash_dump_begun", WORKER), "permit:observe note:crash_dump_begun"),
        (1.2, told("crash_dump_ended"), "permit:full add_requests answer_saved"),
        (1.3, ended(WORKER, "SIGKILL"), "mark_exited add_exit finish"),
    ],
    "requests saved for others that were asked to end, too, are no crash": [
        (1.0, told("draining"), "note:draining"),
        (1.1, ended(RANK, "SIGTERM"), "mark_exited forget_process"),
        (1.2, told("crash_dump_begun"), ""),
        (1.3, told("crash_dump_ended"), "answer_orderly"),
    ],
    "a failed start": [
        (1.0, ended(RANK, 1), LEFT),
        (1.1, told("launch_failed"), f"learn_ranks permit:full note:launch_failed {UNSTARTED}"),
    ],
    "of which no one else knows": [
        (
            1.0,
            told("startup_timeout"),
            f"learn_ranks open:failed_start permit:full capture note:startup_timeout {UNSTARTED}",
        ),
    ],
    "a failed child of a main process without requests": [
        (
            1.0,
            told("child_failed"),
            "open:child_failure permit:full capture note:child_failed "
            "set_requests:the server's main process held no requests answer_when_finished finish",
        ),
    ],
    "the process that is about to end the server waits for what is under way": [
        (0.9, told("await_incident"), "answer"),
        (1.0, ended(RANK, 1), LEFT),
        (1.1, told("await_incident"), "answer"),
        (2.0, TICK, "send_sigquit"),
        (2.1, told("await_incident"), "answer_when_finished"),
    ],
    "a soft watchdog observes": [
        (1.0, told("watchdog_timeout", RANK, soft=True), HUNG),
        (2.0, told("watchdog_timeout", OTHER, soft=True), "permit:observe add_hang answer_stacks"),
        (3.0, told("stacks_wanted", RANK), "answer_stacks"),
        (6.0, TICK, f"{WENT_ON} finish"),
        (7.0, told("watchdog_timeout", RANK), "write forget open:hang permit:full add_hang capture answer_stacks"),
    ],
    "another process hangs by itself": [
        (1.0, told("watchdog_timeout", RANK, soft=True), HUNG),
        (2.0, told("watchdog_timeout", WORKER, soft=True), f"write forget {HUNG}"),
    ],
    "a hard watchdog joins the crash that is gathered": [
        (1.0, told("exception", RANK), RAISED),
        (1.1, told("watchdog_timeout", OTHER), "permit:full add_hang answer_stacks"),
    ],
    "a watchdog after a crash that did not end the server": [
        (1.0, ended(RANK, "SIGKILL"), KILLED),
        (31.0, TICK, "send_sigquit note:budget_spent finish"),
        (32.0, told("watchdog_timeout", OTHER), "forget open:hang permit:full add_hang capture answer_stacks"),
    ],
    "somebody asks for the stacks": [
        (1.0, told("stacks_wanted", RANK), "open:snapshot permit:observe capture answer_stacks"),
        (6.0, TICK, f"{WENT_ON} finish"),
        (7.0, told("stacks_wanted", RANK), "write forget open:snapshot permit:observe capture answer_stacks"),
    ],
    "a hang that the handler noticed": [
        (1.0, observed(), "open:hang permit:observe"),
        (2.0, observed(), "write forget open:hang permit:observe"),
        (3.0, ended(RANK, "SIGKILL"), f"write forget {KILLED}"),
        (4.0, observed(), ""),
    ],
    "a lost peer": [
        (1.0, observed(kind="peer_lost", event=Event.PEER_LOST, secs=2.0), "open:peer_lost permit:none"),
        (3.0, TICK, f"{WENT_ON} finish"),
        (4.0, ended(RANK, "SIGKILL"), f"write forget {KILLED}"),
    ],
    "one that is asked to end while it is silent may end in good order": [
        (0.9, told("draining"), "note:draining"),
        (1.0, observed(withdrawable=True), "open:hang permit:observe"),
        (2.0, ended(OTHER, "SIGTERM"), "discard mark_exited forget_process"),
    ],
    "once its incident is whole it stays": [
        (0.9, told("draining"), "note:draining"),
        (1.0, observed(withdrawable=True, secs=5.0), "open:hang permit:observe"),
        (6.0, TICK, f"{WENT_ON} finish"),
        (7.0, ended(OTHER, "SIGTERM"), "write forget mark_exited forget_process"),
        (7.1, torn_down(ROOT, RANK), ""),
    ],
    "or is torn down by itself": [
        (1.0, observed(withdrawable=True), "open:hang permit:observe"),
        (2.0, torn_down(ROOT, RANK, by=RANK), "note:teardown"),
        (2.1, torn_down(ROOT, RANK), "discard"),
    ],
    "a health check that failed at the end": [
        (1.0, told("draining", unhealthy=True), f"{AT_END} note:draining"),
        (1.1, told("crash_dump_begun"), "permit:full note:crash_dump_begun"),
        (1.6, TICK, ""),
        (1.7, TICK, "capture_again"),
        (1.8, told("crash_dump_ended"), ENDS_DUMP),
    ],
    "its end waits for the second sample": [
        (1.0, told("draining", unhealthy=True), f"{AT_END} note:draining"),
        (1.1, told("crash_dump_begun"), "permit:full note:crash_dump_begun"),
        (1.2, told("crash_dump_ended"), ENDS_DUMP.removesuffix(" finish")),
        (1.7, TICK, "capture_again finish"),
    ],
    "which is no process of a server that is gone": [
        (1.0, told("draining", unhealthy=True), f"{AT_END} note:draining"),
        (1.1, told("crash_dump_begun"), "permit:full note:crash_dump_begun"),
        (1.2, told("crash_dump_ended"), ENDS_DUMP.removesuffix(" finish")),
        (1.3, ended(ROOT, "SIGKILL"), "mark_exited add_exit"),
        (1.7, TICK, "finish"),
    ],
    "one that fails while a crash is gathered": [
        (0.5, TICK, ""),
        (1.0, ended(RANK, "SIGKILL"), KILLED),
        (2.0, told("draining", unhealthy=True), "permit:full note:draining"),
    ],
    "or after a hang was noticed": [
        (1.0, observed(), "open:hang permit:observe"),
        (2.0, told("draining", unhealthy=True), f"write forget {AT_END} note:draining"),
    ],
    "one that fails while it drains": [
        (0.5, told("draining"), "note:draining"),
        (1.0, told("crash_dump_begun", silent=True), f"{AT_END} permit:full note:crash_dump_begun"),
    ],
    "a new server of the same program begins anew": [
        (1.0, torn_down(ROOT, RANK), ""),
        (2.0, Seen("launch", mode=Mode.SERVER, members=frozenset({OTHER}), others_serve=False), "close_journals"),
        (3.0, ended(RANK, "SIGKILL"), KILLED),
    ],
}


OF_MODES: dict[str, tuple[Mode, list[Step]]] = {
    **{name: (Mode.SERVER, steps) for name, steps in STORIES.items()},
    "a dead rank of a library is observed": (
        Mode.LIBRARY,
        [(1.0, ended(RANK, "SIGKILL"), OBSERVED_DEATH), (6.0, TICK, f"{WENT_ON} finish")],
    ),
    "one that raised": (
        Mode.LIBRARY,
        [
            (1.0, told("exception", RANK), "open:exception permit:observe add_exception capture answer_captured"),
            (1.5, TICK, ""),
            (6.0, TICK, f"{WENT_ON} finish"),
        ],
    ),
    "a program may end as it likes": (Mode.LIBRARY, [(1.0, ended(ROOT, 3), "mark_exited")]),
    "but is not to be killed with its server": (Mode.LIBRARY, [(1.0, ended(ROOT, "SIGKILL"), OBSERVED_DEATH)]),
    "unless it has none": (Mode.LIBRARY, [(1.0, ended(ROOT, "SIGKILL", others_serve=False), "mark_exited")]),
    "a failed start of a library, which may go on": (
        Mode.LIBRARY,
        [
            (
                1.0,
                told("launch_failed"),
                f"learn_ranks open:failed_start permit:observe capture note:launch_failed {UNSTARTED}",
            ),
            (2.0, Seen("launch", mode=Mode.LIBRARY), "forget"),
        ],
    ),
    "an elastic server goes on without a rank": (
        Mode.ELASTIC,
        [
            (1.0, ended(RANK, "SIGKILL"), OBSERVED_DEATH),
            (2.0, ended(OTHER, "SIGKILL"), "mark_exited add_exit"),
            (6.0, TICK, f"{WENT_ON} finish"),
        ],
    ),
}


@pytest.mark.parametrize(("mode", "steps"), OF_MODES.values(), ids=[name.replace(" ", "-") for name in OF_MODES])
def test_a_story(mode: Mode, steps: list[Step]) -> None:
    Story(mode).tell(steps)


def test_exits_during_a_capture_join_the_incident() -> None:
    triage = Triage(ROOT, BUDGET)
    triage.shutdown.mode = Mode.SERVER
    triage.take(ended(RANK, 0), 1.0)
    assert [action.do for action in triage.take(ended(OTHER, "SIGKILL"), 1.1)] == ["mark_exited", "add_exit"]
    # The second in which it may be a shutdown begins when the capture is done.
    triage.done("capture", 3.0)
    assert triage.next_due(workers_left=True) == 4.0


@pytest.mark.parametrize(
    ("steps", "due"),
    [
        ([], float("inf")),
        ([(1.0, ended(RANK, "SIGKILL"))], 1.0),
        ([(1.0, ended(RANK, "SIGKILL")), (1.0, TICK)], 6.0),
        ([(1.0, ended(RANK, 1))], 2.0),
        ([(1.0, told("exception", RANK))], 1.5),
        ([(1.0, told("crash_dump_begun"))], 1.0 + BUDGET),
        ([(1.0, observed(secs=2.0))], 3.0),
        ([(1.0, told("crash_dump_begun")), (2.0, ended(ROOT, "SIGKILL"))], 6.0),
        ([(1.0, observed(secs=2.0)), (3.0, TICK)], float("inf")),
    ],
)
def test_it_says_when_a_tick_has_something_to_do(steps: list[tuple[float, Seen]], due: float) -> None:
    story = Story()
    for now, what in steps:
        story.see(now, what)
    assert story.triage.next_due(workers_left=True) == due


def test_an_unknown_end_is_an_exit_in_every_mode() -> None:
    for mode in Mode:
        unknown = replace(ended(RANK, "SIGKILL"), status=ExitStatus())
        assert "open:exited" in Story(mode).see(1.0, unknown)
