"""One incident as a page of HTML: one file that loads nothing and runs no script.

Texts of stacks, logs and requests are not trusted. The template engine escapes each of them, and spells out characters
that are invisible or reverse the text. The page's content security policy allows its own style by a hash; a script that
got in nevertheless would not run, and nothing can be fetched or sent.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sglang_crashkit import __version__
from sglang_crashkit.analysis.ranks import Rank, RankSet, rank_at, scope_of
from sglang_crashkit.analysis.stack_tree import Node, format_tree
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.judging import read_log
from sglang_crashkit.incident.names import Names, natural_order
from sglang_crashkit.incident.store import read_steps
from sglang_crashkit.kernel.private_files import write_named
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.model.lenient import seconds_of
from sglang_crashkit.view import model, words
from sglang_crashkit.view.evidence import IncidentFiles, cut, requests_of, stacks_of
from sglang_crashkit.view.first_screen import first_screen
from sglang_crashkit.view.steps import LAST, tables_of
from sglang_crashkit.visible import visible

#: Most bytes of one file that the page shows, and of all files together.
_MAX_FILE, _MAX_FILES = 64 << 10, 3 << 19
_MAX_LINE, _MAX_DETAILS = 2000, 400
_MAX_GROUPS, _MAX_EVENTS, _MAX_LANES, _MAX_REQUESTS = 100, 1000, 24, 500
#: Most calls and levels of a tree of stacks, and the least width of a call in percent; the rest is left out.
_MAX_CALLS, _MAX_DEPTH, _THINNEST = 4000, 200, 0.12
#: Most characters of a list of ranks, and most sets of ranks in the legend of a tree.
_MAX_NAMES, _MAX_SETS = 60, 24
#: What making a part of the page raises where the incident has a form that no kit version wrote.
_MALFORMED = (ArithmeticError, AttributeError, CrashkitError, LookupError, RecursionError, TypeError, ValueError)
#: The CSS class of events that report a failure, and of those of the crash handler's own work.
_TONES = dict.fromkeys(
    ("process_exited", "exception", "watchdog_timeout", "no_progress", "peer_lost", "server_exited"), "bad"
) | dict.fromkeys(
    ("stacks_captured", "flight_recorders_asked", "native_stacks", "journal_read", "incident_finished"), "own"
)
_HERE = Path(__file__).parent


def write_html(folder: Path, output: Path, *, prompts: bool = False) -> None:
    """Write the page of an incident to a file that only its owner can read; `prompts` includes what users wrote.

    Raises CrashkitError where it cannot be written.
    """
    page = render(folder, prompts=prompts).encode(errors="backslashreplace")
    try:
        write_named(output, page)
    except OSError as error:
        why = error.strerror or error
        raise CrashkitError(f"{output} cannot be written: {why}", next_step="--html FILE, another one") from error


def render(folder: Path, *, prompts: bool = False) -> str:
    """Return the page of the incident in a folder; see `write_html`. No content of the folder makes it raise."""
    files = IncidentFiles(folder)
    try:
        document, problem = files.read_json("incident.json"), ""
    except ValueError as error:
        document, problem = None, str(error)
    incident = Incident.of(document)
    if problem and (logged := read_log(folder)) is not None:
        incident, problem = logged, ""
    basis = incident.verdict.basis or [incident.verdict.text] if incident.verdict is not None else []
    marked = incident.divergence.step if incident.divergence is not None else None
    css = (_HERE / "page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    makers: dict[str, Callable[[], Any]] = {
        "ranks": lambda: _processes(incident),
        "timeline": lambda: _timeline(incident),
        "steps": lambda: {"shown": [*tables_of(read_steps(folder, marked, LAST), marked)][:_MAX_GROUPS]},
        "stacks": lambda: {"shown": [*_trees(incident, files)]},
        "requests": lambda: dict(
            zip(("shown", "left_out"), requests_of(incident, files, _MAX_REQUESTS, prompts=prompts), strict=True)
        ),
        "findings": lambda: {"shown": [*model.findings_of(incident)]},
        "files": lambda: {"shown": _inlined(files, incident, prompts=prompts), "left_out": files.left_out},
    }
    parts = {name: _part(make) for name, make in makers.items()}
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else "" if value is None else visible(str(value)),
    ).get_template("page.html.j2")
    return template.render(
        **parts,
        csp=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        # Not escaped: this is the kit's own file, and the policy names the hash of these bytes.
        css=Markup(css),  # noqa: S704
        incident=incident,
        folder=str(folder),
        headline=cut(first_screen(incident, wraps=False)[0], 300),
        basis=[words.without_build_paths(sentence) for sentence in basis if sentence],
        undecided=words.undecided(incident),
        prompts=prompts,
        facts=[*model.facts(incident), ("reported by", f"{incident.trigger.event} of {incident.trigger.title}")],
        problem=problem,
        nav=[name for name, part in parts.items() if part.get("shown") or part.get("problem")],
        state_words=model.STATES,
        kit=__version__,
    )


def _part(make: Callable[[], Any]) -> Any:
    """Return the data of a part of the page, or else why it cannot be shown."""
    try:
        return make()
    except _MALFORMED as error:
        return {"problem": cut(f"{type(error).__name__}: {error}", 300)}


# -- the parts, each with what is ``shown``, and how much is ``left_out``


def _processes(incident: Incident) -> dict[str, Any]:
    """Return the groups, and the name and the group of each rank and of each other process."""
    names, groups = Names(incident), model.groups_of(incident)
    tiles = [(names.short(one), group, one.is_rank) for group in groups for one in group.members]
    tiles.sort(key=lambda tile: natural_order(tile[0]))
    return {
        "shown": groups[:_MAX_GROUPS],
        "left_out": max(0, len(groups) - _MAX_GROUPS),
        "tiles": [[(name, group) for name, group, is_rank in tiles if is_rank is wanted] for wanted in (True, False)],
        "states": [state for state in model.STATES if any(group.state == state for group in groups)],
    }


def _timeline(incident: Incident) -> dict[str, Any]:
    """Return the events by lane and as a list, each with its place from 0 to 100 and its seconds after the trigger."""
    runs = model.runs_of(incident)
    timed = [(seconds, run) for run in runs if (seconds := run.first.seconds) is not None]
    trigger = seconds_of(incident.trigger.time)
    zero = trigger if trigger is not None else timed[0][0] if timed else 0.0
    times = [*(seconds for seconds, _run in timed), zero]
    begin, secs = min(times), max(times) - min(times)
    events, lanes = [], dict[str, list[dict[str, Any]]]()
    for seconds, run in timed[:_MAX_EVENTS]:
        lane = who = run.who or run.first.title or "crash handler"
        if who not in lanes and len(lanes) >= _MAX_LANES:
            lane = "others"
        event = {
            "after": seconds - zero,
            "place": round(100 * (seconds - begin) / secs, 3) if secs else 0,
            "tone": _TONES.get(run.first.event, "other"),
            "event": run.first.event.replace("_", " "),
            "who": who,
            "words": cut(run.details, _MAX_DETAILS),
        }
        events.append(event)
        lanes.setdefault(lane, []).append(event)
    return {
        "shown": events,
        "lanes": lanes,
        "scale": f"{secs:.3f} s to scale",
        "axis": [begin - zero + secs * part / 4 for part in range(4)],
        "left_out": len(runs) - len(events),
    }


def _trees(incident: Incident, files: IncidentFiles) -> Iterator[dict[str, Any]]:
    """Yield the merged stacks of the main threads of the ranks, of all processes and of all threads."""
    names, first = Names(incident), incident.first_failure
    ranks = {
        one.pid: rank_at({axis: number for axis, number in one.rank.items() if 0 <= number < 1 << 20})
        if one.is_rank
        else Rank(scope_of({"role": names.short(one)}), "", 0)
        for one in incident.processes
    }
    known = [(one, *stack) for one in incident.processes for stack in stacks_of(one, files)]
    alone = str(RankSet([ranks[first.pid]])) if first is not None else ""
    main = [(one, is_main, frames) for one, is_main, frames in known if is_main]
    before = 0
    for name, chosen in (
        ("ranks", [one for one in main if one[0].is_rank]),
        ("all processes", main),
        ("all threads", known),
    ):
        if len(chosen) == before:
            continue
        before, tree = len(chosen), Node()
        for process, _is_main, frames in chosen:
            tree.add(ranks[process.pid], frames)
        sets = {id(node): str(node.through) for node in tree.all()}
        sizes = {sets[id(node)]: len(node.through) for node in tree.all()}
        whole = sets[id(tree)]
        in_order = sorted(sizes.keys() - {whole}, key=lambda one: (one != alone, sizes[one], one))
        # The set of all ranks is grey (c0); the one of the first failure alone is red (c1).
        colours = {one: f"c{2 + place % 7}" for place, one in enumerate(in_order)} | {whole: "c0", alone: "c1"}
        boxes = list(_boxes(tree, sets, colours))
        yield {
            "name": name,
            "text": "\n".join(cut(line, _MAX_LINE) for line in format_tree(tree)),
            "sets": [(colours[one], words.cut(one, _MAX_NAMES), sizes[one]) for one in [whole, *in_order][:_MAX_SETS]],
            "boxes": boxes,
            "height": 1 + max(depth for _left, _width, depth, *_told in boxes),
        }


def _boxes(tree: Node, sets: Mapping[int, str], colours: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Yield the calls from the outermost on: left edge and width in percent, depth, name, words, and colour."""
    # The number of stacks in each node; equal stacks of a rank count once.
    values: dict[int, int] = {}
    for node in reversed(tree.all()):
        values[id(node)] = len(node.ranks) + sum(values[id(child)] for child in node.children.values())
    waiting = [(tree, 0.0, 100.0, 0)]
    for node, left, width, depth in waiting:
        ranks, name = sets[id(node)], cut(node.function or "all stacks", 400)
        told = (
            f"{name} {cut(node.place, 300)}, {words.count(values[id(node)], 'stack')} of {words.cut(ranks, _MAX_NAMES)}"
        )
        yield round(left, 3), round(width, 3), depth, name, told, colours[ranks]
        for child in sorted(node.in_order(), key=lambda child: -values[id(child)]):
            share = width * values[id(child)] / values[id(node)]
            if share >= _THINNEST and len(waiting) < _MAX_CALLS and depth < _MAX_DEPTH:
                waiting.append((child, left, share, depth + 1))
            left += share


