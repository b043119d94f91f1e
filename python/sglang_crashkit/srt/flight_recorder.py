"""Let the flight recorder of a scheduler be asked what its collectives are doing; see `capture.flight_request`.

PyTorch makes the pipe in a thread in which an error ends the process: two processes that make one of the same name at
the same moment, as two replicas would, or a folder that is not there or has no pipes. So each process gets names of its
own, in the crash handler's runtime folder, and only where a pipe can be made there.
"""

from __future__ import annotations

import os
from pathlib import Path

from sglang_crashkit.capture.flight_request import (
    BUFFER_SIZE,
    DUMP_STEMS,
    OTHER_BUFFER_SIZE,
    PIPE_STEM,
    FlightPlace,
)
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.identity_key import server_key
from sglang_crashkit.settings import FLIGHT_VARIABLE, SOCKET_VARIABLE, read_number
from sglang_crashkit.srt.hooks import never_raises


@never_raises
def prepare_flight_recorder() -> None:
    """Tell PyTorch in this process, where it is a scheduler, where to listen and to write; what the user set stays.

    To be called before the first process group is made. Nothing happens where ``--crash-dump-folder`` is not set, there
    is no crash handler, or the user switched the recorder off.
    """
    folder, socket_path = os.environ.get(FLIGHT_VARIABLE), os.environ.get(SOCKET_VARIABLE)
    stat = procfs.read_stat(os.getpid())
    if not folder or not socket_path or stat is None or titles.role_of(procfs.read_title(stat.pid)) != "scheduler":
        return
    if read_number(os.environ, OTHER_BUFFER_SIZE, read_number(os.environ, BUFFER_SIZE, 0)) == 0:
        return
    runtime = Path(socket_path).parent
    if FlightPlace.file_of(runtime, stat.pid, stat.start_ticks).exists():
        return
    theirs = [os.environ[name] for name in DUMP_STEMS if name in os.environ]
    if PIPE_STEM not in os.environ:
        stem = runtime / f"{stat.pid}-{stat.start_ticks}.nccl-"
        _try_pipe(Path(f"{stem}test.pipe"))
        os.environ[PIPE_STEM] = str(stem)
    if not theirs:
        # Not the pid alone: a process of before, or another server's, may leave a dump there and have the same one.
        os.environ[DUMP_STEMS[0]] = f"{folder}/{server_key(stat.pid, stat.start_ticks)}-rank"
    place = FlightPlace(os.environ[PIPE_STEM], os.environ.get(DUMP_STEMS[0]) or theirs[0], is_own=not theirs)
    place.write(runtime, stat.pid, stat.start_ticks)


def _try_pipe(path: Path) -> None:
    """Make a pipe and remove it.

    Raises:
        OSError: none can be made there.
    """
    os.mkfifo(path, 0o600)
    path.unlink()
