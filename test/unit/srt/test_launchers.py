"""Launchers of SGLang's own beside its HTTP server: gRPC, an encoder-only server, and Ray.

Without Ray: an actor is constructed here, from what was pickled for it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.settings import MODE_VARIABLE, SOCKET_VARIABLE, SPOOL_VARIABLE
from sglang_crashkit.srt import crash_exit, supervisor
from sglang_crashkit.srt.disaggregation import encoder
from sglang_crashkit.srt.disaggregation.encoder import on_encoder_launch, on_encoder_rank
from sglang_crashkit.srt.entrypoints import grpc_server
from sglang_crashkit.srt.entrypoints.grpc_server import on_grpc_program
from sglang_crashkit.srt.ray import scheduler_actor
from sglang_crashkit.srt.ray.engine import on_ray_launch, on_ray_shutdown
from sglang_crashkit.srt.ray.scheduler_actor import on_scheduler_actor
from sglang_crashkit.srt.stack_hooks import on_configure_logger
from unit.srt.conftest import CONTEXT, Listener
from unit.support.waiting import LONG

ARGUMENTS = SimpleNamespace(crash_dump_folder="/crash")


# -- gRPC


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of each launch, which starts no handler and no watcher here; signals and classes are given back."""
    seen: list[Any] = []
    for name in ("terminate", "kill"):
        monkeypatch.setattr(BaseProcess, name, getattr(BaseProcess, name))
    monkeypatch.setattr(grpc_server, "on_engine_launch", lambda args: seen.append(args) or crash_exit.note_launch(args))
    monkeypatch.setattr(supervisor, "listen", lambda: SimpleNamespace())
    signals = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)}
    yield seen
    for number, handler in signals.items():
        signal.signal(number, handler)


@on_configure_logger
def configure_logger(server_args: Any, prefix: str = "") -> None:
    """What each of SGLang's launchers calls."""


def test_the_launcher_stays_a_coroutine_and_launches_where_the_logger_is_configured(launches: list[Any]) -> None:
    @on_grpc_program
    async def serve_grpc(server_args: Any) -> tuple[bool, list[Any]]:
        before = list(launches)
        configure_logger(server_args)
        configure_logger(server_args)
        return crash_exit.state.is_program, before

    assert inspect.iscoroutinefunction(serve_grpc)
    assert asyncio.run(serve_grpc(ARGUMENTS)) == (True, [])
    assert launches == [ARGUMENTS]


def test_what_the_launcher_ends_on_sigterm_is_announced(listener: Listener) -> None:
    @on_grpc_program
    async def serve_grpc(server_args: Any) -> int:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        configure_logger(server_args)
        rank = CONTEXT.Process(target=time.sleep, args=(LONG,), daemon=True)
        rank.start()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), LONG)
        rank.terminate()
        # It was forked with the handler of the loop, and goes on.
        os.kill(rank.pid or 0, signal.SIGKILL)
        rank.join(LONG)
        return rank.pid or 0

    pid = asyncio.run(serve_grpc(ARGUMENTS))
    heard = listener.heard(), listener.heard()
    assert [message["event"] for message in heard] == ["draining", "teardown"]
    assert (heard[1]["pid"], heard[1]["whole"]) == (pid, True)


def test_a_failing_rank_ends_it_by_the_launchers_own_handler_and_before_there_is_one(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[str] = []

    def end_after_crash() -> None:
        assert "incident /incident" in caplog.text, "the incident is whole first"
        ends.append("kit")

    monkeypatch.setattr(grpc_server, "end_after_crash", end_after_crash)

    @on_grpc_program
    async def serve_grpc(server_args: Any) -> None:
        configure_logger(server_args)
        os.kill(os.getpid(), signal.SIGQUIT)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, ends.append, "launcher")
        crash_exit.note_started()
        os.kill(os.getpid(), signal.SIGQUIT)
        while len(ends) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(serve_grpc(ARGUMENTS))
    assert ends == ["kit", "launcher"]
    assert [listener.heard()["event"] for _ in ends] == ["launch_failed", "child_failed"]
    assert crash_exit.has_begun()


