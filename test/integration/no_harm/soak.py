"""Serve the same requests with a patched server and an unpatched one, and disturb the patched one's crash handler.

What the kit observes is forced at random moments: a rank is stopped for longer than it takes to be taken for a hang,
and goes on; somebody asks for the stacks; control requests come that do nothing wrong. The handler is stopped for
seconds, and killed in the end. None of that may be seen in what the server does: its tokens, its processes, and what
they hold of memory, descriptors and threads.

Both are asked the same request at a time, and the next once both have answered: in batches of another size a request
has other rounding errors, and a server that answers more of them comes sooner to all that it keeps for a new length.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from integration.faults import STACKS_SIGNAL, write_site
from integration.scenario import HANDLER, members_of
from lanelib.lanes import Lane
from lanelib.procs import Process, alive, all_processes, send, title_of, tree_of, wait_gone, watchers_of
from lanelib.servers import Server, wait_all_ready

#: The kit takes a longer silence of a rank for a hang, in seconds.
HANG_S = 3
CONTROL_REQUESTS = (
    ("abort_request", {"rid": "no one's"}),
    ("pause_generation", {"mode": "in_place"}),
    ("continue_generation", {}),
    ("get_server_info", None),
    ("health", None),
)
REQUEST_TIMEOUT_S, EXIT_TIMEOUT_S, READY_TIMEOUT_S = 120.0, 120.0, 600.0
SAMPLE_EVERY_S = 2.0
#: A server is at rest once it was asked so many times: its pool of tokens was used whole.
WARM_UP, POOL = 24, 2048
#: So long a stopped rank may take to be told.
TOLD_TIMEOUT_S = 60.0
#: PyTorch and oneDNN keep what they made for each length of a request, some megabytes of it by the minute.
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4", "LRU_CACHE_CAPACITY": "4"}
#: The handler is killed when so much of the time is over: before, it is wanted for all that it is to observe.
KILLED_AT = 0.7
#: What is sampled, and by how much more it may grow than without the kit. Two unpatched servers of two ranks, of 3 GB
#: each, differ by a few megabytes over some minutes; what a thousand requests lose by 12 kB each is seen in minutes.
#: What malloc keeps of the first dump of PyTorch's recorder, 14 MB a rank, is no growth: the next one takes the same.
#: The descriptors are the client's connection, and the main process's pidfds of its workers, which it holds once the
#: handler is gone; control requests are answered in some threads.
MEASURES = (("memory, MB", 12.0), ("descriptors", 6.0), ("threads", 3.0), ("zombies", 0.0))


@dataclass
class Side:
    """One of the two servers."""

    name: str  # ``patched`` or ``unpatched``
    server: Server  # the server
    members: list[Process] = field(default_factory=list)  # its processes when it was at rest
    answers: list[list[int]] = field(default_factory=list)  # the tokens of each request, in order
    seconds: list[float] = field(default_factory=list)  # how long each of them took
    #: what its processes held every `SAMPLE_EVERY_S`, in the order of `MEASURES`
    samples: list[tuple[float, ...]] = field(default_factory=list)
    error: str = ""  # why its client stopped early; empty where it did not

    def growth(self, measure: int) -> float:
        """Return by how much the median of the last third is above that of the first; 0 for too few samples."""
        values = [sample[measure] for sample in self.samples]
        third = len(values) // 3
        return statistics.median(values[-third:]) - statistics.median(values[:third]) if third else 0.0


@dataclass
class Outcome:
    """How a soak went."""

    problems: list[str] = field(default_factory=list)  # what must not be, a line each
    table: str = ""  # the figures, for a person
    actions: Counter[str] = field(default_factory=Counter)  # how often each thing was done
    kinds: list[str] = field(default_factory=list)  # of the incidents, in no order


def soak(
    patched: Lane,
    unpatched: Lane,
    folder: Path,
    *,
    seconds: float,
    seed: int = 0,
    tp: int = 2,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Serve with a patched and an unpatched lane for so many seconds, from when both are at rest, and compare."""
    options = ["--crash-dump-folder", str(folder / "crash"), "--max-total-tokens", str(POOL)]
    env = {"SGLANG_CRASHKIT_HANG_SECS": str(HANG_S), **write_site(folder / "site"), **SMALL_CACHES}
    with (
        Server.start(patched, tp=tp, extra_args=options, env=env, spins=True) as first,
        Server.start(unpatched, tp=tp, extra_args=options, env=env, spins=True) as second,
    ):
        wait_all_ready((first, second), READY_TIMEOUT_S)
        sides = Side("patched", first), Side("unpatched", second)
        outcome = _Soak(sides, folder / "crash", seconds, seed, say).run()
    for path in _incidents_in(folder / "crash"):
        document = json.loads(path.read_text())
        outcome.kinds.append(document["kind"])
        if document["kind"] not in ("hang", "snapshot"):
            outcome.problems.append(f"incident {path.parent.name}: {document['verdict']['text']}")
    if not outcome.kinds:
        outcome.problems.append("nothing was observed")
    return outcome


