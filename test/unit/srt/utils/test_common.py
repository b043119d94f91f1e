"""A process tree is killed: the crash handler hears of it first, and the caller may wait, whatever the release can."""

from __future__ import annotations

import errno
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from sglang_crashkit import settings
from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.startup import StartupError
from sglang_crashkit.srt.utils import common as hooks
from unit.srt.conftest import Listener
from unit.support.waiting import LONG, child, wait_until

FAMILY = """
import subprocess
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) for _ in range(2)]
ready(" ".join(str(c.pid) for c in children))
pause()
"""


def old_kill_process_tree(parent_pid, include_parent: bool = True, skip_pid: int = None):  # noqa: RUF013
    """Stands for 0.5.9's, which kills and does not wait."""
    include_parent = include_parent and parent_pid is not None
    process = psutil.Process(parent_pid)
    for member in [*process.children(recursive=True), *([process] if include_parent else [])]:
        if member.pid != skip_pid:
            member.kill()


@pytest.fixture
def old_release(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The patched module of a release without ``wait_timeout``."""
    module = types.ModuleType("sglang.srt.utils.common")
    module.__dict__.update(os=os, psutil=psutil, time=time, logger=logging.getLogger(module.__name__))
    module.__dict__.update(
        _still_holding_resources=hooks.still_holding_resources,
        _wait_for_reap_or_raise=hooks.wait_for_reap_or_raise,
        kill_process_tree=hooks.on_kill_process_tree(old_kill_process_tree),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def kill(old_release: types.ModuleType) -> Callable[..., None]:
    function: Callable[..., None] = old_release.kill_process_tree
    return function


@pytest.fixture
def family() -> Iterator[tuple[Any, list[int]]]:
    with child(FAMILY) as process:
        pids = [int(pid) for pid in process.first_line.split()]
        try:
            yield process, pids
        finally:
            for pid in pids:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)


def holds(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_callers_of_three_parameters_are_served_as_before(kill, family):
    process, pids = family
    kill(process.pid, True, pids[0])
    wait_until(lambda: not holds(process.pid) and not holds(pids[1]), "the tree is killed")
    assert holds(pids[0])
    parameters = inspect.signature(kill).parameters
    assert list(parameters) == ["parent_pid", "include_parent", "skip_pid", "wait_timeout"]
    assert parameters["wait_timeout"].default is None


@pytest.mark.parametrize("spares", [False, True])
def test_with_a_wait_all_but_the_spared_are_gone(kill, family, caplog, spares: bool):
    process, pids = family
    with caplog.at_level(logging.INFO):
        kill(process.pid, not spares, pids[0] if spares else None, wait_timeout=LONG)
    assert [holds(pid) for pid in (process.pid, *pids)] == [spares, spares, False]
    # As upstream does.
    assert caplog.messages == [
        f"kill_process_tree called: parent_pid={process.pid}, include_parent={not spares}, pid={os.getpid()}"
    ]


def test_without_a_pid_the_callers_own_children_are_killed(old_release):
    with child("ready(); pause()") as process:
        # The test's own process may have other children.
        children = [psutil.Process(process.pid)]
        with mock.patch.object(psutil.Process, "children", return_value=children):
            old_release.kill_process_tree(None, wait_timeout=LONG)
        assert not holds(process.pid)


@pytest.mark.parametrize(("pid", "include_parent", "ends"), [(None, True, True), (0, False, True), (1, True, False)])
def test_with_all_children_the_engines_journals_go(
    monkeypatch: pytest.MonkeyPatch, pid: int | None, include_parent: bool, ends: bool
) -> None:
    retired: list[None] = []
    monkeypatch.setattr(hooks, "retire_journals", lambda: retired.append(None))
    kill = hooks.on_kill_process_tree(lambda parent_pid, include_parent=True: None)
    kill(os.getpid() if pid == 0 else pid, include_parent)
    assert bool(retired) is ends


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(1), OSError(errno.EINVAL, "Invalid argument")])
def test_a_process_that_cannot_be_asked_counts_as_gone(error):
    process = mock.Mock(**{"is_running.return_value": True, "status.side_effect": error})
    assert hooks.still_holding_resources([process]) == []


def test_those_that_are_left_are_named_in_a_warning_at_half_the_time_and_at_the_end(old_release, caplog, monkeypatch):
    times = itertools.count(0.0, 0.05)
    monkeypatch.setattr(old_release, "time", types.SimpleNamespace(monotonic=lambda: next(times), sleep=None))
    with child("ready(); pause()") as first, child("ready(); pause()") as second:
        pids = [first.pid, second.pid]
        message = re.escape(f"2 process(es) not reaped within 0.4s after SIGKILL; pids={pids}")
        with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match=message):
            old_release._wait_for_reap_or_raise([psutil.Process(pid) for pid in pids], 0.4)
    assert next(times) >= 0.4
    assert [record.getMessage() for record in caplog.records] == [
        "kill_process_tree: 2 process(es) still alive after 0.2s SIGKILL; "
        f"continuing to wait up to 0.4s total. pids={pids}"
    ]
    assert caplog.records[0].name == "sglang.srt.utils.common"


def test_names_replaced_in_the_patched_module_are_the_ones_used(old_release, monkeypatch):
    process = mock.Mock(pid=4711)
    answers = [[process], [process], []]
    clock = mock.Mock(**{"monotonic.side_effect": [0.0, 0.0, 1.0, 11.0]})
    logger = mock.Mock()
    monkeypatch.setattr(old_release, "_still_holding_resources", lambda procs: answers.pop(0))
    monkeypatch.setattr(old_release, "time", clock)
    monkeypatch.setattr(old_release, "logger", logger)
    old_release._wait_for_reap_or_raise([process], 60)
    assert answers == []
    assert clock.sleep.call_args_list == [mock.call(0.1)] * 2
    assert logger.warning.call_count == 1


@pytest.mark.parametrize("is_on", [True, False])
def test_upstreams_own_wait_is_taken_over(family, monkeypatch, is_on: bool):
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", str(is_on))
    process, _pids = family
    process.kill()
    upstream, processes = mock.Mock(__name__="wait"), [psutil.Process(process.pid)]
    hooks.on_wait_for_reap(upstream)(processes, wait_timeout=LONG)
    assert upstream.call_args_list == ([] if is_on else [mock.call(processes, LONG)])


def test_modules_taken_out_to_import_sglang_afresh_change_nothing(kill, family, monkeypatch):
    process, _pids = family
    for name in [name for name in sys.modules if name.startswith("sglang")]:
        monkeypatch.delitem(sys.modules, name)
    kill(process.pid, wait_timeout=LONG)
    assert process.wait(LONG) == -signal.SIGKILL


def test_a_function_that_can_wait_keeps_its_signature_and_default():
    calls = []

    def kill(parent_pid, include_parent=True, skip_pid=None, wait_timeout=60):
        calls.append((parent_pid, include_parent, skip_pid, wait_timeout))

    wrapped = hooks.on_kill_process_tree(kill)
    assert inspect.signature(wrapped) == inspect.signature(kill)
    wrapped(parent_pid=999_999_999)
    wrapped(999_999_999, wait_timeout=None)
    assert calls == [(999_999_999, True, None, 60), (999_999_999, True, None, None)]


@pytest.mark.parametrize("arguments", [((), {}), ((1, 2, 3, 4, 5), {}), ((), {"parent_pid": 1, "unknown": 2})])
def test_wrong_arguments_are_answered_under_upstreams_name(kill, arguments):
    args, kwargs = arguments
    with pytest.raises(TypeError, match=r"^(old_)?kill_process_tree\(\) "):
        kill(*args, **kwargs, **({} if len(args) > 3 else {"wait_timeout": 1.0}))


def test_errors_come_from_a_function_of_that_name(old_release, family):
    process, _pids = family
    kill = old_release.kill_process_tree
    assert (kill.__name__, kill.__wrapped__) == ("old_kill_process_tree", old_kill_process_tree)
    with (
        mock.patch.object(old_release, "_still_holding_resources", lambda procs: list(procs)),
        pytest.raises(RuntimeError, match=r"^kill_process_tree: 3 process\(es\) not reaped within 0.05s") as raised,
    ):
        kill(process.pid, wait_timeout=0.05)
    assert "kill_process_tree" in [entry.name for entry in raised.traceback]


# -- who is told


@hooks.on_kill_process_tree
def plain_kill(parent_pid: int | None, include_parent: bool = True, skip_pid: int | None = None) -> int | None:
    """Stand for upstream's function."""
    return parent_pid


def test_the_handler_is_told_first(listener: Listener) -> None:
    @hooks.on_kill_process_tree
    def kill_and_listen(parent_pid: int | None, skip_pid: int | None = None) -> Any:
        return listener.heard()

    told = kill_and_listen(None)
    assert (told["event"], told["pid"]) == ("teardown", os.getpid())
    with child("ready(); pause()") as process:
        assert kill_and_listen(process.pid)["pid"] == process.pid


def after(cause: BaseException) -> ValueError:
    """Return an exception that came while another one was handled, and a third one while that was."""
    first, second = ValueError("x"), OSError("y")
    first.__context__, second.__context__, second.__cause__ = second, cause, TypeError("z")
    return first


@pytest.mark.parametrize(
    ("error", "its", "told"),
    [
        pytest.param(ValueError("no tokenizer"), {"is_program": True}, ["exception", "teardown"], id="raises"),
        pytest.param(SystemExit(1), {"is_program": True}, ["exception", "teardown"], id="ends itself"),
        pytest.param(SystemExit(0), {"is_program": True}, ["teardown"], id="ends well"),
        pytest.param(SystemExit(143), {"is_program": True}, ["teardown"], id="tells of SIGTERM"),
        pytest.param(KeyboardInterrupt(), {"is_program": True}, ["teardown"], id="is interrupted"),
        pytest.param(after(KeyboardInterrupt()), {"is_program": True}, ["teardown"], id="fails as it is interrupted"),
        pytest.param(StartupError([], "x"), {"is_program": True}, ["teardown"], id="has reported its ranks"),
        pytest.param(ValueError("x"), {"is_program": True, "draining": True}, ["teardown"], id="was asked to end"),
        pytest.param(ValueError("x"), {"is_program": False}, ["teardown"], id="is a user's"),
    ],
)
def test_a_raising_program_is_told_before_it_ends_its_children(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, error: BaseException, its: dict[str, bool], told: list[str]
) -> None:
    def launch() -> None:
        try:
            raise error
        finally:
            plain_kill(os.getpid(), include_parent=False)

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(crash_exit, "state", crash_exit.State(**its))
    with pytest.raises(type(error)):
        launch()
    assert [listener.heard()["event"] for _ in told] == told


def test_what_another_thread_raises_is_not_what_ends_the_program(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up() -> None:
        try:
            raise ConnectionError
        except ConnectionError:
            plain_kill(os.getpid(), include_parent=False)

    monkeypatch.setattr(crash_exit, "state", crash_exit.State(is_program=True))
    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    assert listener.heard()["event"] == "teardown"


def test_another_servers_handler_is_told_of_its_end(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    with child("ready(); pause()") as server:
        path = settings.socket_of(server.pid)
        path.parent.mkdir(parents=True)
        with Listener(path, {}) as other:
            plain_kill(server.pid)
            assert other.heard()["pid"] == server.pid
        # A socket that was left behind does not keep the tree from being killed.
        assert plain_kill(server.pid) == server.pid


def test_another_servers_handler_is_not_told_of_an_elastic_ranks_end(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    monkeypatch.setenv(settings.MODE_VARIABLE, "elastic")
    # The rank is dead, and its pid another server's by now.
    with child("ready(); pause()") as server:
        path = settings.socket_of(server.pid)
        path.parent.mkdir(parents=True)
        rank = type("Rank", (), {"pid": server.pid, "kill": lambda _rank: None})()
        with Listener(path, {}) as other:
            supervisor.register([rank])
            rank.kill()
            assert [told["event"] for told in listener.heard_so_far()] == ["members", "teardown"]
            plain_kill(server.pid, include_parent=False)
            assert other.heard()["whole"] is False, "it was told of nothing before"
