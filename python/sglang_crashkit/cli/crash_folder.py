"""Find the incident that a user means; without a named folder, below those of running servers and the fallback."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from sglang_crashkit import settings
from sglang_crashkit.cli.output import say
from sglang_crashkit.errors import WHAT_DIR_IS, NothingToDoError, UsageError
from sglang_crashkit.incident.store import StoredIncident, find_one, why_unreadable
from sglang_crashkit.kernel import procfs

_HANDLER_LOG = "crash_handler.log"


def known_folders() -> list[Path]:
    """Return the crash folders of this user's running servers, and the fallback folder of servers without one.

    A crash handler keeps its log open, and that log lies in its server's crash folder.

    Raises:
        NothingToDoError: there is no such folder.
    """
    from sglang_crashkit.cli.commands.status import find_running_servers

    handlers = (server.handler for server in find_running_servers() if server.handler is not None)
    files = (path for handler in handlers for _link, path in procfs.open_files(handler))
    # The handler's own paths: one that runs in a container has another root, so the folder may not exist here.
    found = [path.parent.parent for path in files if path.name == _HANDLER_LOG]
    folders = [folder for folder in dict.fromkeys([*found, settings.fallback_folder()]) if folder.is_dir()]
    if not folders:
        raise NothingToDoError(
            "no server runs here whose crash folder would be known",
            next_step=f"sglang-crashkit incidents DIR{WHAT_DIR_IS}",
        )
    return folders


def find_incident(text: str, folder: Path | None) -> StoredIncident:
    """Return the incident that an id, ``latest`` or a path names; raises what `find_one` raises.

    For ``latest`` and a crash folder it prints which folders cannot be read: a later incident may lie there.
    """
    found, unreadable = [], list[OSError]()
    if folder is not None or "/" in text or Path(text).exists():
        incident = find_one(text, folder, unreadable)
        tell_unreadable(unreadable)
        return incident
    for one in known_folders():
        with contextlib.suppress(NothingToDoError):
            found.append(find_one(text, one, unreadable))
    if not found:
        raise NothingToDoError(
            f"no incident {text} where servers of this host leave theirs",
            next_step=f"the same with --folder DIR{WHAT_DIR_IS}",
        )
    tell_unreadable(unreadable)
    found = [one for one in found if one.finished] or found
    if text != "latest" and len({one.name for one in found}) > 1:
        names = ", ".join(one.name[-8:] for one in found[:8])
        raise UsageError(f"the ids of {len(found)} incidents begin with {text}: {names}", next_step="more of the id")
    return max(found, key=lambda one: one.name)


def tell_unreadable(errors: Sequence[OSError]) -> None:
    """Print the folders that cannot be read, and are left out, on the standard error."""
    for error in errors:
        say(f"{why_unreadable(error, Path())}; what is in it is left out", error=True)


def nothing_of(what: str, incident: StoredIncident) -> NothingToDoError:
    """Return the error for an incident without ``stacks`` or another part, with the reason that the incident has."""
    reasons = [incident.incident.requests.reason] if what == "requests" else []
    pieces = (piece for process in incident.incident.processes for piece in process.evidence)
    reasons += [piece.reason for piece in pieces if piece.kind in (what, what.removesuffix("s"))]
    why = next(filter(None, reasons), "")
    return NothingToDoError(
        f"no {what} in {incident.path}" + (f": {why}" if why else ""),
        next_step=f"sglang-crashkit show {shlex.quote(str(incident.path))}{'' if what == 'events' else ' --timeline'}",
    )
