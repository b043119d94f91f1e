"""What the watch makes of heartbeats that a test invents, by a clock that it sets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.handler import hang_detector, incident_run
from sglang_crashkit.handler.collectors.received import Received
from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.hang_detector import HangDetector, has_compiler
from sglang_crashkit.handler.incident_run import Awaited, Collector, IncidentRun, Moment
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.handler.session import Session, Subject
from sglang_crashkit.handler.triage import Seen
from sglang_crashkit.judge import verdict as verdict  # once, and not in each child that judges
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.forked import call_within
from sglang_crashkit.memory.heartbeat import BEAT_SECS
from sglang_crashkit.model.incident import EvidenceKind
from sglang_crashkit.model.sample import Sample, Thread
from sglang_crashkit.protocol import Mailbox
from sglang_crashkit.settings import Settings
from sglang_crashkit.sources.incident import frames_in
from unit.support.beating import EXTEND, ROOT, Beating
from unit.support.waiting import LONG, child

#: Where a rank is in a batch, where one is that compiles, and where those are that wait for it.
BATCH = "apply (sglang/srt/layers/quantization/unquant.py:1)"
COMPILES, WAITS = "compile (triton/compiler/compiler.py:1)", "all_reduce (torch/distributed/distributed_c10d.py:1)"


class Core(Awaited):
    """A GPU core that a rank writes as long as its world says so."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def is_done(self) -> bool:
        return not self._world.writes_core

    def pids_of(self, kind: EvidenceKind) -> Set[int]:
        return {10} if kind == "cuda_core" else frozenset()

    def look(self) -> None:
        pass

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)


def silent_in(run: IncidentRun) -> list[int | None]:
    """Return who is said to be silent, in that order."""
    return [entry.pid for entry in run.incident.timeline if entry.event == "no_progress"]


def hows(run: IncidentRun) -> list[str]:
    return [failure.message.rpartition(" for ")[0] for failure in run.incident.failures]


def progress(run: IncidentRun) -> list[float]:
    """Return how long a hang had taken each time that it was over."""
    return [entry["hung_secs"] for entry in run.incident.timeline if entry.event == "progress_returned"]


class World(Beating):
    """Two schedulers and the watch, which reads what the processes are in; what an incident takes is made up."""

    place: Place
    mailbox: Mailbox

    def __init__(self, hang_secs: float = 5.0) -> None:
        self.states = {ROOT: "S"}
        self.compiling: set[int] = set()
        #: CPU time that the main thread of each process has used, in seconds.
        self.cpu_secs: dict[int, float] = {}
        #: What the processes do, by pid.
        self.doing: dict[int, str] = {}
        #: What happens while a snapshot is taken, after what it sees.
        self.meanwhile: Callable[[], object] = lambda: None
        self.writes_core = False
        self.captured: list[IncidentRun] = []
        super().__init__(is_on=hang_secs > 0)
        settings = Settings.from_environ({"SGLANG_CRASHKIT_HANG_SECS": str(hang_secs)})
        received = Received(self.tree, settings)
        received.heartbeats = self.heartbeats
        collectors = (Collector("stacks", Moment.CAPTURE, self._take),)
        self.session = Session(self.tree, self.mailbox, self.place, settings, received, collectors)
        self.shutdown = self.session.triage.shutdown
        self.said: list[str] = []
        self.watch = HangDetector(self.tree, self.session, settings, self.said.append, lambda: self.now)

    def _take(self, run: IncidentRun, _deadline: float) -> Core | None:
        if run.incident.kind == "hang":
            # The incident knows who is silent before anything else can happen to it.
            assert silent_in(run)
            assert self.session.hang is run
        self.captured.append(run)
        for process in (process for process in self.tree if process.pid in self.states):
            doing = [self.doing[process.pid]] if process.pid in self.doing else []
            report = run.report(process)
            report.doing = report.doing or doing
            thread = Thread("MainThread", process.pid, active=True, owns_gil=False, frames=frames_in(doing))
            its = {"pid": process.pid, "role": process.role, "ranks": process.rank, "threads": (thread,)}
            # They use the CPU all the time.
            secs = 2.0 * len(self.captured)
            report.samples.append(Sample(time=secs, cpu_secs=secs, doing=tuple(doing), **its))
        self.meanwhile()
        return Core(self) if self.writes_core else None

    def close(self) -> None:
        super().close()
        self.session.shortages.close()

    def add(self, pid: int, title: str) -> TrackedProcess:
        self.states[pid] = "S"
        return super().add(pid, title)

    def batch(self, *pids: int, number: int = 100, **fields: Any) -> None:
        self.beat(*pids, batch_at=self.now + 0.001, batches=number, requests=3, **fields)

    def stop(self, *pids: int, state: str = "T") -> None:
        for pid in pids:
            self.states[pid] = state

    def die(self) -> None:
        for process in self.processes:
            process.exited_at = 1.0

    def pass_time(self, secs: float, meanwhile: Callable[[], object] | None = None) -> World:
        self.pass_with(self.watch, secs, meanwhile)
        return self

    def ask_to_end(self) -> None:
        """Send SIGTERM to the server."""
        self.shutdown.draining = True
        self.watch.act_on_time()

    def crash(self) -> None:
        """Have a rank raise, which is an incident of its own."""
        (rank, *_) = self.processes
        self.session.take(Seen("exception", rank.pid, rank.role), Subject(rank, 1.0))

    @property
    def hangs(self) -> list[IncidentRun]:
        return [run for run in dict.fromkeys(self.captured) if run.incident.kind == "hang"]

    @property
    def withdrawn(self) -> list[IncidentRun]:
        return [run for run in self.hangs if not run.folder.path.exists()]

    def captures(self, run: IncidentRun) -> int:
        return sum(one is run for one in self.captured)


