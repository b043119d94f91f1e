"""Dumps of PyTorch's flight recorder as its ranks write them, made without PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

#: When the first entry was begun, in seconds since the epoch.
BEGAN = 1_795_300_000.0


def entry(
    record: int,
    sequence: int,
    operation: str = "all_reduce",
    *,
    group: tuple[str, str] = ("0", "default_pg"),
    state: str = "completed",
    sizes: Sequence[Sequence[int]] = ((4, 3),),
    outputs: Sequence[Sequence[int]] | None = None,
    dtype: str = "BFloat16",
    is_message: bool = False,
    message_sequence: int = 0,
    backend: str = "nccl",
    retired: bool | None = None,
    frames: Sequence[tuple[str, str, int]] = (),
) -> dict[str, Any]:
    """Return one entry; `outputs` are of the same sizes as the inputs where they are not given."""
    created = int((BEGAN + record) * 1e9)
    outputs = sizes if outputs is None else outputs
    return {
        "frames": [{"name": name, "filename": file, "line": line} for name, file, line in frames],
        "record_id": record,
        "pg_id": int(group[0]) if group[0].isdigit() else 0,
        "process_group": group,
        "thread_name": "python",
        "thread_id": "140192847817600",
        "collective_seq_id": sequence,
        "p2p_seq_id": message_sequence,
        "op_id": sequence + message_sequence,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": created,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": [list(size) for size in outputs],
        "output_dtypes": [dtype] * len(outputs),
        "state": state,
        "time_discovered_started_ns": created + 1000 if state != "scheduled" else None,
        "time_discovered_completed_ns": created + 2000 if state == "completed" else None,
        "retired": state == "completed" if retired is None else retired,
        "timeout_ms": 600_000,
        "is_p2p": is_message,
    }


def document(
    entries: Sequence[dict[str, Any]], ranks: Sequence[int] = (0, 1), **groups: Sequence[int]
) -> dict[str, Any]:
    """Return the dump of one rank.

    Args:
        entries: what it began.
        ranks: of the group of all.
        groups: the ranks of more groups, by name with an underscore before it.
    """
    configured = {"0": ("default_pg", ranks)} | {name[1:]: ("undefined", its) for name, its in groups.items()}
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(list(its))}
            for name, (description, its) in configured.items()
        },
        "comm_lib_version": "2.28.9",
        "entries": list(entries),
    }


def pickled(value: object) -> bytes:
    """Return `value` in the protocol in which PyTorch writes it."""
    return pickle.dumps(value, 2)
