"""``sglang-crashkit revert``: give an installed SGLang upstream's bytes back."""

from __future__ import annotations

import argparse
import json

from sglang_crashkit.cli.apply import outcome_json
from sglang_crashkit.errors import ExitCode

_EXAMPLES = """\
examples:
  sglang-crashkit revert
  sglang-crashkit revert --python /opt/sglang/bin/python --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("--python", metavar="PATH", help="interpreter or virtual environment; this one by default")
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Do it and say what was done."""
    # Imported here, so that every command starts without what the others need.
    from sglang_crashkit.installer.apply import revert
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import Overall

    session = open_session(args.python)
    outcome = revert(session.environment, session.patches, session.lock, dry_run=args.dry_run)
    if args.json:
        print(json.dumps(outcome_json(session.environment, outcome, dry_run=args.dry_run), indent=1))
        return ExitCode.DONE
    name = f"SGLang {session.environment.version} in {session.environment.package}"
    if not outcome.changed and outcome.before in (Overall.PRISTINE, Overall.UNSUPPORTED):
        print(f"{name} is not patched")
    elif args.dry_run:
        print(f"{name} would get upstream's bytes back (it is {outcome.before.value}):")
    else:
        print(f"{name} has upstream's bytes again:")
    for path in outcome.changed:
        print(f"  {path}")
    return ExitCode.DONE
