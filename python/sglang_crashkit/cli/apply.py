"""``sglang-crashkit apply``: patch an installed SGLang."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sglang_crashkit.errors import ExitCode

if TYPE_CHECKING:
    from sglang_crashkit.installer.apply import Outcome
    from sglang_crashkit.installer.environment import Environment

#: What the installation was → what it is now.
_DONE = {
    "outdated": "patched anew, over an earlier kit's patches",
    "interrupted": "patched; a change that was cut off is finished",
}
_EXAMPLES = """\
examples:
  sglang-crashkit apply --dry-run
  sglang-crashkit apply --python /opt/sglang/bin/python
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
    from sglang_crashkit.installer.apply import apply
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import Overall

    session = open_session(args.python)
    outcome = apply(session.environment, session.patches, session.lock, dry_run=args.dry_run)
    if args.json:
        print(json.dumps(outcome_json(session.environment, outcome, dry_run=args.dry_run), indent=1))
        return ExitCode.DONE
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


def outcome_json(environment: Environment, outcome: Outcome, *, dry_run: bool) -> dict[str, Any]:
    """Return for a program what was done, or would be: ``before`` is one of `installer.status.Overall`."""
    return {
        "release": environment.version,
        "package": str(environment.package),
        "before": outcome.before.value,
        "changed": [str(path) for path in outcome.changed],
        "dry_run": dry_run,
    }
