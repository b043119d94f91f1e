"""What the GPUs' driver says in an incident, through real processes and a driver library that is made for it."""

from __future__ import annotations

import array
import fcntl
import json
import os
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.procfs import is_host_namespace
from unit.support.nvml_driver import FIRST, GIB, SECOND, Driver
from unit.support.server_driver import Server, document_of
from unit.support.waiting import wait_until

Start = Callable[..., Server]
#: The word of a rank whose pid the driver does not know.
CLAIM = """
import sys, types
from sglang_crashkit.srt.managers import scheduler_heartbeat
properties = types.SimpleNamespace(uuid="00000001-aaaa")
cuda = types.SimpleNamespace(
    is_initialized=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: properties
)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def watcher_of(server: Server) -> int:
    """Return the pid of the child that waits for Xid events."""

    def found() -> int | None:
        assert server.handler is not None
        children = Path(f"/proc/{server.handler.pid}/task/{server.handler.pid}/children").read_text().split()
        return next(
            (int(pid) for pid in children if "gpu_facts_child" in " ".join(procfs.read_cmdline(int(pid)))), None
        )

    return wait_until(found, "the handler has a watcher")


def unread(watcher: int) -> int:
    """Return how many bytes of what it said the handler has not read."""
    pipe = os.open(f"/proc/{watcher}/fd/1", os.O_RDONLY | os.O_NONBLOCK)
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    os.close(pipe)
    return count[0]


def facts_of(told: dict[str, Any]) -> dict[str, Any]:
    (root,) = [process for process in told["processes"] if process["role"] == "server"]
    (piece,) = [piece for piece in root["evidence"] if piece["kind"] == "gpu_facts"]
    return piece | {"file": piece["path"] and json.loads(Path(told["folder"], piece["path"]).read_text())}


def strike(server: Server, driver: Driver, folder: Path) -> int:
    """Have the second rank say which GPU it has, which then fails; return the pid of the handler's watcher."""
    watcher = watcher_of(server)
    claim = folder / "claim.py"
    claim.write_text(CLAIM)
    server.say(f"tell scheduler_TP1 run {claim}")
    assert server.ask("tell scheduler_TP1 beat") == "beating"
    start = wait_until(lambda: unread(watcher), "the counters are read")
    driver.raise_xid(1, 79)
    wait_until(lambda: unread(watcher) > start, "the event is told")
    return watcher


@pytest.mark.story
def test_an_incident_has_what_became_of_the_gpus(start_server: Start, driver: Driver, tmp_path: Path) -> None:
    driver.say(replay=7)
    server = start_server(environ=driver.environ)
    watcher = strike(server, driver, tmp_path)
    driver.say(replay=19, pids=f"0 {server.ranks['scheduler_TP0']} {119 * GIB}")
    server.kill("scheduler_TP1")
    told = document_of(server)
    gpus, level = told["gpus"], "established" if is_host_namespace() else "supported"
    first = gpus["devices"][0]
    assert first["processes"] == [
        {
            "pid": server.ranks["scheduler_TP0"],
            "title": "sglang::scheduler_TP0",
            "used": 119 * GIB,
            "level": level,
        }
    ]
    assert first["new_errors"] == {"nvlink 0 replay": 12}
    (event,) = gpus["xids"]
    dead = server.ranks["scheduler_TP1"]
    assert (event["xid"], event["bus_id"], event["source"]) == (79, SECOND, "NVML")
    assert [(one["pid"], one["level"]) for one in event["processes"]] == [(dead, "supported")]
    (noted,) = [entry for entry in told["timeline"] if entry["event"] == "xid"]
    assert (noted["number"], noted["gpu"], noted["pids"]) == (79, SECOND, [dead])
    facts = facts_of(told)
    assert (facts["status"], facts["path"], facts["reason"]) == ("captured", "gpu/facts.json", None)
    assert [gpu["temperature"] for gpu in facts["file"]["gpus"]] == [65, 65]
    assert [gpu["bus_id"] for gpu in facts["file"]["start"]["gpus"]] == [FIRST, SECOND]
    summary = Path(told["folder"], "summary.md").read_text()
    assert (
        "\n## GPUs\n\n- GPU 0 NVIDIA H200 (0000:1a:00): 120.0 GiB of 140.0 GiB used; 119.0 GiB by sglang::" in summary
    )
    assert "\n- Xid 79 (GPU has fallen off the bus) at " in summary
    with pytest.raises(ProcessLookupError):
        os.kill(watcher, 0)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_hanging_driver_costs_neither_incident_nor_earlier_facts(
    start_server: Start, driver: Driver, tmp_path: Path, from_the_start: bool
) -> None:
    driver.say(mode="hang_all" if from_the_start else "")
    server = start_server(environ=driver.environ | {"SGLANG_CRASHKIT_BUDGET_SECS": "4"})
    if not from_the_start:
        strike(server, driver, tmp_path)
        driver.say(mode="hang_all")
    server.kill("scheduler_TP1")
    told = document_of(server)
    assert told["complete"]
    assert facts_of(told)["status"] == "failed"
    first, *others, last = told["gpus"]["lines"]
    assert first.startswith("the driver did not answer, before it said anything: ")
    if from_the_start:
        assert not others
        assert "no NVML events: the driver has not answered since the server started" in last
    else:
        dead = server.ranks["scheduler_TP1"]
        assert others[0] == f"GPU 1 NVIDIA H200 ({SECOND}): sglang::scheduler_TP1 (pid {dead}, supported)"
        assert [one["pid"] for one in told["gpus"]["xids"][0]["processes"]] == [dead]


@pytest.mark.parametrize("environ", [{}, {"SGLANG_CRASHKIT_GPU_FACTS": "0"}])
def test_without_a_gpu_or_switched_off_nobody_is_asked(
    start_server: Start, driver: Driver, environ: dict[str, str]
) -> None:
    if not environ and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    server = start_server(environ=(driver.environ if environ else {}) | environ)
    server.kill("scheduler_TP1")
    told = document_of(server)
    assert told["gpus"] is None
    piece = facts_of(told)
    assert piece["status"] == "skipped"
    assert piece["reason"].startswith("switched off by SGLANG_CRASHKIT_GPU_FACTS" if environ else "no GPU: ")
    assert "## GPUs" not in Path(told["folder"], "summary.md").read_text()
