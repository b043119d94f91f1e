"""What a page shows of an incident, section by section, from its document and its files.

Any kit version may have written them, and anybody may have changed them since: what is missing or has another form is
passed over. Every list has an end; of what is beyond it the number is told.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_crashkit.analysis.ranks import Rank, RankSet
from sglang_crashkit.cli.commands.steps import groups_of, in_words, side_by_side
from sglang_crashkit.cli.reporters.incident_files import IncidentFiles, cut, list_of, object_of
from sglang_crashkit.cli.reporters.merged_stacks import MAX_NAMES, cut_names, ranks_by_pid
from sglang_crashkit.incident.first_screen import undecided_in_words
from sglang_crashkit.incident.store import STEPS_SUFFIX, StoredSteps
from sglang_crashkit.incident.summary import (
    Run,
    last_sign_in_words,
    piece_in_words,
    state_in_words,
    timeline_of,
    was_aborted_before,
)
from sglang_crashkit.kernel import titles
from sglang_crashkit.model.checked_json import mapping_of, mappings_of, seconds_of
from sglang_crashkit.model.step import DIVERGED, Step

_MAX_GROUPS, _MAX_EVENTS, _MAX_LANES, _MAX_REQUESTS, _MAX_COLUMNS = 100, 1000, 24, 500, 40
_LAST_STEPS = 20
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


def processes_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranks and the other processes, and which of them are in the same state.

    Returns:
        ``ranks`` and ``others``: a tile each, with ``name``, ``state`` and ``words``. ``groups``: each with ``names``,
        ``state``, ``words``, ``doing``, ``step``, ``sign`` and its ``members``, each with what there is of it alone.
    """
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    places, tiles = ranks_by_pid(document), []
    groups: dict[str, dict[str, Any]] = {}
    ranks_in: dict[str, list[Rank]] = {}
    for process in mappings_of(document.get("processes")):
        pid = process.get("pid")
        rank = places.get(pid) if isinstance(pid, int) else None
        name = RankSet([rank]).format() if rank is not None else str(process.get("title"))
        state, words = _state_of(process, first)
        steps, sign = mapping_of(process.get("steps")), mapping_of(process.get("last_sign"))
        step = mapping_of(steps.get("in_step"))
        shown = {
            "state": state,
            "words": words,
            "doing": [str(frame) for frame in list_of(process.get("doing"))],
            "step": _step_in_words(step) if step else "",
            "rank": process.get("role") == "scheduler",
            "sign": str(sign.get("doing")) if sign else "",
        }
        key = json.dumps(shown)
        group = groups.setdefault(key, shown | {"members": [], "number": len(groups)})
        if rank is not None:
            ranks_in.setdefault(key, []).append(rank)
        group["members"].append(_details(process, name, sign))
        is_rank = process.get("role") == "scheduler"
        tiles.append((is_rank, rank, {"name": name, "state": state, "words": words, "group": group["number"]}))
    for key, group in groups.items():
        names = RankSet(ranks_in.get(key, ())).format(most=6)
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


def _by_rank(tile: tuple[bool, Rank | None, Any]) -> tuple[str, int]:
    rank = tile[1]
    return (
        ("", 0) if rank is None else (json.dumps([[str(name), f"{at!s:0>8}"] for name, at in rank.scope]), rank.number)
    )


def _state_of(process: Mapping[str, Any], first: object) -> tuple[str, str]:
    """Return the state of a process as one of a few classes, and in words."""
    words, state = state_in_words(process), str(mapping_of(process.get("state")).get("State") or "")
    pieces = mappings_of(process.get("evidence"))
    kind = "alive" if process.get("doing") else "unseen"
    if process.get("exit"):
        kind = "dead"
    elif state[:1] in ("T", "t"):
        kind, words = "stopped", f"stopped ({state[:1]})"
    elif any(one.get("kind") == "exception" and one.get("status") == "captured" for one in pieces):
        kind, words = "raised", "raised an exception"
    return "first" if process.get("pid") == first is not None else kind, words


def _step_in_words(step: Mapping[str, Any]) -> str:
    phase = str(step.get("phase")).replace("_", " ")
    return f"{step.get('number')}: {step.get('mode') or 'not scheduled'} of {step.get('size')}, {phase}"


