"""First, do no harm: the kit never ends, signals or delays what the unpatched release would have let live."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.faults import DP1
from integration.import_hook import write_site
from integration.no_harm.programs import Program
from integration.scenario import (
    EXIT_TIMEOUT_S,
    HANDLER,
    SCHEDULER,
    Sent,
    ask_in_flight,
    generate,
    handlers_of,
    incidents_of,
    left_of,
    members_of,
    serving,
    stopped,
    wait_for_incident,
)
from lanelib.lanes import Lane, ensure_lane
from lanelib.procs import Process, alive, all_processes, read_process, send, title_of, tree_of, wait_gone, watchers_of
from lanelib.servers import command_of, free_port, opener

pytestmark = [pytest.mark.live, pytest.mark.timeout(3000)]

NEWEST = "0.5.23"
#: What a server's end may take at most here, in seconds; who was not ended by `LIVES_S` was let live.
END = {"SGLANG_CRASHKIT_EXIT_SECS": "20"}
LIVES_S = 30.0
#: What one server does to another it does this soon, in seconds; a handler ends what is left after 2 s.
AFTER_S = 15.0
READY_S = 600.0
#: The one place that decides the mode says elastic, in every process of the server, its handler included.
ELASTIC_SITE = """
from sglang_crashkit import policy

