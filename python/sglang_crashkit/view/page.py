"""What a page shows of an incident, section by section, with what is in its files.

Any kit version may have written those, and anybody may have changed them since: what is missing or has another form is
passed over. Every list has an end; of what is beyond it the number is told.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sglang_crashkit.analysis.ranks import Rank, RankSet
from sglang_crashkit.incident.names import stopped_state
from sglang_crashkit.incident.store import STEPS_SUFFIX, StoredSteps
from sglang_crashkit.kernel import titles
from sglang_crashkit.model.checked_json import mapping_of, seconds_of
from sglang_crashkit.model.incident import Collectives, Entry, Gpus, Incident, InStep, ProcessReport
from sglang_crashkit.model.peers import LostPeer
from sglang_crashkit.model.step import Step
from sglang_crashkit.view.files import IncidentFiles, cut, object_of
from sglang_crashkit.view.first_screen import undecided_in_words
from sglang_crashkit.view.merged_stacks import MAX_NAMES, cut_names, ranks_by_pid
from sglang_crashkit.view.steps import LAST, describe_step, groups_of, side_by_side
from sglang_crashkit.view.summary import (
    Run,
    last_sign_in_words,
    piece_in_words,
    state_in_words,
    timeline_of,
    was_aborted_before,
)

_MAX_GROUPS, _MAX_EVENTS, _MAX_LANES, _MAX_REQUESTS, _MAX_COLUMNS = 100, 1000, 24, 500, 40
_AT_ONCE_SECS = 1.0
_MAX_LINE = 4 << 20
_MAX_STEP_BYTES = 64 << 20
_MAX_REQUEST_BYTES = 64 << 20
_MAX_VALUES = 600
_NUMBER = re.compile(rb'\{"number": (\d{1,18}),')
#: Events that tell of a failure.
_BAD = frozenset({"process_exited", "exception", "watchdog_timeout", "no_progress", "peer_lost", "server_exited"})
_OWN = frozenset({"stacks_captured", "flight_recorders_asked", "native_stacks", "journal_read", "incident_finished"})
#: What is known of a request and holds nothing of its prompt.
_OF_REQUEST = ("rid", "state", "arrived", "ended", "kind")


# -- processes


def processes_of(incident: Incident) -> dict[str, Any]:
    """Return the ranks and the other processes, and which of them are in the same state.

    Returns:
        ``ranks`` and ``others``: a tile each, with ``name``, ``state`` and ``words``. ``groups``: each with ``names``,
        ``state``, ``words``, ``doing``, ``step``, ``sign`` and its ``members``, each with what there is of it alone.
    """
    first, places, tiles = incident.first_failure, ranks_by_pid(incident), []
    groups: dict[str, dict[str, Any]] = {}
    ranks_in: dict[str, list[Rank]] = {}
    for process in incident.processes:
        rank, step, sign = places[process.pid], process.in_step, process.last_sign
        name, words = RankSet([rank]).format(), state_in_words(process)
        state = "first" if process is first else _state_of(process)
        shown = {
            "state": state,
            "words": words,
            "doing": process.doing,
            "step": _step_in_words(step) if step is not None else "",
            "rank": process.is_rank,
            "sign": sign.doing if sign is not None else "",
        }
        key = json.dumps(shown)
        group = groups.setdefault(key, shown | {"members": [], "number": len(groups)})
        ranks_in.setdefault(key, []).append(rank)
        group["members"].append(_details(process, name))
        tiles.append((process.is_rank, rank, {"name": name, "state": state, "words": words, "group": group["number"]}))
    for key, group in groups.items():
        names = RankSet(ranks_in[key]).format(most=6)
        many = len(group["members"])
        group["names"] = names if len(names) < MAX_NAMES else f"{cut_names(names)} ({many:,} processes)"
    order = {"first": 0, "stopped": 1, "raised": 2, "dead": 3, "unseen": 4, "alive": 5}
    listed = sorted(groups.values(), key=lambda one: (order[one["state"]], not one["rank"], one["number"]))
    return {
        "ranks": [tile for is_rank, rank, tile in sorted(tiles, key=_by_rank) if is_rank],
        "others": [tile for is_rank, _rank, tile in tiles if not is_rank],
        "groups": listed[:_MAX_GROUPS],
        "left_out": max(0, len(listed) - _MAX_GROUPS),
        "states": sorted({tile["state"] for _is_rank, _rank, tile in tiles}, key=order.__getitem__),
    }


def _by_rank(tile: tuple[bool, Rank, Any]) -> tuple[str, int]:
    rank = tile[1]
    return json.dumps([[name, f"{at!s:0>8}"] for name, at in rank.scope]), rank.number


def _state_of(process: ProcessReport) -> str:
    """Return the state of a process as one of a few classes."""
    if process.exit is not None:
        return "dead"
    if stopped_state(process):
        return "stopped"
    if any(one.kind == "exception" and one.status == "captured" for one in process.evidence):
        return "raised"
    return "alive" if process.doing else "unseen"


def _step_in_words(step: InStep) -> str:
    return f"{step.number}: {step.mode or 'not scheduled'} of {step.size}, {step.phase.replace('_', ' ')}"


def _details(process: ProcessReport, name: str) -> dict[str, Any]:
    numbers = [f"{key} {value}" for key, value in (process.state or {}).items() if key != "SigCgt"]
    moments = [
        f"{look.time[11:23]} {look.state} {look.cpu_secs} s of CPU time: {' < '.join(look.doing[:3])}"
        for look in process.looks
    ]
    return {
        "name": name,
        "title": process.title,
        "pid": process.pid,
        "proc": ", ".join(numbers),
        "sign": last_sign_in_words(process.last_sign) if process.last_sign is not None else "",
        "gpu": process.gpu,
        "looks": moments,
        "evidence": [{"status": one.status, "words": piece_in_words(one)} for one in process.evidence],
    }


# -- the timeline


def timeline(incident: Incident) -> dict[str, Any]:
    """Return the events in lanes, each with its place from 0 to 1000, and as a list.

    Returns:
        ``seconds``: from the first to the last event. ``lanes``: each with ``name`` and ``events``. ``events``: each
        with ``after``, in seconds from the trigger; ``place``; ``tone``; ``event``; ``who``; ``words``.
    """
    known = [(one.seconds, one) for one in timeline_of(incident)]
    timed = [(seconds, one) for seconds, one in known if seconds is not None]
    if not timed:
        return {"lanes": [], "events": [], "seconds": 0.0, "begin": 0.0, "left_out": len(known)}
    trigger = seconds_of(incident.trigger.time)
    zero = trigger if trigger is not None else timed[0][0]
    times = [*(seconds for seconds, _one in timed), zero]
    begin, end = min(times), max(times)
    events, first = _merged(timed, incident), incident.first_failure
    who = {event["who"] for event in events}
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events[:_MAX_EVENTS]:
        event["after"] = event["seconds"] - zero
        event["place"] = round(1000 * (event["seconds"] - begin) / (end - begin), 2) if end > begin else 0
        is_first = first is not None and event["pid"] == first.pid
        lane = "other ranks" if len(who) > _MAX_LANES and event["ranks"] and not is_first else event["who"]
        lanes.setdefault(lane if lane in lanes or len(lanes) < _MAX_LANES else "others", []).append(event)
    return {
        "lanes": [{"name": name, "events": some} for name, some in lanes.items()],
        "events": events[:_MAX_EVENTS],
        "seconds": end - begin,
        "begin": begin - zero,
        "left_out": max(0, len(events) - _MAX_EVENTS) + len(known) - len(timed),
    }


def _merged(timed: Sequence[tuple[float, Entry]], incident: Incident) -> list[dict[str, Any]]:
    """Return the events; of many ranks those that are alike and follow one another at once as one."""
    places = ranks_by_pid(incident)
    many = len(places) > _MAX_LANES
    events: list[dict[str, Any]] = []
    before: tuple[str, str, bool] | None = None
    for seconds, one in timed:
        rank = places.get(one.pid) if one.pid is not None else None
        words = Run([one]).details()
        alike = (one.event, words, rank is not None)
        at_once = many and rank is not None and before == alike
        if at_once and seconds - events[-1]["seconds"] <= _AT_ONCE_SECS:
            events[-1]["ranks"].add(rank)
            continue
        before = alike
        events.append(
            {
                "seconds": seconds,
                "pid": one.pid,
                "ranks": {rank} if rank is not None else set(),
                "who": one.title or "crash handler",
                "tone": "bad" if one.event in _BAD else "own" if one.event in _OWN else "other",
                "event": one.event.replace("_", " "),
                "words": cut(words, 400),
            }
        )
    for told in events:
        if told["ranks"]:
            told["who"] = cut_names(RankSet(told["ranks"]).format())
    return events


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# -- steps


def steps_of(incident: Incident, files: IncidentFiles) -> dict[str, Any]:
    """Return the last steps of the ranks side by side, the diverging one marked.

    Returns:
        ``tables``: of each set of ranks that must agree, with ``columns``, the names, and ``rows``, each with
        ``number``, ``marked`` and ``cells``; ``requests`` of the marked step, or the last one.
    """
    marked = incident.divergence.step if incident.divergence is not None else None
    groups = groups_of(_read_last_steps(files, marked))
    tables = [_table(group, marked) for group in groups[:_MAX_GROUPS]]
    return {"tables": tables, "left_out": max(0, len(groups) - _MAX_GROUPS)}


def _read_last_steps(files: IncidentFiles, marked: int | None) -> list[StoredSteps]:
    """Return the last steps of each rank, and those around `marked`."""
    found, left = [], _MAX_STEP_BYTES
    for name, file in files.listed.items():
        label = name.removeprefix("ranks/").removesuffix(STEPS_SUFFIX)
        if not name.startswith("ranks/") or not name.endswith(STEPS_SUFFIX) or left <= 0:
            continue
        data = files.read(name, min(left, file.size), from_end=True)
        left -= len(data)
        kept: deque[bytes] = deque(maxlen=LAST)
        around = []
        for line in data.split(b"\n"):
            match = _NUMBER.match(line)
            if match is None or len(line) > _MAX_LINE:
                continue
            kept.append(line)
            if marked is not None and abs(int(match[1]) - marked) < 2:
                around.append(line)
        steps = {step.number: step for line in [*around, *kept] if (step := _step_of(line)) is not None}
        title, _, pid = label.rpartition("-")
        ranks = titles.rank_of(f"sglang::{title or pid}")
        found.append(
            StoredSteps(
                f"sglang::{title}", int(pid) if pid.isdecimal() else 0, ranks, tuple(steps[n] for n in sorted(steps))
            )
        )
    return found


def _step_of(line: bytes) -> Step | None:
    try:
        return Step.from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _table(group: Sequence[StoredSteps], marked: int | None) -> dict[str, Any]:
    columns, chosen, about = side_by_side(group, marked, LAST)
    shown = columns[:_MAX_COLUMNS]
    rows = []
    for number in chosen:
        steps = [steps.get(number) for _name, steps in shown]
        cells = [_cell(step, steps[0]) for step in steps]
        rows.append({"number": number, "marked": number == marked, "cells": cells})
    requests = [
        {"rank": cut_names(name), "rid": cut(one.rid, 80), "tokens": one.tokens, "length": one.length}
        for name, steps in shown
        if (step := steps.get(about)) is not None
        for one in step.requests[:32]
    ]
    return {
        "columns": [cut_names(name) for name, _steps in shown],
        "rows": rows,
        "about": about,
        "requests": requests[: _MAX_COLUMNS * 4],
        "left_out": len(columns) - len(shown),
    }


def _cell(step: Step | None, other: Step | None) -> dict[str, Any]:
    if step is None:
        return {"words": "-", "mode": "none", "differs": other is not None, "open": False}
    mode = step.mode if step.mode in ("extend", "decode", "mixed", "idle") else "other"
    differs = other is None or (step.mode, step.size, step.tokens) != (other.mode, other.size, other.tokens)
    return {"words": describe_step(step), "mode": mode, "differs": differs, "open": step.ended is None}


# -- requests


def requests_of(incident: Incident, files: IncidentFiles, *, prompts: bool) -> dict[str, Any]:
    """Return what the journals told of the requests, the suspects first; with `prompts` what users of the server wrote.

    Returns:
        ``rows``: each with what `_OF_REQUEST` names, ``numbers``, ``texts`` and ``suspect``. ``undecided``: a sentence
        where nothing is between the suspects. ``suspects_left_out``: how many the incident does not list.
    """
    suspects, journal = {one.rid: one for one in incident.suspects}, incident.requests.journal
    path = journal.path if journal is not None and journal.path else "requests/requests.jsonl"
    rows: list[dict[str, Any]] = []
    count = 0
    data = files.read(path, _MAX_REQUEST_BYTES)
    for line in data.split(b"\n"):
        request = object_of(line[:_MAX_LINE])
        if not request:
            continue
        count += 1
        is_suspect = str(request.get("rid")) in suspects
        if len(rows) < _MAX_REQUESTS or is_suspect:
            rows.append(_request(request, incident, prompts=prompts) | {"suspect": is_suspect})
    rows.sort(key=lambda row: (not row["suspect"], row["state"] != "unfinished"))
    return {
        "rows": rows,
        "left_out": max(0, count - len(rows)),
        "suspects": [
            {"rid": cut(one.rid, 100), "level": one.level, "reasons": one.reasons}
            for one in list(suspects.values())[:50]
        ],
        "undecided": undecided_in_words(incident),
        "suspects_left_out": incident.suspects_left_out,
        "prompts": prompts,
    }


def _request(request: Mapping[str, Any], incident: Incident, *, prompts: bool) -> dict[str, Any]:
    shown = {name: cut(str(request.get(name) or ""), 100) for name in _OF_REQUEST}
    numbers, texts = ["aborted before"] if was_aborted_before(request, incident) else [], []
    for name, value in [*request.items(), *mapping_of(request.get("sampling_params")).items()]:
        if name in (*_OF_REQUEST, "aborted", "sampling_params", "pid") or value is None:
            continue
        if isinstance(value, (bool, int, float)):
            numbers.append(f"{cut(name, 80)} {value!s:.40}")
        elif prompts:
            texts.append((cut(name, 80), cut(_plain(value), 20_000)))
        else:
            # Whatever it is called, a user may have written it.
            what = "characters" if isinstance(value, str) else "entries"
            numbers.append(f"{cut(name, 80)}: {len(value):,} {what}")
    return shown | {"numbers": numbers, "texts": texts}


# -- the rest


def findings_of(incident: Incident) -> list[dict[str, Any]]:
    """Return what is reported of collectives, GPUs and lost peers, each with ``title``, ``level`` and ``lines``."""
    found, collectives = [], incident.collectives or Collectives()
    for one in collectives.findings[:_MAX_GROUPS]:
        title = f"{one.group}: {one.kind.replace('_', ' ')}"
        found.append({"title": title, "level": one.level, "lines": [one.statement], "open": True})
    for title, lines, is_open in (
        ("GPUs", (incident.gpus or Gpus()).lines, True),
        ("no flight recorder", collectives.missing, False),
        ("lost servers of the pair", [_peer(one) for one in incident.peers], True),
    ):
        if lines:
            found.append({"title": title, "level": "", "lines": lines, "open": is_open})
    return found


def _peer(peer: LostPeer) -> str:
    waiting = [one.rid for one in peer.requests[:20]]
    words = f"{peer.role} server {peer.address}: {peer.sign}, since {peer.since}"
    return words + (f"; requests that wait for it: {', '.join(waiting)}" if waiting else "")


def environment_of(files: IncidentFiles, incident: Incident) -> list[dict[str, Any]]:
    """Return the environment in parts, each with ``name`` and ``values``, pairs of a dotted name and a value."""
    whole = files.read_object("environment.json") or msgspec.to_builtins(incident.surroundings)
    plain = [(name, value) for name, value in whole.items() if not isinstance(value, (dict, list))]
    parts: list[tuple[str, Any]] = [("in short", dict(plain))] if plain else []
    parts += [(name, value) for name, value in whole.items() if isinstance(value, (dict, list)) and value]
    found = []
    for name, value in parts[:100]:
        values = list(_flat(value, ""))
        found.append({"name": name, "values": values[:_MAX_VALUES], "left_out": max(0, len(values) - _MAX_VALUES)})
    return found


def _flat(value: object, lead: str) -> Iterator[tuple[str, str]]:
    entries: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        entries = enumerate(value)
    elif isinstance(value, list):
        yield lead, ", ".join(map(str, value))
        return
    else:
        yield lead, "" if value is None else str(value)
        return
    for name, inner in entries:
        yield from _flat(inner, f"{lead}.{name}" if lead else str(name))
