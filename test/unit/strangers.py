"""Processes of the machine that a test runs on, which have nothing to do with it."""

from __future__ import annotations

from collections.abc import Callable


def nothing_where_forbidden(read_maps: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return a reader that says of a process which may not be read, such as one that set the machine up, nothing."""

    def read(pid: int) -> bytes:
        try:
            return read_maps(pid)
        except PermissionError:
            return b""

    return read