class _Soak:
    def __init__(
        self, sides: tuple[Side, Side], crash_folder: Path, seconds: float, seed: int, say: Callable[[str], None]
    ) -> None:
        self.sides, self.crash_folder, self.seconds, self.seed, self.say = sides, crash_folder, seconds, seed, say
        self.random = random.Random(seed)
        self.outcome = Outcome()
        self.handler: Process | None = None
        self.handler_mb = 0.0
        self.began = 0.0
        self.over = threading.Event()

    def run(self) -> Outcome:
        for side in self.sides:
            for number in range(WARM_UP):
                ask(side.server, self.seed, -1 - number)
            side.members = [one.process for one in members_of(side.server) if one.lasts]
        self.handler = self._find_handler()
        self.began = time.monotonic()
        threads = [threading.Thread(target=target, daemon=True) for target in (self._ask, self._sample)]
        try:
            threads[0].start()
            self._observe_each_rank()
            self.began = time.monotonic()
            threads[1].start()
            self._disturb()
        finally:
            self.over.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(REQUEST_TIMEOUT_S)
        self._compare()
        return self.outcome

    def _ask(self) -> None:
        with ThreadPoolExecutor(len(self.sides)) as pool:
            while not self.over.is_set() and not any(side.error for side in self.sides):
                list(pool.map(self._ask_one, self.sides))

    def _ask_one(self, side: Side) -> None:
        began = time.monotonic()
        try:
            side.answers.append(ask(side.server, self.seed, len(side.answers)))
        except (OSError, ValueError, http.client.HTTPException) as error:
            side.error = f"request {len(side.answers)}: {error!r}"
        else:
            side.seconds.append(time.monotonic() - began)

    def _sample(self) -> None:
        while not self.over.wait(SAMPLE_EVERY_S):
            for side in self.sides:
                side.samples.append(sample(side.server.pid))
            if self.handler is not None:
                self.handler_mb = max(self.handler_mb, memory_mb(self.handler.pid))

    # What is done to the patched one.

    def _observe_each_rank(self) -> None:
        """Have each rank observed once, before anything is measured."""
        for rank in self._ranks():
            before, until = len(_incidents_in(self.crash_folder)), time.monotonic() + TOLD_TIMEOUT_S
            self._note("a rank is observed for the first time")
            self._stopped(rank, HANG_S + 1.0)
            while len(_incidents_in(self.crash_folder)) == before and time.monotonic() < until:
                time.sleep(0.2)

    def _disturb(self) -> None:
        ways: dict[str, Callable[[], None]] = {
            "a rank is stopped": self._stop_rank,
            "stacks are wanted": self._want_stacks,
            "control requests": self._post,
            "the handler is stopped": self._stop_handler,
            "a rank and the handler are stopped": self._stop_both,
        }
        waiting: list[str] = []
        while self._ranks() and (now := time.monotonic() - self.began) < self.seconds:
            if self.handler is not None and now > KILLED_AT * self.seconds:
                self._note("the handler is killed")
                send(self.handler, signal.SIGKILL)
                self.handler = None
            # Each at least once in a short soak, in an order of the seed's.
            waiting = waiting or self.random.sample(sorted(ways), len(ways))
            name = waiting.pop()
            if self.handler is not None or "handler" not in name:
                self._note(name)
                ways[name]()
            if self.over.wait(self.random.uniform(1.0, 6.0)) or any(side.error for side in self.sides):
                break
            self.handler = self.handler or self._find_handler()

    def _note(self, name: str) -> None:
        self.outcome.actions[name] += 1
        self.say(f"{time.monotonic() - self.began:7.1f} s  {name}")

    def _ranks(self) -> list[Process]:
        members = alive(self.sides[0].members)
        return [one for one in members if title_of(one.pid).startswith("sglang::scheduler")]

    def _any_rank(self) -> list[Process]:
        """Return one rank, or none where all are gone meanwhile."""
        ranks = self._ranks()
        return [self.random.choice(ranks)] if ranks else []

    def _want_stacks(self) -> None:
        for rank in self._any_rank():
            send(rank, STACKS_SIGNAL)

    def _stop_rank(self) -> None:
        for rank in self._any_rank():
            self._stopped(rank, HANG_S + self.random.uniform(2.0, 5.0))

    def _stop_handler(self) -> None:
        if self.handler is not None:
            self._stopped(self.handler, self.random.uniform(1.0, 6.0))

    def _stop_both(self) -> None:
        thread = threading.Thread(target=self._stop_handler, daemon=True)
        thread.start()
        self._stop_rank()
        thread.join(30)

    def _stopped(self, process: Process, seconds: float) -> None:
        send(process, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            send(process, signal.SIGCONT)

    def _post(self) -> None:
        # The same to both: a cache that is empty makes other batches.
        for side in self.sides:
            for path, body in CONTROL_REQUESTS:
                with contextlib.suppress(OSError):
                    side.server.ask(path, body, REQUEST_TIMEOUT_S)

    def _find_handler(self) -> Process | None:
        found = watchers_of(process.pid for process in self.sides[0].members)
        return next((one for one in found if title_of(one.pid) == HANDLER), None)

    # What must not be seen of it.

    def _compare(self) -> None:
        patched, unpatched = self.sides
        problems = self.outcome.problems
        for side in self.sides:
            problems += [f"{side.name}: {side.error}"] if side.error else []
            living = alive(side.members)
            problems += [f"{side.name}: {process} has ended" for process in side.members if process not in living]
        pairs = list(zip(patched.answers, unpatched.answers))  # noqa: B905 - one of them may have failed
        differ = [number for number, (one, other) in enumerate(pairs) if one != other]
        if not pairs or differ:
            problems.append(f"other tokens in {len(differ)} of {len(pairs)} answers, first in {differ[:1]}")
        if min(len(side.samples) for side in self.sides) < 6:
            problems.append("too few samples to tell a growth")
        lines = [f"{'':24}{'patched':>22}{'unpatched':>22}"]
        medians = [f"{1000 * statistics.median(side.seconds or [0.0]):.1f} ms" for side in self.sides]
        rows = {"requests": [str(len(side.answers)) for side in self.sides], "median answer": medians}
        for measure, (name, tolerance) in enumerate(MEASURES):
            own, theirs = (side.growth(measure) for side in self.sides)
            if own > max(theirs, 0.0) + tolerance:
                problems.append(f"{name} grew by {own:.1f}, and by {theirs:.1f} without the kit")
            last = [side.samples[-1][measure] if side.samples else 0.0 for side in self.sides]
            rows[name] = [f"{last[0]:.0f} ({own:+.1f})", f"{last[1]:.0f} ({theirs:+.1f})"]
        rows["handler, MB"] = [f"{self.handler_mb:.1f}", ""]
        lines += [f"{name:24}{words[0]:>22}{words[1]:>22}" for name, words in rows.items()]
        self.outcome.table = "\n".join(lines)
        statuses = [self._end(side) for side in self.sides]
        if statuses[0] != statuses[1]:
            problems.append(f"asked to end, they end with {statuses}")

    def _end(self, side: Side) -> int:
        side.server.popen.terminate()
        status = side.server.popen.wait(EXIT_TIMEOUT_S)
        if left := wait_gone(side.members, 10.0):
            self.outcome.problems.append(f"{side.name}: left after its end: {[title_of(one.pid) for one in left]}")
        return status


def _incidents_in(crash_folder: Path) -> list[Path]:
    return list(crash_folder.glob("*/incidents/[!.]*/incident.json"))


def ask(server: Server, seed: int, number: int) -> list[int]:
    """Return the tokens of the greedy answer to the request of this number; which it is follows from the seed.

    Raises:
        urllib.error.URLError: the server refused, failed or is gone.
    """
    its = random.Random(f"{seed}-{number}")
    text = " ".join(str(its.randrange(1000)) for _ in range(its.choice((3, 20, 60))))
    answer = server.generate(text, max_new_tokens=its.randrange(4, 33), timeout_s=REQUEST_TIMEOUT_S)
    tokens: list[int] = answer["output_ids"]
    return tokens


def sample(server_pid: int) -> tuple[float, float, float, float]:
    """Return what a server's living processes hold, in the order of `MEASURES`; the handler excepted."""
    pids = [process.pid for process in tree_of(server_pid)]
    zombies = [one for one in all_processes() if one.state == "Z" and one.parent in pids]
    descriptors, threads = (sum(_entries(pid, name) for pid in pids) for name in ("fd", "task"))
    return sum(map(memory_mb, pids)), descriptors, threads, len(zombies)


def memory_mb(pid: int) -> float:
    """Return the proportional set size of a process in MiB, where shared pages are shared out; 0 where it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


def _entries(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/{name}"))  # noqa: PTH208 - only their number
    return 0
