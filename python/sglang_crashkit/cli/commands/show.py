"""``sglang-crashkit show``: one incident on one screen, or one part of it in full."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from sglang_crashkit.cli.arguments import add_incident
from sglang_crashkit.cli.crash_folder import find_incident, nothing_of
from sglang_crashkit.cli.output import say, say_json, say_screen
from sglang_crashkit.errors import ExitCode, UsageError
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.model import SCHEMA_VERSION

_EXAMPLES = """\
examples:
  sglang-crashkit show
  sglang-crashkit show 0123abcd --stacks
  sglang-crashkit show latest --folder /var/crash/sglang --requests
  sglang-crashkit show latest --html incident.html
  sglang-crashkit show /var/crash/sglang/node7/incidents/20260102T030405.678Z-hang-0123abcd --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    add_incident(parser)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--stacks", action="store_true", help="what the processes were doing, identical ones once")
    part.add_argument("--requests", action="store_true", help="the requests in flight, without prompts")
    part.add_argument("--steps", action="store_true", help="the last steps of the ranks side by side")
    part.add_argument("--timeline", action="store_true", help="the events in order, by seconds since it began")
    part.add_argument("--env", action="store_true", help="model, versions, memory, and where the server ran")
    part.add_argument("--json", action="store_true", help="print incident.json")
    part.add_argument("--schema", action="store_true", help="print the JSON Schema of incident.json")
    part.add_argument("--html", metavar="FILE", type=Path, help="write it as a page for a browser")
    parser.add_argument("--prompts", action="store_true", help="with --html: include prompts")


def run(args: argparse.Namespace) -> ExitCode:
    """Print the incident, or the part of it that an option names."""
    if args.prompts and args.html is None:
        raise UsageError("--prompts is for a page", next_step="sglang-crashkit show INCIDENT --html FILE --prompts")
    if args.schema:
        from sglang_crashkit.model.schema import incident_schema

        say_json(incident_schema(), indent=2)
        return ExitCode.DONE
    incident = find_incident(args.incident, args.folder)
    document = incident.document or {}
    if isinstance(version := document.get("schema_version"), int) and version > SCHEMA_VERSION:
        known = f"this kit reads up to {SCHEMA_VERSION}"
        say(f"a newer kit wrote it (schema_version {version}, {known}); next: update this one", error=True)
    if args.json:
        say_json(document, indent=2)
        return ExitCode.DONE
    if args.steps:
        from sglang_crashkit.cli.commands import steps

        return steps.print_steps(incident)
    if args.html is not None:
        from sglang_crashkit.view.html import write_html

        write_html(incident.path, args.html, prompts=args.prompts)
        say(args.html)
        return ExitCode.DONE
    if not (args.requests or args.stacks or args.timeline or args.env):
        say_screen(screen_lines(incident, args))
        return ExitCode.DONE
    from sglang_crashkit.view import terminal
    from sglang_crashkit.view.evidence import IncidentFiles

    whole, files = incident.incident, IncidentFiles(incident.path)
    if args.stacks:
        what, lines = "stacks", terminal.stack_lines(whole, files)
    elif args.requests:
        what, lines = "requests", terminal.request_lines(whole, files)
    elif args.timeline:
        what, lines = "events", terminal.timeline_lines(whole)
    else:
        what, lines = "environment", terminal.environment_lines(whole, files)
    if not (told := list(lines)):
        raise nothing_of(what, incident)
    say(*told)
    return ExitCode.DONE


def screen_lines(incident: StoredIncident, args: argparse.Namespace) -> Iterator[str]:
    """Yield the first screen of an incident that ``args.incident`` and ``args.folder`` name."""
    from sglang_crashkit.view.first_screen import first_screen

    # `where` finds this incident again, also after later ones: its id alone does if it was found by id, without folder.
    path, folder = Path(args.incident), args.folder
    is_named = "/" in args.incident or path.exists()
    if is_named and path.absolute().name != incident.path.absolute().name:
        is_named, folder = False, path
    where = f"{incident.name[-8:]} --folder {shlex.quote(str(folder))}" if folder else ""
    where = shlex.quote(str(path)) if is_named else where
    yield from first_screen(incident.incident, where=where)
    yield f"files   {incident.path}"
