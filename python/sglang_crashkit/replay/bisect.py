"""Find which requests of an incident bring its fault back, and what of them it takes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

from sglang_crashkit.incident.store import StoredIncident
from sglang_crashkit.incident.summary import mappings_of
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private
from sglang_crashkit.replay.fault import words_of
from sglang_crashkit.replay.requests import StoredRequest, read_requests
from sglang_crashkit.replay.search import isolate, lowest, minimize, needed, shortest
from sglang_crashkit.replay.trials import BudgetSpentError, Plan, Trials

REPRODUCER, SCRIPT = "reproducer.json", "reproduce.sh"
#: Requests bring a fault back where they do so this often, each time after others that did no harm.
_PROOFS = 2
#: Where they did not each time, it takes more, and as many without make it chance. So it is in order, each time: which
#: of many parts of a long row fails by chance once is easily found.
_MORE_PROOFS = 3
#: What of a prompt the fault depends on.
Prompt = Literal["nothing", "length", "content", "unknown"]

_PROMPTS = ("text", "input_ids")
#: Where it is not given the release decides, which may take long.
_MAX_NEW_TOKENS = "sampling_params.max_new_tokens"
_ALWAYS = (*_PROMPTS, _MAX_NEW_TOKENS)
#: Prompts of one character or token id that have nothing of the prompt at hand: what both of them fail with is not said
#: by any prompt. Lower ids than these stand for what is special, in most vocabularies.
_NEUTRAL_UNITS, _FIRST_LETTER, _FIRST_ID = 2, ord("a"), 200
#: As many as requests often ask for; and more than one that brings the fault back by asking for one or two.
_MORE_TOKENS = 16
#: What is sent in the place of a prompt that is not kept: the fault may lie in the parameters.
_STAND_IN = "a"
#: So many suspects at most are named that could not be sent.
_MAX_UNSENT = 3


@dataclass
class Result:
    """What was found."""

    incident: str  # the incident's id
    fault: str  # how its server failed
    #: Whether the same fault came back by `requests` alone on a server of its own, and others do not bring it back, as
    #: far as that was tried; see `is_confirmed`.
    reproduced: bool = False
    reason: str = ""  # why not; empty otherwise
    starts: int = 0  # how many servers were started
    #: The bodies to be sent, all at once or `in_order`; with their ids where it takes these, or it was not tried
    #: without.
    requests: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)  # which of the only request's parameters it takes
    prompt: Prompt = "unknown"  # what of the only request's prompt it depends on
    rids: list[str] = field(default_factory=list)  # the ids that the requests had
    left_out: list[str] = field(default_factory=list)  # what of them could not be sent as it came, a sentence each
    path: str = "/generate"  # where they are sent
    is_confirmed: bool = False  # each time that `requests` were sent after others, those did no harm and these did
    in_order: bool = False  # each of `requests` has to be answered before the next one is sent


def bisect(incident: StoredIncident, plan: Plan, say: Callable[[str], object] = lambda _line: None) -> Result:
    """Find the smallest that brings the fault of a finished incident back, and write it to the plan's folder.

    `say` is called with a line for each step.

    Raises:
        CrashkitError: the requests cannot be read, or a server cannot be started.
    """
    document = incident.document or {}
    result = Result(str(document.get("id")), words_of(document))
    stored = read_requests(incident)
    make_private_folder(plan.folder)
    result.left_out = [f"request {one.rid}: {why}" for one in stored for why in _unsent(one)]
    # Those that may be at fault first: what was under way, then what was given up, of which the server may still fail.
    items = sorted(
        (_as_far_as_kept(one) for one in stored if one.body),
        key=lambda one: (not one.is_complete, not one.was_running, not one.was_given_up),
    )
    trials = Trials(document, plan, say)
    try:
        if items:
            _find(trials, items, document, plan.tries, result, stored)
        else:
            result.reason = "none of the requests can be read"
    except BudgetSpentError as error:
        result.reason = result.reason or error.message
    finally:
        trials.close()
        result.starts = trials.starts
        if not result.reproduced:
            result.reason = "; ".join(filter(None, [result.reason, *_unsent_suspects(document, stored)]))
        if result.requests:
            _write_reproducer(plan.folder, result)
    return result


def _as_far_as_kept(request: StoredRequest) -> StoredRequest:
    """Return a request as it can be sent to another server, which has no sessions; with a prompt in any case."""
    body = {name: value for name, value in request.body.items() if name != "session_params"}
    if not any(name in body for name in _PROMPTS):
        # SGLang takes one form of a prompt alone.
        body = {name: value for name, value in body.items() if name != "input_embeds"} | {"text": _STAND_IN}
    return replace(request, body=body)


def _unsent(request: StoredRequest) -> list[str]:
    """Return what of a request cannot be sent as it came, in words."""
    lacks = [f"{', '.join(request.lacks)} is not kept"] if request.lacks else []
    return lacks + ["its session, which no other server has"] * bool(request.body.get("session_params"))


def _unsent_suspects(document: Mapping[str, Any], stored: Sequence[StoredRequest]) -> list[str]:
    """Return which of the most suspicious requests could not be sent as they came, a phrase each."""
    known = {rid: one for one in stored for rid in one.rids}
    whys = {
        # That it was aborted may be what it takes.
        rid: _unsent(known[rid]) + ["its abort, which is not repeated"] * known[rid].was_given_up
        if rid in known
        else ["it is not among the requests that are kept"]
        for rid in _suspected(document)[:_MAX_UNSENT]
    }
    return [f"suspect {rid} could not be sent as it came: {', '.join(why)}" for rid, why in whys.items() if why]


def _suspected(document: Mapping[str, Any]) -> list[str]:
    return [str(one.get("rid")) for one in mappings_of(document.get("suspects"))]


def _suspects(document: Mapping[str, Any], items: Sequence[StoredRequest]) -> list[StoredRequest]:
    found = [item for rid in _suspected(document) for item in items if rid in item.rids]
    return [item for place, item in enumerate(found) if item not in found[:place]]


def _find(
    trials: Trials,
    items: list[StoredRequest],
    document: Mapping[str, Any],
    tries: int,
    result: Result,
    stored: Sequence[StoredRequest],
) -> None:
    group, suspects = None, _suspects(document, items)
    for number in range(tries):
        if number:
            trials.forget_survivors()
        group = isolate(items, suspects, trials.first_failing)
        if group is not None:
            break
        trials.raise_refusal()
    if group is None:
        result.reason = f"not reproduced in {tries} tries of {len(items)} requests"
        _find_in_order(trials, items, result)
        return
    result.rids, result.requests = [one.rid for one in group], [dict(one.body) for one in group]
    result.path = group[0].path
    if not trials.failed_afresh(group) and not any(trials.fails_afresh(group) for _ in range(tries)):
        _depends_on_time(trials, items, result, "it came back once, and not by the same requests alone", tries)
        return
    result.reproduced = True
    answered = [one for one in stored if not one.was_running and not one.was_given_up]
    reduction = _Reduction(group, trials, answered)
    with trials.keeping(_PROOFS):
        reduction.run()
    proof = _prove(trials, reduction.group, reduction.innocent(items))
    if proof in _WHYS:
        result.reproduced = False
        _depends_on_time(trials, items, result, _WHYS[proof], tries)
        return
    result.is_confirmed = proof == "each time"
    if not result.is_confirmed:
        result.parameters = _parameters_of(group[0]) if len(group) == 1 else []
        return
    result.rids = [one.rid for one in reduction.group]
    result.requests = [dict(one.body) for one in reduction.group]
    if len(reduction.group) == 1:
        result.parameters, result.prompt = reduction.parameters, reduction.prompt


#: How requests bring a fault back: where ``by chance`` not more often than not, where ``not alone`` others do, too;
#: ``untried`` where there was no server left to find that out, or nothing that does no harm.
_Proof = Literal["each time", "at times", "by chance", "not alone", "untried"]
#: Why what was found is no proof.
_WHYS: dict[_Proof, str] = {
    "by chance": "what it came back by does not bring it back more often than not",
    "not alone": "others bring it back, too, so it is no one request's",
}


def _prove(
    trials: Trials,
    group: Sequence[StoredRequest],
    innocent: Iterable[Sequence[StoredRequest]],
    *,
    in_order: bool = False,
) -> _Proof:
    """Find out whether a group, which was seen to bring the fault back, does so again, and innocent requests do not.

    A fault that comes by time or by load comes with any requests. `innocent` are groups of these; one that does harm of
    another kind, or that no rank gets, tells nothing, and the next one is taken.
    """
    failed, survived = 0, 0
    starts, groups = 2 if in_order else 1, list(innocent)
    while groups and trials.starts_left >= starts:
        came = trials.contrast(groups[0], group, in_order=in_order)
        if came == "unfit":
            del groups[0]
            continue
        failed, survived = failed + (came == "same"), survived + (came == "survived")
        if came == "harm":
            return "not alone"
        if survived >= (1 if in_order else _MORE_PROOFS):
            return "by chance"
        if failed >= (_MORE_PROOFS if survived or in_order else _PROOFS):
            return "at times" if survived else "each time"
    return "at times" if failed else "by chance" if survived else "untried"


def _depends_on_time(trials: Trials, items: Sequence[StoredRequest], result: Result, why: str, tries: int) -> None:
    result.reason = f"not reproduced in {tries} tries: {why}; it depends on time or on load"
    _find_in_order(trials, items, result)


def _find_in_order(trials: Trials, items: Sequence[StoredRequest], result: Result) -> None:
    """Look whether requests that do nothing at once bring the fault back one after the other, and which of them."""
    group = sorted(items, key=lambda one: one.arrived)
    if len(group) < 2 or trials.starts_left < 2 or not trials.fails_afresh(group, in_order=True):
        return
    kept = 2 * _MORE_PROOFS if trials.starts_left > 3 * _MORE_PROOFS else 1

    def first_failing(groups: Sequence[Sequence[StoredRequest]]) -> int | None:
        # What those before it left behind counts, so each has a server of its own; some starts are kept for the end.
        tried = (trials.starts_left > kept and trials.fails_afresh(some, in_order=True) for some in groups)
        return next((number for number, fails in enumerate(tried) if fails), None)

    group = minimize(group, first_failing)
    proof = _prove(trials, group, [[_neutral(one, ()) for one in group]], in_order=True)
    if proof in _WHYS or (proof == "untried" and not trials.fails_afresh(group, in_order=True)):
        return
    result.reproduced = result.in_order = True
    result.is_confirmed = proof == "each time"
    result.reason, result.path = "", group[0].path
    result.rids, result.requests = [one.rid for one in group], [dict(one.body) for one in group]


class _Reduction:
    """Has requests, which fail together, ask for less and less, as far as the trials allow.

    `answered` are requests that did no harm.

    Attributes:
        group: what is left; it was seen to fail.
        parameters: of a single request, the names of those that are left.
        prompt: of a single request, what of its prompt the fault depends on.
    """

    def __init__(self, group: Sequence[StoredRequest], trials: Trials, answered: Sequence[StoredRequest]) -> None:
        self.group = list(group)
        self.parameters = _parameters_of(group[0])
        self.prompt: Prompt = "unknown"
        self._trials, self._answered = trials, answered
        #: The first that was seen to do no harm where one like it does.
        self._survivor: list[StoredRequest] | None = None

    def run(self) -> None:
        """Reduce requests, parameters, prompts and lengths, until no more servers may be started."""
        try:
            self._reduce_requests()
            self._reduce_parameters()
            for place in range(len(self.group)):
                self._reduce_prompt(place)
            for place in range(len(self.group)):
                self._reduce_length(place)
        except BudgetSpentError:
            pass

    def _reduce_requests(self) -> None:
        if len(self.group) > 1:
            # They meet by chance: fewer that survived once may still be all that it takes.
            self._trials.forget_survivors()
            self.group = minimize(self.group, self._trials.first_failing)
            self.parameters = _parameters_of(self.group[0])

    def _reduce_parameters(self) -> None:
        group = list(self.group)
        names = [(place, name) for place, request in enumerate(group) for name in _parameters_of(request)]
        # What needs no id is tried first.
        names += [(place, "rid") for place, request in enumerate(group) if "rid" in request.body]

        def kept(some: Sequence[tuple[int, str]]) -> list[StoredRequest]:
            return [_with(request, [name for its, name in some if its == place]) for place, request in enumerate(group)]

        few = needed(names, lambda groups: self._trials.first_failing([kept(some) for some in groups]))
        if few is not None:
            self.group, self.parameters = kept(few), [name for _place, name in few]

    def _reduce_prompt(self, place: int) -> None:
        body = self.group[place].body
        name, prompt = _prompt_of(body)
        if not isinstance(prompt, (str, list)):
            return
        is_text = isinstance(prompt, str)

        def made(value: Any) -> list[StoredRequest]:
            return self._put(place, {**body, name: value})

        def whole(parts: Sequence[Any]) -> list[StoredRequest]:
            return made("".join(parts) if is_text else list(parts))

        units = list(islice(_neutral_units(prompt, self._answered), _NEUTRAL_UNITS))
        kinds: list[tuple[Prompt, int]] = [("nothing", 1), ("length", len(prompt))]
        for kind, size in kinds if prompt else kinds[:1]:
            groups = [made(unit * size) for unit in units]
            survivor = next((group for group in groups if self._trials.first_failing([group]) is None), None)
            if groups and survivor is None:
                self.prompt, self.group = kind, groups[-1]
                return
            self._note_survivor(survivor)
        self.prompt = "content"
        # Cut from both ends first, which costs fewer servers the longer it is.
        run = shortest(list(prompt), lambda groups: self._trials.first_failing([whole(parts) for parts in groups]))
        kept = minimize(run, lambda groups: self._trials.first_failing([whole(parts) for parts in groups]))
        self.group = whole(kept)

    def _reduce_length(self, place: int) -> None:
        """Find out how many tokens have to be asked for."""
        body = self.group[place].body
        sampling = body.get("sampling_params")
        if not isinstance(sampling, dict) or type(most := sampling.get("max_new_tokens")) is not int:
            return

        def asking(number: int) -> list[StoredRequest]:
            return self._put(place, {**body, "sampling_params": {**sampling, "max_new_tokens": number}})

        number = lowest(most, lambda few: self._trials.first_failing([asking(one) for one in few]), at_least=1)
        # Of one that asks for next to none, it may be that.
        more = asking(_MORE_TOKENS)
        is_few = most <= 2 and self._trials.first_failing([more]) is None
        self.group = asking(number)
        if number > 1 or is_few:
            self._note_survivor(more if is_few else asking(number - 1))
            if len(self.group) == 1:
                self.parameters = [*self.parameters, _MAX_NEW_TOKENS]

    def innocent(self, items: Iterable[StoredRequest]) -> Iterator[list[StoredRequest]]:
        """Yield groups of as many requests as are left, which lack what it takes as far as that is known.

        `items` are those of the incident.
        """
        if self._survivor is not None:
            yield self._survivor
        neutral = [_neutral(one, self._answered) for one in self.group]
        if [one.body for one in neutral] != [one.body for one in self.group]:
            yield neutral
        rids, bodies = {one.rid for one in self.group}, [_without_id(one.body) for one in self.group]
        others = [one for one in items if one.rid not in rids and _without_id(one.body) not in bodies]
        if len(others) >= len(self.group):
            # Those that were answered are last.
            yield others[-len(self.group) :]

    def _note_survivor(self, group: list[StoredRequest] | None) -> None:
        if group is not None and self._survivor is None and self._trials.survived(group):
            self._survivor = group

    def _put(self, place: int, body: Mapping[str, Any]) -> list[StoredRequest]:
        return [replace(one, body=body) if its == place else one for its, one in enumerate(self.group)]


def _prompt_of(body: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of what a request has for a prompt, and that."""
    return next((name, body[name]) for name in _PROMPTS if name in body)


