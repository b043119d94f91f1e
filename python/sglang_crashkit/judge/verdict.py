"""Chooses the verdict: the finding, among those of all parts of the judge, that explains the case."""

from __future__ import annotations

import re

from sglang_crashkit.judge.components import component_of
from sglang_crashkit.judge.failures import Failures, guess
from sglang_crashkit.judge.finding import TELLING, Finding, finding_of, steps_of
from sglang_crashkit.judge.knowledge import load
from sglang_crashkit.judge.known_issues import known_issues
from sglang_crashkit.judge.stalls import find_stalls
from sglang_crashkit.judge.watched import refine
from sglang_crashkit.model.case import Case
from sglang_crashkit.model.event import Error, Kernel, Line, Raised
from sglang_crashkit.model.verdict import KnownIssue, Verdict

_MAX_STEPS, _MAX_STEP = 8, 240
#: Classes that explain no failure: the most frequent errors and warnings of the case are added to the next steps.
_SILENT = frozenset({"no_incident", "busy", "no_progress", "unknown"})
#: Classes that only say that something failed. Log lines up to this many seconds before it may show what led to it.
_VAGUE, _BEFORE_S = (
    frozenset({"exception", "exception_in_sglang", "startup_failed", "exited", "aborted", "collective_mismatch"}),
    30.0,
)


def judge(case: Case) -> Verdict:
    """Return the one verdict of a case."""
    stalls = find_stalls(case)
    findings = [*Failures(case).find(), *stalls]
    said = [case.watched.text] if case.watched is not None and case.watched.text else []
    # Failures before calm states, causes before consequences, telling before vague, then earlier before later.
    findings.sort(key=lambda one: (one.is_calm, one.is_consequence, one.weight < TELLING, one.where, -one.weight))
    chosen = next(iter(findings), None) or guess(case) or finding_of("unknown", because=said)
    chosen = refine(case, chosen)
    row = load("classes").get(chosen.kind) or load("classes")["unknown"]
    verdict = Verdict(
        kind=chosen.kind,
        level=chosen.level,
        first=chosen.who if chosen.kind != "no_incident" else None,
        component=chosen.component,
        restart_helps=chosen.restart or row["restart"],
        headline=chosen.headline or _headline(case),
        cause=chosen.cause or row["words"],
        because=[*chosen.because, *(case.watched.notes if case.watched else ())],
    )
    steps, query = [*chosen.next], ""
    if not chosen.is_calm:
        issues = known_issues(case, is_hang=any(one is chosen for one in stalls), who=chosen.who)
        columns = KnownIssue.__struct_fields__
        verdict.known_issues = [KnownIssue(**{name: entry[name] for name in columns}) for entry in issues]
        steps[1:1] = [
            f"upstream issue {entry['issue']}: {entry['title']}; {entry['workaround'] or 'no workaround is known'}"
            + (f" (fixed in {entry['fixed_in']})" if entry["fixed_in"] else "")
            for entry in issues[:2]
        ]
        query = "" if issues else search_query(case, chosen)
    steps += row["next"]
    if chosen.kind in _VAGUE and (before := case.said_before(chosen.where, chosen.who, verdict.headline, _BEFORE_S)):
        steps += steps_of("before", line=" | ".join(text[:150] for text in before))
        part = component_of(words=" ".join(before), arguments=case.arguments) if chosen.kind == "aborted" else None
        verdict.component = verdict.component or part
    earlier = (one for one in findings if one.where < chosen.where <= (one.where[0] + _BEFORE_S, chosen.where[1]))
    led = next((one for one in earlier if one.kind != chosen.kind and one.weight > TELLING and one.because), None)
    if led is not None and not led.is_calm and not chosen.is_calm:
        steps += steps_of("led", line=led.because[0])
    logs = {one.file for one in case.progress}
    errors = (one for one in case.events if isinstance(one, Line) and one.level == "error" and one.file not in logs)
    if chosen.kind == "no_incident" and logs and (beside := next(errors, None)) is not None:
        steps += steps_of("beside", line=beside.text[:170])
    for text, count in case.loudest if chosen.kind in _SILENT else ():
        worst = "unexplained" if chosen.kind == "unknown" else "loudest"
        steps += steps_of(worst, text=text[:170], count=count if count > 1 else None)
    if query:
        steps[_MAX_STEPS - 1 :] = [f"search upstream's issues: https://github.com/sgl-project/sglang/issues?q={query}"]
    verdict.next = [step[:_MAX_STEP] for step in dict.fromkeys(_by_vendor(steps, case))][:_MAX_STEPS]
    return verdict


def _by_vendor(steps: list[str], case: Case) -> list[str]:
    """Return the steps with NVIDIA's names replaced by the GPU vendor's, without steps that do not apply to it."""
    texts = [event.text for event in case.events if isinstance(event, Line | Kernel) and event.text]
    texts += [f"{event.error.type} {event.error.text[:500]}" for event in case.events if isinstance(event, Raised)]
    texts.append(str(case.arguments.get("device") or ""))
    for row in load("vendors").values():
        if any(re.search(row["words"], text) for text in texts):
            steps = [step for step in steps if not any(word in step for word in row["not"])]
            for word, other in row["replace"].items():
                steps = [step.replace(word, other) for step in steps]
            break
    return steps


def _headline(case: Case) -> str:
    if case.watched is not None and case.watched.text:
        return case.watched.text
    if case.dumped:
        return f"the server ended with {case.dumped[0].unfinished} requests in flight; why is not in this evidence"
    seen = len([one for one in case.processes.values() if one.who])
    return f"{len(case.events)} events of {seen} processes; no event shows a failure"


def search_query(case: Case, chosen: Finding) -> str:
    """Return a query for upstream's tracker: the first exception with its SGLang frame, or the finding's log line."""
    told = next((one for one in case.events if isinstance(one, Raised)), None)
    error = told.error if told else Error(type="")
    because = chosen.because[0] if chosen.because else ""
    said = (one.text for one in case.events if isinstance(one, Line) and one.level and one.text[:80] in because)
    # Quoted text, paths and numbers are specific to this case, so they are left out.
    text = re.sub(r"'[^'\n]{0,200}'|\"[^\"\n]{0,200}\"|/\S+", " ", (error.text if told else next(said, ""))[:400])
    words = [*dict.fromkeys(re.findall(r"(?<![\w.])[A-Za-z][A-Za-z_-]+(?!\w)", text))]
    frame = next((one.function.rpartition(".")[2] for one in error.frames if "sglang/" in one.file), "")
    return "+".join(filter(None, [error.type.rpartition(".")[2], *words[:10], frame]))