def _inlined(files: IncidentFiles, incident: Incident, *, prompts: bool) -> list[dict[str, Any]]:
    """Return all files; small ones have their text, those of the first failure first, until the page is full."""
    own = f"-{incident.first_failure.pid}." if incident.first_failure is not None else ""
    left, shown = _MAX_FILES, {}
    for name, size in sorted(files.listed.items(), key=lambda file: (own not in file[0], file[1])):
        text = None
        if name.startswith("requests/") and not prompts:
            why = "not shown: it may hold prompts"
        elif name.endswith(".html") or name == "incident.json":
            why = "not shown: it is what this page was made of or makes"
        elif name.endswith(".json") and f"{name.removesuffix('.json')}.txt" in files.listed:
            why = "see its .txt"
        elif min(size, _MAX_FILE) > left:
            why = "not shown: the page would be too long"
        elif b"\0" in (data := files.read(name, _MAX_FILE, from_end=(is_log := name.startswith("logs/"))))[:8192]:
            why = "not shown: it is binary"
        else:
            why = f"{'its end' if is_log else 'its beginning'} only" if size > len(data) else ""
            text = "\n".join(cut(line, _MAX_LINE) for line in data.decode(errors="replace").split("\n"))
            left -= len(text)
        shown[name] = {"name": name, "folder": name.rpartition("/")[0], "size": size, "text": text, "why": why}
    return [shown[name] for name in files.listed]