policy.mode_of = lambda *args, **kwargs: policy.Mode.ELASTIC
"""


def kinds_of(folder: Path) -> list[str]:
    return [str((one.document or {}).get("kind")) for one in incidents_of(folder)]


def the_incident(folder: Path, timeout_s: float = 60.0) -> dict[str, Any]:
    """Wait until the only incident below `folder` is finished, and return what it says."""
    found = wait_for_incident(folder, timeout_s)
    assert len(incidents_of(folder)) == 1, kinds_of(folder)
    return found.document or {}


# One rank of an elastic server dies.


def test_an_elastic_server_serves_on_when_a_rank_dies(release: str, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    # Elastic expert parallelism itself does not serve on a CPU.
    with serving(release, crash, dp=2, env=END | write_site(tmp_path / "site", ELASTIC_SITE)) as server:
        before = [generate(server.url, data_parallel_rank=rank) for rank in (0, 1)]
        others = [member.process for member in members_of(server) if member.lasts and member.title != DP1]
        handlers, victim = handlers_of(server), server.pid_of(DP1)
        os.kill(victim, signal.SIGKILL)
        assert the_incident(crash)["kind"] == "killed"
        until = time.monotonic() + LIVES_S
        while time.monotonic() < until:
            assert generate(server.url, data_parallel_rank=0) == before[0]
            assert server.popen.poll() is None
            time.sleep(5)
        assert alive(others) == others
        assert handlers_of(server) == handlers
        document = the_incident(crash)
        assert document["verdict"]["first_failure"]["pid"] == victim
        # It is asked to end.
        server.popen.terminate()
        status = server.popen.wait(EXIT_TIMEOUT_S)
        assert left_of([server], others) == []
    # The older releases end themselves with their tree, by SIGKILL.
    assert status == (0 if release == NEWEST else -signal.SIGKILL)
    assert kinds_of(crash) == ["killed"]


# A program with an engine runs a server.


@dataclass(frozen=True)
class Neighbour:
    """A server that a program started."""

    pid: int  # its main process
    url: str  # where it answers
    crash: Path  # its crash folder
    processes: list[Process]  # all its processes when it was ready

    def has_lost(self) -> list[str]:
        """Return which of its processes have ended."""
        living = {process.key for process in alive(self.processes)}
        return [str(process) for process in self.processes if process.key not in living]

    def end(self) -> None:
        """Ask it to end, and wait until it has; then end what is left."""
        for process in self.processes:
            if process.pid == self.pid:
                send(process, signal.SIGTERM)
        assert wait_gone(self.processes, EXIT_TIMEOUT_S) == []


@contextlib.contextmanager
def neighbour_of(program: Program, lane: Lane, folder: Path, *, detached: bool = False) -> Iterator[Neighbour]:
    """Let a program start a server of its own in a new folder.

    `detached`: it is started by way of a process that ends at once, and has a session of its own.
    """
    folder.mkdir()
    port, crash = free_port(), folder / "crash"
    command = [str(word) for word in command_of(lane, port)] + ["--crash-dump-folder", str(crash)]
    command = ["setsid", "--fork", *command] if detached else command
    program.do(f"server = subprocess.Popen({command!r}, stdin=subprocess.DEVNULL, start_new_session=True)")
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    processes: list[Process] = []
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError), opener.open(f"{url}/health", timeout=5):
                break
            assert time.monotonic() < deadline, program.log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        titles = {process.pid: title_of(process.pid) for process in all_processes()}
        pid = next(pid for pid, title in titles.items() if f"--port {port} " in title and "setsid" not in title)
        generate(url)
        processes = [one for one in tree_of(pid) if title_of(one.pid).startswith(("sglang::", str(lane.python)))]
        assert {process.pid for process in processes} >= {pid}
        yield Neighbour(pid, url, crash, processes)
    finally:
        handlers = [one for one in watchers_of(one.pid for one in processes) if title_of(one.pid) == HANDLER]
        for process in alive(processes):
            send(process, signal.SIGKILL)
        for process in wait_gone(handlers, 60):
            send(process, signal.SIGKILL)


def test_the_signals_of_server_and_starting_program_stay_apart(release: str, tmp_path: Path) -> None:
    lane = ensure_lane(release)
    with Program(lane, tmp_path / "a", tmp_path / "a-crash") as program:
        program.do("engine = launch()")
        before = program.tokens()
        # After its first request: SGLang has set handlers of its own until then.
        program.do("for number in (signal.SIGQUIT, signal.SIGTERM): signal.signal(number, note)")
        rank = program.pid_of(SCHEDULER)
        with neighbour_of(program, lane, tmp_path / "b") as server:
            server.end()
            time.sleep(AFTER_S)
            assert program.signals == []
            assert program.popen.poll() is None
            assert program.pid_of(SCHEDULER) == rank
            assert program.tokens() == before
            assert incidents_of(server.crash) == []
        with neighbour_of(program, lane, tmp_path / "c") as server:
            answer = generate(server.url)
            known = tree_of(program.popen.pid)
            program.popen.kill()
            assert program.popen.wait(60) == -signal.SIGKILL
            time.sleep(AFTER_S)
            assert server.has_lost() == []
            assert generate(server.url) == answer
            # Its own ranks have died with it, as upstream has it.
            theirs = {process.key for process in server.processes}
            own = [one for one in known if one.key not in theirs and title_of(one.pid).startswith(SCHEDULER)]
            assert wait_gone(own, 5) == []
            assert incidents_of(server.crash) == []
            server.end()
            assert incidents_of(server.crash) == []


def test_a_server_outlives_the_program_that_started_it(release: str, tmp_path: Path) -> None:
    lane = ensure_lane(release)
    with Program(lane, tmp_path / "a", tmp_path / "a-crash") as program:
        program.do("engine = launch()")
        program.tokens()
        # Detached: upstream's shutdown kills every child of the program, whatever it is.
        with neighbour_of(program, lane, tmp_path / "b", detached=True) as server:
            answer = generate(server.url)
            program.do("engine.shutdown()")
            time.sleep(AFTER_S)
            assert server.has_lost() == []
            program.tell("sys.exit(0)")
            assert program.popen.wait(60) == 0
            time.sleep(AFTER_S)
            assert server.has_lost() == []
            assert generate(server.url) == answer
            server.end()
            assert incidents_of(server.crash) == []
    assert incidents_of(tmp_path / "a-crash") == []


# A program that sees to SIGQUIT itself loses a rank.


#: What the program does before it launches its engine's rank, and with what.
SIGQUIT_HANDLERS = {
    "custom_sigquit_handler": ("engine = launch(custom_sigquit_handler=note)",),
    "faulthandler.register": (
        "engine = launch()",
        # SGLang sets its own with the first request.
        "engine.generate('Hello', {'max_new_tokens': 1})",
        "import faulthandler; faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)",
    ),
}


@pytest.mark.parametrize(
    "how", ["custom_sigquit_handler", pytest.param("faulthandler.register", marks=pytest.mark.matrix)]
)
def test_a_dead_rank_does_not_end_a_program_handling_sigquit(release: str, how: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(Program(ensure_lane(release), tmp_path / "patched", tmp_path / "crash", END))
        programs = {"patched": patched}
        if release == NEWEST:
            lane = ensure_lane(release, pristine=True)
            programs["pristine"] = stack.enter_context(
                Program(lane, tmp_path / "pristine", tmp_path / "pristine-crash")
            )
        for step in SIGQUIT_HANDLERS[how]:
            for program in programs.values():
                program.tell(step)
            for program in programs.values():
                program.await_done(step)
        victims = {name: program.pid_of(SCHEDULER) for name, program in programs.items()}
        for pid in victims.values():
            os.kill(pid, signal.SIGKILL)
        assert the_incident(tmp_path / "crash")["verdict"]["first_failure"]["pid"] == victims["patched"]
        time.sleep(LIVES_S)
        statuses = {name: program.popen.poll() for name, program in programs.items()}
        assert statuses == dict.fromkeys(programs), {
            name: one.log.read_text()[-2000:] for name, one in programs.items()
        }
        # As many words to the program as upstream has for it.
        counts = {name: len(program.signals) for name, program in programs.items()}
        assert len(set(counts.values())) == 1, counts
        document = the_incident(tmp_path / "crash")
        assert document["kind"] == "killed"
        assert document["complete"] is True
        # It can end when it wants to.
        for program in programs.values():
            program.tell("os._exit(7)")
            assert program.popen.wait(60) == 7
    assert kinds_of(tmp_path / "crash") == ["killed"]


# A program launches a second engine.


#: SGLang sets others of CUDA's variables itself.
OF_THE_KIT = ("CUDA_COREDUMP_", "CUDA_ENABLE_", "TORCH_NCCL_", "TORCH_FR_")


def names_of_a_child(program: Program) -> set[str]:
    """Return the environment variables of GPU cores and flight recorders that a program's next child inherits."""
    lines = program.value("subprocess.run(['env'], capture_output=True, text=True, timeout=30).stdout.splitlines()")
    return {line.partition("=")[0] for line in lines if line.startswith(OF_THE_KIT)}


