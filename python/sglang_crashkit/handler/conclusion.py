"""Conclude a finished incident from its evidence: the verdict, the suspects, repeats of the fault, and the cause.

A repeat of a known fault is counted. It has no GPU cores, and keeps only the stacks of the process that failed first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shlex
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from sglang_crashkit.analysis.divergence import disagreement, events_in
from sglang_crashkit.analysis.suspects import (
    MAX_SUSPECTS,
    Asked,
    control_of,
    is_by_others,
    is_of_no_request,
    suspects_of,
)
from sglang_crashkit.incident import fingerprint
from sglang_crashkit.incident.exit_status import exit_status_of, while_starting
from sglang_crashkit.incident.fingerprint import count_fault, fault_of
from sglang_crashkit.incident.folder import REQUESTS, IncidentFolder
from sglang_crashkit.incident.judging import explain, judge
from sglang_crashkit.incident.requests import fingerprint_of, parameters_of, was_aborted_before
from sglang_crashkit.kernel.private_files import open_regular, read_regular
from sglang_crashkit.model import ABORTED
from sglang_crashkit.model.incident import Divergence, Incident, Suspect
from sglang_crashkit.redact import redact_json, redact_text
from sglang_crashkit.sources.incident import name_of
from sglang_crashkit.view.first_screen import LOG_LINES, first_screen
from sglang_crashkit.view.markdown import format_summary, format_termination_message

logger = logging.getLogger(__name__)

#: The suspects are chosen from at most this many unanswered requests, the newest ones.
_MAX_UNANSWERED = 2000
#: The time limit for reading what all the requests ask for, in seconds.
LOOK_SECS = 1.0
#: The most bytes that are read of a request's line, with its prompt, and of a process's log.
_MAX_LINE = _MAX_LOG = 4 << 20
#: The beginning of a request's line; it does not match an id that is longer than any searched for.
_LINE = re.compile(rb'\{"rid": ("(?:[^"\\]|\\.){0,1024}"), "state": "(\w+)"')


class Conclusion(msgspec.Struct):
    """The verdict and the documents of an incident whose evidence is complete."""

    document: dict[str, Any]  # see `Incident.to_json`
    summary: str  # ``summary.md``
    status: int | None  # the exit status for this incident; see `exit_status_of`
    lines: list[str]  # the lines for the server's own log if the server goes on
    ending_lines: list[str]  # the lines for the log if the server ends with `status`
    message: str  # the termination message of the container
    is_redacted: bool = False  # the document was searched for secrets; the texts always are
    spare: list[str] = []  # the files that are no longer needed, relative to the folder


def conclude(
    incident: Incident, folder: IncidentFolder, keep: int, begun: Collection[str], *, again: bool
) -> Conclusion:
    """Judge an incident and render it. Unless this is done `again`, also count its fault; see `count_repeat`.

    Call this in a child with a deadline: it runs the judge, and processes what users of the server wrote.
    """
    incident.divergence = _disagreement(incident, folder.path) or incident.divergence
    incident.verdict, spare = judge(incident, folder.path), list[str]()
    if not again:
        name_suspects(incident)
        try:
            spare = count_repeat(incident, folder, keep, begun)
        except Exception:
            # The incident is then kept in full.
            logger.exception("whether the fault was seen before is not known")
    # The explanation depends on all of the above.
    incident.cause = explain(incident, folder.path)
    shown, status = incident.shown(), exit_status_of(incident)
    path = "not written" if folder.problem else str(folder.final_path)
    where = "" if folder.problem else shlex.quote(str(folder.final_path.absolute()))
    ends_with = while_starting(status) if status is not None and shown.failed_at_start else status
    lines, ending = (
        [redact_text(line) for line in first_screen(shown, ends_with=end, where=where, wraps=False)[:LOG_LINES]]
        for end in (None, ends_with)
    )
    summary, message = format_summary(shown, folder.final_path), format_termination_message(shown, path)
    document = redact_json(json.loads(json.dumps(incident.to_json(), default=str)))
    return Conclusion(document, summary, status, lines, ending, message, is_redacted=True, spare=spare)


def count_repeat(incident: Incident, folder: IncidentFolder, keep: int, begun: Collection[str] = ()) -> list[str]:
    """Count the fault of a judged incident that is about to be written for the last time.

    Args:
        incident: the judged incident.
        folder: the incident's folder.
        keep: how many incidents of a fault are kept in full per day; 0 for all.
        begun: the ids of the requests that were in a step of a rank.

    Returns:
        The files that are no longer needed, relative to the folder.
    """
    shown = incident.shown()
    fault = fault_of(shown) if not folder.problem else None
    if fault is None:
        return []
    pieces = (piece for report in incident.processes for piece in report.evidence)
    has_core = any(piece.kind == "cuda_core" and piece.status == "captured" for piece in pieces)
    unanswered: list[str] = []
    if not is_by_others(incident):
        first = incident.first_failure
        unanswered = _unanswered(folder.path / REQUESTS, begun if first is not None and first.is_rank else ())
    # Any request of a large batch may be at fault.
    candidates, _more = _judged(incident, None, None, unanswered, _MAX_UNANSWERED) or ([], 0)
    deadline = time.monotonic() + LOOK_SECS
    asked, aborted = dict[str, Asked](), set[str]()
    # Don't hold all of them in memory at once: their prompts may be long.
    for rid, fields in _fields_of([one.rid for one in candidates], folder.path / REQUESTS, deadline):
        asked[rid] = Asked(fingerprint_of(fields), frozenset(parameters_of(fields)))
        if was_aborted_before(fields, shown):
            aborted.add(rid)
    # After the deadline some requests are unread, so no parameter can be said to be of one request only.
    compared = asked if time.monotonic() <= deadline else {}
    ranked, _more = _judged(incident, None, compared, unanswered, fingerprint.MAX_SUSPECTS) or ([], 0)
    rids = [one.rid for one in reversed(ranked)]
    suspects = {rid: asked[rid].content for rid in rids if rid in asked and asked[rid].content}
    place, name = folder.path.parent, folder.final_path.name
    incident.fault = count_fault(place, fault, incident.id, name, keep, has_core=has_core, suspects=suspects)
    seen = incident.fault.seen if incident.fault is not None else {}
    name_suspects(incident, seen, compared, unanswered)
    listed = {suspect.rid for suspect in incident.suspects}
    if incident.fault is not None:
        incident.fault.seen = {rid: count for rid, count in seen.items() if rid in listed}
    for suspect in incident.suspects:
        if suspect.rid in aborted:
            suspect.reasons.append(ABORTED)
    return list(_give_up_stacks(incident)) if incident.fault and incident.fault.repeats else []


def name_suspects(
    incident: Incident,
    seen: Mapping[str, int] | None = None,
    asked: Mapping[str, Asked] | None = None,
    unanswered: Sequence[str] = (),
) -> None:
    """Set the suspects of an incident (see `suspects_of`), and the control request that each rank worked on.

    If they cannot be judged, the earlier suspects stay.
    """
    judged = _judged(incident, seen, asked, unanswered, MAX_SUSPECTS)
    if judged is not None:
        suspects, left_out = judged
        if is_of_no_request(incident):
            # Except for OOM kills: a request like one of an earlier incident may need too much memory each time.
            is_memory = incident.verdict is not None and incident.verdict.kind == "oom_kill"
            suspects, left_out = [one for one in suspects if is_memory and one.rid in (seen or {})], 0
        incident.suspects, incident.suspects_left_out = suspects, left_out


def _judged(
    incident: Incident,
    seen: Mapping[str, int] | None,
    asked: Mapping[str, Asked] | None,
    unanswered: Sequence[str],
    most: int,
) -> tuple[list[Suspect], int] | None:
    """Return at most `most` suspects, the most suspicious first, and how many more there are; None if that fails."""
    try:
        for process in incident.processes:
            process.control = control_of(process) if process.is_rank else ""
        return suspects_of(incident, seen, asked, unanswered, most)
    except Exception:
        # The incident's other facts are worth more than the suspects.
        logger.exception("the requests of the last step cannot be judged")
        return None


def _unanswered(path: Path, begun: Collection[str]) -> list[str]:
    """Return the ids of the newest unanswered requests, latest first, without those in `begun`."""
    # The unanswered requests come first in the file.
    unfinished = takewhile(lambda one: one[0] == b"unfinished", _requests_in(path))
    newest = deque((rid for _state, rid, _line in unfinished if rid not in begun), _MAX_UNANSWERED)
    return [*reversed(newest)]


def _fields_of(rids: Collection[str], path: Path, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ids and fields of some requests of the incident; of two with the same id, the unanswered one.

    Reading stops at `deadline`, by the monotonic clock.
    """
    left = set(rids)
    for _state, rid, line in _requests_in(path) if left else ():
        fields = None
        if rid in left:
            with contextlib.suppress(ValueError, RecursionError):
                fields = json.loads(line)
        if fields is not None:
            left.discard(rid)
            yield rid, fields
        if not left or time.monotonic() > deadline:
            break


