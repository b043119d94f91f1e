"""Prepare the flight recorders of a scheduler for queries about its collectives; see `capture.flight_request`.

The recorder of NCCL is queried through a pipe. PyTorch makes the pipe in a thread in which an error ends the process,
for example if two processes make one name at the same moment, or the folder is missing or does not support pipes. So
each process gets its own names, in the crash handler's runtime folder, and only if a pipe can be made there.

The recorder of gloo is queried by a function, which the thread of `srt.stack_hooks` calls.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.flight_request import (
    BUFFER_SIZE,
    DUMP_STEMS,
    OLD_BUFFER_SIZE,
    PIPE_STEM,
    FlightPlace,
)
from sglang_crashkit.kernel import procfs, titles
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.settings import FLIGHT_VARIABLE, SOCKET_VARIABLE, published, read_number
from sglang_crashkit.srt.hooks import never_raises, shorten

#: The maximum number of collectives that are returned, newest ones: as many as are kept unless the user sets more.
_MAX_ENTRIES = 2000
#: PyTorch imports this module to write stacks as text. The import takes a second of CPU time, and a lock that a thread
#: hanging in an import holds. SGLang has imported it.
_SYMBOLIZER = "torch._inductor.codecache"
#: Groups that SGLang makes without a coordinator, such as those of HiCache, have the name of the file that uses them.
_USERS = {"cache_controller": "hicache", "hybrid_cache_controller": "hicache"}


@never_raises
def prepare_flight_recorder() -> None:
    """In a scheduler, set where PyTorch listens for queries and writes its dumps; keep values that the user set.

    Call it before the first process group is made.
    """
    folder, socket_path = os.environ.get(FLIGHT_VARIABLE), published(SOCKET_VARIABLE)
    stat = procfs.read_stat(os.getpid())
    if not folder or not socket_path or stat is None or titles.role_of(procfs.read_title(stat.pid)) != "scheduler":
        return
    if read_number(os.environ, BUFFER_SIZE, read_number(os.environ, OLD_BUFFER_SIZE, 0)) == 0:
        return
    runtime = Path(socket_path).parent
    if HookFiles.of(runtime, stat.pid, stat.start_ticks).flight.exists():
        return
    theirs = [os.environ[name] for name in DUMP_STEMS if name in os.environ]
    if PIPE_STEM not in os.environ:
        stem = runtime / f"{stat.pid}-{stat.start_ticks}.nccl-"
        # If a pipe cannot be made, this raises, and PyTorch is not told to make one.
        test = Path(f"{stem}test.pipe")
        os.mkfifo(test, 0o600)
        test.unlink()
        os.environ[PIPE_STEM] = str(stem)
    if not theirs:
        # Not the pid alone: an earlier process or another server's may have had the same pid and left a dump there.
        os.environ[DUMP_STEMS[0]] = f"{folder}/{server_key(stat.pid, stat.start_ticks)}-rank"
    place = FlightPlace(os.environ[PIPE_STEM], os.environ.get(DUMP_STEMS[0]) or theirs[0], is_own=not theirs)
    place.write(runtime, stat.pid, stat.start_ticks)


def describe_collectives() -> bytes:
    """Return the contents of PyTorch's recorder of gloo, in the form of `capture.flight_request`.

    It imports nothing: another thread may hang in an import and hold a lock.
    """
    seconds = time.time()
    torch, c10d = (
        sys.modules.get(f"torch.{name}") for name in ("_C._distributed_c10d", "distributed.distributed_c10d")
    )
    dump = getattr(torch, "_dump_fr_trace", None)
    if c10d is None or not c10d.is_initialized():
        return b"it has no process group"
    if dump is None:
        return b"its PyTorch has no flight recorder of gloo"
    # All collectives, not only active ones: for gloo the recorder cannot distinguish them.
    document = pickle.loads(dump(True, _SYMBOLIZER in sys.modules, False))  # noqa: S301 - PyTorch's own
    entries = document["entries"] = document.get("entries", [])[-_MAX_ENTRIES:]
    if not entries:
        return f"its flight recorder has no entries: no operation used gloo, or {BUFFER_SIZE} is 0".encode()
    short, users = functools.cache(shorten), dict[str, str]()
    for entry in entries:
        frames, group = entry.get("frames", ()), entry["process_group"][0]
        for frame in frames:
            frame["filename"] = short(frame["filename"])
        if group not in users:
            # The file of SGLang's that used the group.
            files = (frame["filename"] for frame in frames)
            own = [Path(file).stem for file in files if "sglang/srt/" in file and "/distributed/" not in file]
            users[group] = _USERS.get(own[0], own[0]) if own else ""
    # The recorder knows only the groups of gloo, and not SGLang's names for them.
    names, world = _names_of_groups(c10d), c10d._world
    document["pg_config"] = {
        name: {
            "name": name,
            "desc": names.get(name)
            or str(getattr(group, "group_desc", "")).removeprefix("undefined")
            or users.get(name, ""),
            "ranks": str(sorted(world.pg_group_ranks.get(group, ()))),
        }
        for group, name in list(world.pg_names.items())
    }
    return b"%d %.6f\n" % (c10d.get_rank(), seconds) + pickle.dumps(document, 2)


def _names_of_groups(c10d: Any) -> dict[str, str]:
    """Return SGLang's name for each process group by PyTorch's name; each coordinator of SGLang has two groups."""
    coordinators = getattr(sys.modules.get("sglang.srt.distributed.parallel_state"), "_groups", {})
    names: dict[str, str] = {}
    for name, reference in list(coordinators.items()):
        coordinator = reference()
        for attribute in ("device_group", "cpu_group"):
            group = c10d._world.pg_names.get(getattr(coordinator, attribute, None))
            if group is not None:
                # There is only one group of each name, except with two models in one process.
                names.setdefault(group, name.removesuffix(":0"))
    return names
