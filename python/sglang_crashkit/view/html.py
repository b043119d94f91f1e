"""One incident as a page of HTML: one file, which loads nothing and in which nothing runs but its own script.

Texts of stacks, logs and requests are not trusted. Each is escaped by the template engine, and shown with what is not
seen, or turns text around, spelled out. The page allows its own script and its own style by their hashes; a script that
got in nevertheless would not run, and nothing may be fetched or sent.

``python -m sglang_crashkit.view.html FOLDER FILE`` writes it by itself, as a crash handler has it do.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sglang_crashkit import __version__
from sglang_crashkit.analysis.ranks import RankSet
from sglang_crashkit.incident.judging import read_log
from sglang_crashkit.incident.store import STEPS_SUFFIX
from sglang_crashkit.kernel.private_files import write_named
from sglang_crashkit.model.incident import Incident, ProcessReport
from sglang_crashkit.view import page as view
from sglang_crashkit.view.files import IncidentFiles, ListedFile, cut
from sglang_crashkit.view.first_screen import first_screen, without_build_paths
from sglang_crashkit.view.merged_stacks import merge, ranks_by_pid, read_stacks
from sglang_crashkit.view.summary import (
    environment_in_words,
    format_summary,
    occurrence_in_words,
    requests_in_words,
)
from sglang_crashkit.visible import visible

#: What a file may be to be shown in the page, and what all of them may be together, in bytes.
_MAX_FILE, _MAX_FILES = 64 << 10, 3 << 19
_MAX_LINE, _MAX_MARKDOWN = 2000, 200_000
#: Of more files the names are folded, too.
_MAX_OPEN = 60
#: As long as a crash handler makes room for.
_MAX_BYTES = 8 << 20
#: A child of a crash handler that takes more memory has gone astray.
_MAX_MEMORY = 1 << 30
#: What a part of an incident raises that has another form than any kit version wrote.
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_STATES = {
    "first": "failed first",
    "stopped": "stopped",
    "raised": "raised an exception",
    "dead": "dead",
    "unseen": "alive, nothing seen",
    "alive": "alive",
}
_HERE = Path(__file__).parent


def write_html(folder: Path, output: Path, *, prompts: bool = False) -> None:
    """Write the page of an incident, readable by its owner alone, to a file.

    With `prompts` it shows what users of the server wrote.

    Raises:
        OSError: it cannot be written.
    """
    write_named(output, render(folder, prompts=prompts).encode(errors="backslashreplace"))


def render(folder: Path, *, prompts: bool = False) -> str:
    """Return the page of the incident in a folder; see `write_html`. It does not raise for what lies in there."""
    files = IncidentFiles(folder)
    problem, document = "", None
    try:
        document = files.read_json("incident.json")
        problem = "" if isinstance(document, dict) else "incident.json is no object"
    except ValueError as error:
        problem = str(error)
    incident = Incident.of(document)
    if problem and (logged := read_log(folder)) is not None:
        incident, problem = logged, ""
    markdown = str(_part(lambda: format_summary(incident), str))
    css, script = _static("page.css"), _static("page.js")
    parts = {
        "ranks": _part(lambda: view.processes_of(incident)),
        "timeline": _part(lambda: view.timeline(incident)),
        "steps": _part(lambda: view.steps_of(incident, files)),
        "stacks": _part(lambda: _stacks(incident, files)),
        "requests": _part(lambda: view.requests_of(incident, files, prompts=prompts)),
        "findings": _part(lambda: view.findings_of(incident), list),
        "environment": _part(lambda: view.environment_of(files, incident), list),
    }
    sections = {"ranks": "groups", "timeline": "events", "steps": "tables", "stacks": "trees", "requests": "rows"}
    there = [name for name, key in sections.items() if parts[name].get(key)]
    there += ["environment"] if parts["environment"] else []
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            **parts,
            csp=_policy(css, script),
            # The kit's own files, to the byte that the policy names.
            css=Markup(css),  # noqa: S704
            js=Markup(script),  # noqa: S704
            incident=incident,
            folder=str(folder),
            headline=_part(lambda: cut(first_screen(incident, wraps=False)[0], 300), str),
            basis=_basis(incident),
            facts=_facts(incident),
            problem=problem,
            nav=[(name, name) for name in [*there, "files"]],
            state_words=_STATES,
            files=_by_folder(_inlined(files, incident.first_failure, prompts=prompts)),
            count=len(files.listed),
            files_left_out=files.left_out,
            kit=__version__,
            markdown=visible(cut(markdown or "The incident cannot be read.\n", _MAX_MARKDOWN)),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        finalize=_finalize,
    )


def _finalize(value: object) -> object:
    """Make what the template shows harmless to look at; it is escaped after that."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else visible(str(value))


