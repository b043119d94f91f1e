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
    started = time.monotonic()
    prepared = [
        hooks
        for pid, start_ticks in processes.items()
        if pid in folders and (hooks := read_stack_hooks(folders[pid], pid, start_ticks)) is not None
    ]
    results: dict[int, Sample] = {}

    def left(but: str) -> list[StackHooks]:
        """Return the prepared ones without a stack, `but` not those in one of these states."""
        return [hooks for hooks in prepared if not results[hooks.pid].threads and _state_of(hooks) not in but]

    def remaining() -> float:
        return max(_LEAST_SHARE * deadline_secs, started + deadline_secs - time.monotonic())

    share = _PYSPY_SHARE if prepared else 1.0
    _take_in(results, sample_all(list(processes), share * deadline_secs), 0.0)
    # Waiting for one that is stopped costs the others their time.
    if asked := left(but="ZXTt"):
        since = time.monotonic() - started
        files = {one.pid: HookFiles.of(folders[one.pid], one.pid, one.start_ticks).socket for one in asked}
        _take_in(results, ask_responders(files, min(remaining(), _RESPONDER_SHARE * deadline_secs)), since)
    if may_signal and (asked := left(but="ZX")):
        since = time.monotonic() - started
        _take_in(results, ask_faulthandler(asked, folders, remaining()), since)
    return [results[pid] for pid in processes]


def _take_in(results: dict[int, Sample], samples: Sequence[Sample], later_secs: float) -> None:
    """Put new samples in the place of earlier ones, whose problems they keep; they began so many seconds later."""
    for new in samples:
        earlier = results.get(new.pid)
        problems = [earlier.problem] if earlier else []
        if new.problem:
            problems.append(new.problem if new.source == "py-spy" else f"{new.source}: {new.problem}")
        seconds = round(new.seconds + later_secs, 4)
        gil = new.gil or (earlier.gil if earlier is not None else "")
        results[new.pid] = replace(new, problem="; ".join(problems), seconds=seconds, gil=gil)


def _state_of(hooks: StackHooks) -> str:
    stat = procfs.read_stat(hooks.pid, hooks.start_ticks)
    return stat.state if stat is not None else "X"
