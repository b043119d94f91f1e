"""An NVIDIA driver library on a machine that has none; see ``nvml_stub.c``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

GIB = 1 << 30
#: The bus ids of its GPUs.
FIRST, SECOND = "0000:1a:00", "0000:1b:00"


class Driver:
    """The library in a folder of its own, and what it says."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        self.folder = folder / "nvml"
        self.folder.mkdir()
        source, library = Path(__file__).with_name("nvml_stub.c"), self.folder / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
        os.mkfifo(self.folder / "xids")
        self.environ = {"NVML_STUB": str(self.folder), "LD_LIBRARY_PATH": str(self.folder)}

    def say(self, **files: object) -> None:
        """Have it answer what is in these files from now on."""
        for name, text in files.items():
            (self.folder / name).write_text(str(text))

    def raise_xid(self, gpu: int, number: int) -> None:
        """Have an event on a GPU, once somebody waits for one."""
        (self.folder / "xids").write_text(f"{gpu} {number}\n")
