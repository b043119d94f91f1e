from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.handler.hang_detector import has_compiler

#: Starts a program below itself, says so, and waits.
PARENT = "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); print('started', flush=True); child.wait()"


@pytest.fixture
def parent_of(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Start a process with a child of this name, and return its pid."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> int:
        tool = tmp_path / name
        shutil.copy(shutil.which("sleep") or "", tool)
        argv = [sys.executable, "-c", PARENT, str(tool), "100"]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert started[-1].stdout is not None
        # Popen returns once the child runs its program, by its own name.
        assert started[-1].stdout.readline()
        return started[-1].pid

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(("name", "is_one"), [("nvcc", True), ("cc1plus", True), ("sleep", False), ("nvccx", False)])
def test_it_is_known_by_its_name(parent_of: Callable[[str], int], name: str, is_one: bool) -> None:
    assert has_compiler(parent_of(name)) is is_one


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    assert not has_compiler(process.pid)
