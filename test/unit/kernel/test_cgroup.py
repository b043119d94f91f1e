from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel.cgroup import find_counter
from unit.support.waiting import LONG, child

V1 = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup (v1) of 64 MB, or a skipped test."""
    group = V1 / f"crashkit-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        with contextlib.suppress(OSError):
            (group / "memory.memsw.limit_in_bytes").write_text(str(64 << 20))
        yield group
    finally:
        group.rmdir()


def test_a_kill_for_lack_of_memory_is_counted(small_cgroup: Path) -> None:
    with child("ready(); sys.stdin.readline(); block = bytearray(512 << 20); pause()") as process:
        (small_cgroup / "cgroup.procs").write_text(str(process.pid))
        counter = find_counter(process.pid)
        assert counter.path == small_cgroup / "memory.oom_control"
        assert counter.grown_by() == 0
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(LONG) == -9
        assert counter.grown_by() == 1


def test_a_process_that_is_gone_has_no_counter() -> None:
    with child("ready()") as process:
        process.wait(LONG)
    assert find_counter(process.pid) is None
