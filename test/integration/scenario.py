"""One real server that is broken while it works on requests, and what was left of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from incident_schema import assert_fits
from lanelib.lanes import Lane, ensure_lane
from lanelib.procs import Process, alive, read_process, title_of, tree_of
from lanelib.servers import ManagedProcess, Server, greedy, opener
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.kernel import procfs
from sglang_crashkit.memory.journal import JournalReader
from sglang_crashkit.memory.ring import NAME as JOURNAL
from sglang_crashkit.memory.ring import RingError
from unit.support.server_driver import PATIENCE as PATIENCE
from unit.support.server_driver import piece_of
from unit.support.targets import state_of
from unit.support.waiting import wait_until, watched_pids

#: For ``params``: a plain run takes the newest release, ``scripts/test --matrix`` the older ones.
RELEASES = (
    pytest.param("0.5.9", marks=pytest.mark.matrix),
    pytest.param("0.5.12.post1", marks=pytest.mark.matrix),
    "0.5.23",
)
EXIT_TIMEOUT_S = 120.0
PROMPTS = ("Hello", "The quick brown fox", "1 2 3 4 5 6 7 8")
HANDLER = "sglang::crash_handler"
SCHEDULER = "sglang::scheduler"
#: What is left of a server is gone this soon after its main process, in seconds; a busy machine takes its time to give
#: the memory of those back that were killed.
GONE_S = 20.0
#: A busy machine works on a request this soon, its first one included, in seconds.
IN_FLIGHT_S = 120.0
#: What every release prints of each batch of a prompt, and now and then of one that decodes, by rank.
BATCH = re.compile(r"^\[[-\d]+ [:\d]+(?P<rank>[^]]*)\] (?:Prefill|Decode) batch\b.*", re.MULTILINE)
REQUESTS_IN_IT = re.compile(r"#(?:new-seq|running-req|queue-req): (\d+)")


@dataclass(frozen=True)
class Member:
    """A process of a server before it was broken."""

    process: Process  # its pid and start time
    title: str  # as incidents name it
    is_fork: bool = False  # it has the title of its parent, and is about to become something else

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lasts(self) -> bool:
        """Whether it lives as long as the server: SGLang's own, and what multiprocessing started for it."""
        own = self.title.startswith("sglang::") and self.title != HANDLER and not self.is_fork
        return own or "sglang.launch_server" in self.title or "multiprocessing." in self.title


@dataclass(frozen=True)
class Sent:
    """A request that was under way when the server was broken."""

    rid: str
    text: str


@dataclass(frozen=True)
class Wreck:
    """What was left of a server."""

    crash_folder: Path  # what the server was given as ``--crash-dump-folder``
    #: every incident folder below it, with what its ``incident.json`` holds
    incidents: list[tuple[Path, dict[str, Any]]]
    members: list[Member]  # each process that the server had before
    pids: dict[str, int]  # pid of each of them that SGLang has titled, by title
    sent: list[Sent]  # the requests that were in flight
    status: int  # the main process's exit status, negative for a signal, as subprocess tells it
    left: list[str]  # processes that were still there after the main process had gone and `GONE_S` had passed
    log: str  # what the server printed
    seconds_to_exit: float  # from the fault to the main process's exit

    @property
    def incident(self) -> dict[str, Any]:
        assert len(self.incidents) == 1, f"{[str(path) for path, _ in self.incidents]}\n{self.log[-3000:]}"
        return self.incidents[0][1]

    @property
    def folder(self) -> Path:
        assert self.incident
        return self.incidents[0][0]

    def report(self, title: str) -> dict[str, Any]:
        """Return the incident's report on the process that had this title before the fault."""
        pid = self.pids[title]
        found = [process for process in self.incident["processes"] if process["pid"] == pid]
        assert len(found) == 1, f"{len(found)} reports on {title} (pid {pid})"
        return found[0]

    def evidence(self, title: str, kind: str) -> dict[str, Any]:
        """Return the only piece of evidence of this kind on that process."""
        return piece_of(self.report(title), kind)

    def text(self, title: str, kind: str) -> str:
        """Return what the file of that piece holds."""
        return (self.folder / self.evidence(title, kind)["path"]).read_text()


def start(lane: Lane | str, folder: Path, *options: str, **how: Any) -> Server:
    """Start a server of a lane, or of a patched release, whose incidents go to `folder`.

    `options` are more of its arguments, `how` is for `Server.start`.
    """
    lane = ensure_lane(lane) if isinstance(lane, str) else lane
    return Server.start(lane, extra_args=["--crash-dump-folder", str(folder), *options], **how)


@contextlib.contextmanager
def serving(lane: Lane | str, folder: Path, *options: str, **how: Any) -> Iterator[Server]:
    """Run a server, see `start`, until the end of the block, and yield it once it is ready."""
    with start(lane, folder, *options, **how) as server:
        server.wait_ready()
        yield server


