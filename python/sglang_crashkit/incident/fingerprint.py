"""Recognise the same fault, so that a server that crashes at every start does not fill the disk.

A fault is the process that failed first (its role and ranks), how it failed, where in the code, and in which release.
An index in the folder of all incidents of a host counts the incidents of each fault, and a limited number of them a day
is kept in full. Servers that share the folder share the index, under a lock; without it an incident is kept in full.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit.incident.store import PARTIAL
from sglang_crashkit.kernel.private_files import FolderLock, read_json, write_json
from sglang_crashkit.model.lenient import iso_time, mapping_of, mappings_of, texts_of

if TYPE_CHECKING:
    from sglang_crashkit.incident.folder import IncidentFolder
    from sglang_crashkit.model.incident import Incident, Occurrence, ProcessReport

logger = logging.getLogger(__name__)

INDEX = "faults.json"
_SCHEMA_VERSION = 1
#: Seconds to wait for the lock on the index: rather than wait longer, finish the incident without counting it.
LOCK_SECS = 0.2
#: Seconds for which an incident kept in full counts against the limit: evidence of another day is worth its space.
_DAY_SECS = 86400.0
_MAX_FAULTS, _MAX_INDEX = 200, 64 << 20
_MAX_FRAMES = 4
#: How many suspects of an incident are counted, and how many of each fault the index keeps; the second is larger, so
#: that one large batch does not displace all earlier suspects.
MAX_SUSPECTS, _MAX_KNOWN = 256, 512
#: How many of the innermost frames of a waiting rank to compare, without lines: the lines and other frames vary.
_MAX_WAITING_FRAMES = 2
_LINE = re.compile(r":\d+\)$")
#: How a starting server names a rank that died before it had its title. If there is one pipeline stage only, this has
#: the tensor-parallel rank.
_NAMED = re.compile(r"(?:DP(?P<dp>\d+) )?Rank (?P<tp>\d+) scheduler\b")
_FAILED_STARTS = ("launch_failed", "startup_timeout")
#: In place of frames of a server that was starting: ranks that load a model are in other frames each time.
_STARTING = "(the server was starting)"
#: How many of the innermost functions of a hanging rank to compare.
_HUNG_FRAMES = 2


@dataclass(frozen=True)
class Fault:
    """The properties in which two crashes of the same fault agree."""

    release: str  # SGLang's version
    kind: str  # the verdict's, such as ``oom_kill``
    who: str  # role and non-zero ranks of the process that failed first, such as ``scheduler tp=1``
    what: str  # its signal, exit status or type of exception; ``stopped (T)`` or ``alive`` if it did not end
    frames: tuple[str, ...]  # where it failed, innermost first; else where the ranks were, or `_STARTING`

    @property
    def key(self) -> str:
        """A short name of this fault, its key in the index."""
        # Import here: it loads OpenSSL, which a command that only reads the index does not need.
        import hashlib

        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def fault_of(incident: Incident) -> Fault | None:
    """Return the fault of an incident; None if no process was seen to fail, or if a hang has no stack."""
    first, verdict = incident.first_failure, incident.verdict
    if first is None or verdict is None:
        return None
    frames = first.doing[:_MAX_FRAMES]
    if verdict.kind == "thread_died":
        # The stack of the main thread does not show where this thread failed.
        dead = (one for one in incident.timeline if one.event == verdict.kind and one.pid == first.pid)
        frames = next((texts_of(one.get("frames"))[:_MAX_FRAMES] for one in dead), frames)
    if not frames and any(entry.event in _FAILED_STARTS for entry in incident.timeline):
        frames = [_STARTING]
    elif not frames:
        waiting = (frame for one in incident.processes if one.is_rank for frame in one.doing[:_MAX_WAITING_FRAMES])
        frames = sorted({_LINE.sub(")", frame) for frame in waiting})
    if verdict.kind == "hang" and not frames:
        # Without a stack, one hang cannot be told from another.
        return None
    role, ranks = first.role, first.rank
    said = [one.message for one in incident.timeline if one.event in _FAILED_STARTS]
    # A process that died right after its start had no title yet; the message of the server that started it names it.
    names = [first.title, *(said if role in ("helper", "starting") else ())]
    if named := next(filter(None, map(_NAMED.match, names)), None):
        role, ranks = "scheduler", {name: int(number) for name, number in named.groupdict().items() if number}
    # Leave out rank 0: the only rank of its kind has no number in its title.
    who = " ".join([role, *(f"{name}={number}" for name, number in sorted(ranks.items()) if number != 0)])
    what = _what_happened_to(first, incident)
    return Fault(incident.server.sglang_version, verdict.kind, who, what, tuple(frames))


def _what_happened_to(process: ProcessReport, incident: Incident) -> str:
    for entry in incident.timeline:
        if entry.event in ("exception", "thread_died") and entry.pid == process.pid:
            # Only the type: the rest of the message holds addresses and sizes.
            return entry.message.partition(":")[0]
    if end := process.exit:
        return end.signal or f"status {end.code}"
    return process.stopped or "alive"


def count_fault(
    incidents: Path,
    fault: Fault,
    incident_id: str,
    name: str,
    keep: int,
    *,
    has_core: bool = False,
    suspects: Mapping[str, str] | None = None,
) -> Occurrence | None:
    """Count a fault in the index of folder `incidents`; None, to keep the incident in full, if that is not possible.

    `name` is that of the incident's finished folder. `keep` is how many incidents of a fault a day are kept in full; 0
    keeps all. `suspects` has the fingerprints of the suspected requests by their ids, the most suspicious last.
    """
    # Import here: a command that only reads the index does not need the whole model.
    from sglang_crashkit.model.incident import Occurrence

    lock = FolderLock(incidents)
    try:
        if lock.acquire(LOCK_SECS) != "held":
            logger.warning("the index of faults in %s could not be locked", incidents)
            return None
        index = read_faults(incidents)
        entry = index.setdefault(fault.key, {"fault": asdict(fault), "count": 0, "first": iso_time(time.time())})
        now = time.time()
        full = [its for its in mappings_of(entry.get("full")) if _counts(its, incidents, now)]
        repeats = str(full[0].get("id")) if 0 < keep <= len(full) else None
        if repeats is None:
            full.append({"id": incident_id, "name": name, "seconds": now})
        before = entry.get("count")
        count = (before if isinstance(before, int) else 0) + 1
        entry |= {"count": count, "last": iso_time(now), "full": full}
        seen = _count_suspects(entry, suspects or {})
        if has_core:
            entry["core"] = {"id": incident_id, "name": name, "seconds": now}
        latest = sorted(index, key=lambda key: str(index[key].get("last")), reverse=True)[:_MAX_FAULTS]
        faults = {key: index[key] for key in latest}
        write_json(incidents / INDEX, {"schema_version": _SCHEMA_VERSION, "faults": faults})
    except OSError as error:
        logger.warning("the index of faults in %s could not be written: %s", incidents, error)
        return None
    finally:
        lock.release()
    return Occurrence(fault.key, count, str(entry.get("first")), repeats, seen)


def read_faults(incidents: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of the index in a folder by the key of the fault: ``fault``, ``count``, ``first``, ``last``.

    The result is empty if there is no index or it cannot be read; counting begins anew then.
    """
    path = incidents / INDEX
    try:
        index = read_json(path, _MAX_INDEX)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the index of faults %s cannot be read and is begun anew: %s", path, error)
        return {}
    if mapping_of(index).get("schema_version") != _SCHEMA_VERSION:
        return {}
    return {key: entry for key, entry in mapping_of(index.get("faults")).items() if isinstance(entry, dict)}