def _without_id(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "rid"}


def _neutral(request: StoredRequest, answered: Iterable[StoredRequest]) -> StoredRequest:
    """Return a request of the same form, with nothing of its prompt and without parameters; see `_neutral_units`."""
    body = dict(_with(request, ()).body)
    name, prompt = _prompt_of(body)
    unit = next(_neutral_units(prompt, answered), None) if isinstance(prompt, (str, list)) else None
    if unit is None:
        del body[name]
        name, unit = "text", _STAND_IN
    asked = {"sampling_params": {"max_new_tokens": _MORE_TOKENS}} if "sampling_params" in body else {}
    return replace(request, body={**body, name: unit, **asked})


def _neutral_units(prompt: str | list[Any], answered: Iterable[StoredRequest]) -> Iterator[Any]:
    """Yield prompts of one character or token id that `prompt` has not; none where it is of something else.

    Token ids that requests had which were answered come first, for the model has them.
    """
    if isinstance(prompt, str):
        letters = filter(str.isalpha, map(chr, range(_FIRST_LETTER, sys.maxunicode)))
        yield from (letter for letter in letters if letter not in prompt)
    elif all(type(one) is int for one in prompt):
        known = [one.body.get("input_ids") for one in answered]
        seen = [number for ids in known if isinstance(ids, list) for number in ids if type(number) is int]
        used, numbers = set(prompt), chain(dict.fromkeys(seen), (one for one in count(_FIRST_ID) if one not in seen))
        yield from ([number] for number in numbers if number not in used)


def _flat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's parameters by name, those of ``sampling_params`` each by itself."""
    flat = {name: value for name, value in body.items() if name != "sampling_params"}
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        flat |= {f"sampling_params.{name}": value for name, value in sampling.items() if value is not None}
    elif sampling is not None:
        flat["sampling_params"] = sampling
    return flat


def _parameters_of(request: StoredRequest) -> list[str]:
    """Return the names of a request's parameters, without those that each request has."""
    return [name for name in _flat(request.body) if name not in (*_ALWAYS, "rid")]


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
        lines.append(f"printf '%s' {shlex.quote(json.dumps(body))} | {send}{'' if result.in_order else ' &'}")
    write_private(folder / SCRIPT, "\n".join([*lines, "wait", ""]).encode())
    (folder / SCRIPT).chmod(0o700)
