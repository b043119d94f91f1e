"""``sglang-crashkit replay``: send the requests of an incident again, as they came."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.argument_types import seconds
from sglang_crashkit.cli.crash_folder import add_incident, find_incident
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.cli.running import terminable
from sglang_crashkit.errors import ExitCode, NothingToDoError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_crashkit.replay.requests import StoredRequest
    from sglang_crashkit.replay.sender import Answer

EXAMPLE = """example:
  sglang-crashkit replay /crash --only 4f1c --url http://127.0.0.1:30000
  sglang-crashkit replay /crash --serve "python -m sglang.launch_server --model-path MODEL"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EXAMPLE
    add_incident(parser, default=None)
    parser.add_argument("--only", nargs="+", metavar="RID", help="these requests alone")
    parser.add_argument("--suspects", action="store_true", help="those alone that the incident suspects")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server that may break")
    where.add_argument("--serve", metavar="COMMAND", help="start a patched server for it, and end it afterwards")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the API key of --url")
    parser.add_argument(
        "--max-gap", type=seconds, default=1.0, metavar="S", help="send them as far apart as they came, up to S (1)"
    )
    parser.add_argument(
        "--request-secs", type=seconds, default=300.0, metavar="S", help="the longest to wait for an answer (300)"
    )
    parser.add_argument("--ready-secs", type=seconds, default=900.0, metavar="S", help="... for a server's start (900)")
    parser.add_argument("-o", "--output-dir", type=Path, metavar="DIR", help="of --serve; default: replay-<id>")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object an answer; with --serve, one of the server last"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Send them.

    Returns:
        DONE where all were answered; PARTIAL where some were not, or the server of --serve failed.
    """
    from sglang_crashkit.kernel.server_arguments import value_of
    from sglang_crashkit.replay.fault import is_same_fault, words_of
    from sglang_crashkit.replay.requests import read_requests
    from sglang_crashkit.replay.sender import send_all
    from sglang_crashkit.replay.server import OwnServer, parse_command
    from sglang_crashkit.watch.health import Address, read_api_key

    incident = find_incident(args.incident, args.folder)
    document = incident.document or {}
    chosen = _chosen(read_requests(incident), args, document.get("suspects"))
    key = read_api_key(args.api_key_file) if args.api_key_file is not None else ""

    def send(address: Address, key: str, is_over: Callable[[], bool]) -> list[Answer]:
        return send_all(
            address,
            chosen,
            args.request_secs,
            api_key=key,
            max_gap_secs=args.max_gap,
            is_over=is_over,
            on_answer=lambda answer: _tell(answer, args),
        )

    if args.url is not None:
        with terminable():
            answers = send(Address.parse(args.url), key, lambda: False)
        is_short = any(answer.is_lost or answer.is_refused for answer in answers)
        return ExitCode.PARTIAL if is_short else ExitCode.DONE
    folder = (args.output_dir or Path(f"replay-{document.get('id')}")).absolute()
    command = parse_command(args.serve)
    with terminable(), OwnServer(command, folder) as server:
        server.start(args.ready_secs, lambda line: say(line, error=True))
        answers = send(server.address, key or value_of(command, "--api-key") or "", lambda: server.is_failing)
        is_lost = len(answers) < len(chosen) or any(answer.is_lost for answer in answers)
        found = server.failure(wait=is_lost)
        told: dict[str, str | None] = {"fault": None, "incident": None}
        if found is not None:
            is_same = is_same_fault(found.document or {}, document)
            outcome = "the same fault" if is_same else "another fault"
            told = {"fault": words_of(found.document or {}), "incident": str(found.path)}
        elif answers and all(answer.is_refused for answer in answers):
            outcome = "nothing was tried: the server refuses the requests"
        elif is_lost:
            outcome = "not all were answered, and the server left no incident"
        else:
            outcome = "not reproduced: the server serves on"
        if args.json:
            say_json({"outcome": outcome, **told})
        elif found is not None:
            say(f"{outcome}: {told['fault']}", f"incident: {told['incident']}")
        else:
            say(outcome)
    is_refused = any(answer.is_refused for answer in answers)
    return ExitCode.PARTIAL if is_lost or is_refused or found is not None else ExitCode.DONE


def _chosen(requests: list[StoredRequest], args: argparse.Namespace, suspects: object) -> list[StoredRequest]:
    wanted = None
    if args.only:
        wanted = set(args.only)
    elif args.suspects:
        wanted = {one.get("rid") for one in suspects if isinstance(one, dict)} if isinstance(suspects, list) else set()
    found = [one for one in requests if wanted is None or not wanted.isdisjoint(one.rids)]
    for one in found:
        if not one.is_complete:
            say(f"left out: request {one.rid}: {', '.join(one.lacks)} is not kept", error=True)
    found = [one for one in found if one.is_complete]
    for one in found:
        if one.was_given_up:
            say(f"request {one.rid}: it had been given up; it is sent, too, and waited for", error=True)
        if one.body.get("session_params"):
            say(f"request {one.rid}: it goes on with a session, which another server does not have", error=True)
    if not found:
        raise NothingToDoError("none of the requests that were asked for can be sent", next_step="leave out --only")
    return found


def _tell(answer: Answer, args: argparse.Namespace) -> None:
    if args.json:
        say_json(vars(answer))
    else:
        said = f"status {answer.status}" if answer.status is not None else "no answer"
        say(f"{answer.rid}: {said} after {answer.secs:.2f} s" + (f": {answer.problem}" if answer.problem else ""))
