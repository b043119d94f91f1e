"""Find which requests of an incident reproduce its fault, and prove it on servers that the kit starts for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.fingerprint import words_of
from sglang_crashkit.incident.requests import StoredRequest, read_requests
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private
from sglang_crashkit.model.incident import Incident
from sglang_crashkit.replay.server import OwnServer

T = TypeVar("T")
REPRODUCER, SCRIPT = "reproducer.json", "reproduce.sh"
#: New servers on each of which the found requests have to reproduce the fault, after other requests that did not; and
#: the most answered requests of the incident that are sent as those others.
_PROOFS, _CONTROLS = 2, 8
#: How often all requests are tried before the fault counts as not reproduced.
_TRIES = 3
_PROMPTS, _SAMPLING = ("text", "input_ids", "input_embeds"), "sampling_params"
_STAND_IN = "a"  # in the place of a prompt
_HARMLESS = StoredRequest("control", 0.0, False, {"text": _STAND_IN, _SAMPLING: {"max_new_tokens": 16}})


@dataclass(frozen=True)
class Plan:
    """How the requests are searched for."""

    command: list[str]  # the words of the command that starts a server
    folder: Path  # folder for logs, crash folders and the result
    max_starts: int = 30  # how many servers are started at most
    ready_secs: float = 900.0  # the longest that a server may take to start, in seconds
    request_secs: float = 300.0  # the longest that an answer may take, in seconds


@dataclass
class Result:
    """The result of the search."""

    incident: str  # the incident's id
    fault: str  # how its server failed
    #: Whether `requests` reproduced the fault on each of `_PROOFS` new servers, and the others before them on none.
    reproduced: bool = False
    reason: str = ""  # why it was not reproduced; empty otherwise
    starts: int = 0  # how many servers were started
    rids: list[str] = field(default_factory=list)  # the ids of the requests that were found
    requests: list[dict[str, Any]] = field(default_factory=list)  # the bodies to send, all at once
    parameters: list[str] = field(default_factory=list)  # parameters that a single request needs to fail
    needs_prompt: bool = True  # whether a single request needs its own prompt to fail
    left_out: list[str] = field(default_factory=list)  # a sentence for each request that is not kept in full
    path: str = "/generate"  # path of the URL that they are sent to


class BudgetSpentError(CrashkitError):
    """No more servers may be started."""


def bisect(incident: StoredIncident, plan: Plan, say: Callable[[str], object] = lambda _line: None) -> Result:
    """Find the fewest requests that reproduce the fault of a finished incident, and write them to the plan's folder.

    `say` is called with a line for each step.

    Raises:
        CrashkitError: the requests cannot be read, or a server cannot be started.
    """
    result = Result(incident.incident.id, words_of(incident.incident))
    stored = read_requests(incident)
    result.left_out = [f"request {one.rid}: {', '.join(one.lacks)} is not kept" for one in stored if one.lacks]
    trials = _Trials(incident.incident, plan, say)
    try:
        _find(trials, [_sendable(one) for one in stored if one.body], result)
    except BudgetSpentError as error:
        result.reason = error.message
    finally:
        trials.close()
        result.starts = trials.starts
        if result.requests:
            write_json(plan.folder / REPRODUCER, asdict(result))
            send = f"curl -sS --data-binary @- -H 'Content-Type: application/json' \"$1{result.path}\" &"
            # curl reads the body from its standard input: an argument holds at most 128 KiB.
            bodies = [f"printf '%s' {shlex.quote(json.dumps(body))} | {send}" for body in result.requests]
            usage = ': "${1:?usage: reproduce.sh http://HOST:PORT}"'
            script = plan.folder / SCRIPT
            write_private(script, "\n".join(["#!/bin/sh", usage, *bodies, "wait", ""]).encode())
            script.chmod(0o700)
    return result


def _find(trials: _Trials, items: Sequence[StoredRequest], result: Result) -> None:
    suspected = [one.rid for one in trials.incident.suspects]
    # Each suspect is tried alone first: there are few, and a request that does no harm costs no new server.
    if not items:
        result.reason = "the incident has no request that can be sent"
        return
    groups = [*([item] for rid in suspected for item in items if rid in item.rids), items]
    for _number in range(_TRIES):
        group = next((one for one in groups if trials.fails(one)), None)
        if group is not None:
            break
        trials.renew()
    else:
        result.reason = f"not reproduced in {_TRIES} tries of {len(items)} requests ({trials.outcome})"
        return
    group = minimize(group, trials.fails)
    result.rids, result.path = [one.rid for one in group], group[0].path
    if len(group) == 1:
        group = [_reduce(group[0], trials, result)]
    result.requests = [dict(one.body) for one in group]
    answered = [one for one in items if not one.was_running and one.rid not in result.rids]
    for _number in range(_PROOFS):
        trials.renew()
        # A fault that depends on time or load comes back with any requests.
        if trials.brings_back([*answered[:_CONTROLS], _HARMLESS]):
            result.reason = "others bring it back, too, so it is not due to one request; it depends on time or on load"
            return
        if not trials.brings_back(group):
            result.reason = "it came back once, and not by the same requests alone; it depends on time or on load"
            return
    result.reproduced = True


def minimize(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of `items`, which fail together, that still fails; no smaller part of it that was tried fails.

    This is delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002).
    """
    kept, parts = list(items), 2
    while len(kept) > 1:
        bounds = [len(kept) * number // parts for number in range(parts + 1)]
        subsets = [kept[begin:end] for begin, end in pairwise(bounds)]
        rests = [list(chain(*subsets[:number], *subsets[number + 1 :])) for number in range(parts)] if parts > 2 else []
        found = next((number for number, some in enumerate(subsets + rests) if fails(some)), None)
        if found is not None:
            kept, parts = (subsets + rests)[found], 2 if found < len(subsets) else max(2, parts - 1)
        elif parts == len(kept):
            break
        else:
            parts = min(len(kept), parts * 2)
    return kept


def _reduce(request: StoredRequest, trials: _Trials, result: Result) -> StoredRequest:
    """Remove from a request the parameters, and the prompt, without which it still reproduces the fault."""

    def fails(body: Mapping[str, Any]) -> bool:
        return trials.fails([replace(request, body=body)])

    body = _fewest(request.body, (*_PROMPTS, _SAMPLING), fails)
    sampling = body.pop(_SAMPLING, None)
    if isinstance(sampling, dict):
        # max_new_tokens stays: without it a request may take long.
        sampling = _fewest(sampling, ("max_new_tokens",), lambda some: fails({**body, _SAMPLING: some}))
        body |= {_SAMPLING: sampling} if sampling else {}
        result.parameters = [f"{_SAMPLING}.{name}" for name in sampling if name != "max_new_tokens"]
    result.parameters += [name for name in body if name not in (*_PROMPTS, _SAMPLING, "rid")]
    without = {name: value for name, value in body.items() if name not in _PROMPTS} | {"text": _STAND_IN}
    result.needs_prompt = without != body and not fails(without)
    return replace(request, body=body if result.needs_prompt else without)


def _fewest(
    fields: Mapping[str, Any], always: Sequence[str], fails: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """Return the fewest of `fields` with which a request fails; those named in `always` stay."""

    def kept(names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name in names or name in always}

    names = [name for name in fields if name not in always]
    return kept(()) if fails(kept(())) else kept(minimize(names, lambda some: fails(kept(some))))


def _sendable(request: StoredRequest) -> StoredRequest:
    """Return a request that another server, which has no sessions, can answer; a lost prompt gets a stand-in."""
    body = {name: value for name, value in request.body.items() if name != "session_params"}
    if "text" not in body and "input_ids" not in body:
        body = {name: value for name, value in body.items() if name not in _PROMPTS} | {"text": _STAND_IN}
    return replace(request, body=body)


class _Trials:
    """Sends groups of requests, one after the other, to a server that it starts; a failed server is replaced."""

    def __init__(self, incident: Incident, plan: Plan, say: Callable[[str], object]) -> None:
        self.incident = incident  # the incident whose fault is to come back
        self.starts = 0  # how many servers were started
        self.outcome = ""  # result of the last group, in words
        self._plan, self._say = plan, say
        self._server: OwnServer | None = None
        self._known: dict[str, bool] = {}

    def fails(self, group: Sequence[StoredRequest]) -> bool:
        """Say whether a group reproduces the fault; each group is tried only once; raises what `_start` raises."""
        key = json.dumps([dict(one.body) for one in group], sort_keys=True)
        if key not in self._known:
            self._known[key] = self.brings_back(group)
        return self._known[key]

    def renew(self) -> None:
        """Use a new server, and forget the groups that did not fail: a fault may not come every time."""
        self._known = {key: True for key, fails in self._known.items() if fails}
        self.close()

    def close(self) -> None:
        """End the server that runs."""
        if self._server is not None:
            # Forget the server only after it has ended, because an interrupt may come before that.
            self._server.end()
            self._server = None

    def brings_back(self, group: Sequence[StoredRequest]) -> bool:
        """Send a group, also one that was tried, and say whether the fault comes back; see `fails`."""
        server = self._server or self._start()
        tried = server.try_requests(group, self.incident, self._plan.request_secs)
        self.outcome = tried.outcome
        what = f"request {group[0].rid}" if len(group) == 1 else f"{len(group)} requests"
        self._say(f"{server.folder.name}: {what}: {tried.outcome}")
        if not tried.serves_on:
            self.close()
        return tried.is_same

    def _start(self) -> OwnServer:
        """Start one more server; BudgetSpentError: the plan allows no more; CrashkitError: it cannot be started."""
        if self.starts >= self._plan.max_starts:
            raise BudgetSpentError(f"{self.starts} servers were started, and --starts allows no more")
        self.starts += 1
        make_private_folder(self._plan.folder)
        self._server = OwnServer(self._plan.command, self._plan.folder / f"server-{self.starts}")
        self._say(f"{self._server.folder.name}: starting")
        self._server.start(self._plan.ready_secs, self._say)
        return self._server
