"""Finds the requests that may have caused a failure: those of the failed process's step, most suspicious first.

``docs/incidents.md`` lists which requests count in which case. The frames of the main thread show whether a control
request was being handled: in all releases one function of the scheduler handles everything that it receives. If a
process died without frames, its record of steps shows it.

A suspicion is not a proof. The proof is a server that fails again by that request alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from sglang_crashkit.model import ALONE, ALONE_AT, IN_LAST, IN_SEVERAL, ONLY, UNANSWERED
from sglang_crashkit.model.incident import Incident, InStep, LastSteps, ProcessReport, Suspect
from sglang_crashkit.model.sample import FREEZER
from sglang_crashkit.model.step import Step
from sglang_crashkit.model.verdict import Level

#: Most suspects that an incident lists.
MAX_SUSPECTS = 16
#: Signals that other programs send to end a server; no request causes them, except through the kernel's OOM killer.
_SENT_BY_OTHERS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
#: The weights of reasons. Any reason from `_ALONE` up makes a suspicion ``supported``; an unusual parameter, or the
#: request's first step, does not.
_NAMED, _SEEN, _ABOUT, _ALONE, _UNUSUAL, _RECEIVED, _FIRST = 64, 32, 24, 16, 4, 2, 1
_ONLY_NEW = f"{UNANSWERED}, and was the only one in no step yet when the rank failed at taking in such"
_WAITED = f"{UNANSWERED}, and was in no step yet"
_RECEIVED_LAST = f"{_WAITED}; the rank had received it last"
#: A shorter id may occur in any text by chance.
_MIN_NAMED = 6
#: Most parameters to name, and the number of innermost frames that show what a stack is about.
_MAX_NAMES, _MAX_FRAMES = 4, 8
#: Functions named after a parameter that every batch passes through, whatever its requests ask for.
_PASSED = re.compile(
    r"(?:[\w<>]+\.)*(?:_sample_from_logprobs|compute_extend_logprob_start_len|get_logprob_from_pp_outputs"
    r"|move_logprobs_to_cpu|_make_sampling_support_logprobs_\w+|_apply_(?:pre|post)_grammar_logits_transforms"
    r"|before_grammar|_advance_pending_grammar|advance_grammar_fsm|\w+_grammar_overlap|has_waiting_grammars"
    r"|grammar_needs_sync) "
)
_PENALIZES = r"(\w+\.)*_?(?!prepare_if)(apply|prepare|cumulate|accumulate|get_scaling|filter|merge)\w* "
#: Parameters, and the frames that are about them, by function or file. For LoRA only the loading of an adapter counts:
#: a server with adapters prepares each batch for them, and older releases multiply each batch by their weights.
_PLACES = (
    (re.compile(r".*logprob.*"), re.compile(r".*logprob")),
    (re.compile(r"regex|json_schema|ebnf|structural_tag"), re.compile(r".*(grammar|constrained/|outlines|llguidance)")),
    (re.compile(r"stop|stop_regex"), re.compile(r"(\w+\.)*_check_str_based_finish |.*(stop_str|stop_regex)")),
    (re.compile(r"logit_bias"), re.compile(r".*logit_bias")),
    (re.compile(r"min_new_tokens|stop_token_ids"), re.compile(_PENALIZES + r".*min_new_tokens")),
    (re.compile(r"\w+_penalty"), re.compile(_PENALIZES + r".*penaltylib")),
    (re.compile(r"custom_logit_processor"), re.compile(r".*custom_logit_processor")),
    (re.compile(r"lora_path"), re.compile(r"(\w+\.)*load_lora\w* ")),
)
#: A GPU kernel's error is reported by any later call, but a lack of memory is reported by the call that asks for it.
_OF_GPU = re.compile(r"\b(?:CUDA|HIP|XPU|NPU|CUBLAS|NCCL)|cuDNN|AcceleratorError|DistBackendError")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory")
#: Signals that are raised by the instruction that a thread executes.
_OF_THREAD = frozenset({"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
#: Functions in which a scheduler takes in requests that were in no step yet.
_TAKES_IN = re.compile(
    r"(?:[\w<>]+\.)*(?:handle_(?:generate|embedding)_request|_?get_new_batch_prefill\w*|prepare_for_extend) "
)

_FRAME = re.compile(r"(?:[\w<>]+\.)*(?P<name>[\w<>]+) \((?P<path>[^)]*)\)")
#: The function in which a scheduler handles what it received, by type.
_HANDLES_RECEIVED = "process_input_requests"
#: The functions that call it, and everything else that a scheduler does.
_LOOP = re.compile(r"event_loop\w*|run_scheduler_process")
#: Control requests whose effect continues during later batches.
_PROFILES = re.compile(r"_?(start|stop|init)_profile")
#: Frames between that function and the handler; and the handlers of generation requests and of aborts.
_BETWEEN = re.compile(r"handle|\w*wrap\w*|decorate_\w+|<lambda>")
_NO_CONTROL = re.compile(r"_?handle_(batch_)?(generate|embedding)\w*|abort_request")


class Asked(NamedTuple):
    """What a request asks for."""

    content: str  # a hash of the whole request; empty if not known
    parameters: Set[str]  # the names of what it asks for in addition to its prompt


class _Step(NamedTuple):
    """The requests of a step: the listed ids and the number of all, both without health checks."""

    rids: list[str]
    size: int


class _Choice(NamedTuple):
    """The requests that are suspects: their ids and number, and by id the weight and the reason of its place."""

    rids: list[str]
    size: int
    places: dict[str, tuple[int, str]]


def suspects_of(
    incident: Incident,
    seen: Mapping[str, int] | None = None,
    asked: Mapping[str, Asked] | None = None,
    unanswered: Sequence[str] = (),
    most: int = MAX_SUSPECTS,
) -> tuple[list[Suspect], int]:
    """Return the suspects of an incident with a verdict, and the number of suspects that are not listed.

    Args:
        incident: the incident, with the last steps of its schedulers and the counts of its journals.
        seen: by id, the number of earlier incidents of the same fault in which a similar request was suspected.
        asked: what each possible suspect asks for, by id.
        unanswered: the ids of unanswered requests, latest first; if a scheduler failed, only those that were in no step
            of any rank. They count if the scheduler was in no step.
        most: the number of suspects to list.
    """
    first = incident.first_failure
    if first is None or incident.kind == "peer_lost" or _is_of_control(incident, first):
        return [], 0
    steps = _steps_of(first)
    finished = [step for step in steps.last if step.ended is not None]
    before = {rid for step in finished for rid in _rids_of(steps, step)}
    # Not all requests of a very large batch are known, so a request's first step may not be detected.
    are_all = all(len(_rids_of(steps, step)) >= step.size for step in finished)
    chosen, is_nobodys = _choose(incident, first, unanswered), is_by_others(incident)
    text, own = " ".join(_exceptions(incident)), _only_asked(asked or {})
    # With a GPU's error the frames may not be where it happened: the GPU reports earlier work there.
    frames = frames_of(first) if not _OF_GPU.search(text) else []
    weighed, waiting = [], set(unanswered)
    for rid in chosen.rids:
        reasons = []
        if len(rid) >= _MIN_NAMED and rid in text and re.search(rf"(?<![\w-]){re.escape(rid)}(?![\w-])", text):
            reasons.append((_NAMED, "the exception names it"))
        if count := (seen or {}).get(rid, 0):
            times = "an earlier incident" if count == 1 else f"{count} earlier incidents"
            reasons.append((_SEEN, f"a request like it was suspected in {times} of the same fault"))
        if (place := chosen.places.get(rid)) and not (is_nobodys and place[0] == _ALONE):
            reasons.append(place)
        if (names := own.get(rid)) and ((asking := _asks_alone(names, frames))[0] == _ABOUT or len(own) > 2):
            reasons.append(asking)
        if are_all and finished and rid not in before and rid not in waiting:
            reasons.append((_FIRST, f"it was in none of the {len(finished)} steps before"))
        reasons.sort(key=lambda one: -one[0])
        weight = sum(weight for weight, _words in reasons)
        level: Level = "supported" if weight >= _ALONE and not is_nobodys else "unknown"
        weighed.append((weight, Suspect(rid, level, [words for _weight, words in reasons] or ["it was in the step"])))
    weighed.sort(key=lambda one: -one[0])
    listed = [suspect for _weight, suspect in weighed[:most]]
    return listed, chosen.size - len(listed)


def _only_asked(asked: Mapping[str, Asked]) -> dict[str, list[str]]:
    """Return, by request, the names of the parameters that no other request asks for; empty for a single request.

    Copies of one request, because it was sent again or has several answers, count as one request.
    """
    asking: dict[str, list[str]] = {}
    for rid, one in asked.items():
        for name in one.parameters:
            asking.setdefault(name, []).append(one.content or rid)
    lone = {
        name
        for name, contents in asking.items()
        if len(contents) == 1 or (len(set(contents)) == 1 and 2 * len(contents) <= len(asked))
    }
    return {rid: sorted(lone & one.parameters) for rid, one in asked.items()} if len(asked) > 1 else {}


def _asks_alone(names: Sequence[str], frames: Sequence[str]) -> tuple[int, str]:
    """Return the weight and reason of parameters that only one request asks for; more if a frame is about one."""
    for name in (name.rpartition(".")[2] for name in names):
        for parameter, place in _PLACES:
            if parameter.fullmatch(name):
                near = (frame for frame in frames[:_MAX_FRAMES] if not _PASSED.match(frame))
                if (found := next(filter(place.match, near), None)) is not None:
                    at = found.partition(" ")[0]
                    return _ABOUT, f"it alone asks for {name}, which the rank was at ({at})"
    # Requests of OpenAI's API have a value for every parameter, so not all are named.
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return _UNUSUAL, f"no other one of the step asks for {', '.join(names[:_MAX_NAMES])}{more}"


def is_of_no_request(incident: Incident) -> bool:
    """Return whether no request caused the first failure: a consequence, an end from outside, or a divergence."""
    first, verdict, divergence = incident.first_failure, incident.verdict, incident.divergence
    if first is None or verdict is None:
        return False
    is_consequence = verdict.kind == "parent_ended" or (
        # An exception is a consequence of the lost peer; a process that others waited for in vain raised nothing.
        verdict.kind == "lost_peer" and bool(_exceptions(incident, first.pid))
    )
    is_outside = verdict.kind == "oom_kill" or is_by_others(incident)
    is_diverged = divergence is not None and divergence.is_one
    return is_consequence or is_outside or is_diverged or verdict.kind == "thread_died"


def is_by_others(incident: Incident) -> bool:
    """Return whether another program ended or stopped the process that failed first, so that no request did."""
    process = incident.first_failure
    if process is None:
        return False
    if process.exit is not None:
        # A process that raised or hung is killed later, when its server ends.
        is_later = incident.verdict is None or incident.verdict.kind == "hang" or _exceptions(incident, process.pid)
        return not is_later and process.exit.signal in _SENT_BY_OTHERS and process.exit.cause != "oom_kill"
    state = process.samples[-1].state if process.samples else process.state_letter
    is_frozen = state[:1] == "S" and str((process.state or {}).get("wchan")) in FREEZER
    return state[:1] in ("T", "t") or is_frozen


def _choose(incident: Incident, first: ProcessReport, unanswered: Sequence[str]) -> _Choice:
    """Return the requests that may have caused the first failure, by their steps; see `suspects_of`."""
    known = _steps_of(first)
    last, current = known.last, known.in_step
    has_results = current is not None and current.phase == "forward_done"
    # Between two batches the requests of the next one are not recorded yet, and that batch may be the one that failed.
    is_between = bool(last) and last[-1].phase == "received" and not has_results
    steps, alone = _unfinished(known), ""
    is_beside = _may_be_beside(incident, first)
    if current is not None and not is_between:
        is_sure = not is_beside or _under_way(incident) == 1
        alone = ALONE if is_sure and _size(steps) == 1 else ""
        if len(steps) > 1 and not is_beside and _is_of_thread(incident, first):
            steps = steps[:1]
            alone = alone or (ALONE_AT if _size(steps) == 1 else "")
    rids = list(listed := dict.fromkeys(rid for step in steps for rid in step.rids))
    # A place among several requests has no weight.
    place = (_ALONE, alone) if alone else (0, IN_SEVERAL) if len(steps) > 1 else None
    places = dict.fromkeys(rids, place) if place else {}
    received = _received(first) if is_between else []
    waited = [rid for rid in unanswered if rid not in listed] if is_between or is_beside or not rids else []
    # Requests of the step are as likely, so waiting ones weigh nothing beside them.
    weight = _RECEIVED if is_between or not rids else 0
    places |= dict.fromkeys(waited, (weight, _WAITED if first.is_rank else UNANSWERED))
    places |= dict.fromkeys(received, (_RECEIVED, _RECEIVED_LAST))
    size, in_no_step = _size(steps) + len(waited), {*received, *waited}
    is_one = len(in_no_step) == 1 and in_no_step <= set(unanswered)
    if is_one and (only := _only_words(incident, first, size)):
        places |= dict.fromkeys(in_no_step, (_ALONE, only))
    # If an idle rank hangs or is ended by others, earlier requests are not the cause.
    is_idle = is_by_others(incident) or (incident.verdict is not None and incident.verdict.kind == "hang")
    if size == 0 and not is_idle:
        # All steps are finished: take the last one that had requests.
        told = (_step(known, one) for one in reversed(last) if one.ended is not None)
        if (answered := next((one for one in told if one.size), None)) is not None:
            return _Choice(answered.rids, answered.size, dict.fromkeys(answered.rids, (0, IN_LAST)))
    return _Choice(rids + waited, size, places)


def _steps_of(process: ProcessReport) -> LastSteps:
    return process.steps or LastSteps([], None)


def _is_of_control(incident: Incident, first: ProcessReport) -> bool:
    """Return whether the first failure was in a control request; no for a GPU error, which may be of earlier work."""
    if not first.control or any(map(_OF_GPU.search, _exceptions(incident, first.pid)[:1])):
        return False
    # Frames show what was being handled; the record alone counts only if that round received no requests.
    is_seen = bool(first.raised_through or first.samples)
    return is_seen or not _steps_of(first).last or not _received(first)


def _exceptions(incident: Incident, pid: int | None = None) -> list[str]:
    """Return the messages of the exceptions of one process, or of all, in the order in which they were reported."""
    told = [entry for entry in incident.timeline if entry.get("event") == "exception"]
    return [str(entry.get("message")) for entry in told if pid is None or entry.get("pid") == pid]


def _is_of_thread(incident: Incident, process: ProcessReport) -> bool:
    """Return whether a process failed by the work of its own thread, and not by a GPU's asynchronous work."""
    if raised := _exceptions(incident, process.pid):
        return not _OF_GPU.search(raised[0]) or bool(_OUT_OF_MEMORY.search(raised[0]))
    return process.exit is not None and process.exit.signal in _OF_THREAD


