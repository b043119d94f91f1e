"""What the CUDA driver says of the first GPU, asked without torch, which takes seconds and gigabytes to import.

Source: the CUDA driver API, ``cuInit``, ``cuDeviceGetAttribute``, ``cuDriverGetVersion``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from lanelib.errors import LaneError

SONAME = "libcuda.so.1"
#: Why a test is skipped where there is none.
NO_DEVICE = "no CUDA device"
#: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 256


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: as the driver calls it.
        compute_capability: major and minor number.
        cuda: the latest version of CUDA that the driver knows, such as (13, 0).
        count: how many GPUs there are.
    """

    name: str
    compute_capability: tuple[int, int]
    cuda: tuple[int, int]
    count: int = 1


def find_device() -> Device | None:
    """Return the first GPU; None where there is no driver, or it has none."""
    try:
        driver = ctypes.CDLL(SONAME)
        count, number, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            return None
        if driver.cuDeviceGet(ctypes.byref(device), 0):
            return None
        name = ctypes.create_string_buffer(_NAME_BYTES)
        driver.cuDeviceGetName(name, _NAME_BYTES, device)
        capability = []
        for attribute in (_MAJOR, _MINOR):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(number.value)
        driver.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        # No library, or a stand-in that has not these functions.
        return None
    cuda = number.value // 1000, number.value % 1000 // 10
    return Device(name.value.decode(errors="replace"), (capability[0], capability[1]), cuda, count.value)


def require_device(without: str) -> Device:
    """Return the first GPU.

    Args:
        without: the command that does what can be done without one.

    Raises:
        LaneError: there is none.
    """
    device = find_device()
    if device is None:
        raise LaneError(f"there is {NO_DEVICE} on this machine", next_step=without)
    return device
