"""Serve the same requests with a patched server and an unpatched one, and disturb the patched one's crash handler.

What the kit observes is forced at random moments: a rank is stopped for longer than it takes to be taken for a hang,
and goes on; somebody asks for the stacks; control requests come that do nothing wrong. The handler is stopped for
seconds, and killed in the end. None of that may be seen in what the server does: its tokens, its processes, and what
they hold of memory, descriptors and threads.

One client asks each server, one request at a time: in batches of another size a request has other rounding errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lanelib.lanes import Lane
from lanelib.procs import Process, alive, all_processes, send, title_of, tree_of, wait_gone, watchers_of
from lanelib.servers import Server

HANDLER, RANK = "sglang::crash_handler", "sglang::scheduler"
#: The kit takes a longer silence of a rank for a hang, in seconds.
HANG_S = 3
#: A process of the server that gets it asks for the stacks, as a watchdog of upstream's would.
WANT_STACKS = signal.SIGRTMIN + 10
#: Python runs it before anything else. The thread is there because a signal handler must not wait.
SITE_CODE = """
import signal
import threading


def want_stacks(*_):
    from sglang.srt.utils.cudacore_pyspy_dump_utils import pyspy_dump_schedulers

    threading.Thread(target=pyspy_dump_schedulers, daemon=True).start()


