"""The self-test: a stand-in tree with a real crash handler loses a rank, and its incident is checked.

Nothing but processes of its own are started, looked at and ended; no server is touched.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_crashkit.doctor.drill_server import RANKS
from sglang_crashkit.doctor.folder_facts import read_folder
from sglang_crashkit.doctor.rules import Finding
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.store import StoredIncident, find_incidents
from sglang_crashkit.incident.summary import mapping_of, mappings_of
from sglang_crashkit.kernel.pidfd import ProcessHandle
from sglang_crashkit.kernel.stack_hooks import read_handler_pid
from sglang_crashkit.settings import OWN_VARIABLES, RUN, Settings, fallback_folder, unpublished

#: The stand-in's crash handler starts within this time, and the incident is whole within the next, in seconds.
_START_SECS = 10.0
_INCIDENT_SECS = 5.0
_END_SECS = 5.0
_POLL_SECS = 0.02
_TOPIC = "drill"


def drill(crash_folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Run the self-test and yield what came of it.

    The incident is written below `crash_folder`, or the temporary folder, and removed. Of the settings in `environ`
    those do not count that would tell others of it.
    """
    began = time.monotonic()
    why = "a crash of a server here would leave no incident"
    quoted = shlex.quote(str(crash_folder or fallback_folder()))
    mend = (f"df -h {quoted}", f"ls -ld {quoted}")
    if problem := _problem_of(crash_folder, environ):
        yield Finding("problem", _TOPIC, problem, why, mend)
        return
    try:
        with contextlib.ExitStack() as undo:
            place = tempfile.TemporaryDirectory(prefix=".drill-", dir=crash_folder, ignore_cleanup_errors=True)
            folder = Path(undo.enter_context(place))
            # Of its own, and short: the path of a socket has 107 bytes at most.
            runtime = undo.enter_context(tempfile.TemporaryDirectory(prefix="ck-", ignore_cleanup_errors=True))
            incident, problem = _crash(folder, _environment(environ, runtime))
    except OSError as error:
        incident, problem = None, f"it cannot be run: {error}"
    seconds = time.monotonic() - began
    document = incident.document if incident is not None else None
    if document is None or problem:
        what = problem or "the incident cannot be read"
        yield Finding("problem", _TOPIC, what, why if document is None else "", mend)
        return
    yield Finding("ok", _TOPIC, f"a rank was killed, and the incident was whole and checked within {seconds:.1f} s")
    yield from check_incident(document)


def check_incident(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with the drill's incident, or that nothing is."""
    survivor, victim = RANKS
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("title")
    if first != victim:
        yield Finding("problem", _TOPIC, f"{first} is said to have failed first, and not {victim}")
    reports = {str(process.get("title")): process for process in mappings_of(document.get("processes"))}
    end = mapping_of(reports.get(victim, {}).get("exit"))
    if end.get("signal") != "SIGKILL":
        yield Finding("problem", _TOPIC, f"the rank that was killed is said to have ended by {end.get('signal')}")
    pieces = mappings_of(reports.get(survivor, {}).get("evidence"))
    stack = next((piece for piece in pieces if piece.get("kind") == "stack"), {})
    if stack.get("status") == "captured":
        yield Finding("ok", _TOPIC, f"the stacks of the rank that lived were taken by {stack.get('source')}")
    else:
        why = "an incident here does not say what the other ranks were doing"
        yield Finding("warning", _TOPIC, f"no stacks of the rank that lived: {stack.get('reason')}", why)


def _problem_of(crash_folder: Path | None, environ: Mapping[str, str]) -> str:
    """Return why no incident would be written; empty where nothing speaks against it."""
    folder = read_folder((crash_folder or fallback_folder()).absolute(), dict(environ))
    if crash_folder is not None and not (folder.exists or folder.problem):
        return f"{folder.path} is not there"
    if folder.problem:
        return f"{folder.path}: {folder.problem}"
    if folder.has_no_room(Settings.from_environ(environ).disk):
        return f"{folder.path}: {folder.free >> 20} MB are free, and an incident has no room"
    return ""


def _environment(environ: Mapping[str, str], runtime: str) -> dict[str, str]:
    kept = {name: value for name, value in unpublished(environ).items() if name not in OWN_VARIABLES}
    return kept | {"TMPDIR": runtime}


def _crash(folder: Path, environ: Mapping[str, str]) -> tuple[StoredIncident | None, str]:
    """Run the stand-in, and return its incident; None, and why, where it leaves none."""
    with subprocess.Popen(
        [sys.executable, "-m", "sglang_crashkit.doctor.drill_server", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(environ),
        start_new_session=True,
    ) as server:
        try:
            runtime, waits = Path(environ["TMPDIR"]), _START_SECS
            deadline = time.monotonic() + waits
            while time.monotonic() < deadline and server.poll() is None:
                if (found := _find_incident(folder)) is not None:
                    return found, ""
                if (found := _find_incident(runtime / fallback_folder().name)) is not None:
                    return found, f"{folder.parent} was not used: the incident went to the temporary folder"
                if waits != _INCIDENT_SECS and (handlers := _handlers_in(runtime)):
                    _close(handlers)
                    waits = _INCIDENT_SECS
                    deadline = time.monotonic() + waits
                time.sleep(_POLL_SECS)
            if server.poll() is None:
                what = "the killed rank left no incident" if waits == _INCIDENT_SECS else "no crash handler started"
                return None, f"{what} within {waits:g} s"
            assert server.stderr is not None
            said = server.stderr.read(1 << 16).decode(errors="replace").strip().splitlines()
            return None, f"the crash handler did not start: {said[-1] if said else f'status {server.returncode}'}"
        finally:
            handlers = _handlers_in(Path(environ["TMPDIR"]))
            assert server.stdin is not None
            server.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_END_SECS)
            server.kill()
            # It leaves with its server, and writes to the incident until then.
            for handler in handlers:
                handler.has_exited(_END_SECS)
            _close(handlers)


def _find_incident(folder: Path) -> StoredIncident | None:
    with contextlib.suppress(OSError, CrashkitError):
        return next((one for one in find_incidents(folder) if one.finished and one.document), None)
    return None


def _close(handlers: list[ProcessHandle]) -> None:
    for handler in handlers:
        handler.close()


def _handlers_in(folder: Path) -> list[ProcessHandle]:
    found = []
    for path in folder.glob(f"*/{RUN}/*"):
        pid = read_handler_pid(path)
        with contextlib.suppress(OSError):
            found += [ProcessHandle(pid)] if pid is not None else []
    return found
