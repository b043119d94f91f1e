"""``sglang-crashkit doctor``: find what would keep a server's crash from being recorded, before there is a crash."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sglang_crashkit.cli.arguments import add_python
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode, NothingToDoError

_LEVELS = {True: "ok", None: "warning", False: "problem"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "examples:\n"
        "  sglang-crashkit doctor --crash-dump-folder /var/crash/sglang   before the server is started\n"
        "  sglang-crashkit doctor --pid 4711                              while it serves"
    )
    parser.add_argument("--pid", type=int, help="a process of the server to check; by default all servers of this user")
    parser.add_argument(
        "--crash-dump-folder", type=Path, metavar="DIR", help="crash folder to check; by default the server's own"
    )
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the checks and print what they found; the exit status is 1 where there is a problem."""
    from sglang_crashkit.cli.commands.status import find_running_servers
    from sglang_crashkit.doctor.checks import CHECKS, Target
    from sglang_crashkit.kernel import procfs
    from sglang_crashkit.kernel.discovery import find_processes, value_of

    user = os.geteuid() if args.pid is None else None
    found = find_processes(pid=args.pid, user=user, everything=True).processes
    servers = {pid: [one for one in found if one.server == pid] for pid in sorted({one.server or 0 for one in found})}
    servers.pop(0, None)
    if args.pid is not None and not servers:
        raise NothingToDoError(f"process {args.pid} belongs to no server", next_step="sglang-crashkit status")
    pid = next(iter(servers), os.getpid())
    arguments = servers[pid][0].server_arguments if servers else ()
    folder = args.crash_dump_folder or value_of(arguments, "--crash-dump-folder")
    known = [server for server in find_running_servers() if server.runtime or server.problem]
    handlers = {server.pid: (server.handler, server.problem) for server in known}
    environ = (procfs.read_environ(pid) if servers else {}) or os.environ
    crash_folder = Path(folder) if folder else None
    target = Target(pid, servers, handlers, environ, arguments, crash_folder, args.python)
    results = [(topic, one) for topic, check in CHECKS.items() for one in check(target)]
    problems, warnings = (sum(one.ok is ok for _topic, one in results) for ok in (False, None))
    if args.json:
        findings = [{"topic": topic, "level": _LEVELS[one.ok], **one._asdict()} for topic, one in results]
        say_json({"schema_version": 2, "healthy": not problems, "findings": findings}, indent=1)
    else:
        for topic, one in results:
            say(f"{_LEVELS[one.ok]:<8} {topic}: {one.words}")
            say(*(f"{'':8}   next: {line}" for line in one.command.splitlines()))
        count = f"{problems} problem(s), {warnings} warning(s)"
        say(f"result   {count if problems or warnings else 'nothing is wrong'}")
    return ExitCode.FAILED if problems else ExitCode.DONE