@pytest.fixture(autouse=True)
def faked(monkeypatch: pytest.MonkeyPatch, short_folder: Path) -> Iterator[None]:
    World.place = Place(short_folder / "host", short_folder / "spool", short_folder)

    def last() -> World:
        return World.made[-1]

    # A busy machine takes longer to judge than a server is kept waiting for it.
    monkeypatch.setattr(
        incident_run, "call_within", lambda _secs, work, *more, **keep: call_within(LONG, work, *more, **keep)
    )
    monkeypatch.setattr(hang_detector, "has_compiler", lambda pid: pid in last().compiling)
    monkeypatch.setattr(TrackedProcess, "state", property(lambda self: last().states.get(self.pid, "S")))
    monkeypatch.setattr(procfs, "main_thread_cpu_secs", lambda pid: last().cpu_secs.get(pid, 0.0))
    with Mailbox.bind(short_folder / "sock") as receiver:
        World.mailbox = Mailbox(receiver)
        yield


@pytest.fixture
def world() -> World:
    """A world whose schedulers are followed."""
    return World().follow()


# -- a server that is asked to end


def asked_to_end(hang_secs: float = 60.0, silent_secs: float = 5.5) -> World:
    """Return a world whose schedulers are silent for so long when the server is asked to end."""
    world = World(hang_secs).follow()
    world.pass_time(silent_secs)
    world.ask_to_end()
    return world


@pytest.mark.parametrize("is_current", [True, False])
def test_where_they_go_on_there_was_none(is_current: bool) -> None:
    world = asked_to_end()
    if not is_current:
        world.crash()
    world.pass_time(5, world.beat)
    assert world.session.hang is None
    assert world.withdrawn == (world.hangs if is_current else [])


@pytest.mark.parametrize("silent_secs", [0.0, 1.0, 2.9])
@pytest.mark.parametrize("number", [1, 100])
def test_a_rank_that_falls_silent_around_sigterm_is_a_hang_that_is_whole_in_time(
    silent_secs: float, number: int
) -> None:
    world = World(60.0).follow()
    world.batch(number=number)
    world.pass_time(silent_secs)
    world.ask_to_end()
    world.pass_time(3.0 - silent_secs - 0.1)
    assert world.hangs == []
    world.pass_time(0.7)
    (run,) = world.hangs
    assert (silent_in(run), run.incident.trigger.event) == ([10, 11], "silent_at_sigterm")
    world.pass_time(2.1)
    assert (world.captures(run), run.finished) == (3, True)
    # It is the same one after the usual time.
    world.pass_time(100)
    assert world.hangs == [run]


