"""Parse the arguments, run one command, and turn its outcome into an exit status."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Protocol

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, ExitCode
from sglang_crashkit.kernel.guarded_read import GuardedReader, guard_reads

#: Module of each command, in the order of ``--help``.
COMMANDS = ("apply", "revert", "status", "wheel", "incidents", "core", "collect", "watch")


class Command(Protocol):
    """What a module in ``sglang_crashkit.cli`` offers."""

    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to `parser`."""

    def run(self, args: argparse.Namespace) -> ExitCode:
        """Do it.

        Raises:
            CrashkitError: it could not be done; `main` prints it.
        """


def load_command(name: str) -> Command:
    """Return the module of the command called `name`."""
    module: Command = importlib.import_module(f"sglang_crashkit.cli.{name}")
    return module


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="sglang-crashkit",
        description="Evidence from crashed and hung SGLang servers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = load_command(name)
        sub = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments without the program's name; the process's own by default.

    Returns:
        The exit status, one of `ExitCode`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Evidence may hold what a terminal's encoding cannot show.
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    guard_reads(GuardedReader())
    try:
        return int(load_command(args.command).run(args))
    except CrashkitError as error:
        if getattr(args, "json", False):
            failure = {"error": error.message, "next": error.next_step}
            print(json.dumps(failure | {"exit_code": int(error.exit_code)}))
        print(f"sglang-crashkit {args.command}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print(f"sglang-crashkit {args.command}: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    finally:
        guard_reads(None)
