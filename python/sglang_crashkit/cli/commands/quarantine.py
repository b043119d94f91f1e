"""``sglang-crashkit quarantine``: what is refused, or logged, because it is known to kill a server."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import WHAT_DIR_IS, CrashkitError, ExitCode, NothingToDoError

EXAMPLE = """examples:
  sglang-crashkit quarantine list --folder /var/crash/sglang
  sglang-crashkit quarantine add bisect-1a2b3c4d/reproducer.json --folder /var/crash/sglang
  sglang-crashkit quarantine remove 0c4f81d2a67b --folder /var/crash/sglang

A server with that crash folder, the same model and release, and SGLANG_CRASHKIT_QUARANTINE=refuse (or observe) heeds it
within seconds. An entry counts for 24 hours. What is proven is refused; what is only suspected is sent alone.
"""
_BISECT = 'sglang-crashkit bisect INCIDENT --serve "COMMAND"   # writes one'
#: What each action does, what it takes beside the folder, and an example of that.
_ACTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "list": ("print the entries", "", ()),
    "add": ("add what a reproducer.json of `bisect` proves", "FILE", ("bisect-1a2b3c4d/reproducer.json",)),
    "remove": ("remove the entry of a key", "KEY", ("0c4f81d2a67b",)),
    "clear": ("remove all entries, also of a file that cannot be read", "", ()),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EXAMPLE
    _add_json(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (words, what, example) in _ACTIONS.items():
        sub = actions.add_parser(
            name,
            help=words,
            description=words,
            epilog=f"example:\n  {' '.join(['sglang-crashkit quarantine', name, *example])} --folder /var/crash/sglang",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if what:
            sub.add_argument("what", metavar=what)
        sub.add_argument(
            "--folder", type=Path, metavar="DIR", required=True, help="what the server was given as --crash-dump-folder"
        )
        _add_json(sub, default=argparse.SUPPRESS)


def _add_json(parser: argparse.ArgumentParser, **how: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print the entries that are left as a JSON list", **how)


def run(args: argparse.Namespace) -> ExitCode:
    """Do it."""
    from sglang_crashkit.incident.quarantine import Entry, add_entry, change_entries, clear_entries, read_entries

    folder: Path = args.folder
    if not folder.is_dir():
        raise NothingToDoError(f"{folder} is not a folder", next_step=f"--folder DIR{WHAT_DIR_IS}")

    def left(entries: list[Entry]) -> list[Entry]:
        kept = [entry for entry in entries if entry.key != args.what]
        if len(kept) == len(entries):
            listed = f"sglang-crashkit quarantine list --folder {shlex.quote(str(folder))}"
            raise NothingToDoError(f"there is no entry {args.what}", next_step=listed)
        return kept

    if args.action == "add":
        from sglang_crashkit.replay.bisect import Result, entry_for

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
        add_entry(folder, entry)
    elif args.action == "remove":
        change_entries(folder, left)
    elif args.action == "clear":
        clear_entries(folder)
    entries = read_entries(folder)
    if args.json:
        say_json([asdict(entry) for entry in entries], indent=2)
        return ExitCode.DONE
    for entry in entries:
        since, origin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.last)), entry.origin
        say(f"{entry.key}  {entry.level}  {entry.words}  (incident {origin.incident}, {since}): {origin.reason}")
        say(f"    counts for {origin.model or 'no model'} on SGLang {origin.release or 'of no release'}")
    if not entries:
        say("nothing is in quarantine")
    return ExitCode.DONE