@pytest.mark.parametrize(
    ("facts", "secs"),
    [
        ({"compiling": {11}, "batch": {}}, 50),
        # An update of the weights, and a long prompt.
        ({"who": (11,), "beat": {"is_busy": True}}, 29),
        ({"batch": {"mode": EXTEND, "tokens": 163_840}}, 29),
    ],
)
def test_a_rank_at_work_at_sigterm_is_no_hang(facts: dict[str, Any], secs: float) -> None:
    world = World(60.0).follow()
    set_up(draining=True, **facts)(world)
    world.ask_to_end()
    world.pass_time(secs)
    assert world.hangs == []


def test_one_that_the_stacks_show_at_work_at_sigterm_is_withdrawn() -> None:
    world = asked_to_end()
    (run,) = world.hangs
    compile_something(world)
    world.pass_time(2.1)
    assert (world.withdrawn, run.finished) == ([run], False)
    # It is looked at again.
    world.pass_time(6)
    assert len(world.hangs) == 2


@pytest.mark.parametrize("is_followed", [True, False])
def test_one_held_or_followed_by_nobody_does_not_hang(is_followed: bool) -> None:
    world = World(60.0)
    if is_followed:
        world.follow().stop(11, state="t")
    world.pass_time(10)
    assert bool(world.heartbeats.silent(0.0)) is is_followed
    world.ask_to_end()
    world.pass_time(10)
    assert world.hangs == []


# -- a hang is noticed, once


def test_a_silent_server_is_one_hang_with_three_snapshots(world: World) -> None:
    world.stop(11)
    world.pass_time(4.5)
    assert world.hangs == []
    world.pass_time(1.6)
    (run,) = world.hangs
    assert silent_in(run) == [10, 11]
    assert world.session.hang is run
    world.pass_time(4.5)
    assert world.captures(run) == 3
    assert run.finished
    world.pass_time(10_000)
    assert len(world.hangs) == 1
    assert world.captures(run) == 3
    assert run.incident.trigger.event == "no_progress"
    assert world.said == [*run.conclusion.lines, f"{run.incident.verdict.text} Incident: {run.folder.path}"]
    assert len(world.said) <= 6


def test_the_one_that_was_silent_first_is_the_trigger(world: World) -> None:
    world.now += 0.2
    world.beat(10)
    world.pass_time(6.5)
    assert [run.incident.trigger.pid for run in world.hangs] == [11]


def test_progress_is_noted_when_all_go_on(world: World) -> None:
    world.pass_time(20)
    (first,) = world.hangs
    world.pass_time(5, lambda: world.beat(10))
    assert progress(first) == []
    world.pass_time(2, world.beat)
    (hung_secs,) = progress(first)
    assert 24 < hung_secs < 28
    # It stays an incident, and tells of the progress.
    assert (world.session.hang, world.withdrawn) == (None, [])
    assert "Progress returned after " in (first.folder.path / "summary.md").read_text()
    world.pass_time(20)
    assert [progress(run) for run in world.hangs] == [progress(first), []]
    assert silent_in(world.hangs[1]) == [10, 11]


def test_whoever_falls_silent_later_joins_the_hang(world: World) -> None:
    world.pass_time(7, lambda: world.beat(10))
    assert silent_in(world.hangs[0]) == [11]
    world.pass_time(7)
    assert [silent_in(run) for run in world.hangs] == [[11, 10]]


def test_snapshots_end_with_the_incident(world: World) -> None:
    world.pass_time(6.1)
    world.hangs[0].finished = True
    world.pass_time(10)
    assert world.captures(world.hangs[0]) == 1