signal.signal(signal.SIGRTMIN + 10, want_stacks)
"""
REQUEST_TIMEOUT_S, EXIT_TIMEOUT_S, READY_TIMEOUT_S = 120.0, 120.0, 600.0
LOOK_EVERY_S = 2.0
#: A server is at rest once it was asked so many times: its pools are full.
WARM_UP = 12
#: The handler is killed when so much of the time is over: before, it is wanted for all that it is to observe.
KILLED_AT = 0.7
#: Two unpatched servers of two ranks, of 3 GB each, differ by a few megabytes over some minutes. What a thousand
#: requests lose by 24 kB each is seen in a few minutes, and by 1 kB each in an hour.
MEMORY_TOLERANCE_MB = 24.0
#: The client's connection, and the main process's pidfds of its workers, which it holds once the handler is gone.
DESCRIPTOR_TOLERANCE = 6
#: A server answers control requests in some.
THREAD_TOLERANCE = 3
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Look:
    """What the processes of a server held at one moment; the kit's handler is not one of them.

    Attributes:
        at: seconds since the soak began.
        memory_mb: their proportional set size, in which shared pages are shared out, in mebibytes.
        descriptors: how many they had open.
        threads: how many they ran.
        zombies: dead children that nobody has reaped.
    """

    at: float
    memory_mb: float
    descriptors: int
    threads: int
    zombies: int


@dataclass
class Side:
    """One of the two servers.

    Attributes:
        name: ``patched`` or ``unpatched``.
        server: the server.
        members: its processes when it was at rest.
        answers: the tokens of each request, in order.
        seconds: how long each of them took.
        looks: what its processes held, in order.
        error: why its client stopped early; empty where it did not.
    """

    name: str
    server: Server
    members: list[Process] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    error: str = ""

    def growth(self, value: Callable[[Look], float]) -> float:
        """Return by how much the median of the last third is above that of the first."""
        third = len(self.looks) // 3
        first, last = self.looks[:third], self.looks[-third:]
        return statistics.median(map(value, last)) - statistics.median(map(value, first))


@dataclass
class Outcome:
    """How a soak went.

    Attributes:
        problems: what must not be, a line each.
        table: the figures, for a person.
        actions: how often each thing was done.
        kinds: of the incidents, in no order.
    """

    problems: list[str]
    table: str
    actions: dict[str, int]
    kinds: list[str]


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
    """Serve with both for a while, and compare.

    Args:
        patched: the lane with the kit.
        unpatched: the same release without it.
        folder: for the crash folder and what the servers import; there and empty.
        seconds: how long the servers are asked, from when both are at rest.
        seed: of all that is random.
        tp: tensor-parallel ranks of each.
        say: takes a line for each thing that is done.
    """
    crash, site = folder / "crash", folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE_CODE)
    arguments = ["--crash-dump-folder", str(crash)]
    env = {"SGLANG_CRASHKIT_HANG_SECS": str(HANG_S), "PYTHONPATH": str(site)}
    with (
        Server.start(patched, tp=tp, extra_args=arguments, env=env) as first,
        Server.start(unpatched, tp=tp, extra_args=arguments, env=env) as second,
    ):
        sides = [Side("patched", first), Side("unpatched", second)]
        for side in sides:
            side.server.wait_ready(READY_TIMEOUT_S)
        return _Soak(sides, crash, seconds, seed, say).run()


class _Soak:
    def __init__(
        self, sides: Sequence[Side], crash: Path, seconds: float, seed: int, say: Callable[[str], None]
    ) -> None:
        self.sides, self.crash, self.seconds, self.seed, self.say = sides, crash, seconds, seed, say
        self.patched, self.unpatched = sides
        self.random = random.Random(seed)  # noqa: S311 - it must be the same each time
        self.problems: list[str] = []
        self.actions: dict[str, int] = {}
        self.handler: Process | None = None
        self.handler_mb: list[float] = []
        self.descriptors: Counter[str] = Counter()
        self.began = 0.0
        self.over = threading.Event()

    def run(self) -> Outcome:
        for side in self.sides:
            for number in range(WARM_UP):
                generate(side.server.url, self.seed, -1 - number)
            side.members = [one for one in tree_of(side.server.pid) if _lasts(title_of(one.pid))]
        self.handler = self._find_handler()
        self.descriptors = descriptors_of(self.patched.members)
        self.began = time.monotonic()
        threads = [threading.Thread(target=self._ask, args=(side,), daemon=True) for side in self.sides]
        threads.append(threading.Thread(target=self._look, daemon=True))
        for thread in threads:
            thread.start()
        try:
            self._disturb()
        finally:
            self.over.set()
            for thread in threads:
                thread.join(REQUEST_TIMEOUT_S)
        self._compare()
        statuses = [self._end(side) for side in self.sides]
        if statuses[0] != statuses[1]:
            self.problems.append(f"asked to end, they end with {statuses}")
        return Outcome(self.problems, self._table(), self.actions, self._check_incidents())

    # What the servers do.

    def _ask(self, side: Side) -> None:
        number = 0
        while not self.over.is_set():
            began = time.monotonic()
            try:
                side.answers.append(generate(side.server.url, self.seed, number))
            except (urllib.error.URLError, OSError, ValueError) as error:
                side.error = f"request {number}: {error!r}"
                return
            side.seconds.append(time.monotonic() - began)
            number += 1

    def _look(self) -> None:
        while not self.over.wait(LOOK_EVERY_S):
            for side in self.sides:
                side.looks.append(look(side.server.pid, time.monotonic() - self.began))
            if self.handler is not None:
                self.handler_mb.append(memory_mb(self.handler.pid))

    # What is done to the patched one.

    def _disturb(self) -> None:
        ways: dict[str, Callable[[], None]] = {
            "a rank is stopped": self._stop_rank,
            "stacks are wanted": self._want_stacks,
            "control requests": self._post,
            "the handler is stopped": self._stop_handler,
            "a rank and the handler are stopped": self._stop_both,
        }
        waiting: list[str] = []
        while (now := time.monotonic() - self.began) < self.seconds:
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
        self.actions[name] = self.actions.get(name, 0) + 1
        self.say(f"{time.monotonic() - self.began:7.1f} s  {name}")

    def _ranks(self) -> list[Process]:
        return [one for one in alive(self.patched.members) if title_of(one.pid).startswith(RANK)]

    def _stop_rank(self) -> None:
        ranks = self._ranks()
        if ranks:
            self._stopped(self.random.choice(ranks), HANG_S + self.random.uniform(2.0, 5.0))

    def _stop_handler(self) -> None:
        if self.handler is not None:
            self._stopped(self.handler, self.random.uniform(1.0, 6.0))

    def _stop_both(self) -> None:
        ranks = self._ranks()
        if ranks and self.handler is not None:
            thread = threading.Thread(target=self._stop_handler, daemon=True)
            thread.start()
            self._stopped(self.random.choice(ranks), HANG_S + self.random.uniform(2.0, 5.0))
            thread.join(30)

    def _stopped(self, process: Process, seconds: float) -> None:
        send(process, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            send(process, signal.SIGCONT)

    def _want_stacks(self) -> None:
        ranks = self._ranks()
        if ranks:
            os.kill(self.random.choice(ranks).pid, WANT_STACKS)

    def _post(self) -> None:
        # The same to both: a cache that is empty makes other batches.
        for side in self.sides:
            for path, body in (
                ("abort_request", {"rid": "nobody's"}),
                ("pause_generation", {"mode": "in_place"}),
                ("continue_generation", {}),
                ("get_server_info", None),
                ("health", None),
            ):
                with contextlib.suppress(urllib.error.URLError, OSError):
                    post(f"{side.server.url}/{path}", body)

    def _find_handler(self) -> Process | None:
        members = {process.pid for process in self.patched.members}
        found = [one for one in watchers_of(members) if title_of(one.pid) == HANDLER]
        return found[0] if found else None

    # What must not be seen of it.

    def _compare(self) -> None:
        for side in self.sides:
            if side.error:
                self.problems.append(f"{side.name}: {side.error}")
            living = {process.key for process in alive(side.members)}
            for process in side.members:
                if process.key not in living:
                    self.problems.append(f"{side.name}: {process} has ended")
        both = min(len(side.answers) for side in self.sides)
        differ = [n for n in range(both) if self.patched.answers[n] != self.unpatched.answers[n]]
        if both == 0 or differ:
            self.problems.append(f"other tokens in {len(differ)} of {both} answers, first in {differ[:1]}")
        if min(len(side.looks) for side in self.sides) < 6:
            self.problems.append("too few looks to tell a growth")
            return
        for name, value, tolerance in MEASURES:
            own, theirs = (side.growth(value) for side in self.sides)
            if own > max(theirs, 0.0) + tolerance:
                self.problems.append(f"{name} grew by {own:.1f}, and by {theirs:.1f} without the kit")
        self.say(f"{'':10}  new descriptors: {dict(descriptors_of(self.patched.members) - self.descriptors)}")

    def _end(self, side: Side) -> int:
        side.server.popen.terminate()
        status = side.server.popen.wait(EXIT_TIMEOUT_S)
        left = wait_gone(side.members, 10.0)
        if left:
            self.problems.append(f"{side.name}: left after its end: {[title_of(one.pid) for one in left]}")
        return status

    def _check_incidents(self) -> list[str]:
        kinds = []
        for path in self.crash.glob("*/incidents/*/incident.json"):
            document = json.loads(path.read_text())
            kinds.append(document["kind"])
            if document["kind"] not in ("hang", "snapshot"):
                self.problems.append(f"incident {path.parent.name}: {document['verdict']['text']}")
        if not kinds:
            self.problems.append("nothing was observed")
        return kinds

    def _table(self) -> str:
        lines = [f"{'':24}{'patched':>22}{'unpatched':>22}"]
        lines.append(f"{'requests':24}" + "".join(f"{len(side.answers):22}" for side in self.sides))
        medians = [1000 * statistics.median(side.seconds or [0.0]) for side in self.sides]
        lines.append(f"{'median answer':24}" + "".join(f"{value:19.1f} ms" for value in medians))
        for name, value, _tolerance in MEASURES:
            words = []
            for side in self.sides:
                if len(side.looks) < 6:
                    words.append("?")
                else:
                    now = statistics.median(map(value, side.looks))
                    words.append(f"{now:.0f} ({side.growth(value):+.1f})")
            lines.append(f"{name:24}" + "".join(f"{word:>22}" for word in words))
        if self.handler_mb:
            lines.append(f"{'handler, MB':24}{self.handler_mb[0]:10.1f} to {max(self.handler_mb):8.1f}")
        return "\n".join(lines)


MEASURES: tuple[tuple[str, Callable[[Look], float], float], ...] = (
    ("memory, MB", lambda one: one.memory_mb, MEMORY_TOLERANCE_MB),
    ("descriptors", lambda one: one.descriptors, DESCRIPTOR_TOLERANCE),
    ("threads", lambda one: one.threads, THREAD_TOLERANCE),
    ("zombies", lambda one: one.zombies, 0),
)


def _lasts(title: str) -> bool:
    """Say whether a process with this title lives as long as its server; a compiler does not."""
    return title.startswith("sglang::") or "sglang.launch_server" in title or "multiprocessing." in title


def generate(url: str, seed: int, number: int) -> list[int]:
    """Return the tokens of the greedy answer to the request of this number; which it is follows from the seed.

    Raises:
        urllib.error.URLError: the server refused, failed or is gone.
    """
    its = random.Random(f"{seed}-{number}")  # noqa: S311 - it must be the same each time
    text = " ".join(str(its.randrange(1000)) for _ in range(its.choice((3, 20, 60))))
    parameters = {"max_new_tokens": its.randrange(4, 33), "temperature": 0.0, "ignore_eos": True}
    answer = post(f"{url}/generate", {"text": text, "sampling_params": parameters})
    tokens: list[int] = json.loads(answer)["output_ids"]
    return tokens


def post(url: str, body: Mapping[str, Any] | None) -> bytes:
    """Post `body`, or get where there is none, and return the answer.

    Raises:
        urllib.error.URLError: the server refused, failed or is gone.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - ours
    with _opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content


def look(server_pid: int, at: float) -> Look:
    """Return what the living processes of a server hold now."""
    pids = [process.pid for process in tree_of(server_pid)]
    zombies = [one for one in all_processes() if one.state == "Z" and one.parent in pids]
    return Look(
        at,
        sum(map(memory_mb, pids)),
        sum(_entries(pid, "fd") for pid in pids),
        sum(_entries(pid, "task") for pid in pids),
        len(zombies),
    )


def descriptors_of(processes: Iterable[Process]) -> Counter[str]:
    """Return how many descriptors of a kind each process has open, such as ``sglang::detokenizer socket``."""
    found: Counter[str] = Counter()
    for process in processes:
        with contextlib.suppress(OSError):
            title = title_of(process.pid).split(" ")[0]
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found[f"{title} {str(entry.readlink()).partition(':[')[0]}"] += 1
    return found


def memory_mb(pid: int) -> float:
    """Return the proportional set size of a process in mebibytes; 0 where it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


def _entries(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/{name}"))  # noqa: PTH208 - only their number
    return 0
