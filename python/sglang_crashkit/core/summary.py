"""An incident in words, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_crashkit.core.incident import Incident, ProcessReport


def format_summary(incident: Incident) -> str:
    """Return ``summary.md``."""
    return "\n".join(_lines(incident)) + "\n"


def format_termination_message(incident: Incident, path: str) -> str:
    """Return the little that a pod's status shows of a container that ended; see `core.termination_log`.

    Args:
        incident: finished.
        path: its folder.
    """
    verdict = incident.verdict
    text = f"{verdict.text} ({verdict.level})" if verdict is not None else f"{incident.kind}: {incident.trigger.title}"
    return f"{text}\nincident {path}, {incident.trigger.time}, requests: {_requests(incident)}\n"


def _lines(incident: Incident) -> Iterator[str]:
    server = incident.server
    yield f"# {incident.kind}: {incident.trigger.title}"
    yield ""
    if incident.verdict is not None:
        yield f"**{incident.verdict.text}** ({incident.verdict.level})"
        yield ""
    yield f"- incident {incident.id} on {server.hostname}, {incident.trigger.time}"
    yield f"- SGLang {server.sglang_version}, server pid {server.pid}, crash kit {server.kit_version}"
    yield f"- requests: {_requests(incident)}"
    yield ""
    yield from _peers(incident)
    yield "## Processes"
    for process in incident.processes:
        yield ""
        yield f"### {process.title} (pid {process.pid}): {_state(process)}"
        yield from (f"- {frame}" for frame in process.doing)
        for piece in process.evidence:
            took = "" if piece.seconds is None else f", {piece.seconds:.3f} s"
            where = "; ".join(part for part in (piece.path, piece.reason) if part) or "in incident.json"
            by = f" by {piece.source}" if piece.source else ""
            yield f"- {piece.kind}: {piece.status}{by} ({where}{took})"
    yield ""
    yield "## Timeline"
    yield ""
    for entry in sorted(incident.timeline, key=lambda entry: str(entry["time"])):
        details = ", ".join(f"{k} {v}" for k, v in entry.items() if k not in ("time", "event"))
        yield f"- {entry['time']} {entry['event']}{': ' if details else ''}{details}"


def _peers(incident: Incident) -> Iterator[str]:
    if not incident.peers:
        return
    yield "## Lost servers of the pair"
    for peer in incident.peers:
        yield ""
        yield f"### {peer.role} server {peer.address}: {peer.sign}, since {peer.since}"
        for what, requests, count in (
            ("waits for it", peer.requests, peer.count),
            (f"waits for a {peer.role} server", peer.unassigned, peer.unassigned_count),
        ):
            yield from (f"- {what}: {request.rid} (room {request.room})" for request in requests)
            if count > len(requests):
                yield f"- {what}: {count - len(requests)} more"
    yield ""


def _requests(incident: Incident) -> str:
    requests, journal = incident.requests, incident.requests.journal
    counts = f"{requests.finished} finished and {requests.unfinished} unfinished"
    if requests.path is not None:
        return f"{counts} in {requests.path}"
    if requests.source != "journal" or journal is None:
        return f"not saved: {requests.reason}"
    lost = f", {journal.lost} more found no room in it" if journal.lost else ""
    return f"{counts}, from the journal, in {journal.path}{lost} (the server saved none: {requests.reason})"


def _state(process: ProcessReport) -> str:
    if process.exit is None:
        return "alive"
    how = process.exit.signal or f"exit status {process.exit.code}"
    return f"dead, {how} ({process.exit.cause}: {process.exit.detail})"
