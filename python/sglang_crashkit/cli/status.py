"""``sglang-crashkit status``: say what an installed SGLang is, and what to run next."""

from __future__ import annotations

import argparse
import json

from sglang_crashkit.errors import ExitCode

HELP = "say whether the SGLang that a python imports is patched"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--python", metavar="PATH", help="interpreter or virtual environment; this one by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Print the status."""
    # Imported here, so that every command starts without what the others need.
    from sglang_crashkit.core.running_servers import find_running_servers, format_server
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import read_status

    session = open_session(args.python)
    status = read_status(session.environment, session.lock)
    servers = find_running_servers()
    if args.json:
        print(json.dumps(status.to_json() | {"servers": [server.to_json() for server in servers]}, indent=1))
    else:
        for line in [*status.lines(), *map(format_server, servers)]:
            print(line)
    return ExitCode.DONE
