"""Real troubles of real servers: each brings one about and leaves an incident, by the name of its page."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lanelib.commands import LaneError
from lanelib.lanes import Lane
from lanelib.paths import ROOT
from lanelib.servers import Server, greedy
from sglang_crashkit.incident.store import find_incidents
from tutoriallib.pages import HOST, REAL_FOLDER, name_of

FOLDER = Path(REAL_FOLDER)
#: Where the commands are run, with what each server's Python runs first; a model without weights.
WORK, EMPTY_MODEL = (FOLDER.with_name(f"{FOLDER.name}-{what}") for what in ("work", "model"))
INCIDENT_S, EXIT_S = 60.0, 120.0
_TP1 = "sglang::scheduler_TP1"
#: A host name of the server's own.
_PREFIX = ("unshare", "--uts", "sh", "-c", f'echo {HOST} >/proc/sys/kernel/hostname && exec "$@"', "sh")
_SPIN, _HOARD = signal.SIGRTMIN + 7, signal.SIGRTMIN + 8
#: What each Python of a server runs first.
_SITE = """
import signal
hoard = []
def wait_for_a_lock(*_):
    while True: pass
def fill_the_cache(*_):
    while True: hoard.append(b"x" * (16 << 20))
signal.signal(signal.SIGRTMIN + 7, wait_for_a_lock)
signal.signal(signal.SIGRTMIN + 8, fill_the_cache)
"""

Trouble = Callable[[Lane], AbstractContextManager[None]]


@contextlib.contextmanager
def _server(lane: Lane, tp: int, *more: str, **env: str) -> Iterator[Server]:
    (WORK / "sitecustomize.py").write_text(_SITE)
    arguments = ["--crash-dump-folder", str(FOLDER), *more]
    environ = {"PYTHONPATH": str(WORK), "HOSTNAME": HOST, **env}
    with Server.start(lane, tp=tp, extra_args=arguments, env=environ, prefix=_PREFIX) as server:
        yield server


def _ask(server: Server, bodies: Sequence[Mapping[str, Any]] | None = None, path: str = "generate") -> None:
    """Have requests under way."""
    texts = ("Hello", "The quick brown fox", "1 2 3 4 5 6 7 8")
    for body in bodies or [greedy(text, 4000) for text in texts]:
        server.ask_later(path, body, EXIT_S)
    time.sleep(2.0)


def _await_incident() -> None:
    deadline = time.monotonic() + INCIDENT_S
    while not (FOLDER.is_dir() and any(one.finished for one in find_incidents(FOLDER))):
        if time.monotonic() > deadline:
            raise LaneError(f"no incident below {FOLDER} after {INCIDENT_S:.0f} s")
        time.sleep(0.05)


@contextlib.contextmanager
def copied(incident: Path) -> Iterator[None]:
    """Have a real incident, its folder or its ``incident.json``, in the crash folder, as if of our host."""
    path = incident / "incident.json" if incident.is_dir() else incident
    document = json.loads(text := path.read_text())
    if saved := document["requests"]["path"]:
        document = json.loads(text.replace(str(Path(saved).parent), str(FOLDER / HOST)))
    document["server"]["hostname"] = HOST
    folder = FOLDER / HOST / "incidents" / name_of(document)
    if incident.is_dir():
        shutil.copytree(incident, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "incident.json").write_text(json.dumps(document))
    yield


@contextlib.contextmanager
def _broken(
    lane: Lane, tp: int, act: Callable[[Server], None], *more: str, serves_on: bool = False, **env: str
) -> Iterator[None]:
    """Break a server, which has ended then, or is still there when the commands are run."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server(lane, tp, *more, **env))
        act(server)
        if serves_on:
            _await_incident()
        else:
            server.popen.wait(2 * EXIT_S)
            stack.close()
        yield


def _work(server: Server) -> None:
    server.wait_ready()
    _ask(server)


def _strike(number: int) -> Callable[[Server], None]:
    """Return what sends a signal to the second rank while it works."""

    def strike(server: Server) -> None:
        _work(server)
        os.kill(server.pid_of(_TP1), number)

    return strike


def _ask_the_worst(server: Server) -> None:
    """Ask, among others, for a top_k beyond a 32-bit number, which ends stock SGLang."""
    ordinary = [
        {"rid": f"chat-{n}", "text": f"Once upon a time {n}", "sampling_params": {"max_new_tokens": 400}}
        for n in range(4)
    ]
    bad = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "top_k": 10**12, "stream": True}
    server.wait_ready()
    _ask(server, ordinary)
    _ask(server, [bad], "v1/completions")


def _fail_to_start(lane: Lane) -> AbstractContextManager[None]:
    """The weights are not where the server is told they are."""
    shutil.copytree(lane.model_dir, EMPTY_MODEL, dirs_exist_ok=True)
    return _broken(lane, 1, lambda _server: None, "--model-path", str(EMPTY_MODEL), "--load-format", "auto")


@contextlib.contextmanager
def _run_out_of_memory(lane: Lane) -> Iterator[None]:
    """A rank takes more memory than its cgroup allows."""
    sys.path.append(str(ROOT / "test"))
    from integration.memory_group import memory_group

    with memory_group("crashkit-tutorial") as group:

        def hoard(server: Server) -> None:
            # All of it is born there, as in a container.
            group.add(server.pid)
            _work(server)
            group.leave_room(256 << 20)
            os.kill(server.pid_of(_TP1), _HOARD)

        with _broken(lane, 2, hoard):
            pass
    yield


_SOON = {"SGLANG_CRASHKIT_HANG_SECS": "5"}
TROUBLES: Mapping[str, Trouble] = {
    "rank-killed": lambda lane: _broken(lane, 2, _strike(signal.SIGKILL)),
    # By upstream's own switch for tests.
    "exception": lambda lane: _broken(lane, 1, _work, SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS="50"),
    "hang": lambda lane: _broken(lane, 2, _strike(_SPIN), serves_on=True, **_SOON),
    "request-that-kills": lambda lane: _broken(lane, 1, _ask_the_worst),
    "failed-start": _fail_to_start,
    "out-of-memory": _run_out_of_memory,
    "stopped-rank": lambda lane: _broken(lane, 2, _strike(signal.SIGSTOP), serves_on=True, **_SOON),
}
