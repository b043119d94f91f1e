"""Which requests may have done it: those of the steps that the first failure had not finished, most suspicious first.

Where it failed in no step, while requests were received or a batch was made, or is no scheduler, those count that had
not been answered.

A suspicion is not a proof; that takes a server which fails again by the request alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_crashkit.model.incident import UNANSWERED, Incident, ProcessReport, Suspect

#: An incident names so many.
MAX_SUSPECTS = 16
#: How the ids of SGLang's own health checks begin.
_HEALTH_CHECK = "HEALTH_CHECK"
_SCHEDULER = "scheduler"
#: What a reason weighs. One of these makes a suspicion supported; that it is a request's first step, or asks for
#: what others do not, does not.
_NAMED, _SEEN, _ALONE, _UNUSUAL, _RECEIVED, _FIRST = 64, 32, 16, 4, 2, 1
#: The reason of a request that was alone.
ALONE = "it was the only request of the step that was not finished"
ONLY = f"{UNANSWERED}, was in no step yet, and no other one was under way"
_WAITED = f"{UNANSWERED}, and was in no step yet"
_RECEIVED_LAST = f"{_WAITED}; the rank had received it last"
#: A shorter id may stand in any text.
_MIN_NAMED = 6


def suspects_of(
    incident: Incident,
    seen: Mapping[str, int] | None = None,
    unusual: Mapping[str, str] | None = None,
    unanswered: Sequence[str] = (),
) -> list[Suspect]:
    """Return the suspects of an incident with its verdict.

    Args:
        incident: with the last steps of its schedulers.
        seen: of requests by id, in how many earlier incidents of the same fault one like it was suspected.
        unusual: of requests by id, the parameters that no other suspect has.
        unanswered: the ids of requests that were not answered, latest first, where a scheduler failed only those that
            were in no step of any rank. They count where it was in no step.
    """
    first = _first_failure(incident)
    if first is None or incident.kind == "peer_lost":
        return []
    last = first.steps.last if first.steps is not None else []
    finished = [step for step in last if step.get("ended") is not None]
    before = {str(request.get("rid")) for step in finished for request in step.get("requests") or ()}
    # Of a large batch the first few are listed.
    are_all = all(len(step.get("requests") or ()) >= (step.get("size") or 0) for step in finished)
    rids, size = _unfinished(first)
    # Between two batches nobody has noted yet who is in the next one, and it may be that one.
    is_between = bool(last) and last[-1].get("phase") == "received"
    received = set(_received(first)) if is_between else set()
    waited = [rid for rid in unanswered if rid not in rids] if is_between or not rids else []
    in_no_step = received.union(waited)
    rids += waited
    text = " ".join(str(entry.get("message")) for entry in incident.timeline if entry.get("event") == "exception")
    weighed = []
    for rid in rids:
        reasons = []
        if len(rid) >= _MIN_NAMED and rid in text:
            reasons.append((_NAMED, "the exception names it"))
        if count := (seen or {}).get(rid, 0):
            times = "an earlier incident" if count == 1 else f"{count} earlier incidents"
            reasons.append((_SEEN, f"a request like it was suspected in {times} of the same fault"))
        if size == 1 and not is_between:
            reasons.append((_ALONE, ALONE))
        if size + len(waited) == 1 and rid in in_no_step and first.role == _SCHEDULER:
            reasons.append((_ALONE, ONLY))
        elif rid in received:
            reasons.append((_RECEIVED, _RECEIVED_LAST))
        elif rid in in_no_step:
            reasons.append((_RECEIVED, _WAITED if first.role == _SCHEDULER else UNANSWERED))
        if names := (unusual or {}).get(rid):
            reasons.append((_UNUSUAL, f"no other one of the step asks for {names}"))
        if are_all and finished and rid not in before and rid not in waited:
            reasons.append((_FIRST, f"it was in none of the {len(finished)} steps before"))
        weighed.append((sum(weight for weight, _words in reasons), rid, [words for _weight, words in reasons]))
    weighed.sort(key=lambda one: -one[0])
    return [
        Suspect(rid, "supported" if weight >= _ALONE else "unknown", reasons or ["it was in the step"])
        for weight, rid, reasons in weighed[:MAX_SUSPECTS]
    ]


def _first_failure(incident: Incident) -> ProcessReport | None:
    failure = incident.verdict.first_failure if incident.verdict is not None else None
    return incident.process(failure.pid) if failure is not None else None


def _unfinished(process: ProcessReport) -> tuple[list[str], int]:
    """Return the requests of the steps that a scheduler had not finished, and how many there are.

    With overlap scheduling these are two: results of one step are processed while the next one is computed.
    """
    steps = process.steps
    if steps is None:
        return [], 0
    rids = list(steps.in_step.rids) if steps.in_step is not None else []
    size = steps.in_step.size if steps.in_step is not None else 0
    for step in reversed(steps.last):
        if step.get("ended") is None and (steps.in_step is None or step.get("number") != steps.in_step.number):
            others = [str(request.get("rid")) for request in step.get("requests") or ()]
            size += len(set(others) - set(rids))
            rids += others
    checks = {rid for rid in rids if rid.startswith(_HEALTH_CHECK)}
    return [rid for rid in dict.fromkeys(rids) if rid not in checks], size - len(checks)


def _received(process: ProcessReport) -> list[str]:
    """Return the requests that a scheduler had received for a step that it did not begin."""
    steps = process.steps
    assert steps is not None
    if steps.in_step is not None and steps.in_step.number == steps.last[-1].get("number"):
        return steps.in_step.rids
    return [str(request.get("rid")) for request in steps.last[-1].get("requests") or ()]