def _count_suspects(entry: dict[str, Any], suspects: Mapping[str, str]) -> dict[str, int]:
    """Count the suspects of an incident; return, by request id, in how many earlier incidents each was suspected."""
    known = {key: count for key, count in mapping_of(entry.get("suspects")).items() if isinstance(count, int)}
    seen = {rid: known[key] for rid, key in suspects.items() if key in known}
    for key in dict.fromkeys(suspects.values()):
        # Keep the latest ones at the end.
        known[key] = known.pop(key, 0) + 1
    entry["suspects"] = dict(list(known.items())[-_MAX_KNOWN:])
    return seen


def _counts(its: Mapping[str, Any], incidents: Path, now: float) -> bool:
    """Return whether an incident of the index still exists and is less than a day old."""
    is_recent = isinstance(its.get("seconds"), (int, float)) and abs(now - its["seconds"]) < _DAY_SECS
    return is_recent and any((incidents / f"{mark}{its.get('name')}").is_dir() for mark in ("", PARTIAL))


def incident_with_core(incident: Incident, folder: IncidentFolder, keep: int) -> str | None:
    """Return the id of an incident of the same fault, less than a day old, that has GPU cores; None if absent."""
    from sglang_crashkit.incident.judging import judge

    incident.verdict = incident.verdict or judge(incident, None)
    fault = fault_of(incident.shown()) if keep and not folder.problem else None
    if fault is None:
        return None
    incidents = folder.path.parent
    core = mapping_of(mapping_of(read_faults(incidents).get(fault.key)).get("core"))
    return str(core.get("id")) if _counts(core, incidents, time.time()) else None


def words_of(incident: Incident) -> str:
    """Return in one line how the server failed."""
    return (incident.verdict.text if incident.verdict is not None else "") or incident.kind


def is_same_fault(some: Incident, other: Incident) -> bool:
    """Return whether two incidents are of one fault: compare their fingerprints, but not the parts that vary by chance.

    These are: which of several equal ranks was first, where the other ranks were, and for a hang, the line.
    """
    if all(one.verdict is not None and one.verdict.kind == "hang" for one in (some, other)):
        (who, where), (others, elsewhere) = _hang_of(some), _hang_of(other)
        # If there is no stack, compare only that the server hangs.
        return bool(who & others) and (not where or not elsewhere or bool(where & elsewhere))
    one, two = fault_of(some), fault_of(other)
    if one is None or two is None:
        return False
    if (one.kind, one.what, one.who.split(" ")[0]) != (two.kind, two.what, two.who.split(" ")[0]):
        return False
    has_frames = all(its.first_failure is not None and its.first_failure.doing for its in (some, other))
    return one.frames == two.frames or not has_frames


def _hang_of(incident: Incident) -> tuple[set[tuple[str, bool]], set[str]]:
    """Return role and whether stopped of the hanging process, or all ranks if none is named, and their functions."""
    first = incident.first_failure
    ranks = [first] if first is not None else [one for one in incident.processes if one.is_rank]
    # The line varies by chance.
    frames = {_LINE.sub(")", frame) for rank in ranks for frame in rank.doing[:_HUNG_FRAMES]}
    return {(rank.role, rank.stopped != "") for rank in ranks}, frames
