"""``sglang-crashkit quarantine``: what is refused, or logged, because it is known to kill a server."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import WHAT_DIR_IS, CrashkitError, ExitCode, NothingToDoError, UsageError

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
        sub.usage = f"{sub.prog} [-h] --folder DIR [--json]{f' {what}' if what else ''}"
        # The folder may also be the first of them.
        sub.add_argument("words", nargs="+" if what else "*", metavar=what or "DIR", help=argparse.SUPPRESS)
        sub.add_argument("--folder", type=Path, metavar="DIR", help="what the server was given as --crash-dump-folder")
        _add_json(sub, default=argparse.SUPPRESS)


def _add_json(parser: argparse.ArgumentParser, **how: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print the entries that are left as a JSON list", **how)


def _folder_and_what(args: argparse.Namespace) -> tuple[Path, str | None]:
    """Return the crash folder, and the file or key; None for the actions that take none."""
    words = [*args.words]
    takes = _ACTIONS[args.action][1]
    what = words.pop() if takes else None
    folder = args.folder or (Path(words.pop()) if words else None)
    if folder is None or words:
        raise UsageError(
            "one crash folder is wanted" + (f", and one {takes}" if takes else ""),
            next_step=f"sglang-crashkit quarantine {args.action} --folder DIR {takes}".rstrip(),
        )
    if not folder.is_dir():
        raise NothingToDoError(f"{folder} is not a folder", next_step=f"--folder DIR{WHAT_DIR_IS}")
    return folder, what


def run(args: argparse.Namespace) -> ExitCode:
    """Do it."""
    from sglang_crashkit.incident.quarantine import Entry, add_entry, change_entries, clear_entries, read_entries

    folder, what = _folder_and_what(args)

    def left(entries: list[Entry]) -> list[Entry]:
        kept = [entry for entry in entries if entry.key != what]
        if len(kept) == len(entries):
            listed = f"sglang-crashkit quarantine list --folder {shlex.quote(str(folder))}"
            raise NothingToDoError(f"there is no entry {what}", next_step=listed)
        return kept

    if args.action == "add" and what is not None:
        from sglang_crashkit.replay.bisect import Result, entry_for

        try:
            told = json.loads(Path(what).read_text())
            entry = entry_for(Result(**told), time.time())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CrashkitError(
                f"{what} is no reproducer.json: {getattr(error, 'strerror', None) or error}", next_step=_BISECT
            ) from error
        if entry is None:
            raise CrashkitError(
                f"{what} does not prove of one request that it brings the fault back", next_step=_BISECT
            )
        add_entry(folder, entry)
    elif args.action == "remove":
        change_entries(folder, left)
    elif args.action == "clear":
        clear_entries(folder)
    entries = read_entries(folder)
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
