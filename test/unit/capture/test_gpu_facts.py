from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.capture.gpu_facts import GpuFacts, XidWatch, ask_driver, facts_of
from unit.support.nvml_driver import FIRST, GIB, SECOND, Driver
from unit.support.targets import is_gone
from unit.support.waiting import LONG, wait_until


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(tmp_path)
    for name, value in driver.environ.items():
        monkeypatch.setenv(name, value)
    return driver


def ask() -> GpuFacts:
    return facts_of(wait_until(ask_driver(LONG).look, "the driver answered"))


def test_all_that_the_driver_knows_is_read(driver: Driver) -> None:
    driver.say(pids=f"0 4711 {119 * GIB}\n0 4712 1\n1 4713 2\n", replay=7)
    facts = ask()
    assert (facts.reason, facts.driver) == ("", {"version": "580.65.06", "cuda": "13.1", "gpus": 2, "errors": {}})
    none = {"corrected_volatile": 0, "corrected_aggregate": 0, "uncorrected_volatile": 0, "uncorrected_aggregate": 0}
    rows = {"corrected": 0, "uncorrected": 0, "pending": 0, "failure": 0}
    first, second = facts.gpus
    assert first == {
        "index": 0,
        "bus_id": FIRST,
        "uuid": "GPU-00000000-aaaa",
        "name": "NVIDIA H200",
        "memory": {"used": 120 * GIB, "total": 140 * GIB},
        "processes": [{"pid": 4711, "used": 119 * GIB}, {"pid": 4712, "used": 1}],
        "utilisation": {"gpu": 97, "memory": 40},
        "temperature": 65,
        "power": 640.5,
        "power_limit": 700.0,
        "sm_clock": 1001,
        "memory_clock": 1002,
        "throttle": ["hw_thermal_slowdown"],
        "counters": {
            "ecc": none,
            "remapped_rows": rows,
            "nvlink": {"0": {"up": 1, "replay": 7, "recovery": 0, "crc_flit": 0, "crc_data": 0}, "1": {"up": 0}},
        },
        "errors": {},
    }
    assert (second["bus_id"], second["throttle"]) == (SECOND, ["gpu_idle"])
    assert second["counters"]["ecc"] == none | {"uncorrected_volatile": 1, "uncorrected_aggregate": 1}


def test_what_a_driver_does_not_support_is_named_once(driver: Driver) -> None:
    driver.say(mode="errors")
    first, second = ask().gpus
    assert first["errors"] == {"Not Supported": ["ecc", "nvlink"]}
    assert first["counters"].keys() == {"remapped_rows"}
    assert second == {"index": 1, "errors": {"GPU is lost": ["all of it"]}}


def test_what_came_before_the_driver_hung_is_kept(driver: Driver) -> None:
    driver.say(mode="hang")
    reader = ask_driver(LONG)
    wait_until((driver.folder / "hangs").exists, "the driver hangs")
    reader.cancel()
    facts = facts_of(wait_until(reader.look, "it was called off"))
    assert facts.reason.startswith("the driver did not answer, at GPU 1 of 2: ")
    assert facts.reason.endswith("was called off")
    assert [gpu["bus_id"] for gpu in facts.gpus] == [FIRST]


def test_a_missing_library_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    assert ask().reason == "NVML Shared Library Not Found"


@pytest.fixture
def watch(driver: Driver) -> Iterator[XidWatch]:
    watch = XidWatch()
    watch.begin()
    yield watch
    watch.close()


def looks(watch: XidWatch) -> XidWatch:
    watch.look()
    return watch


def test_xid_events_are_seen_with_their_gpu(driver: Driver, watch: XidWatch) -> None:
    began = time.time()
    assert "has not answered" in watch.problem
    wait_until(lambda: looks(watch).start, "the watch begins")
    assert (watch.problem, watch.start["errors"]) == ("", {})
    second = watch.start["gpus"][1]
    assert second.pop("counters")["ecc"]["uncorrected_volatile"] == 1
    assert second == {"index": 1, "bus_id": SECOND, "uuid": "GPU-00000001-aaaa", "name": "NVIDIA H200"}
    driver.raise_xid(1, 79)
    driver.raise_xid(0, 31)
    wait_until(lambda: len(looks(watch).xids) == 2, "both events are told")
    assert [(one["xid"], one["bus_id"]) for one in watch.xids] == [(79, SECOND), (31, FIRST)]
    assert all(began <= one["time"] <= time.time() for one in watch.xids)


def test_a_watch_that_is_killed_is_no_silence(watch: XidWatch) -> None:
    os.kill(watch.pid, signal.SIGKILL)
    wait_until(lambda: looks(watch).problem == "its watcher ended", "the end is noticed")


@pytest.mark.parametrize("mode", ["works", "hang_all"])
def test_a_watch_ends_with_who_started_it(driver: Driver, mode: str) -> None:
    driver.say(mode=mode)
    code = (
        "from sglang_crashkit.capture.gpu_facts import XidWatch; import time\n"
        "watch = XidWatch(); watch.begin(); print(watch.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        pid = int(starter.stdout.readline())
        # Before that it would end by itself, as its starter is not there any more.
        wait_until(lambda: str(driver.folder) in Path(f"/proc/{pid}/maps").read_text(), "the watch has the library")
        starter.kill()
    wait_until(lambda: is_gone(pid), "the watch is gone")
