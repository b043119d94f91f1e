"""``sglang-crashkit bundle``: an incident and a report of it in one file, to be attached to a bug report."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit.cli.crash_folder import add_incident, find_incident
from sglang_crashkit.cli.output import say, say_json, say_text
from sglang_crashkit.errors import CrashkitError, ExitCode, RefusedError, UsageError
from sglang_crashkit.kernel.private_files import create_private, read_regular
from sglang_crashkit.model.checked_json import mapping_of
from sglang_crashkit.redact import REDACTED, redact_spans

if TYPE_CHECKING:
    from sglang_crashkit.incident.store import StoredIncident

REPORT = "report.md"
#: What holds prompts, of an incident's folder.
_WITH_PROMPTS = "requests"
#: So many of the files that are left out are named.
_MAX_TOLD = 5
_ZSTD = ".tar.zst"
_LEVEL = 10
#: More of a file, and of the requests' file, is not searched.
_MAX_BYTES = 64 << 20
#: So many characters of prompts, in all forms, are looked for; they take 500 MB of memory.
_MAX_CHARACTERS = 8 << 20
#: As many characters in a row that a text shares with a prompt are taken for the prompt's.
_RUN = 24
#: A shorter prompt is too likely part of an ordinary word or name.
_LEAST = 12
#: What of a request tells which one it is; whatever else is long may be a user's words.
_HARMLESS = frozenset({"rid", "state", "arrived", "ended", "aborted", "kind", "omitted", "truncated"})
#: What is a user's words however short it is.
_PROMPTS = frozenset({"text", "content", "prompt", "input_ids"})
#: What of a request is noted as left out that may have been its prompt.
_OMITTED = frozenset({"text", "input_ids", "request"})
#: Of what is no text, a flight recorder has calls and sizes. A core may have anything that was in memory.
_FLIGHT_RECORDER = "flight_recorder"
#: What the kit makes of facts, where messages of the server are a small part.
_FACTS = ("incident.json", "summary.md", "environment.json", "gpu/facts.json", "stacks/")
_STEPS = ".steps.jsonl"
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

    incident = find_incident(args.incident, args.folder)
    document = incident.document or {}
    search = PromptSearch(incident.path, document) if args.no_prompts else None
    shortcomings = list(search.shortcomings()) if search is not None else []
    report = report_of(incident.path, document).replace("\0", " ").encode(errors="backslashreplace")
    report = search.clean(REPORT, report) if search is not None else report
    if args.report:
        text = report.decode()
        say(*shortcomings, error=True)
        if args.json:
            say_json({"incident": incident.name[-8:], "report": text})
        else:
            say_text(text)
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
        say_json(told | ({} if search is None else {"gaps": search.gaps, "short_prompts": search.short}))
        return ExitCode.DONE
    prompts = "with the" if search is None else "without the known" if search.gaps else "without the"
    of_incident = f"{count} files of incident {incident.name[-8:]}"
    say(f"{path}: {of_incident}, {prompts} prompts of its requests, {size / 1e3:,.0f} kB")
    if left_out:
        names = ", ".join(f"{name} ({why})" for name, why in islice(left_out.items(), _MAX_TOLD))
        more = f" and {len(left_out) - _MAX_TOLD:,} more" if len(left_out) > _MAX_TOLD else ""
        say(f"left out, as they may hold prompts: {names}{more}")
    say(*shortcomings)
    option = " --no-prompts" if search is not None else ""
    shown = shlex.quote(str(incident.path))
    say(f"next: sglang-crashkit bundle {shown} --report{option}   # the text of the report, to be pasted")
    return ExitCode.DONE


def _write(
    path: Path, incident: StoredIncident, report: bytes, search: PromptSearch | None
) -> tuple[int, dict[str, str]]:
    """Write the file in one step, and return how many files it holds, and why which others are left out."""
    import zstandard

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
    top, left_out = f"sglang-{incident.name}", {}
    _add_bytes(tar, tarfile.TarInfo(f"{top}/{REPORT}"), report)
    # A link may lead anywhere.
    paths = [path for path in incident.path.rglob("*") if path.is_file() and not path.is_symlink()]
    count = 1
    for path in sorted(paths):
        inner = path.relative_to(incident.path)
        if search is not None and inner.parts[0] == _WITH_PROMPTS:
            continue
        with path.open("rb") as file:
            info = tar.gettarinfo(arcname=f"{top}/{inner}", fileobj=file)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if search is None:
                tar.addfile(info, file)
            else:
                data = file.read(_MAX_BYTES + 1)
                if why := search.why_left_out(str(inner), data):
                    left_out[str(inner)] = f"{why}, {info.size / 1e6:,.1f} MB"
                    continue
                _add_bytes(tar, info, search.clean(str(inner), data))
        count += 1
    return count, left_out


def _add_bytes(tar: tarfile.TarFile, info: tarfile.TarInfo, data: bytes) -> None:
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


class PromptSearch:
    """Takes the prompts of an incident out of texts.

    Attributes:
        gaps: why there may be prompts that are not known.
        short: how many prompts are too short to be looked for.
    """

    def __init__(self, folder: Path, document: Mapping[str, Any]) -> None:
        # A help needs no model of incidents.
        from sglang_crashkit.model.incident import NOT_SERVING

        self.gaps: list[str] = []
        self.short = 0
        self._whole: set[str] = set()
        #: The hashes of all runs of the longer ones.
        self._runs: set[int] = set()
        journal = mapping_of(mapping_of(document.get("requests")).get("journal"))
        if journal.get("reason") or any(journal.get(name) for name in ("lost", "torn", "left_out")):
            self._miss("the request journal was not whole")
        has_served = mapping_of(document.get("requests")).get("reason") != NOT_SERVING
        left = _MAX_CHARACTERS
        for prompt in set(self._prompts_in(folder, has_served=has_served)):
            # As it is, as Python writes it, and as JSON does.
            for form in {prompt, repr(prompt)[1:-1], json.dumps(prompt)[1:-1]}:
                left -= len(form)
                if left >= 0:
                    self._look_for(form)
        if left < 0:
            self._miss("there is more of prompts than is looked for")

    def shortcomings(self) -> Iterator[str]:
        """Yield what a person is to know of what was not looked for."""
        if self.gaps:
            yield f"a message may still hold a prompt, as {'; '.join(self.gaps)}: look before you hand it on"
        if self.short:
            yield f"prompts shorter than {_LEAST} characters were not looked for: {self.short:,}"

    def why_left_out(self, name: str, data: bytes) -> str:
        """Return why a file that begins with `data` may still hold a prompt after `clean`; empty where it does not."""
        is_recorder = _FLIGHT_RECORDER in name
        if name.endswith(".html"):
            return "show --html makes it anew"
        if b"\0" in data and not is_recorder:
            return "no text"
        if self.gaps and not (is_recorder or name.startswith(_FACTS) or name.endswith(_STEPS)):
            return "not all prompts are known"
        return "too large to be searched" if len(data) > _MAX_BYTES else ""

    def clean(self, name: str, data: bytes) -> bytes:
        """Return a text without prompts; in JSON they are looked for in the values alone, so that it stays JSON."""
        if b"\0" in data:
            return data
        text = data.decode(errors="surrogateescape")
        try:
            cleaned = self._clean_json(name, text)
        except (ValueError, RecursionError):
            # It may be cut off, or be no JSON after all.
            cleaned = self._clean_text(text)
        return data if cleaned == text else cleaned.encode(errors="surrogateescape")

    def _clean_json(self, name: str, text: str) -> str:
        if name.endswith(".json"):
            before = json.loads(text)
            after = self._clean_value(before)
            return text if after == before else json.dumps(after, indent=2) + "\n"
        if name.endswith(".jsonl"):
            lines = [json.loads(line) for line in text.splitlines()]
            cleaned = self._clean_value(lines)
            return text if cleaned == lines else "".join(json.dumps(line) + "\n" for line in cleaned)
        return self._clean_text(text)

    def _clean_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, dict):
            return {name: self._clean_value(one) for name, one in value.items()}
        if _is_numbers(value):
            written = _written(value)
            return value if (text := self._clean_text(written)) == written else text
        return [self._clean_value(one) for one in value] if isinstance(value, list) else value

    def _clean_text(self, text: str) -> str:
        for prompt in self._whole:
            text = text.replace(prompt, REDACTED)
        starts = (at for at in range(len(text) - _RUN + 1) if hash(text[at : at + _RUN]) in self._runs)
        return redact_spans(text, ((at, at + _RUN) for at in starts))

    def _look_for(self, prompt: str) -> None:
        if len(prompt) < _RUN:
            self._whole.add(prompt)
        self._runs.update(hash(prompt[at : at + _RUN]) for at in range(len(prompt) - _RUN + 1))

    def _miss(self, why: str) -> None:
        if why not in self.gaps:
            self.gaps.append(why)

    def _prompts_in(self, folder: Path, *, has_served: bool) -> Iterator[str]:
        from sglang_crashkit.incident.folder import REQUESTS

        try:
            data = read_regular(folder / REQUESTS, _MAX_BYTES + 1)
        except OSError:
            if has_served:
                self._miss(f"there is no {REQUESTS}")
            return
        if len(data) > _MAX_BYTES:
            self._miss(f"{REQUESTS} is too large")
        for line in data.splitlines():
            try:
                request = json.loads(line)
                omitted, truncated = mapping_of(request.get("omitted")), request.get("truncated")
            except (ValueError, RecursionError, AttributeError):
                self._miss("a request cannot be read")
                continue
            if truncated or not _OMITTED.isdisjoint(omitted):
                self._miss("a prompt was not kept whole")
            # The server may have written the text that they were made of, as of a chat's messages.
            if request.get("input_ids") and not request.get("text"):
                self._miss("a prompt is known by its tokens only")
            fields = {name: value for name, value in request.items() if name not in _HARMLESS}
            for text, is_prompt in _words_of(fields, ""):
                if len(text) >= (_LEAST if is_prompt else _RUN):
                    yield text
                elif is_prompt and text:
                    self.short += 1


def _words_of(value: Any, name: str) -> Iterator[tuple[str, bool]]:
    """Yield the texts in what a user sent, and lists of tokens as they are written; and whether it is a prompt."""
    if isinstance(value, str):
        yield value, name in _PROMPTS
    elif isinstance(value, dict):
        for inner, one in value.items():
            yield from _words_of(one, inner)
    elif _is_numbers(value):
        written = _written(value)
        yield written.replace(" ", ""), name in _PROMPTS
        # One that is too short is counted above.
        if len(written) >= _LEAST:
            yield written, name in _PROMPTS
    elif isinstance(value, list):
        for one in value:
            yield from _words_of(one, name)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _written(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
