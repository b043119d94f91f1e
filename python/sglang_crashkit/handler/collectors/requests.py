"""Write the requests of request journals into an incident, readable without SGLang: one JSON object per line."""

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

#: Called with the number of bytes by which the file will grow, before it does.
Charge = Callable[[int], None]

#: What identifies SGLang's own health checks in all releases: the start of the id, which any client may also choose,
#: and all other fields.
_HEALTH_CHECK = "HEALTH_CHECK_"
_OF_HEALTH_CHECK = frozenset(
    ("kind", "rid", "sampling_params", "log_metrics", "input_ids", "omitted", "bootstrap_host", "bootstrap_room")
)
_CHECKED_PARAMS = ({"max_new_tokens": 1, "temperature": 0.0}, {"max_new_tokens": 0, "temperature": 0.0})
#: Seconds for which a journal may be read even if no time is left: its requests are counted, if not written.
_LEAST_SECS = 0.2
#: At most this many ids of health checks are kept.
_MAX_CHECKS = 4096
#: The fields that users of the server wrote, which are not redacted.
_PROMPTS = ("text", "input_ids")
#: The file's size is charged in steps of this many bytes.
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
    ``arrived`` and ``ended`` (UTC), ``aborted`` (UTC) if its client disconnected or a request aborted it, ``pid`` of
    the process that received it, ``text`` or ``input_ids``, ``sampling_params``, and the request's other parameters;
    ``omitted`` describes fields that were not kept, and ``truncated`` which parts of a long prompt were kept (see
    `encode_begin`). Health checks are left out.

    Args:
        journals: the pid of each writer and a descriptor of its journal.
        folder: the incident's folder; see `IncidentFolder.opened`.
        timeout_secs: requests that are not written within this time, in seconds, are left out and counted.
        charge: see `IncidentFolder.charge`; a request for which it raises `NoRoomError` is left out and counted.
        checks: receives the ids of health checks; false if a request that is no health check has the same id.
        seconds: when the incident began, since the epoch; requests that ended `KEPT_SECS` or more before are left out.
    """
    deadline = time.monotonic() + timeout_secs
    result = JournaledRequests()
    readers: list[tuple[int, JournalReader]] = []
    problems = []
    for place, (pid, descriptor) in enumerate(journals):
        now = time.monotonic()
        try:
            # A journal that is crafted to be slow to read must leave time for the others.
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
        why = f"unreadable, no disk space, or not written within {timeout_secs:g} s"
        problems.append(f"{result.left_out} requests are missing: {why}")
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
        except Exception as error:  # noqa: BLE001 - a bad request or record must not cost the other requests
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
    # A living server may have overwritten the request since.
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
    # The hook that writes the journal has little time, and redacts only few of a request's fields.
    return json.dumps({**head, "pid": pid, **redact_json(fields, is_users=True), **prompt}).encode() + b"\n"


def is_health_check(fields: Mapping[str, Any]) -> bool:
    """Return whether a request is one of SGLang's own health checks, judged by all its fields."""
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
        # SGLang itself fills in the other fields, which differ by release, with empty values or -1.
        and all(not value or value == -1 for name, value in fields.items() if name not in _OF_HEALTH_CHECK)
    )


def requests_of(fields: dict[str, Any]) -> Requests:
    """Return one process's report of the requests that it saved.

    Args:
        fields: ``path`` of the file, ``finished`` and ``unfinished``; if nothing was saved, ``error`` or ``reason``.
    """
    told = lenient.read({name: fields.get(name) for name in ("path", "finished", "unfinished")}, Requests)
    if told.path:
        told.source, told.reason = "pickle", None
    else:
        told.reason = str(fields.get("error") or fields.get("reason") or "there were no requests to save")
    return told


def add(before: Requests, now: Requests) -> Requests:
    """Return the reports of two processes, merged."""
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
