"""``sglang-crashkit bundle``: an incident and a report of it in one file, to attach to a bug report."""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit.cli.arguments import add_incident
from sglang_crashkit.cli.crash_folder import find_incident
from sglang_crashkit.cli.output import say, say_json, say_text
from sglang_crashkit.errors import CrashkitError, ExitCode, RefusedError, UsageError
from sglang_crashkit.kernel.private_files import create_private, open_regular
from sglang_crashkit.redact import REDACTED, redact_shared

if TYPE_CHECKING:
    from sglang_crashkit.incident.store import StoredIncident

REPORT = "report.md"
#: Files that the kit makes from facts: they hold no text of a request or of the server's own messages.
_WITHOUT_PROMPTS = ("environment.json", "gpu/facts.json", "gpu/*flight_recorder*", "stacks/*", "ranks/*.steps.jsonl")
#: The fields of a template that hold words of a log or of a request; not those of the code, which is public.
_QUOTES = re.compile(r"\{(?:line|text|word|error|controls)\}")
_DOCUMENT = "incident.json"
_ZSTD = ".tar.zst"
_LEVEL = 10
_MAX_TOLD = 5
_EXAMPLES = """\
examples:
  sglang-crashkit bundle 0123abcd --no-prompts
  sglang-crashkit bundle latest --folder /var/crash/sglang -o report.tar.zst
  sglang-crashkit bundle latest --report

The file holds the incident's folder and report.md, which can be pasted as it is. Logs, exceptions and the environment
were searched for secrets and prompts as they were written. With --no-prompts the files that may hold a word of a
request are left out: requests, logs, exceptions, GPU cores, summary.md and all that is not known. The messages of
exceptions are taken out of incident.json and report.md. Look at what you hand on all the same: host names, paths and
the server's arguments are in it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    add_incident(parser)
    parser.add_argument(
        "--no-prompts", action="store_true", help="without the files, and the messages, that may hold prompts"
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="a new *.tar.zst (sglang-ID.tar.zst)")
    parser.add_argument("--report", action="store_true", help="print the report, and write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Write the bundle, or with ``--report`` print its report."""
    from sglang_crashkit.model.incident import Incident
    from sglang_crashkit.view.evidence import IncidentFiles
    from sglang_crashkit.view.terminal import format_report

    incident = find_incident(args.incident, args.folder)
    document = incident.document or {}
    if args.no_prompts:
        document = _without_messages(document, sorted(set(_messages_in(document)), key=len, reverse=True))
    report = format_report(Incident.of(document), IncidentFiles(incident.path), messages=not args.no_prompts).replace(
        "\0", " "
    )
    if args.report:
        if args.json:
            say_json({"incident": incident.name[-8:], "report": report})
        else:
            say_text(report)
        return ExitCode.DONE
    path = args.out or Path(f"sglang-{incident.name[-8:]}{_ZSTD}")
    if not path.name.endswith(_ZSTD):
        raise UsageError(f"{path} does not end with {_ZSTD}", next_step=f"-o {path.stem}{_ZSTD}")
    if path.exists():
        raise RefusedError(f"{path} is there already", next_step=f"rm {shlex.quote(str(path))}, or -o FILE")
    try:
        count, left_out = _write(path, incident, report, document if args.no_prompts else None)
    except OSError as error:
        raise CrashkitError(
            f"{path} cannot be written: {error.strerror or error}", next_step="-o FILE, elsewhere"
        ) from error
    size = path.stat().st_size
    if args.json:
        told = {"incident": incident.name[-8:], "path": str(path.absolute()), "files": count, "bytes": size}
        say_json(told | {"prompts": not args.no_prompts, "left_out": left_out})
        return ExitCode.DONE
    prompts, option = ("without the", " --no-prompts") if args.no_prompts else ("with the", "")
    say(f"{path}: {count} files, {prompts} prompts of the incident's requests, {size / 1e3:,.0f} kB")
    if left_out:
        more = f" and {len(left_out) - _MAX_TOLD:,} more" if len(left_out) > _MAX_TOLD else ""
        say(f"left out: {', '.join(left_out[:_MAX_TOLD])}{more}")
    command = f"bundle {shlex.quote(str(incident.path))} --report{option}"
    say(f"next: sglang-crashkit {command}   # the text of the report, to be pasted")
    return ExitCode.DONE


def _write(path: Path, incident: StoredIncident, report: str, document: dict[str, Any] | None) -> tuple[int, list[str]]:
    """Write the bundle in one step; with a `document` for ``incident.json``, leave out files that may hold prompts.

    Return how many files it holds, and the names of those that are left out.
    """
    import zstandard

    temporary, top, left_out = path.with_name(f".{path.name}.{os.getpid()}.new"), f"sglang-{incident.name}", []
    # An unfinished incident has no incident.json: write what was read from its log.
    told = document if document is not None or (incident.path / _DOCUMENT).exists() else incident.document
    texts = {REPORT: report} | ({} if told is None else {_DOCUMENT: json.dumps(told, indent=2) + "\n"})
    try:
        with (
            create_private(temporary) as raw,
            zstandard.ZstdCompressor(level=_LEVEL).stream_writer(raw, closefd=False) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            for name, text in texts.items():
                info, data = tarfile.TarInfo(f"{top}/{name}"), text.encode(errors="backslashreplace")
                info.size, info.mode = len(data), 0o600
                tar.addfile(info, io.BytesIO(data))
            count = len(texts)
            for name in sorted(
                str(one.relative_to(incident.path)) for one in incident.path.rglob("*") if not one.is_dir()
            ):
                is_kept = document is None or any(fnmatch.fnmatchcase(name, one) for one in _WITHOUT_PROMPTS)
                try:
                    # Only regular files: a link may lead anywhere, and a pipe may block.
                    file = open_regular(incident.path / name) if is_kept and name not in texts else None
                except OSError:
                    file = None
                if file is None:
                    left_out += [name] if name not in texts else []
                    continue
                with file:
                    info = tar.gettarinfo(arcname=f"{top}/{name}", fileobj=file)
                    info.uid, info.gid, info.uname, info.gname, info.mode = 0, 0, "", "", 0o600
                    tar.addfile(info, file)
                count += 1
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count, left_out


def _messages_in(value: Any) -> Iterator[str]:
    """Yield the messages of exceptions in an ``incident.json``."""
    for name, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if name == "message" and isinstance(one, str):
            yield one
        yield from _messages_in(one)


def _quotes_message(step: str) -> bool:
    """Say whether a next step quotes a message or a log."""
    from sglang_crashkit.judge.knowledge import load

    tables = load("findings")
    lists = (*tables["steps"].values(), *(row.get("next", ()) for row in tables["findings"].values()))
    quoting = (one for some in lists for one in some if isinstance(one, str) and _QUOTES.search(one))
    heads = (re.split(r"[\[{]", one)[0] for one in quoting)
    return "/issues?q=" in step or step.startswith(tuple(filter(None, heads)))


def _without_messages(value: Any, messages: list[str]) -> Any:
    """Return a JSON value without the messages of exceptions, whole or cut off; the exceptions' classes stay."""
    if isinstance(value, dict):
        return {name: _without_messages(one, messages) for name, one in value.items()}
    if isinstance(value, list):
        return [
            _without_messages(one, messages) for one in value if not (isinstance(one, str) and _quotes_message(one))
        ]
    for message in messages if isinstance(value, str) else ():
        kind, colon, words = message.partition(": ")
        value = value.replace(message, f"{kind}: {REDACTED}" if colon else REDACTED)
        value = redact_shared(value, [words or message])
    return value
