"""``sglang-crashkit explain``: what a log, stacks, kernel lines or other plain evidence shows about a failure."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.output import say, say_json, say_screen, say_text
from sglang_crashkit.errors import CrashkitError, ExitCode, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.model.case import Case
    from sglang_crashkit.model.verdict import Verdict

_EXAMPLES = """\
examples:
  sglang-crashkit explain server.log
  kubectl logs --previous POD | sglang-crashkit explain -
  sglang-crashkit explain server.log dmesg.txt py-spy.txt
  sglang-crashkit explain logs/ --markdown        for an issue upstream
  sglang-crashkit explain INCIDENT server.log     an incident beside what stderr said
  sglang-crashkit explain --class gpu_stall       what a class means
"""

#: Names an incident that is not given as a path.
_INCIDENT = re.compile(r"latest|[0-9a-f]{4,8}")

#: Most bytes that a saved incident keeps of each file of plain evidence, from the file's end.
_MAX_SAVED = 4 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="a log, stacks, dmesg (also gzipped), a folder of these, an incident, a crash folder, or - for stdin",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object")
    form.add_argument("--markdown", action="store_true", help="print a report for an issue, without secrets")
    form.add_argument("--save", metavar="FOLDER", type=Path, help="save it as an incident, for show and bundle")
    form.add_argument("--html", metavar="FILE", type=Path, help="write it as a page for a browser")
    form.add_argument("--class", dest="kind", metavar="CLASS", help="print what a class means; all for every class")


def run(args: argparse.Namespace) -> ExitCode:
    """Read the evidence, judge it and print the verdict."""
    if args.kind is not None:
        return _print_class(args.kind)
    if not args.files:
        raise UsageError("there is no file to explain", next_step="sglang-crashkit explain FILE, or - for stdin")
    from sglang_crashkit.incident.store import incidents_below
    from sglang_crashkit.judge.verdict import judge
    from sglang_crashkit.model.case import case_of
    from sglang_crashkit.redact import redact_json, redact_text
    from sglang_crashkit.sources.incident import is_incident, logs_of, read_incident
    from sglang_crashkit.sources.text.reader import read
    from sglang_crashkit.view import verdict as view

    paths = [_path_of(name) for name in dict.fromkeys(args.files)]
    incidents = [path for path in paths if is_incident(path)]
    below, others = incidents_below(path for path in paths if path not in incidents and path.is_dir())
    # The other files in a host's crash folder are not read: the incidents have what they hold.
    hosts = {path.parent.parent if path.parent.name == "incidents" else path for path in below}
    problems: list[CrashkitError] = []
    texts = [text for path in paths if path not in incidents for text in _texts_in(path, hosts, problems)]
    incidents += below
    if others:
        say_text(f"sglang-crashkit explain: {others} older incidents there are not read", error=True)
    events = [event for path in incidents for event in read_incident(path)]
    logs = [log for path in incidents for log in logs_of(path)]
    case = case_of([*events, *read(texts, problems, beside=logs)])
    for problem in problems:
        say_text(f"sglang-crashkit explain: {problem}", error=True)
    verdict = judge(case)
    if args.json:
        import msgspec

        document = {"verdict": msgspec.to_builtins(verdict), "processes": view.processes(case)}
        say_json(redact_json(document), indent=2)
    elif args.save is not None:
        say(_save(verdict, case, texts, args.save))
    elif args.html is not None:
        from sglang_crashkit.view.html import write_html

        with tempfile.TemporaryDirectory() as temporary:
            write_html(_save(verdict, case, texts, Path(temporary)), args.html)
        say(args.html)
    elif args.markdown:
        from sglang_crashkit.view.markdown import section_lines

        say(*map(redact_text, section_lines(view.report(verdict, case), "###")))
    else:
        say_screen(map(redact_text, view.screen(verdict, case)))
    return ExitCode.PARTIAL if problems else ExitCode.DONE


def _texts_in(path: Path, hosts: set[Path], problems: list[CrashkitError]) -> list[Path]:
    """Return what to read as text: the path, or the files below it that are outside of the crash folders `hosts`."""
    if not any(host.is_relative_to(path) for host in hosts):
        return [path]
    from sglang_crashkit.kernel.private_files import files_below

    return [file for file in files_below(path, problems) if hosts.isdisjoint(file.parents)]


def _save(verdict: Verdict, case: Case, texts: Sequence[Path], folder: Path) -> Path:
    """Save a verdict on plain evidence as an incident below `folder`, with the texts; return the incident's path."""
    from sglang_crashkit import __version__
    from sglang_crashkit.incident.store import IncidentName
    from sglang_crashkit.kernel.private_files import make_private_folder, open_regular, write_json, write_private
    from sglang_crashkit.model.incident import Incident
    from sglang_crashkit.redact import redact_json, redact_text
    from sglang_crashkit.view.markdown import format_summary
    from sglang_crashkit.view.verdict import KIND, incident_of

    now = time.time()
    told = redact_json(incident_of(verdict, case, now=now, kit=__version__).to_json())
    try:
        incident = make_private_folder(folder / str(IncidentName(case.last_at or now, KIND, told["id"])))
        write_json(incident / "incident.json", told)
        write_private(incident / "summary.md", format_summary(Incident.of(told)).encode())
        logs = make_private_folder(incident / "logs")
        files = (file for text in texts for file in (sorted(text.rglob("*")) if text.is_dir() else [text]))
        for number, file in enumerate(file for file in files if file.is_file()):
            with open_regular(file, follow=True) as opened:
                skipped = max(0, file.stat().st_size - _MAX_SAVED)
                opened.seek(skipped)
                text = opened.read(_MAX_SAVED).decode(errors="replace")
            # Drop a line whose beginning is cut off: a secret in it has lost the name by which it is found.
            text = redact_text(text.partition("\n")[2] if skipped else text)
            write_private(logs / f"{number}-{file.name}", text.encode(errors="replace"))
    except OSError as error:
        why = error.strerror or error
        raise CrashkitError(f"{folder} cannot be written: {why}", next_step="--save FOLDER, another one") from error
    return incident


def _path_of(name: str) -> Path:
    path = Path(name)
    if name != "-" and not path.exists() and _INCIDENT.fullmatch(name):
        from sglang_crashkit.cli.crash_folder import find_incident

        return find_incident(name, None).path
    return path


def _print_class(kind: str) -> ExitCode:
    from sglang_crashkit.judge.knowledge import load
    from sglang_crashkit.view.verdict import class_lines, page_of_classes

    classes = load("classes")
    if kind == "all":
        say(*page_of_classes(classes))
    elif kind in classes:
        say(*class_lines(kind, classes[kind]))
    else:
        raise UsageError(f"there is no class {kind}", next_step=f"all, or one of {', '.join(classes)}")
    return ExitCode.DONE
