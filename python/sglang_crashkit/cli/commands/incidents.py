"""``sglang-crashkit incidents``: list the incidents below a crash folder, newest first."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_crashkit.cli.arguments import duration, positive
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import WHAT_DIR_IS, ExitCode, NothingToDoError
from sglang_crashkit.incident.fingerprint import read_faults
from sglang_crashkit.incident.store import StoredIncident, find_incidents, parse_name, unreadable_error
from sglang_crashkit.model.lenient import mappings_of

#: Folder → key of a fault → its entry in the folder's index.
Faults = Mapping[Path, Mapping[str, Mapping[str, Any]]]
#: Fields that are kept of an incident, and of its main process.
_KEPT = ("id", "kind", "trigger", "server", "requests", "peers", "verdict", "cause", "fault")
_KEPT_OF_MAIN = ("pid", "title", "role", "rank")
_HEAD: tuple[str, ...] = ("id", "time (UTC)", "kind", "who", "cause", "requests", "seen")
#: Most characters of a cause.
_WIDEST = 50
_EXAMPLES = """\
examples:
  sglang-crashkit incidents /var/crash/sglang
  sglang-crashkit incidents /var/crash/sglang --since 2d --kind hang
  sglang-crashkit incidents --last 5 --json
  sglang-crashkit incidents --by fault fetched/*    what the hosts with the same fault have in common

Without DIR those of the servers that run here are listed, and of those that were given no --crash-dump-folder.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="*", help="what the server was given as --crash-dump-folder"
    )
    parser.add_argument("--since", metavar="T", type=duration, help="of the last T only, such as 90m, 12h or 2d")
    parser.add_argument("--kind", metavar="K", help="of this kind only, such as killed, exception or hang")
    parser.add_argument("--last", metavar="N", type=positive, help="the newest N only")
    parser.add_argument("--by", choices=["fault"], help="group them: the same fault on all hosts together")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")


def run(args: argparse.Namespace) -> ExitCode:
    """List the incidents; the exit status is 5 where some of the folders cannot be read."""
    from sglang_crashkit.cli.crash_folder import known_folders, tell_unreadable
    from sglang_crashkit.view import by_fault

    folders, keep = args.folders or known_folders(), by_fault.keep_of if args.by else _kept
    where = ", ".join(map(str, folders))
    unreadable: list[OSError] = []
    try:
        found = [one for folder in folders for one in find_incidents(folder, unreadable, keep)]
    except OSError as error:
        raise unreadable_error(error, folders[0]) from error
    found.sort(key=lambda one: one.name, reverse=True)
    since = time.time() - args.since if args.since is not None else 0.0
    named = ((one, parse_name(one.path.absolute().name)) for one in found)
    chosen = [one for one, name in named if name and name.seconds >= since and args.kind in (None, name.kind)]
    incidents = chosen[: args.last]
    faults = {folder: read_faults(folder) for folder in {incident.path.parent for incident in incidents}}
    status = ExitCode.PARTIAL if unreadable else ExitCode.DONE
    tell_unreadable(unreadable)
    groups = by_fault.groups_of([one for one in incidents if one.document is not None]) if args.by else []
    for one in incidents if args.by else ():
        if one.document is None:
            say(f"{one.path} {one.problem}; it is left out", error=True)
            status = ExitCode.PARTIAL
    if args.json:
        rows = list(map(asdict, groups)) if args.by else [_as_json(incident, faults) for incident in incidents]
        say_json(rows, indent=2)
        return status if incidents else ExitCode.NOTHING
    if not incidents:
        of_these = " that is asked for" if found else ""
        raise NothingToDoError(
            f"no incident{of_these} below {where}",
            next_step="leave out --since or --kind" if found else f"sglang-crashkit incidents DIR{WHAT_DIR_IS}",
        )
    say(*(by_fault.table_of(groups) if args.by else _as_text(incidents, faults)))
    return status


def _kept(document: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: document[name] for name in _KEPT if name in document}
    # The table takes any other process's name from its title, which is in the verdict.
    main = [one for one in mappings_of(document.get("processes")) if one.get("role") == "server"]
    return kept | {"processes": [{name: process.get(name) for name in _KEPT_OF_MAIN} for process in main]}


def _fault_of(incident: StoredIncident, faults: Faults) -> dict[str, Any] | None:
    """Return an incident's fault, with the number of all its incidents and the time of the last; None without one."""
    import msgspec

    fault = incident.incident.fault
    if fault is None:
        return None
    entry = faults[incident.path.parent].get(fault.key, {})
    return {**msgspec.structs.asdict(fault), "total": entry.get("count", fault.count), "last": entry.get("last")}


def _as_json(incident: StoredIncident, faults: Faults) -> dict[str, Any]:
    # Imported here: the table does not need it.
    from sglang_crashkit.view.model import headline

    document = incident.document or {}
    fields = {name: document.get(name) for name in ("id", "kind", "trigger", "server", "requests", "peers", "verdict")}
    return {
        "path": str(incident.path),
        "finished": incident.finished,
        "problem": incident.problem or None,
        "headline": headline(incident.incident) if document else None,
        **fields,
        "fault": _fault_of(incident, faults),
    }


def _as_text(incidents: Sequence[StoredIncident], faults: Faults) -> Iterator[str]:
    """Yield the table, then the path of the newest incident and the command that shows it."""
    rows = [_HEAD, *(_row(one, (_fault_of(one, faults) or {}).get("total")) for one in incidents)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"newest: {incidents[0].path}"
    if incidents[0].document is not None:
        yield f"next: sglang-crashkit show {shlex.quote(str(incidents[0].path))}"


def _row(incident: StoredIncident, total: object) -> tuple[str, ...]:
    """Return an incident's row of the table; `total` is how often its fault was seen."""
    from sglang_crashkit.incident.names import Names
    from sglang_crashkit.view.words import cut

    name = parse_name(incident.path.absolute().name)
    assert name is not None
    kind = name.kind if incident.finished else f"{name.kind} (not finished)"
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(name.seconds))
    if incident.document is None:
        return (name.id, moment, kind, "-", incident.problem, "-", "-")
    told = incident.incident
    verdict, cause, counts = told.verdict, told.cause, told.requests.counts
    who = ", ".join(f"{peer.role} {peer.address}" for peer in told.peers[:1]) or "-"
    if verdict is not None and verdict.first_failure is not None:
        who = Names(told).short(verdict.first_failure)
    # Without a cause, show the verdict.
    why = f"{verdict.text} [{verdict.level}]" if verdict is not None and verdict.text else "-"
    why = f"{cause.kind} ({cause.level})" if cause is not None else why
    lost = str(counts.unfinished) if counts is not None else "-"
    return (name.id, moment, kind, who, cut(why, _WIDEST), lost, str(total) if isinstance(total, int) else "-")
