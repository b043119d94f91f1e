"""``sglang-crashkit bundle``: an incident and a report of it in one file, to be attached to a bug report."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
import tarfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.crash_folder import add_incident, find_incident
from sglang_crashkit.errors import CrashkitError, ExitCode, RefusedError, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.cli.without_prompts import PromptSearch
    from sglang_crashkit.incident.store import StoredIncident

REPORT = "report.md"
#: What holds prompts, of an incident's folder.
_WITH_PROMPTS = ("requests",)
#: So many of the files that are left out are named.
_MAX_TOLD = 5
_ZSTD = ".tar.zst"
_LEVEL = 10
_EXAMPLES = """\
examples:
  sglang-crashkit bundle 0123abcd --no-prompts
  sglang-crashkit bundle latest --folder /var/crash/sglang -o report.tar.zst
  sglang-crashkit bundle latest --report

The file holds the incident's folder and report.md, which can be pasted as it is. Logs, exceptions and the environment
were searched for secrets and prompts as they were written. With --no-prompts every file is searched again for the
prompts of the requests that the incident has. What cannot be searched, such as a GPU core, is left out; so are logs and
the like where not all of these prompts are known. Look at what you hand on all the same: host names, paths and the
server's arguments are in it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    add_incident(parser)
    parser.add_argument(
        "--no-prompts", action="store_true", help="without the requests, and without their prompts in any file"
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="a new *.tar.zst (sglang-ID.tar.zst)")
    parser.add_argument("--report", action="store_true", help="print the report, and write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Write it."""
    from sglang_crashkit.cli.reporters.incident_text import report_of
    from sglang_crashkit.cli.without_prompts import MayHoldPromptError, PromptSearch

    incident = find_incident(args.incident, args.folder)
    document = incident.document or {}
    search = PromptSearch(incident.path, document) if args.no_prompts else None
    report = report_of(incident.path, document).replace("\0", " ").encode(errors="backslashreplace")
    if search is not None:
        try:
            report = search.clean(REPORT, report)
        except MayHoldPromptError as error:
            raise CrashkitError(f"the report may hold prompts: {error}", next_step="leave --no-prompts out") from error
    if args.report:
        text = report.decode()
        for line in search.shortcomings() if search is not None else ():
            print(line, file=sys.stderr)
        print(json.dumps({"incident": incident.name[-8:], "report": text}) if args.json else text, end="")
        return ExitCode.DONE
    path = args.out or Path(f"sglang-{incident.name[-8:]}{_ZSTD}")
    if not path.name.endswith(_ZSTD):
        raise UsageError(f"{path} does not end with {_ZSTD}", next_step=f"-o {path.stem}{_ZSTD}")
    if path.exists():
        raise RefusedError(f"{path} is there already", next_step=f"rm {shlex.quote(str(path))}, or -o FILE")
    try:
        count, left_out = _write(path, incident, report, search)
    except OSError as error:
        raise CrashkitError(
            f"{path} cannot be written: {error.strerror or error}", next_step="-o FILE, elsewhere"
        ) from error
    size = path.stat().st_size
    if args.json:
        told = {"incident": incident.name[-8:], "path": str(path.absolute()), "files": count, "bytes": size}
        told |= {"prompts": search is None, "left_out": list(left_out), "why_left_out": left_out}
        print(json.dumps(told | ({} if search is None else {"gaps": search.gaps, "short_prompts": search.short})))
        return ExitCode.DONE
    prompts = "with the" if search is None else "without the known" if search.gaps else "without the"
    of_incident = f"{count} files of incident {incident.name[-8:]}"
    print(f"{path}: {of_incident}, {prompts} prompts of its requests, {size / 1e3:,.0f} kB")
    if left_out:
        names = ", ".join(f"{name} ({why})" for name, why in islice(left_out.items(), _MAX_TOLD))
        more = f" and {len(left_out) - _MAX_TOLD:,} more" if len(left_out) > _MAX_TOLD else ""
        print(f"left out, as they may hold prompts: {names}{more}")
    for line in search.shortcomings() if search is not None else ():
        print(line)
    option = " --no-prompts" if search is not None else ""
    shown = shlex.quote(str(incident.path))
    print(f"next: sglang-crashkit bundle {shown} --report{option}   # the text of the report, to be pasted")
    return ExitCode.DONE


def _write(
    path: Path, incident: StoredIncident, report: bytes, search: PromptSearch | None
) -> tuple[int, dict[str, str]]:
    """Write the file in one step, and return how many files it holds, and why which others are left out."""
    import zstandard

    from sglang_crashkit.kernel.private_files import create_private

    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with (
            create_private(temporary) as raw,
            zstandard.ZstdCompressor(level=_LEVEL).stream_writer(raw, closefd=False) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            done = _add(tar, incident, report, search)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return done


def _add(
    tar: tarfile.TarFile, incident: StoredIncident, report: bytes, search: PromptSearch | None
) -> tuple[int, dict[str, str]]:
    from sglang_crashkit.cli.without_prompts import MayHoldPromptError

    top, left_out = f"sglang-{incident.name}", {}
    _add_bytes(tar, tarfile.TarInfo(f"{top}/{REPORT}"), report)
    # A link may lead anywhere.
    paths = [path for path in incident.path.rglob("*") if path.is_file() and not path.is_symlink()]
    count = 1
    for path in sorted(paths):
        inner = path.relative_to(incident.path)
        if search is not None and inner.parts[0] in _WITH_PROMPTS:
            continue
        with path.open("rb") as file:
            info = tar.gettarinfo(arcname=f"{top}/{inner}", fileobj=file)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if search is None:
                tar.addfile(info, file)
            else:
                try:
                    _add_bytes(tar, info, search.clean_file(str(inner), file))
                except MayHoldPromptError as error:
                    left_out[str(inner)] = f"{error}, {info.size / 1e6:,.1f} MB"
                    continue
        count += 1
    return count, left_out


def _add_bytes(tar: tarfile.TarFile, info: tarfile.TarInfo, data: bytes) -> None:
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))