def test_no_snapshot_is_taken_while_a_gpu_core_is_written(world: World) -> None:
    world.writes_core = True
    world.pass_time(16)
    (run,) = world.hangs
    assert world.captures(run) == 1
    world.writes_core = False
    run.look()
    world.pass_time(10)
    assert world.captures(run) == 3


def test_a_hang_whose_schedulers_all_died_is_over(world: World) -> None:
    world.pass_time(7)
    world.die()
    world.pass_time(2)
    assert world.session.hang is None
    assert progress(world.hangs[0]) == []
    assert world.watch.act_on_time() == float("inf")


# -- what is no hang


def test_it_can_be_switched_off() -> None:
    world = World(hang_secs=0.0).follow()
    assert world.watch.act_on_time() == float("inf")


def test_a_limit_below_an_idle_servers_rounds_is_raised() -> None:
    world = World(hang_secs=0.1).follow()
    since = world.now

    def sleep_on_idle() -> None:
        if world.now - since - int(world.now - since) < 0.2:
            world.beat()

    world.pass_time(60, sleep_on_idle)
    assert world.hangs == []
    world.pass_time(3)
    assert len(world.hangs) == 1


def set_up(**facts: Any) -> Callable[[World], None]:
    """Return what makes a world: states by pid, a batch, or what the heartbeats of some say."""

    def make(world: World) -> None:
        for pid, state in facts.get("states", {}).items():
            world.states[pid] = state
        world.beat(*facts.get("who", ()), **facts.get("beat", {}))
        if "batch" in facts:
            world.batch(*facts.get("who", ()), **facts["batch"])
        world.compiling = facts.get("compiling", set())
        world.shutdown.expected |= facts.get("expected", set())
        world.shutdown.gone_at = facts.get("gone_at")
        world.shutdown.draining = facts.get("draining", False)

    return make


@pytest.mark.parametrize(
    ("make", "no_hang_for", "hang_by"),
    [
        (set_up(), 4.5, 6.5),
        (set_up(batch={}), 4.5, 6.5),
        (set_up(states={10: "T", 11: "T"}), 4.5, 6.5),
        # The first batches may take three times as long.
        (set_up(batch={"number": 1}), 14.5, 17.5),
        (set_up(batch={"number": 8}), 14.5, 17.5),
        # One that waits for its compiler twenty times, one that has a control request ten times.
        (set_up(batch={}, compiling={11}), 98, 102),
        (set_up(who=(11,), beat={"is_busy": True}), 48, 52),
        # Whatever a stopped one had to do, it does not do it.
        (set_up(who=(11,), beat={"is_busy": True}, states={11: "T"}), 4.5, 6.5),
        (set_up(who=(11,), beat={"batch_at": 2000.0, "batches": 1}, states={11: "T"}), 4.5, 6.5),
        # A prompt that is taken in at once has the more time the longer it is.
        (set_up(batch={"mode": EXTEND, "tokens": 16_384}), 4, 7),
        (set_up(batch={"mode": EXTEND, "tokens": 32_767}), 4, 7),
        (set_up(batch={"mode": EXTEND, "tokens": 32_768}), 9, 12),
        (set_up(batch={"mode": EXTEND, "tokens": 1_000_000}), 99, 102),
        # Not even after hours: the server is stopped as a whole, held by a debugger, or being ended.
        (set_up(states={ROOT: "T", 10: "T", 11: "T"}), 600, None),
        (set_up(states={10: "t"}), 600, None),
        (set_up(states={11: "t"}), 600, None),
        (set_up(gone_at=1000.0), 600, None),
        (set_up(expected={ROOT}), 600, None),
        (set_up(expected={11}), 600, None),
    ],
)
def test_so_long_a_silence_is_no_hang(
    world: World, make: Callable[[World], None], no_hang_for: float, hang_by: float | None
) -> None:
    make(world)
    world.pass_time(no_hang_for)
    assert world.hangs == []
    if hang_by is not None:
        world.pass_time(hang_by - no_hang_for)
        assert [silent_in(run) for run in world.hangs] == [[10, 11]]


