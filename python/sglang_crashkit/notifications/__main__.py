"""Tell others of one incident, and note in its folder what came of it: ``notifications.json``.

Each command and each request has a deadline, and SIGKILL at its end. What fails costs nobody anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sglang_crashkit.capture.tools import ToolRun, run_tool
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.kernel.private_files import FolderLock, create_in_memory, write_json
from sglang_crashkit.model.checked_json import mapping_of
from sglang_crashkit.notifications.messages import body_of, event_of, find_cluster, short_of
from sglang_crashkit.notifications.plan import INCIDENT, OUTCOME, QUIET_KINDS, SECRET, WEBHOOK, Plan
from sglang_crashkit.settings import OTLP_ENDPOINT

_REQUEST_SECS = 5.0
#: OpenTelemetry tries again by itself.
_OTLP_SECS = 15.0
#: How long is waited before each try, in seconds.
_WAITS_SECS = (0.0, 1.0, 3.0)
#: Answers that say that another try may do.
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_OUTPUT = 1 << 20
_MAX_WORDS = 300
#: A part of a URL that is as long, in characters, is no word of a reason by chance.
_LONG_KEY = 8
#: Of OpenTelemetry's path; and a URL without a name has an empty one.
_NO_KEYS = frozenset({"", "v1", "traces"})

Wait = Callable[[float], None]


def tell(folder: Path, environ: Mapping[str, str] = os.environ, wait: Wait = time.sleep) -> bool:
    """Notify whoever is to know of a finished incident, as `environ` says.

    Returns:
        Whether it was done now; nothing is done where it was before, or another process is at it.

    Raises:
        OSError: the folder is gone, or cannot be written to.
        CrashkitError: there is no such folder.
    """
    lock = FolderLock(folder)
    if lock.acquire() == "taken":
        return False
    try:
        if (folder / OUTCOME).exists():
            return False
        document = find_incidents(folder)[0].document
        if document is None or document.get("kind") in QUIET_KINDS:
            return False
        if mapping_of(document.get("verdict")).get("kind") == "busy":
            # It is withdrawn where the server goes on.
            return False
        plan = Plan.from_environ(environ)
        # The key and the address are the web hook's alone.
        kept = {name: value for name, value in environ.items() if name not in (SECRET, WEBHOOK)}
        outcome: dict[str, Any] = {"schema_version": 1}
        outcome |= {what: {"done": False, "reason": why} for what, why in plan.problems.items()}
        short = short_of(document, str(folder))
        if plan.url:
            outcome["webhook"] = _post(plan, short, environ, wait)
        if plan.makes_event:
            outcome["kubernetes_event"] = _make_event(short, kept, wait)
        if plan.otlp:
            outcome["opentelemetry"] = _log(plan, short, kept)
        if plan.command:
            outcome["command"] = _run(plan, folder, kept)
        write_json(folder / OUTCOME, outcome)
        return True
    finally:
        lock.release()


def _run(plan: Plan, folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    with (folder / "incident.json").open("rb") as document:
        run = run_tool(
            plan.command,
            plan.command_secs,
            environ={**environ, INCIDENT: str(folder)},
            max_output=_MAX_OUTPUT,
            stdin=document.fileno(),
        )
    told = {"done": not run.reason, "seconds": run.seconds}
    return told | ({"reason": _words_of(run)} if run.reason else {})


def _words_of(run: ToolRun, url: str = "") -> str:
    last = run.text.strip().splitlines()[-1:]
    # A key that is cut off would not be found.
    return _without_keys("; ".join([run.reason, *last]), url)[:_MAX_WORDS]


def _post(plan: Plan, short: Mapping[str, Any], environ: Mapping[str, str], wait: Wait) -> dict[str, Any]:
    # The path of a URL may be the key to it.
    told: dict[str, Any] = {"host": urlsplit(plan.url).hostname, "kind": plan.kind}
    return told | _send(body_of(short, plan.kind), [], {**environ, WEBHOOK: plan.url}, wait)


def _make_event(short: Mapping[str, Any], environ: Mapping[str, str], wait: Wait) -> dict[str, Any]:
    cluster = find_cluster(environ)
    if isinstance(cluster, str):
        return {"done": False, "reason": cluster}
    options = ["--token-file", str(cluster.token), "--ca-file", str(cluster.authority)]
    return _send(event_of(short, cluster), options, {**environ, WEBHOOK: cluster.url}, wait)


def _log(plan: Plan, short: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    argv = [sys.executable, "-m", "sglang_crashkit.notifications.otlp"]
    with _in_memory(json.dumps(short).encode()) as stdin:
        run = run_tool(
            argv, _OTLP_SECS, environ={**environ, OTLP_ENDPOINT: plan.otlp}, max_output=_MAX_OUTPUT, stdin=stdin
        )
    return {"done": not run.reason} | ({"reason": _words_of(run, plan.otlp)} if run.reason else {})


def _without_keys(text: str, url: str) -> str:
    """Return a text without what of a URL may be a key: its name and password, and the parts of its path and query.

    A long one is taken out wherever it stands. A short one may be a word of the text, and is where it stands as in a
    URL; so is a name with its password anywhere.
    """
    rest = url.partition("://")[2]
    place = re.split("[/?#]", rest, maxsplit=1)[0]
    name, _colon, password = place.rpartition("@")[0].partition(":")
    if name and password:
        text = text.replace(f"{name}:{password}", "...")
    keys = {name, password, *re.split("[/?&=#]", rest[len(place) :])}
    for key in sorted((keys | set(map(unquote, keys))) - _NO_KEYS, key=len, reverse=True):
        written = re.escape(key)
        if len(key) < _LONG_KEY:
            written = rf"(?<=[/?&=]){written}(?!\w)|(?<!\w){written}(?=[@/])"
        text = re.sub(written, "...", text)
    return text


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    descriptor = create_in_memory("crashkit-notification")
    try:
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _send(data: bytes, options: Sequence[str], environ: Mapping[str, str], wait: Wait) -> dict[str, Any]:
    told: dict[str, Any] = {"done": False}
    with _in_memory(data) as body:
        for number, secs in enumerate(_WAITS_SECS, start=1):
            wait(secs)
            os.lseek(body, 0, os.SEEK_SET)
            argv = [sys.executable, "-m", "sglang_crashkit.notifications.post", *options]
            run = run_tool(argv, _REQUEST_SECS, environ=environ, apart=True, max_output=_MAX_OUTPUT, stdin=body)
            said = run.text.strip()
            status = int(said) if said.isdigit() else None
            told |= {"tries": number, "done": status is not None and 200 <= status < 300}
            told |= {"status": status} if status is not None else {"reason": (said or run.reason)[:_MAX_WORDS]}
            if told["done"] or (status is not None and status not in _LATER):
                break
    return told


def main() -> int:
    """Send the notices; what cannot be sent is said in the crash handler's log."""
    try:
        tell(Path(sys.argv[1]))
    except (OSError, CrashkitError) as error:
        sys.stderr.write(f"nobody was notified of {sys.argv[1]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
