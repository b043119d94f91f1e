"""``sglang-crashkit apply``: patch an installed SGLang."""

from __future__ import annotations

import argparse

from sglang_crashkit.errors import ExitCode

#: What the installation was → what it is now.
_DONE = {
    "outdated": "patched anew, over an earlier kit's patches",
    "interrupted": "patched; a change that was cut off is finished",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--python", metavar="PATH", help="interpreter or virtual environment; this one by default")
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")


def run(args: argparse.Namespace) -> ExitCode:
    """Do it and say what was done."""
    # Imported here, so that every command starts without what the others need.
    from sglang_crashkit.installer.apply import apply
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import Overall

    session = open_session(args.python)
    outcome = apply(session.environment, session.patches, session.lock, dry_run=args.dry_run)
    name = f"SGLang {session.environment.version} in {session.environment.package}"
    if not outcome.changed and outcome.before is Overall.PATCHED:
        print(f"{name} is already patched")
    elif args.dry_run:
        print(f"{name} would be patched (it is {outcome.before.value}):")
    else:
        print(f"{name} is {_DONE.get(outcome.before.value, 'patched')}:")
    for path in outcome.changed:
        print(f"  {path}")
    return ExitCode.DONE
