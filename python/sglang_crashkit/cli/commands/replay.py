"""``sglang-crashkit replay``: send the requests of an incident again, or find those that reproduce its fault."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.arguments import add_incident, command, positive, seconds
from sglang_crashkit.cli.crash_folder import find_incident
from sglang_crashkit.cli.output import say, say_json, tell
from sglang_crashkit.errors import ExitCode, NothingToDoError, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.incident.requests import StoredRequest
    from sglang_crashkit.incident.store import StoredIncident

_EXAMPLE = """examples:
  sglang-crashkit replay /crash --only 4f1c --url http://127.0.0.1:30000
  sglang-crashkit replay /crash --serve "python -m sglang.launch_server --model-path MODEL"
  sglang-crashkit replay /crash --bisect --serve "python -m sglang.launch_server --model-path MODEL --tp 2"

A server of --serve listens at a free port of the loopback address, has a crash folder of its own and no API key,
whatever the command says of these, and ends with the command.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLE
    add_incident(parser, default=None)
    parser.add_argument("--only", nargs="+", metavar="RID", help="send only these requests")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="send them to this server, which may crash")
    where.add_argument(
        "--serve", metavar="COMMAND", type=command, help="start this patched server for it, and end it afterwards"
    )
    parser.add_argument(
        "--request-secs", type=seconds, default=300.0, metavar="S", help="seconds to wait for an answer (300)"
    )
    parser.add_argument(
        "--ready-secs", type=seconds, default=900.0, metavar="S", help="seconds to wait for a server to start (900)"
    )
    parser.add_argument(
        "-o",
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder for logs, crash folders and the reproducer (replay-ID)",
    )
    parser.add_argument(
        "--bisect", action="store_true", help="with --serve: find the fewest requests that reproduce the fault"
    )
    parser.add_argument(
        "--starts", type=positive, default=30, metavar="N", help="with --bisect: start at most N servers (30)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each answer, and one for the outcome last"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Send the requests; PARTIAL where not all were answered or found, or where the server of --serve failed."""
    from sglang_crashkit.incident.requests import read_requests
    from sglang_crashkit.kernel.server_address import Address
    from sglang_crashkit.replay.server import MAX_GAP_SECS, OwnServer, send_all

    if args.bisect and (args.url is not None or args.only):
        raise UsageError("--bisect tries all requests on servers of its own", next_step="give it --serve alone")
    incident = find_incident(args.incident, args.folder)
    folder: Path = args.output_dir or Path(f"replay-{incident.incident.id}")
    if args.bisect:
        return _bisect(args, incident, folder.absolute())
    chosen, tried = _chosen(read_requests(incident), args.only), None
    if args.url is not None:
        answers = send_all(Address.parse(args.url), chosen, args.request_secs, max_gap_secs=MAX_GAP_SECS)
        is_whole = len(answers) == len(chosen)
    else:
        with OwnServer(args.serve, folder.absolute()) as server:
            server.start(args.ready_secs, tell)
            tried = server.try_requests(chosen, incident.incident, args.request_secs, MAX_GAP_SECS)
        answers, is_whole = tried.answers, tried.serves_on
    for answer in answers:
        if args.json:
            say_json(vars(answer))
        else:
            said = f"status {answer.status}" if answer.status is not None else "no answer"
            say(f"{answer.rid}: {said} after {answer.secs:.2f} s" + (f": {answer.problem}" if answer.problem else ""))
    if tried is not None:
        path = str(tried.incident.path) if tried.incident is not None else None
        if args.json:
            say_json({"outcome": tried.outcome, "is_same": tried.is_same, "incident": path})
        else:
            say(tried.outcome, *([f"incident: {path}"] if path else []))
    are_taken = all(one.status is not None and not one.is_refused for one in answers)
    return ExitCode.DONE if is_whole and are_taken else ExitCode.PARTIAL


def _bisect(args: argparse.Namespace, incident: StoredIncident, folder: Path) -> ExitCode:
    from sglang_crashkit.replay.bisect import SCRIPT, Plan, bisect

    plan = Plan(args.serve, folder, args.starts, args.ready_secs, args.request_secs)
    result = bisect(incident, plan, tell)
    if args.json:
        say_json(asdict(result), indent=2)
    elif result.reproduced:
        say(f"reproduced with {result.starts} servers: {result.fault}")
        parameters = ", ".join(result.parameters) or "no parameter"
        prompt = "its prompt" if result.needs_prompt else "no prompt of its own"
        say(
            f"by one request ({result.rids[0]}), with {parameters} and {prompt}"
            if len(result.rids) == 1
            else f"by {len(result.rids)} requests at once: {', '.join(result.rids[:8])}"
        )
        say(f"next: {folder / SCRIPT} http://HOST:PORT   # or refuse such requests at the gateway")
    else:
        say(f"{result.reason} ({result.starts} servers)")
    for line in result.left_out if not args.json else ():
        say(f"left out: {line}")
    return ExitCode.DONE if result.reproduced else ExitCode.PARTIAL


def _chosen(requests: list[StoredRequest], wanted: list[str] | None) -> list[StoredRequest]:
    found = [one for one in requests if not wanted or not set(wanted).isdisjoint(one.rids)]
    for one in found:
        if not one.is_complete:
            tell(f"left out: request {one.rid}: {', '.join(one.lacks)} is not kept")
    found = [one for one in found if one.is_complete]
    if not found:
        raise NothingToDoError("none of the requests that were asked for can be sent", next_step="leave out --only")
    return found