@pytest.mark.parametrize(("hang_secs", "silent_secs", "hangs"), [(60, 2.9, 0), (60, 3.1, 1), (2, 1.9, 0), (2, 2.1, 1)])
def test_so_long_a_silence_is_a_hang_at_the_end(hang_secs: float, silent_secs: float, hangs: int) -> None:
    assert len(asked_to_end(hang_secs, silent_secs).hangs) == hangs


@pytest.mark.parametrize(
    ("followed", "batches", "off", "beating", "silent"),
    [
        # One that goes round does not hang with the other.
        ((10, 11), 100, (), (10,), [11]),
        # A heartbeat that was switched off neither hangs nor excuses the others.
        ((10, 11), 100, (11,), (10,), None),
        ((10, 11), 100, (11,), (), [10]),
        # All of a server's schedulers are ready before it takes in a request.
        ((10,), 9, (), (), [10]),
        ((10,), 0, (), (), None),
        # One that cannot be followed excuses nobody.
        ((10, -11), 0, (), (), [10]),
        ((10, -11), 1, (), (), [10]),
        ((10, 11), 0, (), (), [10, 11]),
    ],
)
def test_who_hangs(
    followed: tuple[int, ...], batches: int, off: tuple[int, ...], beating: tuple[int, ...], silent: list[int] | None
) -> None:
    world = World()
    world.beat(batches=batches)
    for process in world.processes:
        if process.pid in followed or -process.pid in followed:
            world.heartbeats.follow(process, world.writers[process.pid].fd if process.pid in followed else 0)
    for pid in off:
        world.beat(pid, is_off=True)
    world.pass_time(6.5, (lambda: world.beat(*beating)) if beating else None)
    assert [silent_in(run) for run in world.hangs] == ([] if silent is None else [silent])


@given(st.lists(st.floats(0.001, 900.0), min_size=1, max_size=60), st.sampled_from([2.0, 5.0, 60.0]))
def test_a_server_that_beats_between_looks_never_hangs(gaps: list[float], hang_secs: float) -> None:
    world = World(hang_secs).follow()
    for gap in gaps:
        world.now += gap
        world.beat()
        world.watch.act_on_time()
    assert world.hangs == []


@pytest.mark.parametrize("is_loop", [False, True], ids=["schedulers", "loop"])
@given(gaps=st.lists(st.floats(0.001, 900.0), min_size=1, max_size=60), hang_secs=st.sampled_from([2.0, 5.0, 60.0]))
def test_only_time_that_was_seen_to_pass_counts(is_loop: bool, gaps: list[float], hang_secs: float) -> None:
    # A machine that was suspended, a handler that got no CPU: it looks after an hour, and saw nothing of it.
    world = World(hang_secs)
    if is_loop:
        world.processes.append(world.tree.root)
        world.beat()
    world.follow()
    interval = min(2.0, hang_secs / 10)
    world.watch.act_on_time()
    for gap in gaps:
        world.now += gap
        if is_loop:
            world.beat(10, 11)
        world.watch.act_on_time()
    assert world.hangs == [] or sum(min(gap, 2 * interval) for gap in gaps) >= hang_secs - 2 * interval


def test_a_heartbeat_switched_off_in_a_hang_ends_it(world: World) -> None:
    world.pass_time(12)
    world.beat(11, is_off=True)
    world.pass_time(5, lambda: world.beat(10))
    assert world.session.hang is None
    assert len(progress(world.hangs[0])) == 1


# -- busy


def compile_something(world: World) -> None:
    """Let one scheduler be at work, and the other wait for it."""
    world.doing = {10: WAITS, 11: COMPILES}


def test_what_is_busy_for_too_long_is_another_incident(world: World) -> None:
    compile_something(world)
    world.pass_time(15)
    (run,) = world.hangs
    world.pass_time(84)
    assert world.hangs == [run]
    world.pass_time(3)
    assert [one.incident.trigger.event for one in world.hangs] == ["no_progress", "busy_too_long"]
    assert world.withdrawn == [run]
    # By now it is a hang, which stays.
    world.pass_time(200)
    world.pass_time(5, world.beat)
    assert (len(world.hangs), world.withdrawn) == (2, [run])


