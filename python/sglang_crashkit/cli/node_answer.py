"""What the collector on a node of a Slurm job prints for the one that gathers.

First a line at once, which says that the node is there; then a JSON object on a line with all that there is before the
debuggers, and one more after them. A node that is given up while they run has told everything else by then.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.sightings import Sightings
from sglang_crashkit.analysis.sightings_json import to_json
from sglang_crashkit.collect.collection import Collection
from sglang_crashkit.collect.slurm_answer import PENDING
from sglang_crashkit.collect.slurm_gather import renamed
from sglang_crashkit.errors import CrashkitError, ExitCode
from sglang_crashkit.kernel.private_files import make_private_folder
from sglang_crashkit.kernel.slurm_place import Place

#: The debuggers' part of the time that a node has: the start of its step and the end of one debugger are not in it.
_SHARE, _END_SECS = 0.9, 20.0


def greet() -> None:
    """Say that this node answers."""
    print(f"collecting on {os.uname().nodename}", flush=True)


class NodeReport:
    """What a node sends.

    Args:
        collection: what is collected.
        output: the folder for the files.
    """

    def __init__(self, collection: Collection, output: Path) -> None:
        self._collection, self._output = collection, output

    def snapshots_taken(self, status: ExitCode) -> None:
        """Print what there is before the debuggers, with what the exit status would be."""
        self._send(status, pending=True)

    def ended(self, status: ExitCode) -> None:
        """Print all that there is."""
        self._send(status, pending=False)

    def _send(self, status: ExitCode, *, pending: bool) -> None:
        """Print it for `slurm_gather.read_document`."""
        collection = self._collection
        document = {
            "exit_code": int(status),
            PENDING: pending,
            "output_dir": str(self._output.absolute()),
            "snapshots": collection.snapshot_files,
            "processes": [{"pid": one.process.pid, "files": one.files} for one in collection.collected],
            "sightings": merged_by_node(collection),
            # Mostly they are not needed there, where thousands of nodes are read: as text they are not taken apart.
            "rounds": [json.dumps(one.to_json()) for one in collection.rounds],
        }
        print(json.dumps(document), flush=True)


def debugger_secs(node_secs: float, used_secs: float) -> float:
    """Return how long the debuggers may take for all processes, in seconds, so that their part is sent too.

    Args:
        node_secs: when the node is given up, in seconds.
        used_secs: how much of that is over.
    """
    return max(0.0, _SHARE * node_secs - _END_SECS - used_secs)


def folder_or_substitute(output: Path) -> Path:
    """Return `output`; where it cannot be made, as in a container, a temporary folder, for the snapshots are sent."""
    try:
        return make_private_folder(output.absolute())
    except (CrashkitError, OSError):
        return Path(tempfile.mkdtemp(prefix="sglang-crashkit-collect-"))


def merged_by_node(collection: Collection) -> dict[str, Any]:
    """Return what this host's snapshots show as JSON values, under Slurm's name of it in a step of a job."""
    here = Place.of_environ(os.environ)
    return to_json(Sightings.of(renamed(one, here.node) if here else one for one in collection.rounds))
