"""Find which requests of an incident bring its fault back, and what of them it takes."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.quarantine import Entry, entry_of
from sglang_crashkit.incident.quarantine import Prompt as Counting
from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private
from sglang_crashkit.replay.fault import is_same_fault, words_of
from sglang_crashkit.replay.requests import StoredRequest, read_requests
from sglang_crashkit.replay.search import isolate, minimize, needed
from sglang_crashkit.replay.sender import send_all
from sglang_crashkit.replay.server import OwnServer, option_of

TRIALS, REPRODUCER, SCRIPT = "trials.json", "reproducer.json", "reproduce.sh"
#: ``same`` is the incident's fault; ``other`` another one, or a server that answers no more.
Outcome = Literal["same", "other", "survived"]
#: What of a prompt the fault depends on.
Prompt = Literal["nothing", "length", "content", "unknown"]

_PROMPTS = ("text", "input_ids")
#: Where it is not given the release decides, which may take long.
_ALWAYS = (*_PROMPTS, "sampling_params.max_new_tokens")
#: A prompt that says nothing.
_NEUTRAL_TEXT = "a"


class BudgetSpentError(CrashkitError):
    """No more servers may be started."""


@dataclass(frozen=True)
class Plan:
    """How the trials are done.

    Attributes:
        command: the words of the command that serves.
        folder: where everything goes.
        tries: how often the whole is tried before it counts as not reproduced.
        max_starts: how many servers are started at most.
        ready_secs: the longest that a server may take to start, in seconds.
        request_secs: the longest that an answer may take, in seconds.
    """

    command: list[str]
    folder: Path
    tries: int = 3
    max_starts: int = 30
    ready_secs: float = 900.0
    request_secs: float = 300.0


@dataclass
class Result:
    """What was found.

    Attributes:
        incident: the incident's id.
        fault: how its server failed.
        reproduced: whether the same fault came back twice, the second time by `requests` alone on a server of its own.
        reason: why not; empty otherwise.
        starts: how many servers were started.
        requests: the bodies to be sent, all at once.
        parameters: which of the only request's parameters it takes.
        prompt: what of the only request's prompt it depends on.
        rids: the ids that the requests had.
        left_out: what could not be sent as it came, a sentence each.
        path: where they are sent.
        is_confirmed: what was reduced brought it back once more, alone on a server of its own.
    """

    incident: str
    fault: str
    reproduced: bool = False
    reason: str = ""
    starts: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    prompt: Prompt = "unknown"
    rids: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    path: str = "/generate"
    is_confirmed: bool = False


class Trials:
    """Sends groups of requests to servers of one's own, and remembers what each came to.

    Args:
        incident: whose fault is looked for.
        plan: how.
        say: told of each step, in a line.
    """

    def __init__(self, incident: StoredIncident, plan: Plan, say: Callable[[str], object]) -> None:
        self.starts = 0
        self._document: Mapping[str, Any] = incident.document or {}
        self._plan = plan
        self._say = say
        self._server: OwnServer | None = None
        self._known = self._read()

    def first_failing(self, groups: Sequence[Sequence[StoredRequest]]) -> int | None:
        """Return the index of the first group that brings the fault back; see `search`.

        Raises:
            BudgetSpentError: it would take one more server than the plan allows.
        """
        for number, group in enumerate(groups):
            outcome = self._known.get(_key(group))
            if outcome is None:
                outcome = self._known[_key(group)] = self._try(group)
                self._write()
            if outcome == "same":
                return number
        return None

    def fails_afresh(self, group: Sequence[StoredRequest]) -> bool:
        """Say whether a group brings the fault back on a server to which nothing was sent before; see above."""
        self.close()
        return self._try(group) == "same"

    @property
    def can_start(self) -> bool:
        """Whether one more server may be started."""
        return self.starts < self._plan.max_starts

    def forget_survivors(self) -> None:
        """Have those tried again that did not fail: a fault may not come every time."""
        self._known = {key: outcome for key, outcome in self._known.items() if outcome == "same"}
        self.close()

    def close(self) -> None:
        """End the server at hand."""
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def _try(self, group: Sequence[StoredRequest]) -> Outcome:
        server = self._server or self._start()
        key = option_of(self._plan.command, "--api-key") or ""
        answers = send_all(
            server.address, group, self._plan.request_secs, api_key=key, is_over=lambda: server.is_failing
        )
        refused = [answer for answer in answers if answer.is_refused]
        if len(refused) == len(group):
            raise CrashkitError(
                f"the server refuses the requests with status {refused[0].status}: {refused[0].problem}",
                next_step="serve the same model with the same arguments",
            )
        is_lost = len(answers) < len(group) or any(answer.is_lost for answer in answers)
        found = server.failure(wait=is_lost)
        what = f"{len(group)} requests" if len(group) != 1 else f"request {group[0].rid}"
        if found is None and not is_lost and not server.has_ended:
            self._say(f"server {self.starts}: {what}: it serves on")
            return "survived"
        is_same = found is not None and is_same_fault(found.document or {}, self._document)
        told = words_of(found.document or {}) if found is not None else "it answers no more, and there is no incident"
        self._say(f"server {self.starts}: {what}: {'the same fault' if is_same else 'another fault'}: {told}")
        self.close()
        return "same" if is_same else "other"

    def _start(self) -> OwnServer:
        if self.starts >= self._plan.max_starts:
            raise BudgetSpentError(
                f"{self.starts} servers were started, which is what --starts allows",
                next_step="the same command again with a larger --starts goes on from here",
            )
        self.starts += 1
        folder = self._plan.folder / f"server-{self.starts}"
        while folder.exists():
            # Of a run before.
            folder = folder.with_name(f"{folder.name}-again")
        self._say(f"server {self.starts}: starting")
        server = self._server = OwnServer(self._plan.command, folder)
        server.start(self._plan.ready_secs)
        if server.failure(wait=False) is not None or server.has_ended:
            raise CrashkitError(
                "the server failed before anything was sent to it, so its fault is no request's",
                next_step=f"sglang-crashkit incidents {server.crash_folder}",
            )
        return server

    def _read(self) -> dict[str, Outcome]:
        try:
            known = json.loads((self._plan.folder / TRIALS).read_text())
            is_same = (known["incident"], known["command"]) == (self._document.get("id"), self._plan.command)
            trials = known["trials"] if is_same else {}
            return {str(key): value for key, value in trials.items() if value in ("same", "other", "survived")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _write(self) -> None:
        told = {"incident": self._document.get("id"), "command": self._plan.command, "trials": self._known}
        write_json(self._plan.folder / TRIALS, told)


def _key(group: Iterable[StoredRequest]) -> str:
    bodies = [{name: value for name, value in one.body.items() if name != "rid"} for one in group]
    return hashlib.sha256(json.dumps(bodies, sort_keys=True).encode()).hexdigest()


def bisect(incident: StoredIncident, plan: Plan, say: Callable[[str], object] = lambda _line: None) -> Result:
    """Find the smallest that brings the fault of an incident back, and write it to the plan's folder.

    Args:
        incident: a finished one.
        plan: how.
        say: told of each step, in a line.

    Raises:
        CrashkitError: the requests cannot be read, or a server cannot be started.
    """
    document = incident.document or {}
    make_private_folder(plan.folder)
    result = Result(str(document.get("id")), words_of(document))
    stored = read_requests(incident)
    result.left_out = [f"request {one.rid}: {', '.join(one.lacks)} is not kept" for one in stored if one.lacks]
    items = sorted((one for one in stored if one.is_complete), key=lambda one: not one.was_running)
    trials = Trials(incident, plan, say)
    try:
        if items:
            _find(trials, items, _suspects(document, items), plan.tries, result)
        else:
            result.reason = "none of the requests is kept whole"
    except BudgetSpentError as error:
        result.reason = result.reason or error.message
    finally:
        trials.close()
        result.starts = trials.starts
        if result.requests:
            _write_reproducer(plan.folder, result)
    return result


def _suspects(document: Mapping[str, Any], items: Sequence[StoredRequest]) -> list[StoredRequest]:
    named = document.get("suspects")
    rids = [one.get("rid") for one in named if isinstance(one, dict)] if isinstance(named, list) else []
    return [item for rid in rids for item in items if item.rid == rid]


def _find(
    trials: Trials, items: list[StoredRequest], suspects: list[StoredRequest], tries: int, result: Result
) -> None:
    group = None
    for number in range(tries):
        if number:
            trials.forget_survivors()
        group = isolate(items, suspects, trials.first_failing)
        if group is not None:
            break
    if group is None:
        result.reason = f"not reproduced in {tries} tries of {len(items)} requests"
        return
    result.rids, result.requests = [one.rid for one in group], [_bare(one) for one in group]
    result.path = group[0].path
    if not any(trials.fails_afresh(group) for _ in range(tries)):
        words = "it came back once, and not by the same requests alone"
        result.reason = f"not reproduced in {tries} tries: {words}; it depends on time or on load"
        return
    result.reproduced = True
    if len(group) == 1:
        whole = list(_flat(group[0].body))
        reduced = _reduce(group[0], trials, result)
        # A fault that comes now and then may seem to need what it does not.
        if trials.can_start and trials.fails_afresh([reduced]):
            result.requests, result.is_confirmed = [_bare(reduced)], True
        else:
            result.parameters, result.prompt = [name for name in whole if name not in (*_ALWAYS, "rid")], "unknown"


def entry_for(result: Result, now: float) -> Entry | None:
    """Return what recognises the request that was proven to bring the fault back; None where there is no such one.

    Args:
        result: see `bisect`.
        now: the time, in seconds since the epoch.
    """
    if not result.is_confirmed or len(result.requests) != 1:
        return None
    prompts: dict[Prompt, Counting] = {"nothing": "any", "length": "length"}
    prompt = prompts.get(result.prompt, "content")
    try:
        return entry_of(result.requests[0], result.parameters, prompt, result.fault, result.incident, now)
    except CrashkitError:
        return None


def _reduce(request: StoredRequest, trials: Trials, result: Result) -> StoredRequest:
    """Return a request that does the same with fewer parameters and less of a prompt, as far as the trials allow."""
    names = [name for name in _flat(request.body) if name not in _ALWAYS and name != "rid"]
    result.parameters = names
    try:
        few = needed(names, lambda groups: trials.first_failing([[_with(request, names)] for names in groups]))
        if few is not None:
            result.parameters, request = few, _with(request, few)
        return _reduce_prompt(request, trials, result)
    except BudgetSpentError:
        return request


def _reduce_prompt(request: StoredRequest, trials: Trials, result: Result) -> StoredRequest:
    name, prompt = next((name, request.body[name]) for name in _PROMPTS if name in request.body)
    if not isinstance(prompt, (str, list)) or not prompt:
        return request
    unit: Any = _NEUTRAL_TEXT if isinstance(prompt, str) else [prompt[0]]

    def made(value: Any) -> list[StoredRequest]:
        return [replace(request, body={**request.body, name: value})]

    kinds: list[tuple[Prompt, Any]] = [("nothing", unit), ("length", unit * len(prompt))]
    at = trials.first_failing([made(value) for _kind, value in kinds])
    if at is not None:
        result.prompt = kinds[at][0]
        return made(kinds[at][1])[0]
    result.prompt = "content"
    glue = "" if isinstance(prompt, str) else None

    def whole(parts: Sequence[Any]) -> list[StoredRequest]:
        return made("".join(parts) if glue is not None else list(parts))

    try:
        kept = minimize(list(prompt), lambda groups: trials.first_failing([whole(parts) for parts in groups]))
    except BudgetSpentError:
        return request
    return whole(kept)[0]


def _flat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's parameters by name, those of ``sampling_params`` each by itself."""
    flat = {name: value for name, value in body.items() if name != "sampling_params"}
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        flat |= {f"sampling_params.{name}": value for name, value in sampling.items() if value is not None}
    elif sampling is not None:
        flat["sampling_params"] = sampling
    return flat


