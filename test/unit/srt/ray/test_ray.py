"""Without Ray: an actor is constructed here, from what was pickled for it."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.settings import MODE_VARIABLE, SOCKET_VARIABLE, SPOOL_VARIABLE
from sglang_crashkit.srt.ray import scheduler_actor
from sglang_crashkit.srt.ray.engine import on_ray_launch, on_ray_shutdown
from sglang_crashkit.srt.ray.scheduler_actor import on_scheduler_actor
from unit.srt.conftest import Listener

ARGUMENTS = SimpleNamespace(crash_dump_folder="/crash")
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
def sent(listener: Listener) -> list[bytes]:
    return RayEngine.launch(ARGUMENTS, PortArgs(1))


def heard(listener: Listener) -> dict[str, Any]:
    """Return the next message that is not about the environment, of which an earlier launch may have this one tell."""
    while (message := listener.heard())["event"] == "environment":
        pass
    return message


def in_the_actors_process(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Take from this process what the engine's environment gave it, and return that."""
    environ = {name: os.environ[name] for name in CARRIED}
    for name in CARRIED:
        monkeypatch.delenv(name)
    return environ


@pytest.mark.parametrize("which", [0, 1])
def test_an_actor_joins_the_server_and_tells_what_ends_it(
    sent: list[bytes], which: int, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = in_the_actors_process(monkeypatch)
    actor = SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(sent[which]), tp_rank=3)
    assert actor.environ == environ
    told = heard(listener)
    assert (told["event"], told["title"]) == ("member", "sglang::scheduler_TP3")
    with pytest.raises(KeyError):
        actor.run_event_loop()
    told = heard(listener)
    assert (told["event"], told["message"]) == ("exception", "KeyError: 'odd'")


def test_an_actor_that_fails_as_it_is_made_tells_why(
    sent: list[bytes], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_actors_process(monkeypatch)
    with pytest.raises(SystemExit):
        SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(sent[0]), tp_rank=0, error=SystemExit(3))
    assert [heard(listener)["event"] for _ in range(2)] == ["member", "exception"]


def test_an_actor_on_another_node_has_a_handler_of_its_own(sent: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_actors_process(monkeypatch)
    launched: list[Any] = []
    monkeypatch.setattr(scheduler_actor, "boot_id", lambda: "another")
    monkeypatch.setattr(scheduler_actor, "on_engine_launch", launched.append)
    actor = SchedulerActor(server_args=ARGUMENTS, port_args=pickle.loads(sent[0]), tp_rank=0)
    assert (launched, set(actor.environ.values())) == ([ARGUMENTS], {None})


def test_an_actor_of_an_engine_without_a_handler_is_as_published(tmp_path: Path) -> None:
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