@pytest.mark.matrix
def test_a_second_engines_hang_is_noticed_without_inherited_variables(
    tmp_path: Path,
) -> None:
    crash = tmp_path / "crash"
    with Program(ensure_lane(NEWEST), tmp_path / "a", crash, {"SGLANG_CRASHKIT_HANG_SECS": "3"}) as program:
        inherited = names_of_a_child(program)
        program.do("engine = launch(sleep_on_idle=False)")
        before = program.tokens()
        assert names_of_a_child(program) == inherited
        program.do("engine.shutdown()")
        program.do("engine = launch(sleep_on_idle=False)")
        assert program.tokens() == before
        assert names_of_a_child(program) == inherited
        assert incidents_of(crash) == []
        rank = program.pid_of(SCHEDULER)
        with stopped(rank):
            began = time.monotonic()
            found = wait_for_incident(crash, 60)
            seconds = time.monotonic() - began
        assert (found.document["kind"], found.document["trigger"]["pid"]) == ("hang", rank)
        assert seconds < 30
        assert program.tokens() == before
        program.do("engine.shutdown()")
        program.tell("sys.exit(0)")
        assert program.popen.wait(60) == 0
    assert kinds_of(crash) == ["hang"]


# A service manager ends all processes of a server at once.


#: As the unpatched release ends: 0 where it drained, SIGKILL of itself where it first saw that a child had ended.
UPSTREAMS_STATUSES = (0, -signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.parametrize("requests", [0, 3], ids=["idle", "at work"])
def test_sigterm_to_all_processes_at_once_is_an_orderly_end(requests: int, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    with serving(NEWEST, crash, tp=2) as server:
        generate(server.url)
        sent = [Sent(f"in-flight-{number}", f"Once upon a time there were {number}") for number in range(requests)]
        ask_in_flight(server, *sent)
        handlers = [process for pid in handlers_of(server) if (process := read_process(pid)) is not None]
        known = [*tree_of(server.pid), *handlers]
        for process in known:
            send(process, signal.SIGTERM)
        status = server.popen.wait(EXIT_TIMEOUT_S)
        left = left_of([server], known, timeout_s=15)
    assert (left, kinds_of(crash)) == ([], [])
    assert status in UPSTREAMS_STATUSES
