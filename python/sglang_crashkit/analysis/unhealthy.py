"""Judge a server whose health check failed while no scheduler was silent, or nobody knows whether one was.

Then nothing but the stacks and what the kernel says tell who it is: of the schedulers the odd one of its group, of the
other processes one that is stopped, such as a detokenizer.
"""

from __future__ import annotations

from sglang_crashkit.analysis.grouping import groups_of, rank_at
from sglang_crashkit.analysis.groups import judge_group
from sglang_crashkit.analysis.hang import all_stopped, member_of
from sglang_crashkit.analysis.outliers import find_odd
from sglang_crashkit.model.incident import Failure, Incident, Level, Verdict

#: The trigger of such an incident.
UNHEALTHY = "unhealthy_at_sigterm"
_CERTAINTY: tuple[Level, ...] = ("established", "supported", "unknown")


def judge_unhealthy(incident: Incident) -> Verdict:
    """Return the verdict on an incident of which no failure is known.

    Args:
        incident: with its processes, which were looked at.
    """
    ranks = [process for process in incident.processes if process.role == "scheduler" and process.samples]
    others = [process for process in incident.processes if process.role not in ("scheduler", "helper")]
    stopped = all_stopped(ranks)
    if stopped:
        return Verdict("hang", None, "established", stopped, [stopped])
    groups = groups_of([(rank_at(process.rank), process) for process in ranks])
    findings = [judge_group("", [member_of(process) for process in group]) for group in groups]
    odd = [(one.level, one.named[0].source, one.statement) for one in findings if one.named]
    for process in others:
        # One alone stands out by nothing but what the kernel says of it.
        alone = find_odd([member_of(process)])
        if alone is not None and alone.level == "established":
            odd.append((alone.level, process, alone.statement))
    if odd:
        level, process, statement = min(odd, key=lambda one: _CERTAINTY.index(one[0]))
        return Verdict("hang", Failure(process.pid, process.title), level, statement, [statement])
    name = f"{incident.trigger.title} (pid {incident.trigger.pid})"
    basis = [f"The health check of {name} had failed, but no process was seen to stand still."]
    basis += [one.statement for one in findings]
    return Verdict("unknown", None, "unknown", " ".join(basis), basis)