def test_the_requests_of_its_manager_are_journaled(
    launches: list[Any], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GrpcRequestManager:
        def __init__(self, server_args: Any) -> None:
            self.launched_before = list(launches)
            self.server_args = server_args
            self.rid_to_state: dict[str, Any] = {}
            self.event_loop = None

        def auto_create_handle_loop(self) -> None:
            self.event_loop = asyncio.get_running_loop()

    for name in ("smg_grpc_servicer", "smg_grpc_servicer.sglang", "smg_grpc_servicer.sglang.request_manager"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].GrpcRequestManager = GrpcRequestManager

    @on_grpc_program
    async def serve_grpc(server_args: Any) -> Any:
        return GrpcRequestManager(server_args=server_args)

    manager = asyncio.run(serve_grpc(ARGUMENTS))
    assert manager.launched_before == [ARGUMENTS]
    heard = listener.heard()
    assert (heard["event"], heard["has_descriptor"]) == ("journal", True)


# -- an encoder-only server


@on_encoder_rank
async def run_encoder(server_args: Any, schedule_path: str, dist_init_method: str, rank: int) -> None:
    raise ValueError(schedule_path)


@on_encoder_rank
async def run_dp_worker(server_args: Any, dp_rank: int, gpu_id: int) -> int:
    return gpu_id


def test_the_handler_is_there_before_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(encoder, "on_engine_launch", seen.append)

    @on_encoder_launch
    def launch_server(server_args: Any) -> list[Any]:
        return list(seen)

    @on_encoder_launch
    async def serve_grpc_encoder(server_args: Any) -> list[Any]:
        return list(seen)

    assert launch_server(ARGUMENTS) == [ARGUMENTS]
    assert asyncio.run(serve_grpc_encoder(ARGUMENTS)) == [ARGUMENTS] * 2


def test_a_rank_says_what_it_is_and_what_ends_it(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(encoder, "install_in_worker", lambda _server_args, title: joined.append(title))
    assert inspect.iscoroutinefunction(run_encoder)
    with pytest.raises(ValueError, match="path"):
        asyncio.run(run_encoder(ARGUMENTS, "path", "tcp://", 1))
    assert asyncio.run(run_dp_worker(ARGUMENTS, dp_rank=2, gpu_id=0)) == 0
    assert joined == ["sglang::encoder_TP1", "sglang::encoder_DP2"]
    heard = listener.heard()
    assert (heard["event"], heard["message"]) == ("exception", "ValueError: path")


# -- Ray


CARRIED = (SOCKET_VARIABLE, SPOOL_VARIABLE, MODE_VARIABLE)


@dataclass
class PortArgs:
    nccl_port: int

    @staticmethod
    def init_new(nccl_port: int) -> PortArgs:
        return PortArgs(nccl_port)


class SchedulerActor:
    @on_scheduler_actor
    def __init__(self, server_args: Any, port_args: PortArgs, tp_rank: int, error: BaseException | None = None) -> None:
        self.environ = {name: os.environ.get(name) for name in CARRIED}
        if error is not None:
            raise error

    @on_scheduler_actor
    def run_event_loop(self) -> None:
        raise KeyError("odd")


class RayEngine:
    @classmethod
    @on_ray_launch
    def launch(cls, server_args: Any, port_args: PortArgs, *, error: Exception | None = None) -> list[bytes]:
        """Return what is sent to the actors: a rank's own ports, and those that a controller makes for its replicas."""
        if error is not None:
            raise error
        return [pickle.dumps(ports) for ports in (port_args, PortArgs.init_new(2))]

    @on_ray_shutdown
    def shutdown(self) -> str:
        return "killed"


@pytest.fixture
def sent(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the actors are sent, in whose process nothing is of the engine's environment."""
    found = RayEngine.launch(ARGUMENTS, PortArgs(1))
    for name in CARRIED:
        monkeypatch.delenv(name)
    return found


def heard(listener: Listener) -> dict[str, Any]:
    """Return the next message that is not about the environment, of which an earlier launch may have this one tell."""
    while (message := listener.heard())["event"] == "environment":
        pass
    return message


@pytest.mark.parametrize("which", [0, 1])
def test_an_actor_joins_the_server_and_tells_what_ends_it(sent: list[bytes], which: int, listener: Listener) -> None:
    actor = SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(sent[which]), tp_rank=3)
    folder = listener.path.parent
    assert actor.environ == dict(zip(CARRIED, (str(listener.path), str(folder / "spool"), "server"), strict=True))
    told = heard(listener)
    assert (told["event"], told["title"]) == ("member", "sglang::scheduler_TP3")
    with pytest.raises(KeyError):
        actor.run_event_loop()
    told = heard(listener)
    assert (told["event"], told["message"]) == ("exception", "KeyError: 'odd'")


def test_an_actor_that_fails_as_it_is_made_tells_why(sent: list[bytes], listener: Listener) -> None:
    with pytest.raises(SystemExit):
        SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(sent[0]), tp_rank=0, error=SystemExit(3))
    assert [heard(listener)["event"] for _ in range(2)] == ["member", "exception"]


def test_an_actor_on_another_node_has_a_handler_of_its_own(sent: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(scheduler_actor, "boot_id", lambda: "another")
    monkeypatch.setattr(scheduler_actor, "on_engine_launch", launched.append)
    actor = SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(sent[0]), tp_rank=0)
    assert (launched, set(actor.environ.values())) == ([ARGUMENTS], {None})


def test_an_actor_of_an_engine_without_a_handler_is_as_published() -> None:
    (ports, _) = RayEngine.launch(ARGUMENTS, PortArgs(1))
    actor = SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(ports), tp_rank=0)
    assert set(actor.environ.values()) == {None}


def test_a_launch_that_fails_is_told_and_raised(listener: Listener) -> None:
    error = RuntimeError("Scheduler actor failed to initialize")
    with pytest.raises(RuntimeError) as raised:
        RayEngine.launch(ARGUMENTS, PortArgs(1), error=error)
    assert raised.value is error
    told = heard(listener)
    assert (told["event"], told["message"]) == ("launch_failed", f"RuntimeError: {error}")


def test_actors_are_killed_on_purpose(listener: Listener) -> None:
    assert RayEngine().shutdown() == "killed"
    told = heard(listener)
    assert (told["event"], told["pid"], told["whole"]) == ("teardown", os.getpid(), False)
