"""What NVIDIA's own reader says of a core, as text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TABLES = {
    "devices": "info cuda devices",
    "kernels": "info cuda kernels",
    "lanes": "info cuda lanes device all sm all warp all lane all",
    "warps": "info cuda warps device all sm all",
}
#: Cores of real GPUs, compressed, each with what the cuda-gdb of its machine said of it in a ``.txt`` of its name.
REAL = Path(__file__).parent / "real"
CORE_SUFFIX = ".nvcudmp.gz"


def ask_cuda_gdb(program: str | Path, core: Path, folder: Path, timeout_s: float = 60.0) -> str:
    """Return what cuda-gdb prints of a core and of each of `TABLES`, in a `folder` for its own files."""
    command = [program, "-nx", "-batch", "-iex", "set width 0", "-ex", f"target cudacore {core}"]
    for name, listing in TABLES.items():
        command += ["-ex", f"echo == {name}\\n", "-ex", listing]
    environ = {name: value for name, value in os.environ.items() if name != "DEBUGINFOD_URLS"}
    run = subprocess.run(
        command,
        env=environ | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=True,
    )
    assert "Could not open" not in run.stderr, run.stderr
    return run.stdout