def answers_of(server: Server) -> list[list[int]]:
    """Return the tokens of a few greedy answers."""
    return [server.generate(prompt, max_new_tokens=16, timeout_s=120)["output_ids"] for prompt in PROMPTS]


def wreck(
    server: Server,
    crash_folder: Path,
    fault: Callable[[Server], None],
    *,
    requests: int = 3,
    breaks_by_itself: bool = False,
) -> Wreck:
    """Break a ready server while long requests are under way, or one that starts, and gather what is left.

    Where it breaks by itself once it works on them, its schedulers are held until all have arrived.
    """
    members = members_of(server)
    pids = {member.title: member.pid for member in members if "::" in member.title and not member.is_fork}
    known = [member.process for member in members]
    known += [process for pid in handlers_of(server) if (process := read_process(pid)) is not None]
    sent = [Sent(f"in-flight-{number}", f"Once upon a time there were {number}") for number in range(requests)]
    rids, log_size = {request.rid for request in sent}, server.log_path.stat().st_size
    ranks = [pid for pid, title in server.processes() if breaks_by_itself and title.startswith(SCHEDULER)]
    with stopped(*ranks):
        threads = [ask(server, request) for request in sent]
        if breaks_by_itself:
            wait_until(lambda: rids <= journaled_rids(server.pid), f"{sorted(rids)} have arrived", IN_FLIGHT_S)
        elif rids:
            wait_in_flight(server, rids, log_size)
    # A request has compilers started.
    known += tree_of(server.pid) if server.popen.poll() is None else []
    began = time.monotonic()
    fault(server)
    status = server.popen.wait(timeout=EXIT_TIMEOUT_S)
    seconds_to_exit = time.monotonic() - began
    left = left_of([server], known)
    for thread in threads:
        thread.join(timeout=10)
    found = incidents_of(crash_folder)
    for stored in found:
        if stored.finished:
            assert_fits(stored.document)
    return Wreck(
        crash_folder=crash_folder,
        incidents=[(stored.path, stored.document or {}) for stored in found],
        members=members,
        pids=pids,
        sent=sent,
        status=status,
        left=left,
        log=server.log_path.read_text(errors="replace"),
        seconds_to_exit=seconds_to_exit,
    )


def generate(url: str, **fields: Any) -> list[int]:
    """Return the tokens of a greedy answer of the server at an address, which may be none of a test's own."""
    body = json.dumps(greedy("Hello", 8, **fields)).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with opener.open(request, timeout=EXIT_TIMEOUT_S) as answer:
        tokens: list[int] = json.load(answer)["output_ids"]
    return tokens


def break_one(
    lane: Lane | str,
    folder: Path,
    fault: Callable[[Server], None],
    *options: str,
    requests: int = 3,
    breaks_by_itself: bool = False,
    **how: Any,
) -> Wreck:
    """Break a server that is run for that; see `serving` and `wreck`."""
    with serving(lane, folder, *options, **how) as server:
        return wreck(server, folder, fault, requests=requests, breaks_by_itself=breaks_by_itself)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, and let them go on at the end of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            wait_until(lambda pid=pid: state_of(pid) == "T", f"process {pid} is stopped")
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def states_until_gone(pid: int) -> str:
    """Return the state letters of a process, one every 5 ms, once it is dead."""
    states = []
    while (state := state_of(pid)) not in ("", "Z", "X"):
        states.append(state)
        time.sleep(0.005)
    return "".join(states)


def wait_in_flight(server: ManagedProcess, rids: Collection[str], log_from: int) -> None:
    """Wait until a server has taken in all of these requests and its schedulers have them; see `worked_on`."""
    # Of one that no one may trace only root can read the journal. SGLang as published has none.
    has_journal = os.access(f"/proc/{server.pid}/fd", os.R_OK) and not server.name.endswith("-pristine")
    wait_until(
        lambda: (
            worked_on(server, log_from) >= len(rids) and (not has_journal or set(rids) <= journaled_rids(server.pid))
        ),
        f"{sorted(rids)} are in flight",
        IN_FLIGHT_S,
    )


def ask_in_flight(server: ManagedProcess, *sent: Sent, tokens: int = 4000) -> None:
    """Have these requests in flight, on threads of their own."""
    log_from = server.log_path.stat().st_size
    for request in sent:
        ask(server, request, tokens)
    wait_in_flight(server, [request.rid for request in sent], log_from)


def journaled_rids(pid: int) -> set[str]:
    """Return the ids of the requests that a patched server with this process id has taken in and not answered yet."""
    rids = set()
    for process in tree_of(pid):
        for path in _entries(Path(f"/proc/{process.pid}/fd")):
            # It is gone meanwhile, or written in this moment.
            with contextlib.suppress(OSError, RingError):
                if JOURNAL in path.readlink().name:
                    with path.open("rb") as file:
                        reader = JournalReader(file.fileno())
                        read = [reader.load(request) for request in reader.requests if request.ended is None]
                    rids |= {str(fields["rid"]) for fields in read if fields}
    return rids


