"""A stand-in for a server: titles, children and signals of a two-rank SGLang, which calls the kit's real hooks.

Run as a program by `unit.support.server_driver`; each line on its standard input is a command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import setproctitle

from sglang_crashkit.srt import crash_exit, handler_process
from sglang_crashkit.srt.entrypoints.engine import on_engine_launch, on_launch_phase_sigquit
from sglang_crashkit.srt.exception_record import tell_caught
from sglang_crashkit.srt.hooks import notify, request
from sglang_crashkit.srt.managers.scheduler import on_parent_told, on_scheduler_exception
from sglang_crashkit.srt.managers.scheduler_heartbeat import on_iteration
from sglang_crashkit.srt.managers.tokenizer_manager import (
    on_crash_dump,
    on_request_states,
    on_sigterm,
    open_crash_dump,
)
from sglang_crashkit.srt.stack_hooks import on_configure_logger
from sglang_crashkit.srt.utils.common import on_kill_process_tree
from sglang_crashkit.srt.utils.cudacore_pyspy_dump_utils import on_pyspy_dump
from sglang_crashkit.srt.utils.watchdog import on_watchdog_timeout

sys.path.insert(0, str(Path(__file__).parents[2]))

from unit.capture.cuda_core import cuda_driver
from unit.srt.managers import stepping
from unit.support import torch_recorder
from unit.support.waiting import LONG

# A busy machine takes longer to start a handler than a server waits for one.
handler_process.START_SECS = handler_process.READY_SECS = LONG

PR_SET_PDEATHSIG = 1
SCHEDULER = SimpleNamespace(_engine_paused=False)
STEPPING = stepping.Scheduler()
children: dict[str, tuple[int, int]] = {}  # by title: pid, write end of the pipe of its commands


class Manager:
    """What the hooks use of ``TokenizerManager``."""

    def __init__(self, crash_folder: str | None, error: str | None, dump_secs: float = 0.0) -> None:
        self.dump_secs = dump_secs
        self.crash_dump_folder = crash_folder
        self.crash_dump_performed = False
        self.crash_dump_request_list = [object()] * 3
        self.rid_to_state = {"a": SimpleNamespace(finished=True), "b": SimpleNamespace(finished=False)}
        self.error = error

    @on_crash_dump
    def dump_requests_before_crash(self) -> None:
        self.crash_dump_performed = True
        time.sleep(self.dump_secs)
        if self.error:
            raise ValueError(self.error)
        if self.crash_dump_folder:
            name = Path(self.crash_dump_folder) / os.environ["HOSTNAME"] / "crash_dump.pkl"
            with open_crash_dump(self, str(name), {}) as file:
                file.write(b"requests")


@on_kill_process_tree
def kill_process_tree(parent_pid: int | None, include_parent: bool = True) -> None:
    for pid, _pipe in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if include_parent:
        os._exit(41)


@on_configure_logger
def configure_logger() -> None:
    """Stand for upstream's, which each worker calls once it has its title."""
    logging.basicConfig(handlers=[logging.NullHandler()], level=logging.INFO, force=True)


def sample(command: str) -> None:
    # As gloo does.
    error = RuntimeError if "by peer" in command else ValueError
    raise error(command.replace("\\udcff", "\udcff"))


def forward_one_batch(command: str) -> None:
    try:
        sample(command)
    except (RuntimeError, ValueError):
        on_scheduler_exception()
        os.kill(os.getppid(), signal.SIGQUIT)
        on_parent_told()


def survive_one_batch(command: str) -> None:
    """Do what a release does that catches it in the event loop and serves on."""
    try:
        sample(command)
    except (RuntimeError, ValueError):
        tell_caught()


@on_pyspy_dump
def pyspy_dump_schedulers() -> str:
    return "upstream's"


def time_out(kind: str) -> str:
    """Do what a rank's watchdog does, and return who took the stacks."""
    on_watchdog_timeout(SimpleNamespace(debug_name="Scheduler", watchdog_timeout=20.0, soft=kind == "soft"))
    return pyspy_dump_schedulers() or "the handler"


def start_copy(title: str = "", *, is_worker: bool = False) -> int:
    """Fork a copy that has this process's title, unless it gets one, and ends with status 5 on SIGUSR1."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        if title:
            setproctitle.setproctitle(title)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if is_worker:
            configure_logger()
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
        os.write(done, b".")
        while True:
            # A pause would sleep through a signal that came just before it.
            time.sleep(0.01)
    os.read(ready, 1)
    os.close(ready)
    os.close(done)
    return pid


def hold_the_lock() -> None:
    """Wait for a mutex for ever without letting another thread run Python."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def spin() -> None:
    """Be at the same place for ever, busy."""
    while True:
        pass


