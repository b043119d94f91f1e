"""``sglang-crashkit explain``: what a log, stacks, kernel lines or other plain evidence tells of a failure."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sglang_crashkit.cli.output import say, say_json, say_title
from sglang_crashkit.errors import ExitCode, UsageError

_EXAMPLES = """\
examples:
  sglang-crashkit explain server.log
  kubectl logs --previous POD | sglang-crashkit explain -
  sglang-crashkit explain server.log dmesg.txt py-spy.txt
  sglang-crashkit explain logs/ --markdown        for an issue upstream
  sglang-crashkit explain INCIDENT server.log     an incident beside what stderr said
  sglang-crashkit explain --class gpu_stall       what a class means
"""

#: What names an incident that is no path.
_INCIDENT = re.compile(r"latest|[0-9a-f]{4,8}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="a log, stacks, dmesg … (also gzip), a folder of these, an incident, or - for the standard input",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object")
    form.add_argument("--markdown", action="store_true", help="print what goes into an issue, without secrets")
    form.add_argument("--class", dest="kind", metavar="CLASS", help="print what a class of verdicts, or all, means")


def run(args: argparse.Namespace) -> ExitCode:
    """Read the evidence, judge it and print the verdict."""
    if args.kind is not None:
        return _class(args.kind)
    if not args.files:
        raise UsageError("there is no file to explain", next_step="sglang-crashkit explain FILE, or - for stdin")
    from sglang_crashkit.judge.verdict import judge
    from sglang_crashkit.model.case import reduce
    from sglang_crashkit.redact import redact_json, redact_text
    from sglang_crashkit.sources.incident import is_incident, logs_of, read_incident
    from sglang_crashkit.sources.text.reader import read
    from sglang_crashkit.view import verdict as view

    paths = [_path_of(name) for name in args.files]
    incidents = [path for path in paths if is_incident(path)]
    texts = [path for path in paths if path not in incidents]
    events = [event for path in incidents for event in read_incident(path)]
    case = reduce([*events, *read([*texts, *(log for path in incidents for log in logs_of(path))])])
    verdict = judge(case)
    if args.json:
        import msgspec

        document = {"verdict": msgspec.to_builtins(verdict), "processes": view.processes(case)}
        say_json(redact_json(document), indent=2)
    elif args.markdown:
        say(*(redact_text(line) for line in view.markdown(verdict, case)))
    else:
        head, *rest = view.screen(verdict, case)
        say_title(redact_text(head))
        say(*map(redact_text, rest))
    return ExitCode.DONE


def _path_of(name: str) -> Path:
    path = Path(name)
    if name != "-" and not path.exists() and _INCIDENT.fullmatch(name):
        from sglang_crashkit.cli.crash_folder import find_incident

        return find_incident(name, None).path
    return path


def _class(kind: str) -> ExitCode:
    from sglang_crashkit.judge.knowledge import load
    from sglang_crashkit.view.classes import page, section

    classes = load("classes")
    if kind == "all":
        say(*page(classes))
    elif kind in classes:
        say(*section(kind, classes[kind]))
    else:
        raise UsageError(f"there is no class {kind}", next_step=f"all, or one of {', '.join(classes)}")
    return ExitCode.DONE