def _with(request: StoredRequest, names: Sequence[str]) -> StoredRequest:
    """Return a request with no other parameters than these."""
    body: dict[str, Any] = {}
    for name, value in _flat(request.body).items():
        if name in names or name in _ALWAYS:
            parent, _, child = name.partition(".")
            if child:
                body.setdefault(parent, {})[child] = value
            else:
                body[name] = value
    return replace(request, body=body)


def _bare(request: StoredRequest) -> dict[str, Any]:
    return {name: value for name, value in request.body.items() if name != "rid"}


def _write_reproducer(folder: Path, result: Result) -> None:
    write_json(folder / REPRODUCER, asdict(result))
    lines = [
        "#!/bin/sh",
        "# Sends what brought this back to the server whose URL is given:",
        *(f"#   {line}" for line in result.fault.splitlines()),
        'url="${1:?usage: reproduce.sh http://HOST:PORT}"',
    ]
    for body in result.requests:
        # On its standard input: an argument holds 128 KiB.
        send = f"curl -sS --data-binary @- -H 'Content-Type: application/json' \"$url{result.path}\""
        lines.append(f"printf '%s' {shlex.quote(json.dumps(body))} | {send} &")
    write_private(folder / SCRIPT, "\n".join([*lines, "wait", ""]).encode())
    (folder / SCRIPT).chmod(0o700)
