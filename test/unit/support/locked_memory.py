"""A process whose memory map stays locked: the process that reads its command line waits, as with a driver that hangs.

One process reads a page of the target through ``/proc/PID/mem``, which a file system of ours never delivers, and holds
the target's mmap lock meanwhile; a thread of the target that maps something waits to write it, and from then on every
other reader waits behind that thread. All goes on when the file system is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.support.targets import settle
from unit.support.waiting import LONG, child

_TARGET = """
import ctypes, mmap, threading
with open(sys.argv[1], "rb") as file:
    page = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
ready(ctypes.addressof(ctypes.c_char.from_buffer(page)))
sys.stdin.readline()
mmap.mmap(-1, 4096)
pause()
"""
_READ_PAGE = "import os, sys; os.pread(os.open(sys.argv[1], os.O_RDONLY), 1, int(sys.argv[2]))"
#: Of linux/fuse.h: header of a request, header of an answer, and what is asked.
_IN, _OUT = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
_GETATTR, _OPEN, _READ, _INIT = 3, 14, 15, 26
_ATTR = struct.Struct("=QI4xQQQQQQIIIIIIIIII")


@contextlib.contextmanager
def locked_process(folder: Path, title: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child whose memory map is locked to the end of the block; skips the test where that cannot be.

    Args:
        folder: a folder for the mount.
        title: its title, set before.
    """
    with _file_that_never_comes(folder / "page") as (path, is_asked), child(_TARGET, str(path), title=title) as target:
        address = target.first_line  # type: ignore[attr-defined]
        with subprocess.Popen([sys.executable, "-c", _READ_PAGE, f"/proc/{target.pid}/mem", address]) as reader:
            try:
                assert is_asked.wait(LONG), "no one asked for the page"
                target.stdin.write(b"\n")
                target.stdin.flush()
                settle(target.pid, "D")
                yield target
            finally:
                # Both die once the file system is closed, at the end of the outer block, at the latest.
                reader.kill()
                target.kill()
                _abort(path)
                reader.wait(LONG)


@contextlib.contextmanager
def _file_that_never_comes(path: Path) -> Iterator[tuple[Path, threading.Event]]:
    """Mount a file of 4096 bytes, of which no read is ever answered; say when one was asked."""
    path.touch()
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no file system of our own: {error}")
    options = f"fd={device},rootmode=100444,user_id={os.getuid()},group_id={os.getgid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"crashkit-test", os.fsencode(path), b"fuse", 0, options.encode()) != 0:
        os.close(device)
        pytest.skip(f"mounting is not permitted: {os.strerror(ctypes.get_errno())}")
    server = threading.Thread(target=_serve, args=(device, is_asked := threading.Event()), daemon=True)
    server.start()
    try:
        yield path, is_asked
    finally:
        _abort(path)
        server.join(LONG)
        os.close(device)


def _abort(path: Path) -> None:
    # MNT_FORCE | MNT_DETACH: what waits for an answer gets an error.
    ctypes.CDLL(None).umount2(os.fsencode(path), 1 | 2)


def _serve(device: int, is_asked: threading.Event) -> None:
    attributes = _ATTR.pack(1, 0, 1, 4096, 8, 0, 0, 0, 0, 0, 0, 0o100444, 1, os.getuid(), os.getgid(), 0, 4096, 0)
    answers = {
        _INIT: struct.pack("=IIIIHHIIHHI28x", 7, 31, 4096, 0, 12, 10, 4096, 0, 1, 0, 0),
        _GETATTR: attributes,
        _OPEN: struct.pack("=QIi", 1, 0, 0),
    }
    with contextlib.suppress(OSError):
        while True:
            request = os.read(device, 1 << 17)
            _length, what, unique, *_rest = _IN.unpack_from(request)
            if what == _READ:
                is_asked.set()
                continue
            answer = answers.get(what)
            error = 0 if answer is not None else -38
            body = answer or b""
            os.write(device, _OUT.pack(_OUT.size + len(body), error, unique) + body)