def _may_be_beside(incident: Incident, process: ProcessReport) -> bool:
    """Return whether a process may have failed by something unrelated to its step."""
    if _exceptions(incident, process.pid) or process.hit_in_main:
        return False
    is_out_of_memory = process.exit is not None and process.exit.cause == "oom_kill"
    return is_out_of_memory or process.hit_in_main is False


def _under_way(incident: Incident) -> int | None:
    """Return the number of unanswered requests; None if the journal may not contain all of them."""
    journal = incident.requests.journal
    if journal is None or not journal.path or journal.left_out or journal.lost or journal.torn or journal.reason:
        return None
    return journal.unfinished


def _only_words(incident: Incident, process: ProcessReport, size: int) -> str:
    """Return the reason for the only request in no step yet, of `size` suspects; empty if there is no reason."""
    under_way = _under_way(incident)
    if not process.is_rank or under_way is None:
        return ""
    if under_way == size == 1:
        return ONLY
    # The other requests were in steps already.
    frames = process.raised_through or process.doing
    takes_in = bool(_exceptions(incident, process.pid)) and any(map(_TAKES_IN.match, frames))
    return _ONLY_NEW if takes_in else ""


def _unfinished(steps: LastSteps) -> list[_Step]:
    """Return the unfinished steps of a scheduler that contain requests, its current step first."""
    current = steps.in_step
    found = [_step(steps, current)] if current is not None else []
    others = (step for step in reversed(steps.last) if current is None or step.number != current.number)
    found += [_step(steps, step) for step in others if step.ended is None]
    return [step for step in found if step.size]


