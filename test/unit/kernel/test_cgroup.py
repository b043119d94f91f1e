from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel import cgroup as oom
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


@pytest.mark.parametrize(
    ("mount", "files", "expected"),
    [
        # The path of the host, and the mount is the group itself: a container.
        ("cgroup2 {} cgroup2 rw,nosuid 0 0", ["memory.events"], "memory.events"),
        # A space in the mount point.
        ("cgroup2 {}/a\\040b cgroup2 rw 0 0", ["a b/memory.events"], "a b/memory.events"),
        ("cgroup {} cgroup rw,cpu 0 0", ["memory.oom_control"], None),
        ("tmpfs {} tmpfs rw 0 0", ["memory.events"], None),
    ],
)
def test_the_counter_is_found_below_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, files: list[str], expected: str | None
) -> None:
    # Stands for kernels and containers that this machine is not.
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("oom_kill 5\n")
    mounts = tmp_path / "mounts"
    mounts.write_bytes(b"dev /m\xff ext4 rw 0 0\n" + mount.format(tmp_path).encode() + b"\n")
    monkeypatch.setattr(oom, "_MOUNTS", mounts)
    counter = find_counter(os.getpid())
    assert (counter and counter.path) == (expected and tmp_path / expected)
