"""Which server an incident happened to, and which crash handler gathers it."""

from __future__ import annotations

import os
import socket
from importlib import metadata

from sglang_crashkit import __version__
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.identity_key import own_namespace
from sglang_crashkit.model.incident import HandlerInfo, ServerInfo


def handler_info() -> HandlerInfo:
    """Describe this process."""
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    return HandlerInfo(stat.pid, stat.start_ticks)


def server_info(pid: int, start_ticks: int) -> ServerInfo:
    """Describe the server `pid` of this installation, which started at `start_ticks`."""
    try:
        sglang_version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        sglang_version = "unknown"
    return ServerInfo(pid, sglang_version, __version__, socket.gethostname(), start_ticks, own_namespace())