def _requests_in(path: Path) -> Iterator[tuple[bytes, str, bytes]]:
    """Yield the state, id and line of each request in a file; skip requests whose id is overlong or missing."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        for line in iter(lambda: file.readline(_MAX_LINE), b""):
            # Match only the beginning of the line: the prompt may be long.
            told = _LINE.match(line)
            if told is not None:
                with contextlib.suppress(ValueError):
                    yield told[2], json.loads(told[1]), line


def _give_up_stacks(incident: Incident) -> Iterator[str]:
    """Remove the stacks from the incident, except those of the process that failed first; yield the files' names."""
    assert incident.fault is not None
    for report in incident.processes:
        for piece in report.evidence:
            if piece.path and piece.path.startswith("stacks/") and report is not incident.first_failure:
                yield from (str(Path(piece.path).with_suffix(suffix)) for suffix in (".txt", ".json"))
                piece.status, piece.path, piece.source = "skipped", None, None
                piece.reason = f"the same fault as in incident {incident.fault.repeats}, which has its stacks"


def _disagreement(incident: Incident, folder: Path) -> Divergence | None:
    """Return the divergence that SGLang's checker found, by the logs of the ranks that it ended; None without one."""
    told = {}
    for one in incident.processes:
        path = next((piece.path for piece in one.evidence if piece.kind == "log" and piece.path), None)
        if path and one.is_rank and one.exit is not None and one.exit.cause != "exception":
            with contextlib.suppress(OSError):
                events = events_in(read_regular(folder / path, _MAX_LOG).decode(errors="replace"))
                if events is not None:
                    told[one.pid] = (name_of(one), events)
    return disagreement(told)
