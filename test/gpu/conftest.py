"""The lane on a GPU, why a test is skipped without one, and what a run found of the driver."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu.gpu_server import CUDA_GDB_S, cuda_gdb
from lanelib.gpulanes import NO_DEVICE, Device, find_device
from lanelib.lanes import Lane
from unit.capture.cuda_core.oracle import CORE_SUFFIX, ask_cuda_gdb

#: A core is copied where it is no larger than this, compressed.
MAX_COPIED_BYTES = 16 << 20
FINDINGS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("on a GPU")
    group.addoption("--gpu-release", default="0.5.12.post1", metavar="RELEASE", help="which SGLang")
    group.addoption("--gpu-lane", default="", metavar="FOLDER", help="the lane that scripts/gpu_lane made")
    group.addoption("--gpu-out", default="", metavar="FOLDER", help="what is small of the evidence is copied there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.get_closest_marker("gpu")]
    reason = ""
    if ours and find_device() is None:
        reason = NO_DEVICE
    elif ours and not option(config, "--gpu-lane"):
        reason = "no lane on a GPU is named; next: scripts/gpu_lane"
    if reason:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    # After each test: whoever lends the GPU may end the run at any time.
    found, out = item.config.stash.get(FINDINGS, {}), option(item.config, "--gpu-out")
    if found and out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "findings.json").write_text(json.dumps(found, indent=1, default=str) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(FINDINGS, {})
    if not found:
        return
    terminalreporter.section("what the driver does")
    for name, value in found.items():
        terminalreporter.line(f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}")


def option(config: pytest.Config, name: str) -> str:
    # Not registered where this folder is not named on the command line.
    return str(config.getoption(name, default=""))


@pytest.fixture(scope="session")
def device() -> Device:
    found = find_device()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def lane(pytestconfig: pytest.Config) -> Lane:
    return Lane(option(pytestconfig, "--gpu-release"), False, Path(option(pytestconfig, "--gpu-lane")), None)


@pytest.fixture(scope="session")
def findings(pytestconfig: pytest.Config, device: Device) -> dict[str, Any]:
    """Return what is printed at the end, by name; a test adds what it saw before it judges it."""
    found = pytestconfig.stash.setdefault(FINDINGS, {})
    found["device"] = f"{device.name}, driver for CUDA {'.'.join(map(str, device.cuda))}"
    version = Path("/proc/driver/nvidia/version")
    if version.is_file():
        found["driver"] = version.read_text().splitlines()[0]
    return found


@pytest.fixture(scope="session")
def keep_core(pytestconfig: pytest.Config, findings: dict[str, Any]) -> Callable[[Path, str], None]:
    """Return what copies a core to the folder that ``--gpu-out`` names, with what cuda-gdb says of it.

    It is compressed, and copied where it is small enough then; `unit.capture.cuda_core.oracle` says where it is used.
    """

    def keep(core: Path, name: str) -> None:
        findings[f"bytes of the core {name}"] = core.stat().st_size
        out = option(pytestconfig, "--gpu-out")
        if not out:
            return
        Path(out).mkdir(parents=True, exist_ok=True)
        copy = Path(out) / f"{name}{CORE_SUFFIX}"
        with core.open("rb") as source, gzip.open(copy, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        if copy.stat().st_size > MAX_COPIED_BYTES:
            copy.unlink()
        elif (program := cuda_gdb()) is not None:
            copy.with_name(f"{name}.txt").write_text(ask_cuda_gdb(program, core, Path(out), CUDA_GDB_S))

    return keep
