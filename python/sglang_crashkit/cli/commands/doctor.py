"""``sglang-crashkit doctor``: say what would keep a crash of a server from being recorded, before it comes to that."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.argument_types import seconds
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode, NothingToDoError, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.doctor.facts import ServerFacts
    from sglang_crashkit.doctor.rules import Finding


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "examples:\n"
        "  sglang-crashkit doctor --crash-dump-folder /var/crash/sglang   before the server is started\n"
        "  sglang-crashkit doctor --pid 4711                              while it serves\n"
        "  sglang-crashkit doctor --drill                                 a crash, of nobody's server"
    )
    parser.add_argument("--pid", type=int, help="a process of the server that is meant; all of this user's by default")
    parser.add_argument(
        "--crash-dump-folder", type=Path, metavar="DIR", help="what the server is given; by default what it was given"
    )
    parser.add_argument("--python", metavar="PATH", help="interpreter or virtual environment; this one by default")
    parser.add_argument(
        "--grace-secs", type=seconds, metavar="S", help="how long the server has between SIGTERM and SIGKILL"
    )
    parser.add_argument(
        "--drill", action="store_true", help="kill a rank of a stand-in, check its incident; no server is touched"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Look, and print what was found; the exit status is 1 where there is a problem."""
    if args.drill and args.pid is not None:
        raise UsageError(
            "--drill is of no server, so that --pid has no place in it", next_step="sglang-crashkit doctor --drill"
        )
    from sglang_crashkit.doctor.rules import has_problem

    document: dict[str, object] = {"schema_version": 1}
    if args.drill:
        from sglang_crashkit.doctor.drill import drill

        findings = list(drill(args.crash_dump_folder))
    else:
        from sglang_crashkit.doctor.facts import gather, read_installation
        from sglang_crashkit.doctor.rules import judge, servers_to_json

        servers = _find_servers(args.pid)
        facts = gather(
            read_installation(args.python), servers, crash_folder=args.crash_dump_folder, grace_secs=args.grace_secs
        )
        findings = judge(facts)
        document["servers"] = servers_to_json(facts.servers)
    is_bad = has_problem(findings)
    if args.json:
        say_json(document | {"healthy": not is_bad, "findings": [asdict(one) for one in findings]}, indent=1)
    else:
        say(*format_findings(findings))
    return ExitCode.FAILED if is_bad else ExitCode.DONE


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Return the lines for a person, for all that is not in order with the reason and what mends it."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.topic}: {finding.what}")
        lines += [f"{'':8}   why: {finding.why}"] if finding.why else []
        lines += [f"{'':8}   next: {step}" for step in finding.next]
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    told = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count]
    lines.append(f"result   {', '.join(told) or 'nothing is wrong'}")
    return lines


def _find_servers(pid: int | None) -> list[ServerFacts]:
    from sglang_crashkit.cli.commands.status import find_running_servers
    from sglang_crashkit.doctor.facts import server_facts
    from sglang_crashkit.kernel.discovery import find_processes

    found = find_processes(pid=pid, user=os.geteuid() if pid is None else None, everything=True).processes
    if pid is not None and not found:
        raise NothingToDoError(f"process {pid} is of no server", next_step="sglang-crashkit status")
    known = {server.pid: (server.handler, server.problem) for server in find_running_servers()}
    return server_facts(found, known)
