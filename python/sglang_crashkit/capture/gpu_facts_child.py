"""Query the library of the GPUs' driver in a process of its own, as a driver may hang, and the libraries are big.

`gpu_facts` starts this program. It prints JSON objects, one a line, each as soon as it is known, so that a call that
hangs does not lose the earlier ones. With ``facts``: ``driver``, then a ``gpu`` each. With ``watch``: ``start``, each
GPU with its current error counters, then an ``xid`` for each event, for as long as the process that started it lives.

Names and units are those of NVIDIA's ``nvml.h``, except that power is in watts and memory in bytes. A GPU is named by
its PCI bus id as ``domain:bus:device`` in lower-case hexadecimal. A value that the driver does not support is left out;
its name is in ``errors``, by the error.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
#: The most events to report: more add no information, and the pipe is nearly full.
_MAX_EVENTS = 128
#: How long one wait for an event lasts, in milliseconds; and NVML_ERROR_TIMEOUT, its result in `nvmlEventSetWait_v2`.
_WAIT_MS, _TIMEOUT = 60_000, 10
#: The library that ``pynvml`` loads.
_LIBRARY = "libnvidia-ml.so.1"
#: The bits of `nvmlDeviceGetCurrentClocksThrottleReasons`, from the lowest on (``nvmlClocksEventReason...``).
_REASONS = (
    *("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown"),
    *("hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting"),
)
#: Counters of `nvmlDeviceGetNvLinkErrorCounter` by their number (``nvmlNvLinkErrorCounter_t``).
_LINK_COUNTERS = ("replay", "recovery", "crc_flit", "crc_data")


class Attempts:
    """Makes calls that may fail independently; `errors` has the names of those that failed, by the error."""

    def __init__(self) -> None:
        self.errors: dict[str, list[str]] = {}

    def __call__(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call`; if it raises, record the error under the name `what` and return None."""
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - each library has its own, and none is to cost the other facts
            names = self.errors.setdefault(str(error) or type(error).__name__, [])
            if what not in names:
                names.append(what)
            return None


def bus_id(text: str) -> str:
    """Return a PCI bus id, with a domain of any length, with or without a function, as ``domain:bus:device``."""
    domain, bus, device = text.lower().split(".")[0].split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


