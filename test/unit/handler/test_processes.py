from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.handler import processes
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.kernel import cgroup, procfs
from sglang_crashkit.kernel.guarded_read import GuardedReader, guard_reads
from unit.support.launching import STARTS, Case, handling, watched
from unit.support.locked_memory import locked_process
from unit.support.targets import INSTALL
from unit.support.waiting import LONG, child, wait_until

#: A program that only uses an engine, and runs a whole server as a subprocess.
USES = (
    STARTS
    + """
code = "import ctypes, os, setproctitle; os.fork() or "
ready(start(code + "(ctypes.CDLL(None).prctl(1, 9), setproctitle.setproctitle('sglang::scheduler_TP0'))"))
pause()
"""
)


def test_another_server_that_a_process_started_is_not_this_servers() -> None:
    with child(USES) as process:
        tree, other = ProcessTree(process.pid), int(process.first_line)
        wait_until(lambda: tree.refresh() == [] and other not in {p.pid for p in tree}, "it is known for a server")
        rank = next(pid for pid in procfs.TreeScanner(other).scan() - {other})
        assert {process.pid for process in tree} == {process.pid}
        found = tree.get(rank)
        assert (found.role, found.matters, tree.started_by_own(found)) == ("helper", False, False)


@pytest.mark.parametrize("start_ticks", [1, 4711])
def test_nobody_is_registered_by_the_pid_of_an_earlier_process(launching: Case, start_ticks: int) -> None:
    tree = launching.handler.tree
    tree.register(launching.starting, start_ticks)
    tree.register(4194305, 0)
    assert not tree.get(launching.starting).matters


@pytest.fixture
def oom_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What the memory cgroup of all processes counts."""
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 3\n")
    find = lambda pid: cgroup.OomCounter(events, int(events.read_text().split()[1]))  # noqa: E731
    monkeypatch.setattr(cgroup, "find_counter", find)
    return events


def test_an_oom_kill_of_long_ago_is_not_counted(
    oom_kills: Path, launching: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = launching.handler.tree
    launching.end(launching.starting)
    counter = tree.root.oom_counter
    oom_kills.write_text("oom_kill 4\n")
    tree.refresh()
    assert tree.root.oom_counter is counter, "a kill of this moment is counted"
    monkeypatch.setattr(processes, "OOM_AGE_SECS", 0.0)
    tree.refresh()
    assert tree.root.oom_counter.grown_by() == 1, "so is one of half a minute ago"
    tree.refresh()
    assert tree.root.oom_counter.grown_by() == 0


def test_the_oom_kill_of_a_neighbour_in_the_container_is_no_processs_own(oom_kills: Path, launching: Case) -> None:
    tree, pid = launching.handler.tree, launching.starting
    oom_kills.write_text("oom_kill 4\n")
    tree.refresh()
    counters = [tree.get(one).oom_counter for one in (tree.root.pid, pid)]
    assert [counter.grown_by() for counter in counters] == [0, 0]
    # The next one is that of the process that dies then.
    oom_kills.write_text("oom_kill 5\n")
    launching.end(pid)
    tree.refresh()
    assert tree.get(pid).oom_counter.grown_by() == 1


#: In a PID namespace of its own, where it says which process id is the next one.
RECYCLED = """
import os, signal, time
from pathlib import Path
from sglang_crashkit.kernel import procfs
from sglang_crashkit.handler.processes import ProcessTree

def start():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid

def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

def start_as(pid):
    os.waitpid(pid, 0)
    # The kernel tells start times in clock ticks.
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    assert start() == pid

pid = start()
tree = ProcessTree(os.getpid())
# A handler leaves itself and what it runs out; here it is the server, too.
tree.scanner = procfs.TreeScanner(os.getpid())
(first,) = tree.refresh()

# One that was let go of: its successor is a new process.
end(pid)
tree.forget(first)
assert tree.refresh() == []
start_as(pid)
(second,) = tree.refresh()
assert (second.pid, second.exited_at) == (pid, None)
assert second.handle.start_ticks > first.handle.start_ticks

# One that an incident still tells of: what is done to it never reaches its successor, which is found after that.
end(pid)
assert second.handle.has_exited()
second.exited_at = time.time()
start_as(pid)
assert tree.refresh() == []
assert second not in tree.alive()
try:
    second.handle.send_signal(signal.SIGKILL)
    raise AssertionError("the successor got a signal")
except ProcessLookupError:
    pass
