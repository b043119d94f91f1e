"""``sglang-crashkit apply`` and ``revert``: patch an installed SGLang, or give it upstream's bytes back."""

from __future__ import annotations

import argparse

from sglang_crashkit.cli.arguments import add_python
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode

#: State of the installation before → what `apply` did to it.
_DONE = {
    "outdated": "is patched anew, over an earlier kit's patches",
    "interrupted": "is patched; a change that was cut off is finished",
}
_EXAMPLES = {
    "apply": """\
examples:
  sglang-crashkit apply --dry-run
  sglang-crashkit apply --python /opt/sglang/bin/python
""",
    "revert": """\
examples:
  sglang-crashkit revert
  sglang-crashkit revert --python /opt/sglang/bin/python --json
""",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES.get(parser.prog.rpartition(" ")[2])
    add_python(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Apply or revert, as ``args.command`` says, and print what was done."""
    from sglang_crashkit.installer.apply import apply, revert
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import State

    environment, patches, lock = open_session(args.python)
    is_apply = args.command == "apply"
    outcome = (apply if is_apply else revert)(environment, patches, lock, dry_run=args.dry_run)
    before = outcome.before.value
    if args.json:
        told = {"release": environment.version, "package": str(environment.package)}
        changed = {"before": before, "changed": [str(path) for path in outcome.changed], "dry_run": args.dry_run}
        say_json(told | changed, indent=1)
        return ExitCode.DONE
    name = f"SGLang {environment.version} in {environment.package}"
    goals = (State.PATCHED,) if is_apply else (State.PRISTINE, State.UNSUPPORTED)
    done = _DONE.get(before, "is patched") if is_apply else "has upstream's bytes again"
    if not outcome.changed and outcome.before in goals:
        say(f"{name} is {'already' if is_apply else 'not'} patched")
    elif args.dry_run:
        goal = "be patched" if is_apply else "get upstream's bytes back"
        say(f"{name} would {goal} (it is {before}):")
    else:
        say(f"{name} {done}:")
    for path in outcome.changed:
        say(f"  {path}")
    return ExitCode.DONE