def nvml_facts(nvml: Any) -> Iterator[dict[str, Any]]:
    """Yield the facts from ``pynvml``."""
    nvml.nvmlInit()
    attempt = Attempts()
    version = attempt("version", nvml.nvmlSystemGetDriverVersion)
    cuda = attempt("cuda", nvml.nvmlSystemGetCudaDriverVersion_v2)
    driver = {"version": version, "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None}
    count = nvml.nvmlDeviceGetCount()
    yield {"driver": driver | {"gpus": count, "errors": attempt.errors}}
    for index in range(count):
        yield {"gpu": {"index": index} | _nvml_gpu(nvml, index)}


def _nvml_gpu(nvml: Any, index: int) -> dict[str, Any]:
    attempt = Attempts()
    handle = attempt("all of it", nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return {"errors": attempt.errors}

    def ask(what: str, name: str, *arguments: Any) -> Any:
        return attempt(what, lambda: getattr(nvml, name)(handle, *arguments))

    def watts(what: str, name: str) -> Any:
        milliwatts = ask(what, name)
        return milliwatts and milliwatts / 1000

    # All drivers have the function of this name; from 535 on there is a second name, too.
    bits = ask("throttle", "nvmlDeviceGetCurrentClocksThrottleReasons")
    memory, rates = ask("memory", "nvmlDeviceGetMemoryInfo"), ask("utilisation", "nvmlDeviceGetUtilizationRates")
    processes = ask("processes", "nvmlDeviceGetComputeRunningProcesses_v3")
    facts = _identity(nvml, handle, attempt) | {
        "memory": memory and {"used": memory.used, "total": memory.total},
        "processes": processes and [{"pid": one.pid, "used": one.usedGpuMemory} for one in processes],
        "utilisation": rates and {"gpu": rates.gpu, "memory": rates.memory},
        "temperature": ask("temperature", "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "power": watts("power", "nvmlDeviceGetPowerUsage"),
        "power_limit": watts("power_limit", "nvmlDeviceGetEnforcedPowerLimit"),
        "sm_clock": ask("sm_clock", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock": ask("memory_clock", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "throttle": bits and [name for place, name in enumerate(_REASONS) if bits >> place & 1],
        "counters": _nvml_counters(nvml, handle, attempt),
    }
    return {name: value for name, value in facts.items() if value is not None} | {"errors": attempt.errors}


def _identity(nvml: Any, handle: Any, attempt: Attempts) -> dict[str, Any]:
    return {
        "bus_id": attempt("bus_id", lambda: bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        "uuid": attempt("uuid", nvml.nvmlDeviceGetUUID, handle),
        "name": attempt("name", nvml.nvmlDeviceGetName, handle),
    }


def _nvml_counters(nvml: Any, handle: Any, attempt: Attempts) -> dict[str, Any]:
    """Return counters that never decrease: ECC errors, remapped rows, and the errors of each NVLink that is up."""
    ecc = {
        f"{kind}_{since}": attempt("ecc", nvml.nvmlDeviceGetTotalEccErrors, handle, kind_number, since_number)
        for kind_number, kind in enumerate(("corrected", "uncorrected"))
        for since_number, since in enumerate(("volatile", "aggregate"))
    }
    rows = attempt("remapped_rows", nvml.nvmlDeviceGetRemappedRows, handle)
    links: dict[str, dict[str, int] | None] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            is_up = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError as error:
            if not links:
                attempt.errors.setdefault(str(error), []).append("nvlink")
            # The GPU has no more links.
            break
        links[str(link)] = _known(
            {"up": int(is_up)}
            | {
                name: attempt(f"nvlink {name}", nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, number)
                for number, name in enumerate(_LINK_COUNTERS)
                if is_up
            }
        )
    names = ("corrected", "uncorrected", "pending", "failure")
    return _known({"ecc": _known(ecc), "remapped_rows": dict(zip(names, rows or (), strict=False)), "nvlink": links})


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != {}}


def watch(nvml: Any) -> Iterator[dict[str, Any]]:
    """Yield ``start``, then each Xid event; RuntimeError when a wait fails, or after `_MAX_EVENTS` events."""
    nvml.nvmlInit()
    events, attempt, addresses, gpus = nvml.nvmlEventSetCreate(), Attempts(), {}, []
    for index in range(nvml.nvmlDeviceGetCount()):
        what = f"GPU {index}"
        handle = attempt(what, nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is not None:
            attempt(what, nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, events)
            gpu = _known(_identity(nvml, handle, attempt)) | {"counters": _nvml_counters(nvml, handle, Attempts())}
            gpus.append({"index": index} | gpu)
            addresses[_number_of(handle)] = gpu.get("bus_id")
    yield {"start": {"time": time.time(), "gpus": gpus, "errors": attempt.errors}}

    class Event(ctypes.Structure):
        # Not the class of pynvml, which looks names up in that module, whose names are removed below.
        _fields_ = nvml.c_nvmlEventData_t._fields_

    data, library = Event(), ctypes.CDLL(_LIBRARY)
    library.nvmlErrorString.restype = ctypes.c_char_p
    del nvml
    # Free the memory of a module with thousands of names: 11 of 28 MB.
    sys.modules.pop("pynvml").__dict__.clear()
    gc.collect()
    # Only glibc has this function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    for _event in range(_MAX_EVENTS):
        while (status := library.nvmlEventSetWait_v2(events, ctypes.byref(data), _WAIT_MS)) == _TIMEOUT:
            pass
        if status:
            raise RuntimeError(library.nvmlErrorString(status).decode(errors="replace"))
        yield {"xid": data.eventData, "bus_id": addresses.get(_number_of(data.device)), "time": time.time()}
    raise RuntimeError(f"more than {_MAX_EVENTS} Xid events")


def _number_of(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def main(arguments: Sequence[str]) -> int:
    """Run the program; the arguments are the pid of the process that started it, and ``facts`` or ``watch``."""
    parent, what = arguments
    # Ask the kernel to kill this process with the one that started it: nothing else would end it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        nvml = importlib.import_module("pynvml")
        for answer in watch(nvml) if what == "watch" else nvml_facts(nvml):
            print(json.dumps(answer), flush=True)  # noqa: T201 - to who started it
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        print(json.dumps({"error": str(error) or type(error).__name__}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