tree.forget_dead()
(third,) = tree.refresh()
assert third.pid == pid
assert not third.handle.has_exited()
end(pid)
print("all of it")
"""


def test_a_process_id_that_is_given_again_is_another_process() -> None:
    container = ["unshare", "-Urpf", "--mount-proc", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, timeout=LONG).returncode != 0:
        pytest.skip("a process id cannot be chosen: no PID namespace is to be had")
    done = subprocess.run([*container, sys.executable, "-c", RECYCLED], capture_output=True, text=True, timeout=LONG)
    assert done.stdout == "all of it\n", done.stderr


def test_a_process_that_cannot_be_read_holds_nothing_up(tmp_path: Path) -> None:
    guard_reads(GuardedReader())
    try:
        with locked_process(tmp_path, title="sglang::scheduler_TP1") as process:
            before = time.monotonic()
            tree = ProcessTree(process.pid)
            for _scan in range(10):
                tree.refresh()
            assert time.monotonic() - before < LONG / 2
            found = tree.root
            assert (found.title, found.is_python, found.is_nameless) == ("sglang::schedul", True, True)
            # Who dies meanwhile is noticed nonetheless.
            process.kill()
            assert found.handle.has_exited(LONG)
    finally:
        guard_reads(None)


@pytest.fixture
def case(launching: Case) -> Case:
    titled, starting = map(launching.handler.tree.get, (launching.titled, launching.starting))
    assert (titled.title, starting.role) == ("sglang::scheduler_TP0", "starting")
    launching.kill(launching.starting)
    return launching


@pytest.fixture(params=["seen", "not seen", "seen before it was executed"])
def early_case(request: pytest.FixtureRequest, tmp_path: Path, short_folder: Path) -> Iterator[Case]:
    """The second rank was dead when the handler looked for the first time, before or after it heard of the failure.

    Or it had not replaced the launcher's program by its own then.
    """
    with watched(tmp_path, short_folder) as case:
        tree = case.handler.tree
        if request.param == "seen before it was executed":
            case.handler.look()
            tree.get(case.starting).title = tree.root.title
        os.kill(case.starting, signal.SIGKILL)
        wait_until(lambda: not procfs.read_cmdline(case.starting), "the rank is dead")
        if request.param != "not seen":
            case.handler.look()
            wait_until(tree.get(case.starting).handle.has_exited, "it has ended")
            case.handler.session.collect_exits()
        yield case


def test_a_rank_that_died_early_gets_the_servers_word(case: Case) -> None:
    titles = case.fail({str(case.starting): "Rank 1 scheduler", "1": "somebody else's"})
    assert titles[str(case.starting)] == "Rank 1 scheduler"
    verdict = case.verdict()
    assert (verdict.first_failure.pid, verdict.first_failure.title) == (case.starting, "Rank 1 scheduler")
    assert (verdict.kind, verdict.level) == ("signal", "established")
    assert "Rank 1 scheduler (pid" in verdict.text


def test_so_does_one_that_was_dead_when_first_seen(early_case: Case) -> None:
    pid = early_case.starting
    assert early_case.fail({str(pid): "Rank 1 scheduler"})[str(pid)] == "Rank 1 scheduler"
    verdict = early_case.verdict()
    assert (verdict.first_failure.pid, verdict.first_failure.title) == (pid, "Rank 1 scheduler")
    assert (verdict.kind, verdict.level) == ("signal", "established")


def test_the_dead_at_first_sight_did_not_fail_before_others(early_case: Case) -> None:
    early_case.fail({str(early_case.titled): "Rank 0 scheduler"})
    assert early_case.verdict().first_failure is None


#: No process has it: the kernel gives pids up to 4194304 (proc_sys_kernel(5), pid_max).
REAPED = 5_000_000


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_rank_reaped_unseen_is_told_by_the_server(launching: Case, is_begun: bool) -> None:
    if is_begun:
        launching.kill(launching.titled)
    titles = launching.fail({str(REAPED): "Rank 1 scheduler"}, exit_codes={str(REAPED): -signal.SIGKILL})
    assert titles[str(REAPED)] == "Rank 1 scheduler"
    verdict = launching.verdict()
    # The others were alive when they were seen, and all are started in one moment.
    level = "supported" if is_begun else "established"
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (REAPED, "signal", level)
    assert f"Rank 1 scheduler (pid {REAPED}) was killed by SIGKILL" in verdict.text


def kill_as(case: Case, title: str) -> None:
    """Kill the rank that starts, known by another title by then."""
    starting = case.handler.tree.get(case.starting)
    starting.title = title
    case.end(case.starting)
    case.handler.session.take_exit(starting)


def test_a_rank_that_died_as_it_ran_its_program_is_told_by_the_server(launching: Case) -> None:
    # On a busy machine the command line of neither is there in time, and only that of the one that lives is, later.
    root = launching.handler.tree.root
    title, root.title = root.title, "python"
    kill_as(launching, "python")
    root.title = title
    launching.fail({str(launching.starting): "Rank 1 scheduler"}, exit_codes={str(launching.starting): -9})
    verdict = launching.verdict()
    assert (verdict.first_failure.pid, verdict.kind, verdict.level) == (launching.starting, "signal", "established")


@pytest.mark.parametrize("of", ["a rank", "a server that is ready", "a server that starts"])
def test_the_end_of_a_helper_is_no_first_failure(case: Case, of: str) -> None:
    # A compiler's pool, or another one, fails in a container that is locked, and a rank is killed a moment later.
    tree = case.handler.tree
    helper, rank = tree.get(case.starting), tree.get(case.titled)
    if of == "a rank":
        helper.parent = rank
    elif of == "a server that is ready":
        case.say("environment", ready=True)
    case.kill(case.titled)
    assert case.failures() == [case.starting] * (of == "a server that starts") + [case.titled]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_rank_that_died_before_the_launch_named_it_failed_first(launching: Case, is_last: bool) -> None:
    pid, tree = launching.starting, launching.handler.tree
    kill_as(launching, tree.root.title)
    if not is_last:
        launching.kill(launching.titled)
    launching.say("members", started=[[pid, tree.get(pid).handle.start_ticks]])
    launching.fail({str(pid): "Rank 1 scheduler"}, exit_codes={str(pid): -9})
    verdict = launching.verdict()
    assert (verdict.first_failure.pid, verdict.kind) == (pid, "signal")
    assert sorted(launching.failures()) == sorted([pid] if is_last else [pid, launching.titled])
    ends = [one for one in launching.handler.session.run.incident.timeline if one["event"] == "process_exited"]
    assert len(ends) == len({one["pid"] for one in ends})


@pytest.mark.parametrize(
    ("pid", "codes"),
    [
        *((pid, {pid: 3}) for pid in ("0", "-1", "x", "٣", "9" * 5000, str(10**11))),
        *((str(REAPED), {str(REAPED): code}) for code in (10**400, -(10**9), 256, "-9", True)),
        (str(REAPED), {}),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_pid_or_exit_code_is_passed_over(launching: Case, pid: str, codes: Any) -> None:
    assert pid not in launching.fail({pid: "Rank 1 scheduler"}, exit_codes=codes)


@pytest.mark.parametrize("title", [7, ""])
def test_what_is_no_title_is_passed_over(case: Case, title: Any) -> None:
    assert case.fail({str(case.starting): title, "x": "y"})[str(case.starting)].endswith("-c multiprocessing.spawn")


def test_a_title_is_cut_and_can_be_written(case: Case) -> None:
    assert case.fail({str(case.starting): "\udcff" + "x" * 500})[str(case.starting)] == "\\udcff" + "x" * 119


#: A main process with a rank that the kernel ends with it; it leaves with status 0 when it is told to.
LEAVES = STARTS + "ready(start_titled('sglang::scheduler_TP0')); sys.stdin.readline(); os._exit(0)"


def test_a_server_reaped_meanwhile_has_ended_before_its_rank(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with handling(LEAVES, tmp_path, short_folder) as (handler, process):
        handler.look()
        rank = handler.tree.get(int(process.first_line))
        original = procfs.read_stat

        def read_stat(pid: int) -> procfs.ProcStat | None:
            """Have the server leave between two looks of the handler."""
            if pid == process.pid and process.returncode is None:
                process.communicate(b"\n", timeout=LONG)
                assert rank.handle.has_exited(LONG)
            return original(pid)

        monkeypatch.setattr(procfs, "read_stat", read_stat)
        handler.session.take_exit(rank)
        assert handler.session.run is None
        assert handler.tree.root.exited_at is not None
        assert not list(tmp_path.rglob("incident.json"))


#: A main process with stack hooks and two ranks.
ARMED = INSTALL + STARTS + "ready(' '.join(str(start_titled(f'sglang::scheduler_TP{n}')) for n in '01')); pause()"


@pytest.mark.parametrize("answers", [True, False])
def test_a_parent_says_how_one_ended_that_is_closed(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    asked = []
    # One that is not stuck may be slow.
    monkeypatch.setattr(processes, "ASK_SECS", LONG if answers else 0.3)
    monkeypatch.setattr(processes, "ask_exit", lambda *arguments: asked.append(arguments[2]) or ask_exit(*arguments))
    folder, title = str(short_folder), "sglang::server"
    with handling(ARMED, tmp_path, short_folder, folder, title=title) as (handler, process):
        handler.look()
        ranks = [handler.tree.get(int(pid)) for pid in process.first_line.split()]
        if not answers:
            os.kill(process.pid, signal.SIGSTOP)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
            wait_until(rank.handle.has_exited, "the rank has ended")
        # As of a process of other credentials, or one that is not dumpable: proc_pid_stat(5) has 0 for its status.
        read_stat = procfs.read_stat
        monkeypatch.setattr(procfs, "may_inspect", lambda _pid: False)
        without = lambda pid: (stat := read_stat(pid)) and dataclasses.replace(stat, wait_status=0)  # noqa: E731
        monkeypatch.setattr(procfs, "read_stat", without)
        handler.session.collect_exits()
        incident = handler.session.run.incident
        ends = [incident.process(rank.pid).exit for rank in ranks]
        if answers:
            assert incident.kind == "killed"
            assert [end.signal for end in ends] == ["SIGKILL", "SIGKILL"]
        else:
            assert [end.cause for end in ends] == ["unknown", "unknown"]
            assert "its parent did not answer" in str(ends[0])
        # One that is stuck is waited for once.
        assert len(asked) == (2 if answers else 1)
