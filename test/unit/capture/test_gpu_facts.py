from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture.gpu_facts import GpuFacts, GpuFactsReader, Library, XidWatch
from unit.support.nvml_driver import FIRST, GIB, SECOND, Driver
from unit.support.targets import is_gone
from unit.support.waiting import LONG, wait_until


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(tmp_path)
    for name, value in driver.environ.items():
        monkeypatch.setenv(name, value)
    return driver


def ask(seconds: float = LONG, library: Library = "pynvml", since: float = 0.0, log: str = "/nowhere") -> GpuFacts:
    return wait_until(GpuFactsReader(library, seconds, since, log).look, "the driver answered")


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


def test_a_driver_that_hangs_costs_a_deadline(driver: Driver) -> None:
    driver.say(mode="hang_all")
    facts = ask(0.3)
    assert (facts.driver, facts.gpus) == ({}, [])
    assert facts.reason.startswith("the driver did not answer, before it said anything: ")
    assert facts.reason.endswith("did not end within 0.3 s")


def test_what_came_before_the_driver_hung_is_kept(driver: Driver) -> None:
    driver.say(mode="hang")
    reader = GpuFactsReader("pynvml", LONG, 0.0, "/nowhere")
    wait_until((driver.folder / "hangs").exists, "the driver hangs")
    reader.cancel()
    facts = wait_until(reader.look, "it was called off")
    assert facts.reason.startswith("the driver did not answer, at GPU 1 of 2: ")
    assert facts.reason.endswith("was called off")
    assert [gpu["bus_id"] for gpu in facts.gpus] == [FIRST]
    assert facts.kernel_problem == "/nowhere: No such file or directory"


def test_a_missing_library_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    assert ask().reason == "NVML Shared Library Not Found"
    assert ask(library="amdsmi").reason == "no amdsmi library: No module named 'amdsmi'"


AMD = """
class AmdSmiException(Exception): pass
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return ["a"]
def amdsmi_get_gpu_device_bdf(handle): return "0000:C1:00.0"
def amdsmi_get_gpu_asic_info(handle): return {"market_name": "AMD Instinct MI300X"}
def amdsmi_get_gpu_vram_usage(handle): return {"vram_used": 1024, "vram_total": 196608}
def amdsmi_get_gpu_process_list(handle): return [{"pid": 7, "memory_usage": {"vram_mem": 5}}]
def amdsmi_get_gpu_activity(handle): return {"gfx_activity": 70}
def amdsmi_get_power_info(handle): return {"current_socket_power": "N/A", "average_socket_power": 250}
def amdsmi_get_gpu_total_ecc_count(handle): return {"correctable_count": 1, "uncorrectable_count": 2}
def amdsmi_get_gpu_device_uuid(handle): raise AmdSmiException("not supported")
"""


def test_amds_library_is_asked_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "amdsmi.py").write_text(AMD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    facts = ask(library="amdsmi")
    assert facts.reason == ""
    assert facts.gpus == [
        {
            "index": 0,
            "bus_id": "0000:c1:00",
            "name": "AMD Instinct MI300X",
            "memory": {"used": 1 << 30, "total": 192 << 30},
            "processes": [{"pid": 7, "used": 5}],
            "utilisation": {"gpu": 70},
            "power": 250,
            "counters": {"ecc": {"corrected": 1, "uncorrected": 2}},
            "errors": {"not supported": ["uuid"]},
        }
    ]


def test_the_kernels_log_is_read_for_xids(driver: Driver, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    now = int(time.monotonic() * 1e6)
    lines = [
        f"4,1,{now - 9_000_000},-;NVRM: Xid (PCI:0000:1a:00): 31, pid=9, name=python3, Ch 00000008",
        f"6,2,{now - 2_000_000},-;eth0: link up",
        f"4,3,{now - 1_000_000},-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen",
        f"4,4,{now},c;NVRM: Xid (PCI:0000:1a:00): 13, pid=4711, name=python3, Graphics Exception",
        " SUBSYSTEM=pci",
    ]
    log.write_text("\n".join(lines))
    found = ask(since=time.time() - 5, log=str(log)).kernel_xids
    assert [(one["xid"], one["bus_id"], one["pid"]) for one in found] == [(79, SECOND, None), (13, FIRST, 4711)]


@pytest.fixture
def watch(driver: Driver) -> Any:
    watch = XidWatch()
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


def test_a_watch_of_a_driver_that_hangs_holds_nobody_up(driver: Driver) -> None:
    driver.say(mode="hang_all")
    watch = XidWatch()
    watch.look()
    assert (watch.start, watch.xids, "has not answered" in watch.problem) == ({}, [], True)
    watch.close()
    with pytest.raises(ProcessLookupError):
        os.kill(watch.pid, 0)


def test_a_watch_that_is_killed_is_no_silence(watch: XidWatch) -> None:
    os.kill(watch.pid, signal.SIGKILL)
    wait_until(lambda: looks(watch).problem == "its watcher ended", "the end is noticed")


@pytest.mark.parametrize("mode", ["works", "hang_all"])
def test_a_watch_ends_with_who_started_it(driver: Driver, mode: str) -> None:
    driver.say(mode=mode)
    code = (
        "from sglang_crashkit.capture.gpu_facts import XidWatch; import time\n"
        "watch = XidWatch(); print(watch.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        pid = int(starter.stdout.readline())
        # Before that it would end by itself, as its starter is not there any more.
        wait_until(lambda: str(driver.folder) in Path(f"/proc/{pid}/maps").read_text(), "the watch has the library")
        starter.kill()
    wait_until(lambda: is_gone(pid), "the watch is gone")