def _details(process: Mapping[str, Any], name: str, sign: Mapping[str, Any]) -> dict[str, Any]:
    state = mapping_of(process.get("state"))
    numbers = [f"{key} {value}" for key, value in state.items() if key != "SigCgt"]
    looks = mappings_of(process.get("looks"))
    moments = [
        f"{str(one.get('time'))[11:23]} {one.get('state')} {one.get('cpu_secs')} s of CPU time: "
        + " < ".join(map(str, list_of(one.get("doing"))[:3]))
        for one in looks
    ]
    return {
        "name": name,
        "title": process.get("title"),
        "pid": process.get("pid"),
        "proc": ", ".join(numbers),
        "sign": last_sign_in_words(sign) if sign else "",
        "gpu": [str(line) for line in list_of(process.get("gpu"))],
        "looks": moments,
        "evidence": [
            {"status": str(one.get("status")), "words": piece_in_words(one)}
            for one in mappings_of(process.get("evidence"))
        ],
    }


# -- the timeline


def timeline(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the events in lanes, each with its place from 0 to 1000, and as a list.

    Returns:
        ``seconds``: from the first to the last event. ``lanes``: each with ``name`` and ``events``. ``events``: each
        with ``after``, in seconds from the trigger; ``place``; ``tone``; ``event``; ``who``; ``words``.
    """
    known = [(seconds_of(one.get("time")), one) for one in timeline_of(document)]
    timed = [(seconds, one) for seconds, one in known if seconds is not None]
    if not timed:
        return {"lanes": [], "events": [], "seconds": 0.0, "begin": 0.0, "left_out": len(known)}
    trigger = seconds_of(mapping_of(document.get("trigger")).get("time"))
    zero = trigger if trigger is not None else timed[0][0]
    times = [*(seconds for seconds, _one in timed), zero]
    begin, end = min(times), max(times)
    events = _merged(timed, document)
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    who = {event["who"] for event in events}
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events[:_MAX_EVENTS]:
        event["after"] = event["seconds"] - zero
        event["place"] = round(1000 * (event["seconds"] - begin) / (end - begin), 2) if end > begin else 0
        many = len(who) > _MAX_LANES and event["ranks"] and event["pid"] != first
        lane = "other ranks" if many else event["who"]
        lanes.setdefault(lane if lane in lanes or len(lanes) < _MAX_LANES else "others", []).append(event)
    return {
        "lanes": [{"name": name, "events": some} for name, some in lanes.items()],
        "events": events[:_MAX_EVENTS],
        "seconds": end - begin,
        "begin": begin - zero,
        "left_out": max(0, len(events) - _MAX_EVENTS) + len(known) - len(timed),
    }


def _merged(timed: Sequence[tuple[float, Mapping[str, Any]]], document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events; of many ranks those that are alike and follow one another at once as one."""
    places = ranks_by_pid(document)
    many = len(places) > _MAX_LANES
    events: list[dict[str, Any]] = []
    before: tuple[str, str, bool] | None = None
    for seconds, one in timed:
        event, pid = str(one.get("event")), one.get("pid")
        rank = places.get(pid) if isinstance(pid, int) else None
        words = Run([one]).details()
        alike = (event, words, rank is not None)
        at_once = many and rank is not None and before == alike
        if at_once and seconds - events[-1]["seconds"] <= _AT_ONCE_SECS:
            events[-1]["ranks"].add(rank)
            continue
        before = alike
        events.append(
            {
                "seconds": seconds,
                "pid": pid,
                "ranks": {rank} if rank is not None else set(),
                "who": str(one.get("title") or "crash handler"),
                "tone": "bad" if event in _BAD else "own" if event in _OWN else "other",
                "event": event.replace("_", " "),
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


def steps_of(document: Mapping[str, Any], files: IncidentFiles) -> dict[str, Any]:
    """Return the last steps of the ranks side by side, the diverging one marked.

    Returns:
        ``tables``: of each set of ranks that must agree, with ``columns``, the names, and ``rows``, each with
        ``number``, ``marked`` and ``cells``; ``requests`` of the marked step, or the last one.
    """
    divergence = mapping_of(document.get("divergence"))
    step = divergence.get("step")
    marked = step if type(step) is int else None
    groups = groups_of(_read_last_steps(files, marked))
    tables = [_table(group, marked) for group in groups[:_MAX_GROUPS]]
    return {
        "statement": divergence.get("statement"),
        "level": divergence.get("level"),
        "diverged": divergence.get("kind") in DIVERGED,
        "tables": tables,
        "left_out": max(0, len(groups) - _MAX_GROUPS),
    }


def _read_last_steps(files: IncidentFiles, marked: int | None) -> list[StoredSteps]:
    """Return the last steps of each rank, and those around `marked`."""
    found, left = [], _MAX_STEP_BYTES
    for name, file in files.listed.items():
        label = name.removeprefix("ranks/").removesuffix(STEPS_SUFFIX)
        if not name.startswith("ranks/") or not name.endswith(STEPS_SUFFIX) or left <= 0:
            continue
        data = files.read(name, min(left, file.size), from_end=True)
        left -= len(data)
        kept: deque[bytes] = deque(maxlen=_LAST_STEPS)
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
    columns, chosen, about = side_by_side(group, marked, _LAST_STEPS)
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
    return {"words": in_words(step), "mode": mode, "differs": differs, "open": step.ended is None}


# -- requests


def requests_of(document: Mapping[str, Any], files: IncidentFiles, *, prompts: bool) -> dict[str, Any]:
    """Return what the journals told of the requests, the suspects first; with `prompts` what users of the server wrote.

    Returns:
        ``rows``: each with what `_OF_REQUEST` names, ``numbers``, ``texts`` and ``suspect``. ``undecided``: a sentence
        where nothing is between the suspects. ``suspects_left_out``: how many the incident does not list.
    """
    suspects = {str(one.get("rid")): one for one in mappings_of(document.get("suspects"))}
    journal = mapping_of(mapping_of(document.get("requests")).get("journal"))
    path = journal.get("path") or "requests/requests.jsonl"
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
            rows.append(_request(request, suspects.get(str(request.get("rid"))), document, prompts=prompts))
    rows.sort(key=lambda row: (row["suspect"] is None, row["state"] != "unfinished"))
    return {
        "rows": rows,
        "left_out": max(0, count - len(rows)),
        "suspects": [
            {"rid": cut(str(one.get("rid")), 100), "level": one.get("level"), "reasons": list_of(one.get("reasons"))}
            for one in list(suspects.values())[:50]
        ],
        "undecided": undecided_in_words(document),
        "suspects_left_out": left_out if type(left_out := document.get("suspects_left_out")) is int else 0,
        "prompts": prompts,
    }


def _request(
    request: Mapping[str, Any], suspect: object, document: Mapping[str, Any], *, prompts: bool
) -> dict[str, Any]:
    shown = {name: cut(str(request.get(name) or ""), 100) for name in _OF_REQUEST}
    numbers, texts = ["aborted before"] if was_aborted_before(request, document) else [], []
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
    return shown | {"numbers": numbers, "texts": texts, "suspect": mapping_of(suspect) if suspect else None}


# -- the rest


def findings_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is reported of collectives, GPUs and lost peers, each with ``title``, ``level`` and ``lines``."""
    found = []
    collectives = mapping_of(document.get("collectives"))
    for one in mappings_of(collectives.get("findings"))[:_MAX_GROUPS]:
        title = f"{one.get('group')}: {str(one.get('kind')).replace('_', ' ')}"
        found.append({"title": title, "level": one.get("level"), "lines": [one.get("statement")], "open": True})
    for title, lines, is_open in (
        ("GPUs", list_of(mapping_of(document.get("gpus")).get("lines")), True),
        ("no flight recorder", list_of(collectives.get("missing")), False),
        ("lost servers of the pair", [_peer(one) for one in mappings_of(document.get("peers"))], True),
    ):
        if lines:
            found.append({"title": title, "level": "", "lines": lines, "open": is_open})
    return found


def _peer(peer: Mapping[str, Any]) -> str:
    waiting = [str(one.get("rid")) for one in mappings_of(peer.get("requests"))[:20]]
    words = f"{peer.get('role')} server {peer.get('address')}: {peer.get('sign')}, since {peer.get('since')}"
    return words + (f"; requests that wait for it: {', '.join(waiting)}" if waiting else "")


def environment_of(files: IncidentFiles, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the environment in parts, each with ``name`` and ``values``, pairs of a dotted name and a value."""
    whole = files.read_object("environment.json") or mapping_of(document.get("environment"))
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
