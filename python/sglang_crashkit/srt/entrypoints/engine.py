"""Hooks of ``sglang/srt/entrypoints/engine.py``: the launch of a server, the wait for its ranks, a failed launch."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from sglang_crashkit.capture.environment import read_versions
from sglang_crashkit.incident.exit_status import ServerExit, status_of_exit
from sglang_crashkit.memory.ring import write_blob
from sglang_crashkit.redact import redact_command
from sglang_crashkit.settings import LAUNCH_VARIABLE, SOCKET_VARIABLE, Settings, published
from sglang_crashkit.srt import crash_exit, handler_process, startup, supervisor
from sglang_crashkit.srt.hooks import Function, before, in_place_of, never_raises, note_failure, notify
from sglang_crashkit.srt.log_handler import keep_log_records
from sglang_crashkit.srt.redaction import fields_of, known_secrets, redact, redacted_fields
from sglang_crashkit.srt.server_args import set_crash_dump_env, withdraw_crash_dump_env
from sglang_crashkit.srt.stack_hooks import install_in_server
from sglang_crashkit.srt.startup import Startup, StartupError
from sglang_crashkit.srt.supervisor import STATUS_SECS, Child, Clock, Supervisor
from sglang_crashkit.srt.utils.common import end_after_crash

logger = logging.getLogger(__name__)

#: The maximum length of the text that replaces a value which JSON cannot represent, in characters.
_MAX_WORDS = 1000
#: Cached: each package is searched for on all of Python's path.
_versions = functools.cache(read_versions)

#: Whether this process launches a node of a rank above 0; the ``ServerArgs`` of its launch.
_follows, _server_args = False, None
#: The current wait for the ranks, None if absent.
_start: Startup | None = None


@never_raises
def on_engine_launch(server_args: Any) -> None:
    """Start the crash handler before the first child process, if a crash folder is set or diagnostics are on."""
    global _follows, _server_args
    settings = Settings.from_environ()
    crash_folder = getattr(server_args, "crash_dump_folder", None)
    if not settings.enabled:
        return
    set_crash_dump_env(server_args)
    mode = crash_exit.note_launch(server_args)
    # The time at which the wait for the new processes begins, by the monotonic clock.
    os.environ[LAUNCH_VARIABLE] = str(time.monotonic())
    _follows = (getattr(server_args, "node_rank", 0) or 0) > 0
    if crash_folder or settings.diagnostics:
        try:
            handler_process.start(crash_folder)
            notify("launch", mode=mode.value)
            install_in_server()
            keep_log_records(server_args, of_all=crash_exit.state.is_program)
            _server_args = server_args
            _tell_environment(ready=False)
        finally:
            # If the handler did not start, this process must watch its workers at once.
            supervisor.begin(follows=_follows)


def on_launch_phase_sigquit(handler: Function) -> Function:
    """Wrap the launch phase's handler of SIGQUIT, which a failed child sends: it runs once the incident is complete.

    Waits for the incident at most ``SGLANG_CRASHKIT_BUDGET_SECS``, or longer if the crash handler asks for more time.
    The SIGQUIT handler is in place until the server serves; on a node of a rank above 0 as long as the node runs.
    """
    return before(handler, _report_failed_child)


def on_wait_for_scheduler_ready(wait: Function) -> Function:
    """Replace ``_wait_for_scheduler_ready``: any rank's death ends the wait at once.

    Returns each rank's message, in order. A RuntimeError names the rank that died, closed its pipe, sent another
    message, failed, or was silent for longer than ``SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS``; it is raised once the
    incident is complete.
    """

    def watch(wait: Function, scheduler_pipe_readers: Sequence[Any], scheduler_procs: Sequence[Any]) -> Any:
        if not Settings.from_environ().enabled:
            return wait(scheduler_pipe_readers, scheduler_procs)
        supervisor.register(scheduler_procs)
        can_watch = startup.can_watch(scheduler_pipe_readers, scheduler_procs)
        children = []
        if can_watch:
            # The data-parallel controller reports for processes without a pipe. The order of such processes is not
            # that of their ranks.
            is_rank = len(scheduler_pipe_readers) == len(scheduler_procs)
            for number, (process, reader) in enumerate(zip_longest(scheduler_procs, scheduler_pipe_readers)):
                name = f"Rank {number} scheduler" if is_rank or process is None else ""
                children.append(Child(name, process, reader))
        try:
            infos = _watch_start(children) if can_watch else None
            if infos is None:
                readers = startup.readers_of(children) if can_watch else scheduler_pipe_readers
                infos = wait(readers, scheduler_procs)
        except StartupError as error:
            crash_exit.end_by_status(error, startup.report(error))
            raise
        finally:
            # The ranks have been started, and have the variables, even if the wait for them failed.
            if not crash_exit.state.is_program:
                withdraw_crash_dump_env()
        on_ranks_ready()
        if _follows and can_watch:
            _follow(scheduler_procs)
        return infos

    return in_place_of(wait, watch, meant=StartupError)


def on_ranks_ready() -> None:
    """Note that all ranks that this process launched are ready."""
    crash_exit.note_started()
    if _server_args is not None:
        # Some arguments are resolved during the start of the ranks.
        _tell_environment(ready=True)


def _watch_start(children: Sequence[Child]) -> list[Any] | None:
    global _start
    try:
        _start = Startup(children)
        return _start.run()
    except StartupError:
        raise
    except Exception:  # noqa: BLE001 - upstream waits instead
        note_failure(_watch_start)
        return None
    finally:
        _start = None


def _report_failed_child(*_args: Any, **_kwargs: Any) -> None:
    settings = Settings.from_environ()
    if not settings.enabled:
        return
    crash_exit.begin(ServerExit.CRASHED, settings.budget_secs + settings.end_secs)
    deaths = never_raises(_start.deaths)() if _start is not None else None
    if deaths is not None:
        startup.report(deaths)
    else:
        crash_exit.report("child_failed" if crash_exit.state.started else "launch_failed")


class Following(Supervisor):
    """The schedulers and the data-parallel controller of a node of a rank above 0, once all of them are ready.

    On such a node upstream waits for one scheduler after the other, behind a ``/health`` that always answers 200, and
    exits with 0 whatever they died of. Only rank 0 is asked to end; when it tells the schedulers, they exit with 0.
    """

    def __init__(self, children: Sequence[Child], clock: Clock | None = None) -> None:
        super().__init__(children, clock)
        self._settings = Settings.from_environ()
        self._lock = threading.Lock()
        self._is_draining = False

    def run(self) -> None:
        """Wait until a process has failed, or until all have ended because rank 0 told them to."""
        while not self.have_failed() and self.living():
            self.wait(self._patience())

    def have_failed(self) -> bool:
        """Check the processes and return whether one failed; if so, its incident is complete.

        Call it before this process does anything that the end of a process may lead to.
        """
        if self._lock.acquire(timeout=self._settings.exit_secs):
            try:
                if not crash_exit.has_begun():
                    self._look()
            finally:
                self._lock.release()
        return crash_exit.has_begun()

    def _look(self) -> None:
        for child in self.living():
            child.look_up_title()
        self.wait(0.0)
        ended = self.ended()
        self.learn_exits(ended, STATUS_SECS)
        for child in ended:
            if child.exit.code != 0:
                self._fail(child)
                return
        if ended and not self._is_draining:
            self._is_draining = True
            # Rank 0 told it to end. The other processes are about to end as well.
            notify("draining")
        if self._patience() == 0.0:
            names = ", ".join(child.label() for child in self.living())
            self._fail(ended[0], f"; these processes did not end with it: {names}")

    def _patience(self) -> float | None:
        """Return the seconds that the other processes have left to end after the first did; None if unlimited."""
        ended = self.ended()
        if not ended or not self.living():
            return None
        return max(0.0, ended[0].ended_at + self._settings.end_secs - self.clock.now())

    def _fail(self, child: Child, rest: str = "") -> None:
        message = f"{child.label()} {child.how_it_ended()}{rest}"
        logger.error("crash kit: %s; this node ends", message)
        crash_exit.begin(status_of_exit(child.exit), self._settings.budget_secs + self._settings.end_secs)
        crash_exit.report("child_failed", message=message)


@never_raises
def _follow(processes: Iterable[Any]) -> None:
    if not crash_exit.ends_with_the_server():
        return
    following = Following([Child("", process) for process in processes])
    crash_exit.state.has_failed = following.have_failed

    def run() -> None:
        following.run()
        if crash_exit.has_begun():
            end_after_crash()

    threading.Thread(target=never_raises(run), name="crashkit-follower", daemon=True).start()


@never_raises
def _tell_environment(*, ready: bool) -> None:
    """Send the crash handler what only this process knows: its arguments, without secrets, and versions."""
    if not published(SOCKET_VARIABLE):
        return
    # If the method is absent, the fields themselves hold the resolved values.
    resolve = getattr(_server_args, "resolved_dict", None)
    facts = {
        "command_line": redact_command(sys.orig_argv, known_secrets(_server_args)),
        "arguments": redacted_fields(resolve() if callable(resolve) else fields_of(_server_args)),
        "versions": _versions(),
    }
    text = json.dumps(facts, default=lambda value: redact(str(value), _server_args)[:_MAX_WORDS])
    descriptor = write_blob(text.encode())
    try:
        notify("environment", descriptor=descriptor, ready=ready)
    finally:
        os.close(descriptor)
