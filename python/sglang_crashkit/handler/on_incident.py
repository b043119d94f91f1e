"""Run the user's command for one complete incident: ``python -m sglang_crashkit.handler.on_incident FOLDER``.

``SGLANG_CRASHKIT_ON_INCIDENT`` is split into words as by a shell, but run without a shell. The last argument is the
incident's folder, standard input is ``summary.md``. The outcome is written to ``on_incident.json`` in the folder.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel.private_files import FolderLock, open_regular, write_json
from sglang_crashkit.redact import redact_text
from sglang_crashkit.settings import read_seconds

COMMAND, COMMAND_SECS = "SGLANG_CRASHKIT_ON_INCIDENT", "SGLANG_CRASHKIT_ON_INCIDENT_SECS"
#: The file with the command's outcome, in the incident's folder.
OUTCOME = "on_incident.json"
#: The kinds of incidents without a command: a user asked for the stacks.
QUIET_KINDS = frozenset({"snapshot"})
_DEFAULT_SECS = 30.0
_MAX_OUTPUT = 1 << 20
_MAX_WORDS = 300


def deadline_secs(environ: Mapping[str, str] = os.environ) -> float:
    """Return the time limit of the command, in seconds."""
    return read_seconds(environ, COMMAND_SECS, _DEFAULT_SECS)


def run_command(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Run the command that `environ` names for a finished incident, to its end or its deadline.

    Returns:
        The outcome; None if the command was run before, another process runs it, or the incident gets none.

    Raises:
        OSError: the folder is gone, or cannot be written to.
        CrashkitError: there is no such folder.
    """
    lock = FolderLock(folder)
    if lock.acquire() == "taken":
        return None
    try:
        stored = None if (folder / OUTCOME).exists() else find_incidents(folder)[0]
        if stored is None or stored.document is None or stored.incident.kind in QUIET_KINDS:
            return None
        verdict = stored.incident.verdict
        if verdict is not None and verdict.kind == "busy":
            # The incident is withdrawn if the server goes on.
            return None
        outcome: dict[str, Any] = {"schema_version": 1, "done": False}
        try:
            words = shlex.split(environ.get(COMMAND, ""))
        except ValueError as error:
            outcome["reason"] = f"{COMMAND} cannot be split into words: {error}"
        else:
            argv, secs = [*words, str(folder)], deadline_secs(environ)
            with open_regular(folder / "summary.md") as summary:
                run = run_tool(argv, secs, environ=environ, max_output=_MAX_OUTPUT, stdin=summary.fileno())
            outcome |= {"done": not run.reason, "seconds": run.seconds}
            if run.reason:
                last = run.text.strip().splitlines()[-1:]
                # Redact before cutting: a secret that is cut off would not be recognised.
                outcome["reason"] = redact_text("; ".join([run.reason, *last]))[:_MAX_WORDS]
        write_json(folder / OUTCOME, outcome)
        return outcome
    finally:
        lock.release()


def main() -> int:
    """Run the command; write the reason of a failure to standard error, for the crash handler's log."""
    try:
        outcome = run_command(Path(sys.argv[1]))
        problem = "" if outcome is None or outcome["done"] else outcome["reason"]
    except (OSError, CrashkitError) as error:
        problem = str(error)
    sys.stderr.write(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
