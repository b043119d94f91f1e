"""The lane on a GPU, why a test is skipped without one, and what a run found of the driver."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanelib.gpulanes import NO_DEVICE, Device, find_device
from lanelib.lanes import Lane
from sglang_crashkit.capture.cuda_core.reading import CudaCore, core_in_lines, read_cuda_core
from sglang_crashkit.errors import CrashkitError

#: A core is copied where it is no larger than this, compressed.
MAX_COPIED_BYTES = 16 << 20
#: cuda-gdb may take long for a core with the kernels of torch.
CUDA_GDB_S = 240.0
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
    # After each test: the process that lends the GPU may end the run at any time.
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
def read_core(pytestconfig: pytest.Config, findings: dict[str, Any]) -> Callable[[Path, str], CudaCore | None]:
    """Return what reads a core, None without cuda-gdb, and copies it to the folder that ``--gpu-out`` names.

    The copy is compressed, and kept where it is small enough then, with what cuda-gdb says of the core.
    """

    def read(core: Path, name: str) -> CudaCore | None:
        findings[f"bytes of the core {name}"] = core.stat().st_size
        try:
            told = read_cuda_core(core, CUDA_GDB_S)
        except CrashkitError as error:
            findings[f"the core {name}"] = error.message
            told = None
        else:
            findings[f"the core {name}"] = list(core_in_lines(told))
        out = option(pytestconfig, "--gpu-out")
        if out:
            Path(out).mkdir(parents=True, exist_ok=True)
            copy = Path(out) / f"{name}.nvcudmp.gz"
            with core.open("rb") as source, gzip.open(copy, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
            if copy.stat().st_size > MAX_COPIED_BYTES:
                copy.unlink()
            if told is not None:
                copy.with_name(f"{name}.txt").write_text(told.text)
        return told

    return read