def worked_on(server: ManagedProcess, log_from: int = 0) -> int:
    """Return how many requests a server said to have at once in a batch or behind it, of any release, patched or not.

    Of its log, what it said after `log_from` bytes counts.
    """
    log = server.log_path.read_bytes()[log_from:].decode(errors="replace")
    most: dict[str, int] = {}
    for line in BATCH.finditer(log):
        count = sum(map(int, REQUESTS_IN_IT.findall(line[0])))
        most[line["rank"]] = max(count, most.get(line["rank"], 0))
    return sum(most.values())


def members_of(server: ManagedProcess) -> list[Member]:
    """Return each living process of a server."""
    processes = tree_of(server.pid)
    titles = {process.pid: procfs.read_title(process.pid) for process in processes}
    return [
        Member(process, titles[process.pid], is_fork=titles[process.pid] == titles.get(process.parent))
        for process in processes
    ]


def left_of(servers: Sequence[ManagedProcess], known: Iterable[Process], timeout_s: float = GONE_S) -> list[str]:
    """Wait until `known`, and all else in the servers' sessions, have ended; return pid and title of who has not."""
    known, deadline = list(known), time.monotonic() + timeout_s
    while True:
        running = {process.pid for process in alive(known)}
        running |= {process.pid for server in servers for process in tree_of(server.pid)}
        if not running or time.monotonic() > deadline:
            return [f"{pid} {title_of(pid)}" for pid in sorted(running)]
        time.sleep(0.05)


def rank_that_starts(server: ManagedProcess, title: str, timeout_s: float) -> int:
    """Wait until a process of a server that starts has a title, and return its pid."""

    def find() -> int:
        assert server.popen.poll() is None, server.log_tail()
        return next((pid for pid, its in server.processes() if its.split(" ")[0] == title), 0)

    return wait_until(find, title, timeout_s)


def handler_pid(server: ManagedProcess) -> int:
    """Return the pid of the crash handler that watches `server`."""
    pids = handlers_of(server)
    assert len(pids) == 1, f"{len(pids)} crash handlers of server {server.pid}"
    return pids[0]


def handlers_of(server: ManagedProcess) -> list[int]:
    """Return the crash handlers that hold a pidfd of one of its processes."""
    watched = {process.pid for process in tree_of(server.pid)}
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if procfs.read_title(pid) == HANDLER and watched & watched_pids(pid)]


def _entries(folder: Path) -> list[Path]:
    """Return what is in a process's folder; nothing of one that ends in this moment, which may be another test's."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def shared_memory_of(server: ManagedProcess) -> set[str]:
    """Return the names of the files in ``/dev/shm`` that a server's processes map."""
    maps = (procfs.read_maps(process.pid).decode(errors="replace") for process in tree_of(server.pid))
    names = {line.partition("/dev/shm/")[2] for text in maps for line in text.splitlines()}
    return {name for name in names if name and not name.endswith(" (deleted)")}


def incidents_of(folder: Path) -> list[StoredIncident]:
    """Return the incidents below a crash folder, which the server may not have made."""
    return find_incidents(folder) if folder.is_dir() else []


def whole_incidents(folder: Path) -> list[StoredIncident]:
    """Return the whole incidents below a crash folder, the newest first."""
    return [stored for stored in incidents_of(folder) if stored.finished and stored.document]


def wait_for_incident(folder: Path, timeout_s: float) -> StoredIncident:
    """Wait until there is a whole incident below a crash folder, and return the newest."""
    return wait_until(lambda: whole_incidents(folder), f"an incident below {folder} is whole", timeout_s)[0]


def ask(server: ManagedProcess, sent: Sent, tokens: int = 4000) -> threading.Thread:
    """Ask for what takes longer than the test, in a thread of its own, and bear that it is cut off."""
    return server.ask_later("generate", greedy(sent.text, tokens, rid=sent.rid), EXIT_TIMEOUT_S)


def run_kit(
    *arguments: object, status: int | None = 0, timeout_s: float = 300.0, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``sglang-crashkit``, which is to end with this status, or any where that is None."""
    argv = [sys.executable, "-m", "sglang_crashkit", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, **how)
    assert status in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
    return done


def run_in_lane(lane: Lane, code: str, *arguments: object) -> Any:
    """Run Python `code` in a lane, and return what it prints last, as JSON."""
    argv = [str(word) for word in (lane.python, "-c", code, *arguments)]
    done = subprocess.run(argv, env=lane.serve_env(), capture_output=True, text=True, timeout=200, check=True)
    return json.loads(done.stdout.splitlines()[-1])
