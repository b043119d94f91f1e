from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel import cgroup
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


EVENTS_V2 = "low 0\nhigh 0\nmax 41\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL_V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


@pytest.mark.parametrize(
    ("memberships", "kind", "where", "text"),
    [
        pytest.param("0::/", "cgroup2 {} cgroup2 ro", "memory.events", EVENTS_V2, id="v2, a cgroup namespace"),
        pytest.param(
            "9:cpuset:/docker/4f1c\n7:memory:/docker/4f1c\n0::/",
            "cgroup {} cgroup ro,memory",
            "memory.oom_control",
            CONTROL_V1,
            id="v1",
        ),
    ],
)
def test_the_counter_of_a_container_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memberships: str, kind: str, where: str, text: str
) -> None:
    mount, file = tmp_path / "cgroup", tmp_path / "cgroup" / where
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"{memberships}\n")
    (tmp_path / "mounts").write_text(f"proc /proc proc rw 0 0\n{kind.format(mount)} 0 0\n")
    monkeypatch.setattr(cgroup, "PROC", tmp_path)
    monkeypatch.setattr(cgroup, "MOUNTS", tmp_path / "mounts")
    assert find_counter(7) == cgroup.OomCounter(file, 2)
