"""Run a command for each of many nodes, from a bounded pool: whatever one of them does, the others' answers are had.

What runs here is the program that carries the command to its node, such as srun, ssh or kubectl. It reads nothing, and
is killed, with all that it started, at its deadline.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import make_private_folder, write_private

#: Of what was said beside an answer, the last is kept.
_MAX_ERRORS = 1 << 20


@dataclass(frozen=True)
class Limits:
    """How many nodes are asked at the same time, and how long each and all may take, in seconds; None for no limit."""

    at_once: int = 32
    node_secs: float = 300.0
    total_secs: float | None = None
    max_output: int = 1 << 28  # of how many bytes of output a node is given up; none has more to say


@dataclass(frozen=True)
class NodeRun:
    """What became of the command for one node."""

    node: str
    status: int | None  # the carrier's exit status, None where it did not end by itself or was not started
    output: str = ""  # what the command printed on the node, to standard output
    errors: str = ""  # what it and the carrier printed to standard error
    problem: str = ""  # why there is no status; empty where there is one
    secs: float = 0.0  # how long it took, in seconds
    late: bool = False  # it was killed at its deadline, or at that of all nodes


def run_on_nodes(
    commands: Mapping[str, Sequence[str]],
    on_end: Callable[[NodeRun], None],
    *,
    output: Path,
    log: str,
    environ: Mapping[str, str],
    limits: Limits,
    give_up: Callable[[str], None] = lambda _node: None,
) -> KeyboardInterrupt | None:
    """Run the command of each node; Ctrl-C ends all that run and starts no more.

    Args:
        commands: by the node's name.
        on_end: called for each node in this thread, as it ends; once more where Ctrl-C came in between.
        output: what is said of each node is noted in a folder of the node's name in it.
        log: the name of the file there.
        environ: the environment of all commands.
        limits: how many run at the same time, and for how long.
        give_up: ends what runs on the node of this name, where killing the command here does not.

    Returns:
        What ended it before all nodes had answered, None where nothing did.
    """
    stop, until = threading.Event(), time.monotonic() + (math.inf if limits.total_secs is None else limits.total_secs)

    def run(node: str, argv: Sequence[str]) -> NodeRun:
        secs = round(min(limits.node_secs, until - time.monotonic()), 1)
        if stop.is_set() or secs <= 0:
            why = "interrupted before its turn" if stop.is_set() else "not asked: the time for all nodes was over"
            return NodeRun(node, None, problem=why, late=not stop.is_set())
        try:
            make_private_folder(output / node)
        except (OSError, CrashkitError) as error:
            return NodeRun(node, None, problem=f"{argv[0]} was not started: {error}")
        ended = _run_one(node, argv, secs, stop, environ, limits.max_output)
        # An answer counts for more than what was said beside it.
        with contextlib.suppress(OSError):
            write_private(output / node / log, ended.errors.encode(errors="backslashreplace"))
        if ended.status is None:
            give_up(node)
        return ended

    interrupt = None
    with ThreadPoolExecutor(max_workers=limits.at_once) as pool:
        pending = {pool.submit(run, node, argv): node for node, argv in commands.items()}
        try:
            for future in as_completed(tuple(pending)):
                on_end(future.result())
                # What a node printed is not kept, for a thousand nodes print much.
                del pending[future]
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            stop.set()
    # Those that the interruption ended, in the order of the commands.
    for future in pending:
        on_end(future.result())
    return interrupt


def _run_one(
    node: str,
    argv: Sequence[str],
    secs: float,
    stop: threading.Event,
    environ: Mapping[str, str],
    max_output: int,
) -> NodeRun:
    done = run_tool(argv, secs, stop, environ=environ, apart=True, max_output=max_output)
    errors = done.errors[-_MAX_ERRORS:]
    if done.status is not None and not stop.is_set():
        return NodeRun(node, done.status, done.text, errors, secs=done.seconds)
    late = done.seconds >= secs and not stop.is_set()
    problem = "interrupted" if stop.is_set() else f"no answer within {secs:.0f} s" if late else done.reason
    return NodeRun(node, None, done.text, errors, problem, done.seconds, late)