def go_round(stop: threading.Event) -> None:
    """Be an event loop with nothing to do."""
    while not stop.wait(0.02):
        on_iteration(SCHEDULER, [])


def take_steps(number: int, *rids: str) -> None:
    """Go round so many times with these requests, and begin one more batch of them."""
    batch = stepping.batch_of(stepping.DECODE, [stepping.Req(rid, 5) for rid in rids])
    for _step in range(number):
        STEPPING.step(batch)
    STEPPING.process_input_requests()
    STEPPING.run_batch(batch)


def sleep_in_the_kernel(fifo: str) -> None:
    """Be in uninterruptible sleep until somebody writes to `fifo`.

    posix_spawn(3) waits like vfork(2), and its child waits for the other end of the pipe.
    """
    actions = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions), 0)


def start_cuda(seconds: str, fraction: str, then: str = "", steps: str = "10") -> None:
    """Have this process answer a trigger as the CUDA driver does, with a core that takes `seconds`."""
    pipe = torch_recorder.open_pipe(cuda_driver.name_of(os.environ["CUDA_COREDUMP_PIPE"]), os.O_RDWR)
    threading.Thread(
        target=cuda_driver.answer,
        args=(pipe, os.environ["CUDA_COREDUMP_FILE"], float(seconds)),
        kwargs={"fraction": float(fraction), "then": then, "steps": int(steps)},
        daemon=True,
    ).start()


