"""One of two ranks of PyTorch on the CPU: the first begins a collective that the second never does.

Run with the folder to work in, the rank, and how many collectives both do; writes what it would answer the crash
handler to ``answer<rank>`` there.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._inductor.codecache  # as SGLang has it imported
import torch.distributed as dist

from sglang_crashkit.srt.flight_recorder import describe_collectives


def name_as_sglang_does(group: object) -> None:
    """Keep the group as ``sglang.srt.distributed.parallel_state`` keeps those of its coordinators."""
    coordinator = SimpleNamespace(device_group=None, cpu_group=group)
    state = SimpleNamespace(_groups={"tp:0": lambda: coordinator, "gone:0": lambda: None})
    sys.modules["sglang.srt.distributed.parallel_state"] = state  # type: ignore[assignment]


def main() -> None:
    folder, rank, common = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # So long the other one is waited for; only its end ends this one.
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    group, numbers = dist.new_group([0, 1]), torch.ones(4, 3)
    name_as_sglang_does(group)
    for _ in range(common):
        dist.all_reduce(numbers, group=group)
    dist.broadcast(numbers, 0)
    work = dist.all_reduce(numbers, group=group, async_op=True) if rank == 0 else None
    part = folder / f"answer{rank}.part"
    answer = describe_collectives()
    # A thread of gloo says a moment later that one is over.
    while sum(not entry["retired"] for entry in pickle.loads(answer.partition(b"\n")[2])["entries"]) > (
        work is not None
    ):
        time.sleep(0.05)
        answer = describe_collectives()
    part.write_bytes(answer)
    part.rename(folder / f"answer{rank}")
    # Until the other one has its dump too.
    sys.stdin.read()
    del work
    os._exit(0)


if __name__ == "__main__":
    main()