def _step(steps: LastSteps, step: Step | InStep) -> _Step:
    rids = _rids_of(steps, step)
    listed = [rid for rid in dict.fromkeys(rids) if rid not in steps.checks]
    checks = sum(rid in steps.checks for rid in rids)
    return _Step(listed, max(step.size - checks, len(listed)))


def _rids_of(steps: LastSteps, step: Step | InStep) -> list[str]:
    """Return the known ids of the requests of a step."""
    listed = step.rids if isinstance(step, InStep) else [request.rid for request in step.requests]
    return steps.rids.get(step.number) or listed


def _size(steps: Sequence[_Step]) -> int:
    """Return the number of requests in these steps; unlisted ones of large steps may be the same, and count once."""
    listed = {rid for step in steps for rid in step.rids}
    return len(listed) + max((step.size - len(step.rids) for step in steps), default=0)


def _received(process: ProcessReport) -> list[str]:
    """Return the ids of the requests that a scheduler had received for a step that it did not begin."""
    steps = _steps_of(process)
    last, current = steps.last[-1], steps.in_step
    return _rids_of(steps, current if current is not None and current.number == last.number else last)


# -- control requests


def frames_of(process: ProcessReport) -> list[str]:
    """Return the frames of a process's exception, else the known frames of its main thread, innermost first."""
    threads = process.samples[-1].threads if process.samples else ()
    sampled = [str(frame) for frame in threads[0].frames] if threads else []
    return process.raised_through or sampled or process.doing


def control_of(process: ProcessReport) -> str:
    """Return the control request that a scheduler handled when it failed or hung; empty if it handled none.

    If its frames do not reach the function that shows this, `control` of the report is used: the record keeps a control
    request from its receipt until the next batch or round begins.
    """
    names = [found["name"] for frame in frames_of(process) if (found := _FRAME.match(frame))]
    if any(map(_PROFILES.fullmatch, names)):
        return "profile"
    if _HANDLES_RECEIVED not in names:
        return "" if process.raised_through or any(map(_LOOP.fullmatch, names)) else process.control
    dispatched, *inner = (*reversed(names[: names.index(_HANDLES_RECEIVED)]), "")
    name = next((one for one in inner if one and not _BETWEEN.fullmatch(one)), "") if dispatched == "__call__" else ""
    return "" if _NO_CONTROL.fullmatch(name) else name
