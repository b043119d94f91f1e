"""``sglang-crashkit fleet``: what the incidents of many hosts have in common."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from sglang_crashkit.cli.argument_types import duration
from sglang_crashkit.errors import WHAT_DIR_IS, WHOSE_IT_IS, CrashkitError, ExitCode, NothingToDoError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "examples:\n"
        "  sglang-crashkit fleet /shared/crash --since 7d      a crash folder that all hosts share\n"
        "  sglang-crashkit fleet fetched/* --html fleet.html   folders that were fetched from each host"
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="crash folder, or folder of crash folders")
    parser.add_argument("--since", type=duration, metavar="T", help="of the last T only, such as 90m, 12h or 2d")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that loads nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Print it.

    Raises:
        NothingToDoError: there is no incident.
        CrashkitError: no folder can be read, or the page cannot be written.
    """
    from sglang_crashkit.analysis.fleet import group
    from sglang_crashkit.cli.reporters.fleet import format_groups, format_page
    from sglang_crashkit.incident.fleet import read_fleet
    from sglang_crashkit.kernel.private_files import write_to_device

    fleet = read_fleet(args.folders, time.time() - args.since if args.since is not None else 0.0)
    problems = [f"{path} cannot be read: {why}" for path, why in fleet.problems.items()]
    missing = [f"{path} is not a folder" for path in fleet.missing]
    if not fleet.incidents and problems:
        raise CrashkitError(
            "; ".join([*problems, *missing]), next_step=f"ls -ld {next(iter(fleet.problems))}{WHOSE_IT_IS}"
        )
    if not fleet.incidents:
        raise NothingToDoError(
            "; ".join([*missing, f"no incident of {len(fleet.hosts)} hosts that can be read"]),
            next_step=f"sglang-crashkit fleet DIR{WHAT_DIR_IS}",
        )
    for line in [*problems, *missing]:
        print(line, file=sys.stderr)
    unreadable = [*fleet.unreadable, *fleet.problems, *fleet.missing]
    status = ExitCode.PARTIAL if unreadable else ExitCode.DONE
    groups, hosts = group(fleet.incidents), len(fleet.hosts)
    if args.html is not None:
        try:
            page = format_page(groups, hosts).encode(errors="backslashreplace")
            if not write_to_device(args.html, page):
                args.html.write_bytes(page)
        except OSError as error:
            raise CrashkitError(
                f"{args.html} cannot be written: {error}", next_step="--html FILE, another one"
            ) from error
    if args.json:
        told = {"schema_version": 1, "hosts": hosts, "incidents": len(fleet.incidents), "unreadable": unreadable}
        print(json.dumps(told | {"faults": [one.to_json() for one in groups]}, indent=1))
        return status
    for line in format_groups(groups, hosts):
        print(line)
    if fleet.unreadable:
        print(f"{len(fleet.unreadable)} incidents could not be read, such as {fleet.unreadable[0]!r}")
    return status
