"""``sglang-crashkit quarantine``: what is refused, or logged, because it is known to kill a server."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from sglang_crashkit.errors import CrashkitError, ExitCode, NothingToDoError, UsageError

EXAMPLE = """example:
  sglang-crashkit quarantine add /crash bisect-1a2b3c4d/reproducer.json
  sglang-crashkit quarantine list /crash
  sglang-crashkit quarantine remove /crash 0c4f81d2a67b

A server with that crash folder, the same model and release, and SGLANG_CRASHKIT_QUARANTINE=refuse (or observe) heeds it
within seconds. An entry counts for 24 hours. What is proven is refused; what is only suspected is sent alone.
"""
_BISECT = "sglang-crashkit bisect INCIDENT --serve COMMAND, which writes one"
_ACTIONS = ("list", "add", "remove", "clear")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLE
    parser.add_argument("action", choices=_ACTIONS)
    parser.add_argument("folder", type=Path, help="what the server was given as --crash-dump-folder")
    parser.add_argument("what", nargs="?", help="of add: a reproducer.json of `bisect`; of remove: an entry's key")
    parser.add_argument("--json", action="store_true", help="print the entries that are left as a JSON list")


def run(args: argparse.Namespace) -> ExitCode:
    """Do it.

    Raises:
        CrashkitError: the file cannot be read or written, or there is no such entry.
    """
    from sglang_crashkit.incident.quarantine import Entry, add_entry, change_entries, clear_entries, read_entries
    from sglang_crashkit.replay.bisect import Result, entry_for

    if not args.folder.is_dir():
        raise NothingToDoError(f"{args.folder} is not a folder", next_step="name the server's --crash-dump-folder")
    if (args.what is None) == (args.action in ("add", "remove")):
        raise UsageError(f"{args.action} takes " + ("one thing more" if args.what is None else "no more than a folder"))

    def left(entries: list[Entry]) -> list[Entry]:
        kept = [entry for entry in entries if entry.key != args.what]
        if len(kept) == len(entries):
            raise NothingToDoError(
                f"there is no entry {args.what}", next_step=f"sglang-crashkit quarantine list {args.folder}"
            )
        return kept

    if args.action == "add":
        try:
            told = json.loads(Path(args.what).read_text())
            entry = entry_for(Result(**told), time.time())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CrashkitError(
                f"{args.what} is no reproducer.json: {getattr(error, 'strerror', None) or error}", next_step=_BISECT
            ) from error
        if entry is None:
            raise CrashkitError(
                f"{args.what} does not prove of one request that it brings the fault back", next_step=_BISECT
            )
        add_entry(args.folder, entry)
    elif args.action == "remove":
        change_entries(args.folder, left)
    elif args.action == "clear":
        clear_entries(args.folder)
    entries = read_entries(args.folder)
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return ExitCode.DONE
    for entry in entries:
        since, origin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.last)), entry.origin
        print(f"{entry.key}  {entry.level}  {entry.words}  (incident {origin.incident}, {since}): {origin.reason}")
        print(f"    counts for {origin.model or 'no model'} on SGLang {origin.release or 'of no release'}")
    if not entries:
        print("nothing is in quarantine")
    return ExitCode.DONE
