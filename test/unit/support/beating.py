"""Processes whose heartbeats a test invents, on a clock that it sets; none of them runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from sglang_crashkit.handler.heartbeats import Heartbeats
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle
from sglang_crashkit.memory import heartbeat
from sglang_crashkit.memory.heartbeat import HeartbeatWriter

#: The process that runs the tests is the server's main process.
ROOT = os.getpid()
EXTEND = 1
MODES: Mapping[str, str] = {str(EXTEND): "extend"}
FLAGS = {"paused": heartbeat.PAUSED, "is_busy": heartbeat.BUSY, "is_off": heartbeat.OFF}
FLAGS |= {"is_waiting": heartbeat.WAITING}
WORDS = {"loop_at": heartbeat.LOOP_TIME, "batch_at": heartbeat.BATCH_TIME, "batches": heartbeat.BATCHES}
WORDS |= {"requests": heartbeat.REQUESTS, "mode": heartbeat.MODE, "tokens": heartbeat.TOKENS}
#: These stay as they are until another one is told.
COLLECTED = {"long_collections": heartbeat.LONG_COLLECTIONS, "collection_secs": heartbeat.COLLECTION_SECS}
COLLECTED |= {"collection_ended": heartbeat.COLLECTION_ENDED}


class Beating:
    """The schedulers TP0, TP1 and so on of a server, with the pids 10, 11 and so on, and their heartbeats."""

    made: list[Any] = []  # noqa: RUF012 - all that a test made, closed when it is over

    def __init__(self, pids: tuple[int, ...] = (10, 11), *, is_on: bool = True) -> None:
        self.made.append(self)
        self.now = 1000.0
        self.tree, self.writers = ProcessTree(ROOT), dict[int, HeartbeatWriter]()
        self.heartbeats = Heartbeats(self.tree, is_on=is_on, now=lambda: self.now)
        #: Those that beat, or are to.
        self.processes = [self.add(pid, f"sglang::scheduler_TP{pid - 10}") for pid in pids]
        self.beat()

    def add(self, pid: int, title: str) -> TrackedProcess:
        process = self.tree.add_reaped(pid, title, ExitStatus(), 0.0)
        process.handle = ProcessHandle.of_reaped(pid, None)  # type: ignore[arg-type] - it has not ended
        process.exited_at = None
        return process

    def close(self) -> None:
        heartbeats = self.heartbeats
        for each in (self.tree, *heartbeats.followed.values(), *heartbeats.others.values(), *self.writers.values()):
            each.close()

    def follow(self, *pids: int, modes: Any = MODES) -> Any:
        for process in self.processes:
            if not pids or process.pid in pids:
                self.heartbeats.follow(process, self.writers[process.pid].fd, modes)
        return self

    def beat(self, *pids: int, **fields: Any) -> None:
        """Let processes begin a round now, by default all, and in it do what `fields` say."""
        told = {"loop_at": self.now, "batches": 100} | fields
        for pid in pids or [process.pid for process in self.processes]:
            if pid not in self.writers:
                self.writers[pid] = HeartbeatWriter()
            words = self.writers[pid].words
            words[heartbeat.FLAGS] = sum(flag for name, flag in FLAGS.items() if told.get(name))
            for name, word in WORDS.items():
                words[word] = told.get(name, 0)
            for name in told.keys() & COLLECTED:
                words[COLLECTED[name]] = told[name]

    def pass_with(self, watch: Any, secs: float, meanwhile: Callable[[], object] | None) -> None:
        """Let the handler's loop run a watch for so long; `meanwhile` happens before each of its turns."""
        end, due = self.now + secs, watch.act_on_time()
        while self.now < end:
            self.now = min(end, max(self.now + 0.01, due))
            if meanwhile is not None:
                meanwhile()
            due = watch.act_on_time()
