"""One incident as a page of HTML: one file, which loads nothing and in which nothing runs but its own script.

Texts of stacks, logs and requests are not trusted. Each is escaped by the template engine, and shown with what is not
seen, or turns text around, spelled out. The page allows its own script and its own style by their hashes; a script that
got in nevertheless would not run, and nothing may be fetched or sent.

``python -m sglang_crashkit.view.html FOLDER FILE`` writes it by itself, as a crash handler has it do.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import resource
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.judging import read_log
from sglang_crashkit.incident.names import Names, natural_order
from sglang_crashkit.incident.store import STEPS_SUFFIX, read_steps
from sglang_crashkit.kernel.private_files import write_named
from sglang_crashkit.model.checked_json import seconds_of
from sglang_crashkit.model.incident import Incident, ProcessReport
from sglang_crashkit.view import model, words
from sglang_crashkit.view.evidence import ENVIRONMENT, IncidentFiles, cut, flat, requests_of
from sglang_crashkit.view.first_screen import first_screen
from sglang_crashkit.view.icicle import merge
from sglang_crashkit.view.markdown import format_summary
from sglang_crashkit.view.steps import LAST, tables_of
from sglang_crashkit.visible import visible

#: What a file may be to be shown in the page, and what all of them may be together, in bytes.
_MAX_FILE, _MAX_FILES = 64 << 10, 3 << 19
_MAX_LINE, _MAX_MARKDOWN, _MAX_DETAILS = 2000, 200_000, 400
_MAX_GROUPS, _MAX_EVENTS, _MAX_LANES, _MAX_REQUESTS, _MAX_VALUES = 100, 1000, 24, 500, 2000
#: Of more files the names are folded, too.
_MAX_OPEN = 60
#: As long as a crash handler makes room for.
_MAX_BYTES = 8 << 20
#: A child of a crash handler that takes more memory has gone astray.
_MAX_MEMORY = 1 << 30
#: What a part of an incident raises that has another form than any kit version wrote.
_ODD = (ArithmeticError, AttributeError, CrashkitError, LookupError, RecursionError, TypeError, ValueError)
#: Events that tell of a failure, and of the crash handler's own work.
_BAD = frozenset({"process_exited", "exception", "watchdog_timeout", "no_progress", "peer_lost", "server_exited"})
_OWN = frozenset({"stacks_captured", "flight_recorders_asked", "native_stacks", "journal_read", "incident_finished"})
_HERE = Path(__file__).parent


def write_html(folder: Path, output: Path, *, prompts: bool = False) -> None:
    """Write the page of an incident, readable by its owner alone, to a file.

    With `prompts` it shows what users of the server wrote.

    Raises:
        CrashkitError: it cannot be written.
    """
    page = render(folder, prompts=prompts).encode(errors="backslashreplace")
    try:
        write_named(output, page)
    except OSError as error:
        why = error.strerror or error
        raise CrashkitError(f"{output} cannot be written: {why}", next_step="--html FILE, another one") from error


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
    basis = incident.verdict.basis or [incident.verdict.text] if incident.verdict is not None else []
    marked = incident.divergence.step if incident.divergence is not None else None
    css, script = ((_HERE / name).read_text() for name in ("page.css", "page.js"))
    makers: dict[str, Callable[[], Any]] = {
        "ranks": lambda: _processes(incident),
        "timeline": lambda: _timeline(incident),
        "steps": lambda: {"shown": [*tables_of(read_steps(folder, marked, LAST), marked)][:_MAX_GROUPS]},
        "stacks": lambda: _pair(merge(incident, files)),
        "requests": lambda: _pair(requests_of(incident, files, _MAX_REQUESTS, prompts=prompts)),
        "findings": lambda: {"shown": [*model.findings_of(incident)]},
        "environment": lambda: _environment(files),
    }
    parts = {name: _part(make) for name, make in makers.items()}
    markdown = _part(lambda: format_summary(incident))
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        finalize=_finalize,
    ).get_template("page.html.j2")
    return template.render(
        **parts,
        csp=_policy(css, script),
        # The kit's own files, to the byte that the policy names.
        css=Markup(css),  # noqa: S704
        js=Markup(script),  # noqa: S704
        incident=incident,
        folder=str(folder),
        headline=cut(first_screen(incident, wraps=False)[0], 300),
        basis=[words.without_build_paths(sentence) for sentence in basis if sentence],
        undecided=words.undecided(incident),
        prompts=prompts,
        facts=[*model.facts(incident), ("reported by", f"{incident.trigger.event} of {incident.trigger.title}")],
        problem=problem,
        nav=[*(name for name, part in parts.items() if part.get("shown") or part.get("problem")), "files"],
        state_words=model.STATES,
        files=_inlined(files, incident.first_failure, prompts=prompts),
        max_open=_MAX_OPEN,
        files_left_out=files.left_out,
        kit=__version__,
        markdown=visible(cut(markdown if isinstance(markdown, str) else str(markdown), _MAX_MARKDOWN)),
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


def _part(make: Callable[[], Any]) -> Any:
    """Return what a part of the page is made of; in its place why it cannot be shown."""
    try:
        return make()
    except _ODD as error:
        return {"problem": cut(f"{type(error).__name__}: {error}", 300)}


def _pair(made: tuple[Any, Any]) -> dict[str, Any]:
    return {"shown": made[0], "left_out": made[1]}


# -- the parts, each with what is ``shown``, and how much is ``left_out``


def _processes(incident: Incident) -> dict[str, Any]:
    """Return the groups, with what there is of each process alone, and a tile for each process."""
    names, groups, tiles = Names(incident), model.groups_of(incident), []
    details: dict[int, Any] = {}
    for group in groups:
        for one in group.members:
            tiles.append((one.is_rank, names.short(one), group))
            proc = ", ".join(f"{key} {value}" for key, value in (one.state or {}).items() if key != "SigCgt")
            sign = f"last sign: {words.last_sign(one.last_sign)}" if one.last_sign is not None else ""
            looks = (
                f"{look.time[11:23]} {look.state} {look.cpu_secs} s of CPU time: {' < '.join(look.doing[:3])}"
                for look in one.looks
            )
            told = [("", text) for text in (proc, sign, *looks) if text]
            details[one.pid] = [*told, *model.evidence_of([one], names)]
    tiles.sort(key=lambda tile: natural_order(tile[1]))
    states = {group.state for group in groups}
    return {
        "shown": groups[:_MAX_GROUPS],
        "left_out": max(0, len(groups) - _MAX_GROUPS),
        "tiles": [tile for tile in tiles if tile[0]],
        "others": [tile for tile in tiles if not tile[0]],
        "states": [state for state in model.STATES if state in states],
        "names": names,
        "details": details,
    }


def _timeline(incident: Incident) -> dict[str, Any]:
    """Return the events in lanes, each with its place from 0 to 100, and as a list; times are from the trigger on."""
    runs = model.runs_of(incident)
    timed = [(seconds, run) for run in runs if (seconds := run.first.seconds) is not None]
    trigger = seconds_of(incident.trigger.time)
    zero = trigger if trigger is not None else timed[0][0] if timed else 0.0
    times = [*(seconds for seconds, _run in timed), zero]
    begin, secs = min(times), max(times) - min(times)
    events: list[dict[str, Any]] = [
        {
            "after": seconds - zero,
            "place": round(100 * (seconds - begin) / secs, 3) if secs else 0,
            "tone": "bad" if run.first.event in _BAD else "own" if run.first.event in _OWN else "other",
            "event": run.first.event.replace("_", " "),
            "who": run.who or run.first.title or "crash handler",
            "words": cut(run.details, _MAX_DETAILS),
        }
        for seconds, run in timed[:_MAX_EVENTS]
    ]
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        lane = event["who"]
        lanes.setdefault(lane if lane in lanes or len(lanes) < _MAX_LANES else "others", []).append(event)
    left_out = len(runs) - len(events)
    return {"shown": events, "lanes": lanes, "seconds": secs, "begin": begin - zero, "left_out": left_out}


def _environment(files: IncidentFiles) -> dict[str, Any]:
    """Return the values of the environment by the first part of their names."""
    parts = []
    for name, inside in groupby(flat(files.read_object(ENVIRONMENT)), lambda pair: pair[0].partition(".")[0]):
        values = [(full.removeprefix(f"{name}."), value) for full, value in inside]
        parts.append((name, values[:_MAX_VALUES], max(0, len(values) - _MAX_VALUES)))
    return {"shown": parts}


# -- files


def _inlined(files: IncidentFiles, first: ProcessReport | None, *, prompts: bool) -> list[dict[str, Any]]:
    """Return the files with the text of those that are small, those of the first failure before others."""
    own = f"-{first.pid}." if first is not None else ""
    left, shown = _MAX_FILES, {}
    for name, size in sorted(
        files.listed.items(), key=lambda file: (own not in file[0], file[0].endswith(STEPS_SUFFIX), file[1])
    ):
        text = None
        if name.startswith("requests/") and not prompts:
            why = "not shown: it may hold prompts"
        elif name.endswith(".html") or name == "incident.json":
            why = "not shown: it is what this page was made of or makes"
        elif name.endswith(".json") and f"{name.removesuffix('.json')}.txt" in files.listed:
            why = "see its .txt"
        elif min(size, _MAX_FILE) > left:
            why = "not shown: the page would be too long"
        else:
            from_end = name.startswith("logs/")
            data = files.read(name, _MAX_FILE, from_end=from_end)
            why = f"{'its end' if from_end else 'its beginning'} only" if size > len(data) else ""
            if b"\0" in data[:8192]:
                why = "not shown: it is binary"
            else:
                text = "\n".join(cut(line, _MAX_LINE) for line in data.decode(errors="replace").split("\n"))
                left -= len(text)
        shown[name] = {"name": name, "folder": name.rpartition("/")[0], "size": size, "text": text, "why": why}
    return [shown[name] for name in files.listed]


def _step_back() -> None:
    """Give way to a server that may live on: in processor time, in memory, and where the kernel has to end one."""
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
