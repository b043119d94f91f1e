from __future__ import annotations

import signal

import pytest

from sglang_crashkit.handler import shared_memory
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.shared_memory import SharedMemory, left_by_others
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.shared_memory import FOLDER, OrphanedSegment
from unit.support.targets import nothing_where_forbidden
from unit.support.waiting import LONG, child

#: A server and its rank, each with a segment; the rank outlives the server for as long as its input is open.
SHARING = """
import mmap
def make():
    name = f"torch_{os.getpid()}_77_1"
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return name, mmap.mmap(file.fileno(), 0)
reading, writing = os.pipe()
rank = os.fork()
name, view = make()
if rank == 0:
    os.write(writing, name.encode())
    pause()
ready(f"{name} {os.read(reading, 100).decode()} {rank}")
pause()
"""


def test_nothing_is_removed_before_the_last_process_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "read_maps", nothing_where_forbidden(procfs.read_maps))
    with child(SHARING) as process:
        *names, rank = process.first_line.split()  # type: ignore[attr-defined]
        paths = [FOLDER / name for name in names]
        tree = ProcessTree(process.pid)
        tree.refresh()
        tree.register(int(rank), 0)
        leftovers = SharedMemory(tree)
        leftovers.note()
        try:
            # WHEN all live
            removed, left = leftovers.clear()
            assert removed == []
            assert {one.name: one.why for one in left} == dict.fromkeys(names, "a process of the server lives")
            # WHEN the main process is dead, and a rank lives
            process.kill()
            process.wait(LONG)
            tree.root.exited_at = 1.0
            assert leftovers.clear()[0] == []
            # WHEN the handler let go of the rank, which lives nonetheless
            found = tree.get(int(rank))
            assert found is not None
            tree.forget(found)
            assert leftovers.clear()[0] == []
            assert all(path.exists() for path in paths)
        finally:
            handle = tree.root.handle
            handle.close()
            end_orphan(int(rank))
        # WHEN nobody is left
        try:
            removed, left = leftovers.clear()
            assert sorted(removed) == sorted(names)
            assert left == []
        finally:
            for path in paths:
                path.unlink(missing_ok=True)


def end_orphan(pid: int) -> None:
    """Kill a process that is not this one's child, and wait for it."""
    handle = ProcessHandle(pid)
    handle.send_signal(signal.SIGKILL)
    assert handle.has_exited(LONG)
    handle.close()


def test_what_is_mapped_is_noted_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with child("ready()\npause()") as process:
        leftovers = SharedMemory(ProcessTree(process.pid))
        notes: list[None] = []
        monkeypatch.setattr(leftovers, "note", lambda: notes.append(None))
        leftovers.act_on_time()
        assert notes == []
        monkeypatch.setattr(shared_memory, "_MAPS_AFTER_A_CHANGE_SECS", 0.0)
        leftovers.act_on_time()
        assert notes == [None]


@pytest.mark.parametrize(
    ("left", "line"),
    [
        ([], ""),
        ([OrphanedSegment("torch_1_2_3", 1 << 30, "process 7 maps it")], ""),
        (
            [OrphanedSegment("torch_1_2_3", 1 << 29, ""), OrphanedSegment("sgl_shm_mq_1_0123abcd", 1 << 30, "")],
            "2 segments of user 0 in /dev/shm (1.50 GiB; the largest is sgl_shm_mq_1_0123abcd) are of processes "
            "that are gone; next: sglang-crashkit doctor",
        ),
    ],
)
def test_what_others_left_is_one_line(monkeypatch: pytest.MonkeyPatch, left: list[OrphanedSegment], line: str) -> None:
    monkeypatch.setattr(shared_memory.shared_memory, "of_gone", lambda: left)
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: 0)
    assert left_by_others() == line