def _policy(style: str, script: str) -> str:
    """Return the content security policy: nothing but these."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    ours = "script-src 'sha256-{}'; style-src 'sha256-{}'".format(*hashes)
    return (
        f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _static(name: str) -> str:
    return (_HERE / name).read_text()


def _part(make: Callable[[], Any], otherwise: Callable[[], Any] | None = None) -> Any:
    """Return what a part of the page is made of; in its place why it cannot be shown, or what stands for nothing."""
    try:
        return make()
    except _ODD as error:
        return otherwise() if otherwise is not None else {"problem": cut(f"{type(error).__name__}: {error}", 300)}


# -- the first screen


def _basis(incident: Incident) -> list[str]:
    verdict = incident.verdict
    sentences = verdict.basis or [verdict.text] if verdict is not None else []
    return [without_build_paths(sentence) for sentence in sentences if sentence]


def _facts(incident: Incident) -> list[tuple[str, str]]:
    server, trigger, fault = incident.server, incident.trigger, incident.fault
    facts = [
        ("when", trigger.time),
        ("where", server.hostname),
        ("SGLang", f"{server.sglang_version}, main process {server.pid}"),
        *(("run", line) for line in environment_in_words(incident.surroundings)),
        ("requests", requests_in_words(incident.requests)),
        ("reported by", f"{trigger.event} of {trigger.title}"),
    ]
    if fault is not None:
        facts.append(("seen", "for the first time" if fault.count == 1 else occurrence_in_words(fault)))
    return [(name, value) for name, value in facts if value]


# -- stacks and files


def _stacks(incident: Incident, files: IncidentFiles) -> dict[str, Any]:
    first, ranks, stacks = incident.first_failure, ranks_by_pid(incident), list(read_stacks(incident, files))
    unseen = RankSet({*ranks.values()} - {one.rank for one in stacks})
    trees = merge(stacks, ranks[first.pid] if first is not None else None)
    return {"trees": trees, "unseen": unseen and unseen.format()}


def _inlined(files: IncidentFiles, first: ProcessReport | None, *, prompts: bool) -> list[dict[str, Any]]:
    """Return the files with the text of those that are small, those of the first failure before others."""
    own = f"-{first.pid}." if first is not None else ""
    left, texts = _MAX_FILES, {}
    for file in sorted(
        files.listed.values(), key=lambda file: (own not in file.name, file.name.endswith(STEPS_SUFFIX), file.size)
    ):
        shown = {"name": file.name, "size": _size(file.size), "text": None, "why": ""}
        texts[file.name] = shown
        if file.name.startswith("requests/") and not prompts:
            shown["why"] = "not shown: it may hold prompts"
        elif file.name.endswith(".html") or file.name == "incident.json":
            shown["why"] = "not shown: it is what this page was made of or makes"
        elif file.name.endswith(".json") and f"{file.name.removesuffix('.json')}.txt" in files.listed:
            shown["why"] = "see its .txt"
        elif min(file.size, _MAX_FILE) > left:
            shown["why"] = "not shown: the page would be too long"
        else:
            shown["text"], shown["why"] = _text_of(files, file)
            left -= len(shown["text"] or "")
    return [texts[name] for name in files.listed]


def _by_folder(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    folders: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        folders.setdefault(file["name"].rpartition("/")[0], []).append(file)
    return [{"name": name, "files": folders[name], "open": len(files) <= _MAX_OPEN} for name in sorted(folders)]


def _text_of(files: IncidentFiles, file: ListedFile) -> tuple[str | None, str]:
    from_end = file.name.startswith("logs/")
    data = files.read(file.name, _MAX_FILE, from_end=from_end)
    if b"\0" in data[:8192]:
        return None, "not shown: it is binary"
    text = "\n".join(cut(line, _MAX_LINE) for line in data.decode(errors="replace").split("\n"))
    which = "its end" if from_end else "its beginning"
    return text, f"{which} only" if file.size > len(data) else ""


def _size(size: int) -> str:
    return (
        f"{size:,} bytes" if size < 10_000 else f"{size / 1024:,.0f} KiB" if size < 10 << 20 else f"{size >> 20:,} MiB"
    )


def _step_back() -> None:
    """Give way to a server that may live on: in processor time, in memory, and where the kernel has to end somebody."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for which, most in ((resource.RLIMIT_AS, _MAX_MEMORY), (resource.RLIMIT_FSIZE, _MAX_BYTES)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (most, most))


if __name__ == "__main__":
    _step_back()
    write_html(Path(sys.argv[1]), Path(sys.argv[2]))