def go_on_in(world: World, snapshot: int) -> None:
    """Have both go on amid a snapshot, which sees them in a batch, and from then on."""

    def meanwhile() -> None:
        if world.captures(world.hangs[0]) == snapshot - 1:
            world.doing = dict.fromkeys((10, 11), BATCH)
        elif world.captures(world.hangs[0]) == snapshot:
            world.beat()

    world.meanwhile = meanwhile


@pytest.mark.parametrize("snapshot", [2, 3])
def test_what_compiled_until_a_snapshot_was_taken_is_withdrawn(world: World, snapshot: int) -> None:
    compile_something(world)
    go_on_in(world, snapshot)
    world.pass_time(4.9 + 2 * snapshot)
    (run,) = world.hangs
    # It sees more than they did when they were silent.
    assert (world.captures(run), run.finished) == (snapshot, False)
    world.pass_time(5, world.beat)
    assert (world.withdrawn, world.session.hang) == ([run], None)
    assert all(len(report.samples) == snapshot - 1 for report in run.incident.processes if report.is_rank)


def test_one_that_goes_on_for_a_moment_amid_the_last_snapshot_hangs(world: World) -> None:
    compile_something(world)
    go_on_in(world, 3)
    world.pass_time(20)
    (run,) = world.hangs
    assert (run.finished, run.incident.verdict.kind, world.session.hang) == (True, "hang", run)
    assert all(len(report.samples) == 3 for report in run.incident.processes if report.is_rank)


#: Starts a program below itself, which ends with it.
PARENT = """
import ctypes, subprocess
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
# Popen returns once the child runs its program, by its own name.
process = subprocess.Popen([sys.argv[1], "100"], preexec_fn=die_with_parent)
ready(); pause()
"""


@pytest.mark.parametrize(("name", "is_one"), [("nvcc", True), ("cc1plus", True), ("sleep", False), ("nvccx", False)])
def test_a_compiler_is_known_by_its_name(tmp_path: Path, name: str, is_one: bool) -> None:
    shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    with child(PARENT, str(tmp_path / name)) as process:
        assert has_compiler(process.pid) is is_one
    assert not has_compiler(process.pid)


# -- processes beside the schedulers


@pytest.fixture
def loading() -> World:
    """A world in which the second scheduler has no heartbeat yet, beside a detokenizer."""
    world = World().follow(10)
    world.add(20, "sglang::detokenizer")
    return world


@pytest.fixture
def served() -> World:
    """A world whose schedulers are followed, and beat, beside a detokenizer."""
    world = World().follow()
    world.add(20, "sglang::detokenizer")
    return world


# -- those of them that beat

DETOKENIZER, WORKER = 20, 21


@pytest.fixture
def whole(served: World) -> World:
    """A world in which the loops of the main process and of a tokenizer worker beat, and the detokenizer, too."""
    served.processes += [served.tree.root, served.add(WORKER, "sglang::tokenizer_worker:1")]
    served.processes.append(served.tree.get(DETOKENIZER))
    served.beat(ROOT, WORKER)
    served.beat(DETOKENIZER, is_waiting=True)
    return served.follow()


def live(world: World, *quiet: int, cpu: float = 0.0) -> Callable[[], None]:
    """Return what lets all go on but these; the detokenizer waits, and `cpu` is its share of a CPU."""

    def act() -> None:
        if beating := {10, 11, ROOT, WORKER}.difference(quiet):
            world.beat(*beating)
        world.cpu_secs[DETOKENIZER] = cpu * world.now

    return act


@pytest.mark.parametrize("loop", [ROOT, WORKER], ids=["main process", "tokenizer worker"])
def test_a_loop_that_does_not_come_round_hangs_until_then(whole: World, loop: int) -> None:
    whole.pass_time(20, live(whole))
    whole.pass_time(4, live(whole, loop))
    assert whole.hangs == []
    whole.pass_time(10, live(whole, loop))
    (run,) = whole.hangs
    assert (silent_in(run), hows(run)) == ([loop], ["did not come back to its event loop"])
    assert (whole.captures(run), progress(run)) == (3, [])
    whole.pass_time(3, live(whole))
    assert len(progress(run)) == 1
    assert whole.session.hang is None


