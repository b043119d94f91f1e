"""One of two ranks of PyTorch on the CPU: the first begins a collective that the second never does.

Run with the folder to work in, the rank, and how many collectives both do; writes what PyTorch's flight recorder says
to ``dump<rank>`` there.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[import-not-found]


def main() -> None:
    folder, rank, common = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # So long the other one is waited for; only its end ends this one.
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    group, numbers = dist.new_group([0, 1]), torch.ones(4, 3)
    for _ in range(common):
        dist.all_reduce(numbers, group=group)
    dist.broadcast(numbers, 0)
    work = dist.all_reduce(numbers, group=group, async_op=True) if rank == 0 else None
    part = folder / f"dump{rank}.part"
    data = _dump_fr_trace()
    # A thread of gloo says a moment later that one is over.
    while sum(not entry["retired"] for entry in pickle.loads(data)["entries"]) > (work is not None):
        time.sleep(0.05)
        data = _dump_fr_trace()
    part.write_bytes(data)
    part.rename(folder / f"dump{rank}")
    # Until the other one has its dump too.
    sys.stdin.read()
    del work
    os._exit(0)


if __name__ == "__main__":
    main()
