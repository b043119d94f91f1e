"""Take the Python stacks of processes, one way after the other until one gives them, within one time.

1. py-spy, from outside, without a pause: needs permission to trace, and nothing of the process.
2. a thread of the process itself: needs its GIL, and no permission.
3. faulthandler, in a signal handler of the process: needs neither, and a thread that takes a signal. It may crash the
   process, so that it is for one that is about to be ended.

The second and the third work for a process that prepared them at its start; see `kernel.stack_hooks`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.capture.responder import ask_responders
from sglang_crashkit.capture.stack_signal import ask_faulthandler
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import HookFiles, StackHooks, read_stack_hooks
from sglang_crashkit.model.sample import Sample

#: What py-spy gets of the time where there is another way, and what the threads get.
_PYSPY_SHARE, _RESPONDER_SHARE = 0.5, 0.2
#: What either way within the process gets at least, also when the time is over: a machine that stood still, as a
#: virtual one does now and then, gave it to nobody.
_LEAST_SHARE = 0.15


def capture_all(
    processes: Mapping[int, int],
    folder: Path | Mapping[int, Path],
    deadline_secs: float,
    *,
    may_signal: bool = False,
) -> list[Sample]:
    """Take the stacks of all processes side by side; return a result for each, in the order given.

    Args:
        processes: start time of each process by its pid; see `procfs.ProcStat`.
        folder: the runtime folder, where processes say which hooks they have; by pid where they are of several servers.
        deadline_secs: the longest that it may take, in seconds; a third more on a machine that stood still meanwhile.
        may_signal: the third way is open: the processes are about to be ended.
    """
    folders = dict.fromkeys(processes, folder) if isinstance(folder, Path) else folder
    return _Ascent(processes, folders, deadline_secs, may_signal=may_signal).climb()


class _Ascent:
    """The results so far, and who has none yet."""

    def __init__(
        self, processes: Mapping[int, int], folders: Mapping[int, Path], deadline_secs: float, *, may_signal: bool
    ) -> None:
        self._folders = folders
        self._deadline_secs = deadline_secs
        self._may_signal = may_signal
        self._started = time.monotonic()
        self._pids = list(processes)
        self._hooks = {
            pid: hooks
            for pid, start_ticks in processes.items()
            if pid in folders and (hooks := read_stack_hooks(folders[pid], pid, start_ticks)) is not None
        }
        self._results: dict[int, Sample] = {}

    def climb(self) -> list[Sample]:
        share = _PYSPY_SHARE if self._hooks else 1.0
        self._take_in(sample_all(self._pids, share * self._deadline_secs), 0.0)
        self._ask_responders()
        if self._may_signal:
            self._ask_faulthandler()
        return [self._results[pid] for pid in self._pids]

    def _ask_responders(self) -> None:
        # Waiting for one that is stopped costs the others their time.
        if asked := self._without(but="ZXTt"):
            since = time.monotonic() - self._started
            files = {a.pid: HookFiles.of(self._folders[a.pid], a.pid, a.start_ticks).socket for a in asked}
            secs = min(self._remaining(), _RESPONDER_SHARE * self._deadline_secs)
            self._take_in(ask_responders(files, secs), since)

    def _ask_faulthandler(self) -> None:
        if asked := self._without(but="ZX"):
            since = time.monotonic() - self._started
            self._take_in(ask_faulthandler(asked, self._folders, self._remaining()), since)

    def _without(self, but: str) -> list[StackHooks]:
        """Return those without a result, `but` not those in one of these states."""
        hooks = [self._hooks[pid] for pid in self._pids if pid in self._hooks and not self._results[pid].threads]
        return [one for one in hooks if _state_of(one) not in but]

    def _remaining(self) -> float:
        least = _LEAST_SHARE * self._deadline_secs
        return max(least, self._started + self._deadline_secs - time.monotonic())

    def _take_in(self, samples: Sequence[Sample], later_secs: float) -> None:
        for new in samples:
            earlier = self._results.get(new.pid)
            problems = [earlier.problem] if earlier else []
            if new.problem:
                problems.append(new.problem if new.source == "py-spy" else f"{new.source}: {new.problem}")
            seconds = round(new.seconds + later_secs, 4)
            gil = new.gil or (earlier.gil if earlier is not None else "")
            self._results[new.pid] = replace(new, problem="; ".join(problems), seconds=seconds, gil=gil)


def _state_of(hooks: StackHooks) -> str:
    stat = procfs.read_stat(hooks.pid, hooks.start_ticks)
    return stat.state if stat is not None else "X"
