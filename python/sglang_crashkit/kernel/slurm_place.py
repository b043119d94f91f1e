"""Tell which Slurm job and node a process belongs to.

Several jobs of one user may share a node, and in tests several nodes a machine; a step of one job is then not asked
about the processes of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_crashkit.kernel import procfs


@dataclass(frozen=True)
class Place:
    """Where Slurm has put a process.

    Attributes:
        job_id: the job.
        node: the node, by Slurm's name for it.
    """

    job_id: str
    node: str

    @classmethod
    def of_environ(cls, environ: Mapping[str, str]) -> Place | None:
        """Return the place that a step's environment names, None outside of a step."""
        job_id, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
        return cls(job_id, node) if job_id and node else None


def place_of(pid: int) -> Place | None:
    """Return the place of process `pid`, None where nothing tells.

    A process that has set its title has overwritten the environment that ``/proc`` shows of it; its nearest ancestor
    that has one is asked then.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        place = Place.of_environ(procfs.read_environ(pid))
        if place is not None:
            return place
        stat = procfs.read_stat(pid)
        pid = stat.ppid if stat is not None else 0
    return None


def other_place_of(pid: int, here: Place | None) -> Place | None:
    """Return the place of process `pid` where it is known to be another job or node than `here`, else None."""
    place = place_of(pid) if here is not None else None
    return None if place == here else place
