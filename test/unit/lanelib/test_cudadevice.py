from __future__ import annotations

import ctypes

import pytest

from lanelib import cudadevice
from lanelib.cudadevice import Device, find_device, require_device
from lanelib.errors import LaneError


class FakeDriver:
    """Stands in for libcuda.so.1 with one GPU."""

    def __init__(self, devices: int = 1, status: int = 0) -> None:
        self.devices = devices
        self.status = status

    def cuInit(self, flags):  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, number):  # noqa: N802
        number._obj.value = self.devices
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = 0
        return 0

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, number, attribute, device):  # noqa: N802
        number._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    def cuDriverGetVersion(self, number):  # noqa: N802
        number._obj.value = 13000
        return 0


def test_a_gpu_is_described(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())

    assert find_device() == Device("NVIDIA H200", (9, 0), (13, 0), 1)


@pytest.mark.parametrize("driver", [FakeDriver(devices=0), FakeDriver(status=100), object()])
def test_a_driver_without_a_gpu_is_none(monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)

    assert find_device() is None


def test_no_driver_is_no_gpu(monkeypatch):
    monkeypatch.setattr(cudadevice, "SONAME", "libcrashkit_nowhere.so.1")

    assert find_device() is None
    with pytest.raises(LaneError, match="there is no CUDA device on this machine") as caught:
        require_device("scripts/lane")
    assert caught.value.next_step == "scripts/lane"
