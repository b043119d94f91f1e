"""Put what request journals hold into an incident, readable without SGLang: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.folder import REQUESTS
from sglang_crashkit.incident.retention import NoRoomError
from sglang_crashkit.kernel.private_files import create_private, make_private_folder
from sglang_crashkit.memory.journal import KEPT_SECS, JournaledRequest, JournalReader
from sglang_crashkit.memory.ring import RingError
from sglang_crashkit.model import lenient
from sglang_crashkit.model.incident import JournaledRequests, Requests, iso_time
from sglang_crashkit.redact import redact_json

logger = logging.getLogger(__name__)

#: Is told by how many bytes the file will grow, before it does.
Charge = Callable[[int], None]

#: What SGLang's own health checks are in all releases: the start of the id, which any client may choose, too, and all
#: else that they ask for.
_HEALTH_CHECK = "HEALTH_CHECK_"
_OF_HEALTH_CHECK = frozenset(
    ("kind", "rid", "sampling_params", "log_metrics", "input_ids", "omitted", "bootstrap_host", "bootstrap_room")
)
_CHECKED_PARAMS = ({"max_new_tokens": 1, "temperature": 0.0}, {"max_new_tokens": 0, "temperature": 0.0})
#: What is there is counted even without time to write it; one journal is looked at for so long then, in seconds.
_LEAST_SECS = 0.2
#: So many ids of health checks are kept.
_MAX_CHECKS = 4096
#: What users of the server wrote, which is kept as it is.
_PROMPTS = ("text", "input_ids")
#: The file is counted in steps of this many bytes.
_AT_A_TIME = 256 * 1024


def export_requests(
    journals: Sequence[tuple[int, int]],
    folder: Path,
    timeout_secs: float,
    charge: Charge,
    seconds: float,
    checks: dict[str, bool],
) -> JournaledRequests:
    """Write the requests of `journals` to ``requests/requests.jsonl`` in `folder`, the unfinished ones first.

    Each line has ``rid``, ``state`` (``unfinished``, ``finished``, or ``dropped``: it ended without an answer),
    ``arrived`` and ``ended`` (UTC), ``aborted`` (UTC) where its client had gone or somebody asked for its end, ``pid``
    of the process that took it in, ``text`` or ``input_ids``, ``sampling_params``, and what else the request asked for;
    ``omitted`` describes what was not kept, and ``truncated`` says how much of a long prompt is there (see
    `encode_begin`). Health checks are left out.

    Args:
        journals: the pid of each writer and a descriptor of its journal.
        folder: the incident's folder; see `IncidentFolder.opened`.
        timeout_secs: what is not written within this time, in seconds, is left out and counted.
        charge: see `IncidentFolder.charge`; what it raises `NoRoomError` for is left out and counted.
        checks: gets the ids of health checks, and false where another request has the same one.
        seconds: when the incident began, since the epoch; what ended `KEPT_SECS` before that or earlier is left out.
    """
    deadline = time.monotonic() + timeout_secs
    result = JournaledRequests()
    readers: list[tuple[int, JournalReader]] = []
    problems = []
    for place, (pid, descriptor) in enumerate(journals):
        now = time.monotonic()
        try:
            # One that is made to be read slowly leaves time for the others.
            share_secs = max(_LEAST_SECS, (deadline - now) / 2 / (len(journals) - place))
            reader = JournalReader(descriptor, now + share_secs)
        except Exception as error:
            is_known = isinstance(error, RingError)
            logger.warning("the journal of process %d cannot be read", pid, exc_info=not is_known)
            why = error.message if isinstance(error, RingError) else f"cannot be read: {type(error).__name__}"
            problems.append(f"the journal of process {pid} {why}")
        else:
            readers.append((pid, reader))
            if reader.is_cut:
                problems.append(f"the journal of process {pid} was not read to its end")
    result.lost = sum(reader.lost for _pid, reader in readers)
    result.torn = sum(reader.torn for _pid, reader in readers)
    try:
        make_private_folder((folder / REQUESTS).parent)
        (folder / REQUESTS).unlink(missing_ok=True)
        with create_private(folder / REQUESTS) as file:
            every = [(pid, reader, one) for pid, reader in readers for one in reader.requests]
            kept = [one for one in every if one[2].ended is None or one[2].ended > seconds - KEPT_SECS]
            kept.sort(key=lambda one: one[2].ended is not None)
            _write_all(kept, file, charge, result, deadline, checks)
            file.flush()
            os.fsync(file.fileno())
        result.path = REQUESTS
    except (OSError, CrashkitError) as error:
        problems.append(f"{REQUESTS}: {error}")
    if result.left_out:
        problems.append(
            f"{result.left_out} requests could not be read, found no room, or not within {timeout_secs:g} s"
        )
    result.reason = "; ".join(problems) or None
    return result


def _write_all(
    requests: Iterable[tuple[int, JournalReader, JournaledRequest]],
    file: BinaryIO,
    charge: Charge,
    result: JournaledRequests,
    deadline: float,
    checks: dict[str, bool],
) -> None:
    size = charged = 0
    is_full = False
    for pid, reader, request in requests:
        if time.monotonic() > deadline:
            result.left_out += 1
            continue
        state = "finished" if request.finished else "unfinished" if request.ended is None else "dropped"
        try:
            line = _line_of(reader, request, state, pid, checks)
        except Exception as error:  # noqa: BLE001 - what one client sent, or one process noted, costs no other request
            logger.debug("a request of process %d cannot be read: %s", pid, error)
            result.left_out += 1
            continue
        if line is None:
            continue
        size += len(line)
        for wanted in (size + _AT_A_TIME, size):
            if charged < size and not is_full:
                with contextlib.suppress(NoRoomError):
                    charge(wanted - charged)
                    charged = wanted
        is_full = is_full or charged < size
        if is_full:
            result.left_out += 1
        else:
            file.write(line)
            result.finished += state == "finished"
            result.unfinished += state == "unfinished"


def _line_of(
    reader: JournalReader, request: JournaledRequest, state: str, pid: int, checks: dict[str, bool]
) -> bytes | None:
    fields = reader.load(request)
    # A server that lives may have overwritten it meanwhile.
    if fields is None:
        return None
    rid = fields.get("rid")
    if isinstance(rid, str) and rid.startswith(_HEALTH_CHECK) and (rid in checks or len(checks) < _MAX_CHECKS):
        checks[rid] = is_health_check(fields) and checks.get(rid, True)
    if is_health_check(fields):
        return None
    ended = None if request.ended is None else iso_time(request.ended)
    head = {"rid": fields.pop("rid", None), "state": state, "arrived": iso_time(request.arrived), "ended": ended}
    if request.aborted is not None:
        head["aborted"] = iso_time(request.aborted)
    prompt = {name: fields.pop(name) for name in _PROMPTS if name in fields}
    # The hook looks at few of a request's fields, in little time.
    return json.dumps({**head, "pid": pid, **redact_json(fields, is_users=True), **prompt}).encode() + b"\n"


def is_health_check(fields: Mapping[str, Any]) -> bool:
    """Say whether a request is one of SGLang's own health checks, by all that it is."""
    withheld = fields.get("omitted", {})
    has_ids = fields.get("input_ids") == [0] or (
        isinstance(withheld, dict)
        and withheld.keys() == {"input_ids"}
        and str(withheld["input_ids"]).endswith("list of 1")
    )
    return (
        str(fields.get("rid")).startswith(_HEALTH_CHECK)
        and has_ids
        and fields.get("log_metrics") is False
        and fields.get("sampling_params") in _CHECKED_PARAMS
        # SGLang itself fills in, by release, that nothing else is asked for.
        and all(not value or value == -1 for name, value in fields.items() if name not in _OF_HEALTH_CHECK)
    )


def requests_of(fields: dict[str, Any]) -> Requests:
    """Return the requests that one process says it saved.

    Args:
        fields: ``path`` of the file, ``finished`` and ``unfinished``; where nothing was saved ``error`` or ``reason``.
    """
    told = lenient.read({name: fields.get(name) for name in ("path", "finished", "unfinished")}, Requests)
    if told.path:
        told.source, told.reason = "pickle", None
    else:
        told.reason = str(fields.get("error") or fields.get("reason") or "there were no requests to save")
    return told


def add(before: Requests, now: Requests) -> Requests:
    """Return what two processes saved as one."""
    if before.finished is None and before.unfinished is None:
        return now
    path = before.path or now.path
    return msgspec.structs.replace(
        now,
        finished=(now.finished or 0) + (before.finished or 0),
        unfinished=(now.unfinished or 0) + (before.unfinished or 0),
        path=path,
        reason=None if path else now.reason,
        source="pickle" if path else None,
    )
