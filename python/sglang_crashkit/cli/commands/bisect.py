"""``sglang-crashkit bisect``: find the smallest set of an incident's requests that brings its fault back."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.argument_types import positive, seconds
from sglang_crashkit.cli.crash_folder import add_incident, find_incident
from sglang_crashkit.cli.output import say, say_json, say_text
from sglang_crashkit.cli.running import terminable
from sglang_crashkit.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.replay.bisect import Result

EXAMPLE = """example:
  sglang-crashkit bisect /crash/host/incidents/20260101T120000.000Z-exception-1a2b3c4d \\
      --serve "python -m sglang.launch_server --model-path MODEL --tp 2"

Each server of --serve has a crash folder and, where the command names no --port, a port of its own, and ends with the
command. Ctrl-C keeps what is known by then, and the same command again goes on from there.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EXAMPLE
    add_incident(parser, default=None)
    parser.add_argument("--serve", metavar="COMMAND", required=True, help="starts a patched server like that one")
    parser.add_argument("--tries", type=positive, default=3, metavar="N", help="before it is not reproduced (3)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="servers that serve at once (1)")
    parser.add_argument("--starts", type=positive, default=30, metavar="N", help="start at most so many servers (30)")
    parser.add_argument(
        "--request-secs", type=seconds, default=300.0, metavar="S", help="the longest to wait for an answer (300)"
    )
    parser.add_argument("--ready-secs", type=seconds, default=900.0, metavar="S", help="... for a server's start (900)")
    parser.add_argument("-o", "--output-dir", type=Path, metavar="DIR", help="default: bisect-<incident's id>")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Find it."""
    from sglang_crashkit.kernel.server_arguments import value_of
    from sglang_crashkit.replay import bisect
    from sglang_crashkit.replay.server import parse_command
    from sglang_crashkit.replay.trials import Plan

    incident = find_incident(args.incident, args.folder)
    folder = (args.output_dir or Path(f"bisect-{(incident.document or {}).get('id')}")).absolute()
    command = parse_command(args.serve)
    if args.jobs > 1 and value_of(command, "--port") is not None:
        raise UsageError("several servers cannot have one port", next_step="leave --port out of the command")
    plan = Plan(command, folder, args.tries, args.starts, args.ready_secs, args.request_secs, args.jobs)
    with terminable():
        result = bisect.bisect(incident, plan, lambda line: say(line, error=True))
    if args.json:
        say_json(asdict(result), indent=2)
        return ExitCode.DONE if result.reproduced else ExitCode.PARTIAL
    say_text(_words(result, folder))
    for line in result.left_out:
        say(f"left out: {line}")
    return ExitCode.DONE if result.reproduced else ExitCode.PARTIAL


def _words(result: Result, folder: Path) -> str:
    from sglang_crashkit.replay.bisect import REPRODUCER, SCRIPT

    if not result.reproduced:
        return f"{result.reason} ({result.starts} servers)"
    lines = [f"reproduced with {result.starts} servers: {result.fault}"]
    if result.in_order:
        lines.append(
            f"by {len(result.requests)} requests one by one; it needs these in order: {', '.join(result.rids)}"
        )
    elif len(result.requests) == 1:
        parameters = ", ".join(result.parameters) or "no parameter"
        lines.append(f"by one request ({result.rids[0]}), with {parameters}; of its prompt: {result.prompt}")
    else:
        lines.append(f"by {len(result.requests)} requests at once: {', '.join(result.rids[:8])}")
    if not result.is_confirmed:
        lines.append(
            "not proven: it was not seen each time, after others that did no harm; --starts may allow for more"
        )
    lines.append(f"next: {folder / SCRIPT} http://HOST:PORT   # or see {folder / REPRODUCER}")
    return "\n".join(lines)