@pytest.mark.parametrize("root_hangs", [False, True])
def test_a_loop_between_two_heartbeats_does_not_hang_too(root_hangs: bool) -> None:
    world = World(hang_secs=2.0)
    world.processes.append(world.tree.root)
    world.beat()
    world.follow().pass_time(10, world.beat)
    due = world.now + BEAT_SECS

    def act() -> None:
        nonlocal due
        world.beat(11)
        if not root_hangs and world.now >= due:
            world.beat(ROOT)
            # It has something else to do, too.
            due = world.now + 1.4 * BEAT_SECS

    world.pass_time(8, act)
    assert [silent_in(run) for run in world.hangs] == [[10, ROOT] if root_hangs else [10]]


@pytest.mark.parametrize(
    ("fields", "state", "cpu", "how"),
    [
        # Idle, but for a signal now and then; or given back to its loop as the server ends.
        ({"is_waiting": True}, "S", 0.0, None),
        ({"is_waiting": True}, "S", 0.01, None),
        ({"is_off": True}, "R", 1.0, None),
        # At a message, whatever it uses: it computes, or waits for a lock.
        ({}, "R", 1.0, "worked at one message"),
        ({}, "S", 0.0, "worked at one message"),
        ({}, "D", 0.0, "worked at one message"),
        # Behind a message.
        ({"is_waiting": True}, "R", 0.9, "did not take the next message"),
        ({"is_waiting": True}, "R", 0.1, "did not take the next message"),
        ({"is_waiting": True}, "D", 0.0, "did not take the next message"),
        ({"is_waiting": True}, "T", 0.0, "was stopped"),
        ({}, "T", 0.0, "was stopped"),
        ({}, "t", 0.0, None),
    ],
)
def test_what_a_detokenizer_hangs_in(
    whole: World, fields: dict[str, bool], state: str, cpu: float, how: str | None
) -> None:
    whole.beat(DETOKENIZER, **fields)
    whole.states[DETOKENIZER] = state
    whole.pass_time(4, live(whole, cpu=cpu))
    assert whole.hangs == []
    whole.pass_time(60, live(whole, cpu=cpu))
    assert [(silent_in(run), hows(run)) for run in whole.hangs] == ([] if how is None else [([DETOKENIZER], [how])])


def test_descriptors_passed_on_by_ended_processes_are_closed(whole: World) -> None:
    whole.tree.root.exited_at = 1.0
    whole.pass_time(60, live(whole, ROOT))
    assert (whole.hangs, ROOT in whole.heartbeats.others) == ([], False)


# -- stories, of which only who hangs is told

Story = list[float | Callable[[World], object]]


def do(name: str, *arguments: Any, **options: Any) -> Callable[[World], object]:
    return lambda world: getattr(world, name)(*arguments, **options)


def beats(secs: float, *pids: int, **fields: Any) -> Callable[[World], object]:
    """Let time pass in which some go round, by default all."""
    return lambda world: world.pass_time(secs, lambda: world.beat(*pids, **fields))


def lives(secs: float, *quiet: int) -> Callable[[World], object]:
    """Let time pass in which all go on but these."""
    return lambda world: world.pass_time(secs, live(world, *quiet))


def compiles(*pids: int) -> Callable[[World], object]:
    return lambda world: setattr(world, "compiling", set(pids))


def no_hang(world: World) -> None:
    assert world.hangs == []


def takes_message_after_message(cpu: float) -> Callable[[World], object]:
    def work(world: World) -> None:
        live(world, cpu=cpu)()
        world.beat(DETOKENIZER, is_waiting=int(world.now) % 2 == 0)

    return lambda world: world.pass_time(600, lambda: work(world))


