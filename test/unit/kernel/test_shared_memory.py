from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.shared_memory import FOLDER, OrphanedSegment, Segment, clear, mapped_by, of_gone
from unit.support.targets import nothing_where_forbidden
from unit.support.waiting import child

#: Makes a segment with its own pid in the name, or another, and maps it.
HOLDS_A_SEGMENT = """
import mmap
name = sys.argv[1].replace("PID", str(os.getpid()))
with open(f"/dev/shm/{name}", "w+b") as file:
    file.truncate(4096)
    view = mmap.mmap(file.fileno(), 0)
view[:] = bytes(4096)
ready(name)
for line in sys.stdin:
    view.close()
    ready("closed")
"""
MAPS_IT = """
import mmap
with open(f"/dev/shm/{sys.argv[1]}", "r+b") as file:
    view = mmap.mmap(file.fileno(), 0)
ready()
pause()
"""
NOBODY = 65534


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of this machine that may not be read, such as one that set it up, map nothing."""
    monkeypatch.setattr(procfs, "read_maps", nothing_where_forbidden(procfs.read_maps))


@pytest.fixture
def left_behind(readable: None) -> Iterator[Callable[[str], tuple[Segment, dict[int, int]]]]:
    """Have a process make a segment and die; return it with the start time of the process by its pid."""
    made: list[Path] = []

    def leave(pattern: str) -> tuple[Segment, dict[int, int]]:
        with child(HOLDS_A_SEGMENT, pattern) as process:
            path = FOLDER / process.first_line  # type: ignore[attr-defined]
            made.append(path)
            stat = procfs.read_stat(process.pid)
            segments = {one for one in mapped_by(process.pid) if one.name == path.name}
            (segment,) = segments or {Segment(path.name, path.stat().st_ino)}
        return segment, {stat.pid: stat.start_ticks}

    yield leave
    for path in made:
        path.unlink(missing_ok=True)


def why(segment: Segment, dead: dict[int, int]) -> str:
    """Return why a segment is not removed."""
    removed, (left,) = clear([segment], dead)
    assert removed == []
    assert (left.name, left.bytes) == (segment.name, 4096)
    assert (FOLDER / segment.name).exists()
    return left.why


@pytest.mark.parametrize("pattern", ["torch_PID_3456_1", "sgl_shm_mq_PID_0123abcd", "multi_tokenizer_args_PID"])
def test_a_dead_processs_memory_is_removed_when_nobody_maps_it(left_behind, pattern: str) -> None:
    segment, dead = left_behind(pattern)
    assert segment.creator in dead
    assert clear([segment], dead) == ([segment.name], [])
    assert not (FOLDER / segment.name).exists()
    assert clear([segment], dead) == ([], [])


def test_what_processes_left_that_are_gone_is_told_and_stays(left_behind) -> None:
    segment, _dead = left_behind("sgl_shm_mq_PID_0123abcd")
    nameless, _dead = left_behind("sgl_shm_PID")
    with child(HOLDS_A_SEGMENT, "torch_PID_3456_1") as process:
        living = FOLDER / process.first_line  # type: ignore[attr-defined]
        try:
            left = of_gone()
        finally:
            living.unlink()
    assert OrphanedSegment(segment.name, 4096, "") in left
    assert not {nameless.name, living.name} & {one.name for one in left}
    assert (FOLDER / segment.name).exists()


@pytest.mark.parametrize(
    "pattern", ["psm_0123abcd", "sem.mp-PID_0123", "nccl-0123ab", "sglang_loads_x_0123.shm", "sgl_shm_PID"]
)
def test_what_does_not_say_whose_it_is_stays(left_behind, pattern: str) -> None:
    segment, dead = left_behind(pattern)
    assert why(segment, dead) == "its name does not say whose it is"


def test_while_a_process_of_the_server_lives_all_stays(left_behind) -> None:
    segment, _dead = left_behind("torch_PID_3456_1")
    assert why(segment, {}) == "a process of the server lives"


def test_what_a_living_process_made_and_closed_stays() -> None:
    with child(HOLDS_A_SEGMENT, "torch_PID_3456_1") as process:
        (segment,) = mapped_by(process.pid)
        try:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"closed\n"
            assert mapped_by(process.pid) == set()
            # Also where its pid was one of the server's before.
            assert why(segment, {process.pid: 1}) == f"there is a process {process.pid}"
        finally:
            (FOLDER / segment.name).unlink()


def test_what_another_process_maps_stays(left_behind) -> None:
    segment, dead = left_behind("torch_PID_3456_1")
    with child(MAPS_IT, segment.name) as process:
        assert why(segment, dead) == f"process {process.pid} maps it"
    assert clear([segment], dead) == ([segment.name], [])


#: Runs as the user that its last argument names.
LOOKS = """
import json
from sglang_crashkit.kernel.shared_memory import Segment, clear, of_gone
name, inode, pid, user = sys.argv[1:]
os.setgid(int(user)); os.setuid(int(user))
told = [[one.name, one.why] for one in of_gone()]
removed, left = clear([Segment(name, int(inode))], {int(pid): 1})
ready(json.dumps([removed, [one.why for one in left], [why for one, why in told if one == name]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users")
def test_where_another_users_process_cannot_be_read_all_stays(left_behind) -> None:
    segment, (pid, *_rest) = left_behind("torch_PID_3456_1")
    os.chown(FOLDER / segment.name, NOBODY, NOBODY)
    with (
        child(MAPS_IT, segment.name) as _of_root,
        child(LOOKS, segment.name, str(segment.inode), str(pid), str(NOBODY)) as process,
    ):
        removed, *reasons = json.loads(process.first_line)  # type: ignore[attr-defined]
    assert removed == []
    assert all(re.fullmatch(r"what process \d+ maps cannot be read", why) for (why,) in reasons)
    assert (FOLDER / segment.name).exists()


#: Makes and closes a segment with a pid of its own namespace in the name, which no process has outside of it.
MAKES_ONE_IN_A_CONTAINER = """
from pathlib import Path
Path("/proc/sys/kernel/ns_last_pid").write_text(sys.argv[1])
pid = os.fork()
if pid == 0:
    Path(f"/dev/shm/multi_tokenizer_args_{os.getpid()}").write_bytes(bytes(4096))
    ready(os.getpid())
    pause()
os.waitpid(pid, 0)
"""
CONTAINER = ("unshare", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child")
UNSEEN = "a process outside of this container, which cannot be seen from here, may use it"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes PID namespaces")


@needs_root
def test_what_another_container_uses_is_neither_removed_nor_called_gone() -> None:
    with child(HOLDS_A_SEGMENT, "torch_4190000_3456_1", wrapper=CONTAINER) as holder:
        path = FOLDER / holder.first_line  # type: ignore[attr-defined]
        try:
            with child(LOOKS, path.name, str(path.stat().st_ino), "4190000", "0", wrapper=CONTAINER) as process:
                assert json.loads(process.first_line) == [[], [UNSEEN], [UNSEEN]]  # type: ignore[attr-defined]
            assert path.exists()
        finally:
            path.unlink()


@needs_root
def test_what_a_container_made_is_not_gone_though_its_pid_is_another_here(readable: None) -> None:
    with child(MAKES_ONE_IN_A_CONTAINER, "4189999", wrapper=CONTAINER) as process:
        path = FOLDER / f"multi_tokenizer_args_{process.first_line}"  # type: ignore[attr-defined]
        try:
            (told,) = [one for one in of_gone() if one.name == path.name]
            assert re.fullmatch(r"process \d+ of a container may have made it", told.why)
        finally:
            path.unlink()


def test_where_processes_are_hidden_all_stays(left_behind, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, dead = left_behind("torch_PID_3456_1")
    mounts = "proc /proc proc rw,relatime,hidepid=invisible 0 0\n"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_args, **_kwargs: mounts)
        assert why(segment, dead) == "/proc hides other users' processes (hidepid)"


def test_a_name_that_was_given_again_is_another_segment(left_behind) -> None:
    segment, dead = left_behind("torch_PID_3456_1")
    assert clear([Segment(segment.name, segment.inode + 1)], dead) == ([], [])
    assert (FOLDER / segment.name).exists()


def test_files_with_other_names_are_nobodys_but_their_owners() -> None:
    with child(HOLDS_A_SEGMENT, "weights-PID.safetensors") as process:
        try:
            assert mapped_by(process.pid) == set()
        finally:
            (FOLDER / process.first_line).unlink()  # type: ignore[attr-defined]
