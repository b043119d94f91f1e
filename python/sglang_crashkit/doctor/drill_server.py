"""A server that is none, for `drill`: a main process with a real crash handler and two ranks, one of which it kills.

Run as ``python -m sglang_crashkit.doctor.drill_server CRASH_FOLDER``. It ends at the end of its standard input.
"""

from __future__ import annotations

import os
import signal
import sys

import setproctitle

from sglang_crashkit.policy import Mode
from sglang_crashkit.srt import handler_process
from sglang_crashkit.srt.hooks import handler_pid, notify, request
from sglang_crashkit.srt.stack_hooks import install_in_server, install_in_worker

_ANSWER_SECS = 2.0
RANKS = ("sglang::scheduler_TP0", "sglang::scheduler_TP1")


def main(crash_folder: str) -> int:
    """Start the tree, kill its last rank, and wait to be told to end."""
    handler_process.start(crash_folder)
    if handler_pid() is None:
        return 1
    # A server program without a handler for SIGQUIT is not told, so the incident is whole at once.
    notify("launch", mode=Mode.SERVER.value)
    install_in_server()
    # The ranks end with this process, whatever ends it: nobody else holds the other end.
    theirs, ours = os.pipe()
    pids = [_start_rank(title, theirs, ours) for title in RANKS]
    # Answered when the handler has taken in all that was said before: it knows the ranks.
    request("await_incident", _ANSWER_SECS)
    os.kill(pids[-1], signal.SIGKILL)
    sys.stdin.buffer.read()
    os.close(ours)
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


def _start_rank(title: str, theirs: int, ours: int) -> int:
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        setproctitle.setproctitle(title)
        install_in_worker()
        os.write(done, b".")
        wait_for_the_others(theirs)
        os._exit(0)
    os.close(done)
    os.read(ready, 1)
    os.close(ready)
    return pid


def wait_for_the_others(descriptor: int) -> None:
    """Stand for a rank in a collective: return when there are no others."""
    os.read(descriptor, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