ALL = (ROOT, 10, 11)
BUSY = do("beat", 10, 11, is_busy=True)
STORIES: dict[str, tuple[str, Story, list[list[int]]]] = {
    **{
        f"what was excused (state {state}) does not count later": (
            "world",
            [do("stop", *ALL, state=state), 600, do("stop", *ALL, state="S"), 3, no_hang, 3.5],
            [[10, 11]],
        )
        for state in "tT"
    },
    "what was noticed before it is asked to end is not another one": (
        "world",
        [7, do("ask_to_end"), 4],
        [[10, 11]],
    ),
    "an incident that cannot begin is tried again": (
        "world",
        [do("crash"), 30, no_hang, lambda world: world.session.finish_observed(), 11],
        [[10, 11]],
    ),
    "one sign is no progress": ("world", [7, do("beat"), 7], [[10, 11]]),
    "a paused server goes round": ("world", [beats(600, paused=True)], []),
    "one that announces its heartbeat anew does so": ("world", [do("follow"), beats(600, paused=True)], []),
    "between two compilers there may be none": (
        "world",
        [do("batch"), compiles(10), 20, compiles(), 4, no_hang, 3],
        [[10, 11]],
    ),
    "a long prompt advances in chunks": (
        "world",
        [step for chunk in range(50) for step in (do("batch", number=1 + chunk), 4.0)],
        [],
    ),
    # Of a detokenizer without a heartbeat.
    "who has more time does not hang with one stopped": ("served", [BUSY, 1, do("stop", 20), 8], [[20]]),
    "who has as much does": ("served", [do("beat", 10, 11), 1, do("stop", 20), 8], [[10, 11, 20]]),
    **{
        f"one is stopped {secs} s after a far longer control request began": (
            "served",
            [BUSY, secs, do("stop", 20), 4, no_hang, 2.5],
            [[20]],
        )
        for secs in (8, 30)
    },
    "it is held by a debugger": ("served", [do("stop", 20, state="t"), beats(20, 10, 11)], []),
    "it is in the kernel": ("served", [do("stop", 20, state="D"), beats(20, 10, 11)], []),
    "so is a rank": ("served", [do("stop", 20), do("stop", 10, state="t"), beats(20, 10, 11)], []),
    "the server is stopped as a whole": ("served", [do("stop", 20, *ALL), 20], []),
    "it is stopped with a rank": ("served", [do("stop", 20, 10), beats(20, 11)], [[10, 20]]),
    "a server that never ends being loaded": (
        "loading",
        [do("stop", 20), do("beat", 10, batches=0), beats(20, 10, batches=0)],
        [],
    ),
    # Of one with a heartbeat, and of loops.
    **{
        f"it takes message after message, with {cpu} of a CPU": ("whole", [takes_message_after_message(cpu)], [])
        for cpu in (0.0, 1.0)
    },
    "a debugger holds the main process": ("whole", [do("stop", ROOT, state="t"), lives(600, ROOT)], []),
    "it is asked to end": ("whole", [lambda world: world.shutdown.expected.add(ROOT), lives(600, ROOT)], []),
    "all are stopped": ("whole", [do("stop", *ALL, DETOKENIZER), lives(600, *ALL)], []),
    "its loop has ended": ("whole", [do("beat", ROOT, is_off=True), lives(600, ROOT)], []),
    # The loop waits for the schedulers to end, which may take long.
    "the schedulers leave": ("whole", [do("beat", 10, 11, is_off=True), lives(600, *ALL)], []),
    # The schedulers' compilers are among its descendants.
    "a loop hangs while a scheduler compiles": ("whole", [compiles(ROOT), lives(6.5, ROOT)], [[ROOT]]),
}


@pytest.mark.parametrize(("kind", "steps", "hung"), STORIES.values(), ids=[name.replace(" ", "-") for name in STORIES])
def test_a_story(request: pytest.FixtureRequest, kind: str, steps: Story, hung: list[list[int]]) -> None:
    world = request.getfixturevalue(kind)
    for step in steps:
        if callable(step):
            step(world)
        else:
            world.pass_time(step)
    assert [sorted(silent_in(run)) for run in world.hangs] == [sorted(pids) for pids in hung]