def start_nccl(rank: str, content: str, seconds: str, how: str = "") -> None:
    """Have this process answer as PyTorch's flight recorder does, with what is in the file `content`."""
    pipe = torch_recorder.open_pipe(f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe")
    dump = os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank
    threading.Thread(
        target=torch_recorder.answer, args=(pipe, dump, Path(content).read_bytes(), float(seconds), how), daemon=True
    ).start()


def wait_for_a_command(commands: int) -> None:
    """Stand for a rank at work."""
    stop = threading.Event()
    with os.fdopen(commands, "r") as lines:
        for line in lines:
            verb, _, argument = line.strip().partition(" ")
            if verb == "exit":
                os._exit(int(argument))
            elif verb == "abort":
                os.abort()
            elif verb == "raise":
                forward_one_batch(argument)
            elif verb == "diverge":
                # As upstream's rank consensus checker does, in a thread of its own.
                words = (
                    f"Found rank divergence for 2 events(s)! local hash: {'ab' * 20}, events = {json.loads(argument)}"
                )
                logging.getLogger("sglang.srt.utils.rank_consensus_checker").critical(words)
                os._exit(1)
            elif verb == "catch":
                survive_one_batch(argument)
            elif verb == "lose_thread":
                threading.Thread(target=sample, args=(argument,), name="Thread-7 (transfer_worker)").start()
            elif verb == "watchdog":
                answer(time_out(argument))
                if argument == "hard":
                    os.kill(os.getppid(), signal.SIGQUIT)
            elif verb == "lost":
                notify("peer_lost", **json.loads(argument))
            elif verb == "snapshot":
                answer(pyspy_dump_schedulers() or "the handler")
            elif verb == "exit_later":
                time.sleep(0.5)
                os._exit(int(argument))
            elif verb == "become_hooked_controller":
                setproctitle.setproctitle("sglang::data_parallel_controller")
                answer(start_copy(argument, is_worker=True))
            elif verb == "cuda":
                start_cuda(*argument.split())
                answer("listening")
            elif verb == "nccl":
                start_nccl(*argument.split())
                answer("listening")
            elif verb == "beat":
                stop.clear()
                on_iteration(SCHEDULER, [])
                threading.Thread(target=go_round, args=(stop,), daemon=True).start()
                answer("beating")
            elif verb == "hush":
                stop.set()
                answer("silent")
            elif verb == "step":
                number, *rids = argument.split()
                take_steps(int(number), *rids)
                answer("in a step")
            elif verb == "sleep":
                sleep_in_the_kernel(argument)
            elif verb == "copy":
                answer(start_copy())
            elif verb == "hold_the_lock":
                hold_the_lock()
            elif verb == "spin":
                spin()
            elif verb == "run":
                runpy.run_path(argument)
    # As a real rank it does not mind that its parent is gone, and has reported its stacks; somebody else ends it.
    while True:
        signal.pause()


def start_child(title: str) -> None:
    theirs, ours = os.pipe()
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        for signum in (signal.SIGQUIT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(ours)
        setproctitle.setproctitle(title)
        configure_logger()
        logging.getLogger("sglang.srt").info("%s is ready", title)
        os.write(done, b".")
        wait_for_a_command(theirs)
        os._exit(0)
    os.close(theirs)
    os.close(done)
    os.read(ready, 1)
    os.close(ready)
    children[title.removeprefix("sglang::")] = (pid, ours)


def answer(text: object) -> None:
    os.write(1, f"{text}\n".encode())


def obey(line: str, options: dict[str, Any]) -> None:
    verb, _, argument = line.partition(" ")
    if verb == "tell":
        name, _, command = argument.partition(" ")
        os.write(children[name][1], f"{command}\n".encode())
    elif verb == "teardown":
        kill_process_tree(os.getpid(), include_parent=argument != "children")
        answer("done")
    elif verb == "start":
        start_child(argument)
        answer(children[argument.removeprefix("sglang::")][0])
    elif verb == "helper":
        process = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
        options["helpers"].append(process)
        answer(process.pid)
    elif verb == "crowd":
        crowd = [subprocess.Popen(["sleep", "60"]) for _ in range(int(argument))]
        options["helpers"] += crowd
        answer(" ".join(str(process.pid) for process in crowd))
    elif verb == "disperse":
        for process in options["helpers"]:
            process.kill()
            process.wait(LONG)
        options["helpers"].clear()
        answer("done")
    elif verb == "dump_begun":
        notify("crash_dump_begun")
        answer("done")
    elif verb == "draining":
        notify("draining", unhealthy=argument == "unhealthy")
        answer("done")
    elif verb == "dump_ended":
        answer((request("crash_dump_ended", 20.0, workers=2) or {}).get("path"))
    elif verb == "ask":
        rid, text = argument.split(" ", 1)
        request_state = SimpleNamespace(finished=False, obj=SimpleNamespace(rid=rid, text=text))
        options["manager"].rid_to_state[rid] = request_state
        answer("done")
    elif verb == "answer":
        options["manager"].rid_to_state[argument].finished = True
        del options["manager"].rid_to_state[argument]
        answer("done")
    elif verb == "join":
        os.waitpid(children[argument][0], 0)
    elif verb == "leave":
        os._exit(int(argument))


def main(options: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    manager = Manager(options["crash_folder"], options.get("dump_error"), options.get("dump_secs", 0.0))
    options["helpers"] = []

    def sigquit(_signum: int, _frame: object) -> None:
        answer("sigquit")
        if options["answers_sigquit"]:
            manager.dump_requests_before_crash()
            if options.get("ends_after_dump", True):
                kill_process_tree(os.getpid())

    @on_launch_phase_sigquit
    def launch_sigquit(_signum: int, _frame: object) -> None:
        answer("sigquit")
        kill_process_tree(os.getpid())

    @on_sigterm
    def sigterm(_signum: int, _frame: object) -> None:
        if options["tears_down_on_sigterm"]:
            kill_process_tree(os.getpid())
        answer("draining")

    if options["catches_sigquit"]:
        signal.signal(signal.SIGQUIT, launch_sigquit if options.get("launching") else sigquit)
    if options.get("catches_sigterm", True):
        signal.signal(signal.SIGTERM, sigterm)
    if options.get("mode", "server") != "library":
        crash_exit.state.is_program = True
    on_engine_launch(
        SimpleNamespace(
            crash_dump_folder=options["crash_folder"],
            model_path="tiny",
            tp_size=2,
            api_key="canary-api-key",
            elastic_ep_backend="mooncake" if options.get("mode") == "elastic" else None,
        )
    )
    for title in ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer"):
        start_child(title)
    # After the children, as upstream's tokenizer manager: what is forked later would hold the journal's lock, too.
    if options.get("journals"):
        manager.rid_to_state = {}
        on_request_states(manager)
    options["manager"] = manager
    if options.get("started", not options.get("launching")):
        crash_exit.note_started()
    answer("ready " + " ".join(f"{name}={pid}" for name, (pid, _pipe) in children.items()))
    while line := sys.stdin.buffer.readline():
        obey(line.decode().strip(), options)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
