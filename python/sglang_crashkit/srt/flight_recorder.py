"""Let the flight recorders of a scheduler be asked what its collectives are doing; see `capture.flight_request`.

That of NCCL is asked through a pipe. PyTorch makes it in a thread in which an error ends the process: where two make
one of the same name at the same moment, or where the folder is not there or has no pipes. So each process gets names of
its own, in the crash handler's runtime folder, and only where a pipe can be made there.

That of gloo is asked by a function, which the thread of `srt.stack_hooks` calls.
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

#: So many of the newest collectives are told, as many as are kept unless the user has more kept.
_MAX_ENTRIES = 2000
#: Puts stacks into words. PyTorch imports it for that, which takes a second of CPU time, and a lock
#: that a thread which hangs in an import holds. SGLang has imported it.
_SYMBOLIZER = "torch._inductor.codecache"
#: Groups that SGLang makes without a coordinator, such as those of HiCache, have the name of the file that uses them.
_USERS = {"cache_controller": "hicache", "hybrid_cache_controller": "hicache"}


@never_raises
def prepare_flight_recorder() -> None:
    """Tell PyTorch in this process, where it is a scheduler, where to listen and to write; what the user set stays.

    To be called before the first process group is made.
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
        # Where none can be made, PyTorch is not told to.
        test = Path(f"{stem}test.pipe")
        os.mkfifo(test, 0o600)
        test.unlink()
        os.environ[PIPE_STEM] = str(stem)
    if not theirs:
        # Not the pid alone: a process of before, or another server's, may leave a dump there and have the same one.
        os.environ[DUMP_STEMS[0]] = f"{folder}/{server_key(stat.pid, stat.start_ticks)}-rank"
    place = FlightPlace(os.environ[PIPE_STEM], os.environ.get(DUMP_STEMS[0]) or theirs[0], is_own=not theirs)
    place.write(runtime, stat.pid, stat.start_ticks)


def describe_collectives() -> bytes:
    """Return what PyTorch's recorder of gloo keeps, as `capture.flight_request` has it.

    Nothing is imported: another thread may hang while it imports something.
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
    # Not only those under way: of gloo it cannot tell them from the others.
    document = pickle.loads(dump(True, _SYMBOLIZER in sys.modules, False))  # noqa: S301 - PyTorch's own
    entries = document["entries"] = document.get("entries", [])[-_MAX_ENTRIES:]
    if not entries:
        return f"it keeps none: nothing was done over gloo, or {BUFFER_SIZE} is 0".encode()
    short, users = functools.cache(shorten), dict[str, str]()
    for entry in entries:
        frames, group = entry.get("frames", ()), entry["process_group"][0]
        for frame in frames:
            frame["filename"] = short(frame["filename"])
        if group not in users:
            # Which file of SGLang's has used it.
            files = (frame["filename"] for frame in frames)
            own = [Path(file).stem for file in files if "sglang/srt/" in file and "/distributed/" not in file]
            users[group] = _USERS.get(own[0], own[0]) if own else ""
    # The recorder knows of the groups of gloo only, and not what SGLang calls them.
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
    """Return what SGLang calls each process group, by PyTorch's name for it: its coordinators have two each."""
    coordinators = getattr(sys.modules.get("sglang.srt.distributed.parallel_state"), "_groups", {})
    names: dict[str, str] = {}
    for name, reference in list(coordinators.items()):
        coordinator = reference()
        for attribute in ("device_group", "cpu_group"):
            group = c10d._world.pg_names.get(getattr(coordinator, attribute, None))
            if group is not None:
                # The first of a name is the only one, but for two models in one process.
                names.setdefault(group, name.removesuffix(":0"))
    return names
