"""The processes of an incident in lines of Markdown: a section for each group of processes that agree.

As in `incident.summary`, what is missing or has another form is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_crashkit.incident import step_words
from sglang_crashkit.incident.first_screen import cut
from sglang_crashkit.incident.likeness import without_own_numbers
from sglang_crashkit.incident.names import Names, join_names, stopped_state
from sglang_crashkit.model.checked_json import mapping_of, mappings_of

#: Of so many processes of a group the pids are told, and so many lines of their GPUs and of evidence.
_MAX_PIDS, _MAX_GPU_LINES, _MAX_LINES = 8, 8, 24
_MAX_NAMES = 160

Process = Mapping[str, Any]


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a section for each group of processes that agree: who failed first, the other ranks, the rest.

    Args:
        document: what an ``incident.json`` holds.
    """
    first = mapping_of(mapping_of(document.get("verdict")).get("first_failure")).get("pid")
    groups: dict[str, list[Process]] = {}
    for process in mappings_of(document.get("processes")):
        groups.setdefault(_likeness(process, is_first=process.get("pid") == first is not None), []).append(process)
    names = Names(document)
    for members in sorted(groups.values(), key=lambda its: (its[0].get("pid") != first, not _is_rank(its[0]))):
        yield ""
        yield from _section(members[0]) if len(members) == 1 else _section_of_many(members, names)


def state_in_words(process: Process) -> str:
    """Say whether a process was alive when it was looked at, was stopped, or raised; and how it ended otherwise."""
    end = mapping_of(process.get("exit"))
    if not end:
        pieces = mappings_of(process.get("evidence"))
        raised = any(piece.get("kind") == "exception" and piece.get("status") == "captured" for piece in pieces)
        return stopped_state(process) or ("raised an exception" if raised else "alive then")
    how = end.get("signal") or f"exit status {end.get('code')}"
    # That it was a signal goes without saying.
    cause = "" if end.get("cause") == "signal" else f"{end.get('cause')}: "
    return f"dead, {how} ({cause}{end.get('detail')})"


def last_sign_in_words(sign: Mapping[str, Any]) -> str:
    """Say what a scheduler was about when its heartbeat was last written to, and when that was."""
    return f"{sign.get('doing')}{_span([sign.get('seconds_before')], ', ', ' s before', 1)}"


def piece_in_words(piece: Mapping[str, Any]) -> str:
    """Say of a piece of evidence what it is, whether it is there, and where or why not."""
    return _evidence_in_words([piece])


def _is_rank(process: Process) -> bool:
    return process.get("role") == "scheduler"


def _likeness(process: Process, *, is_first: bool) -> str:
    """Return what processes of one group have in common; numbers that differ with the process are left out."""
    sign, step = mapping_of(process.get("last_sign")), _step_of(process)
    at = [step.get(name) for name in ("number", "mode", "phase", "size")]
    gpu = [without_own_numbers(line) for line in _texts(process.get("gpu"))]
    told = (process.get("role"), state_in_words(process), _texts(process.get("doing")), sign.get("doing"), at, gpu)
    return repr((is_first, *told))


def _section(process: Process) -> Iterator[str]:
    yield f"### {process.get('title')} (pid {process.get('pid')}): {state_in_words(process)}"
    yield from (f"- {frame}" for frame in _texts(process.get("doing")))
    if sign := mapping_of(process.get("last_sign")):
        yield f"- last sign: {last_sign_in_words(sign)}"
    if step := _step_of(process):
        yield f"- in {step_words.current_in_words(step)}"
    yield from (f"- GPU: {line}" for line in _texts(process.get("gpu")))
    yield from (f"- {piece_in_words(piece)}" for piece in mappings_of(process.get("evidence")))


def _section_of_many(members: Sequence[Process], names: Names) -> Iterator[str]:
    process = members[0]
    who = cut(join_names(str(one.get("title")) for one in members), _MAX_NAMES)
    yield f"### {who} ({len(members):,} processes): {state_in_words(process)}"
    pids = [f"{names.short(one)} {one.get('pid')}" for one in members]
    more = f" and {len(pids) - _MAX_PIDS:,} more in incident.json" if len(pids) > _MAX_PIDS else ""
    yield f"- pids: {', '.join(pids[:_MAX_PIDS])}{more}"
    yield from (f"- {frame}" for frame in _texts(process.get("doing")))
    if sign := mapping_of(process.get("last_sign")):
        before = [mapping_of(one.get("last_sign")).get("seconds_before") for one in members]
        yield f"- last sign: {sign.get('doing')}{_span(before, ', ', ' s before', 1)}"
    if step := _step_of(process):
        secs = [_step_of(one).get("seconds") for one in members]
        yield f"- in {step_words.current_in_words({**step, 'seconds': None})}{_span(secs, ', for ', ' s', 3)}"
    of_gpu: dict[str, list[str]] = {}
    of_evidence: dict[tuple[str, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for one in members:
        for line in _texts(one.get("gpu")):
            of_gpu.setdefault(line, []).append(names.short(one))
        for piece in mappings_of(one.get("evidence")):
            its = [str(piece.get(name) or "") for name in ("kind", "status", "source")]
            key = (*its, without_own_numbers(str(piece.get("reason") or "")))
            of_evidence.setdefault(key, []).append((names.short(one), piece))
    yield from _few([f"GPU of {join_names(some)}: {line}" for line, some in of_gpu.items()], _MAX_GPU_LINES)
    lines = []
    for having in of_evidence.values():
        some = dict.fromkeys(name for name, _piece in having)
        of = "" if len(some) == len(members) else cut(join_names(some), _MAX_NAMES)
        lines.append(_evidence_in_words([piece for _name, piece in having], of=of))
    yield from _few(lines, _MAX_LINES)


def _few(lines: Sequence[str], most: int) -> Iterator[str]:
    yield from (f"- {line}" for line in lines[:most])
    if len(lines) > most:
        yield f"- {len(lines) - most:,} more in incident.json"


def _evidence_in_words(pieces: Sequence[Mapping[str, Any]], *, of: str = "") -> str:
    """Say of a piece of evidence, which several processes may have, what became of it.

    Args:
        pieces: alike but for their files, times, and the numbers in their reasons.
        of: whose they are, where not all of a group have one.
    """
    one = pieces[0]
    paths = list(dict.fromkeys(str(piece["path"]) for piece in pieces if piece.get("path")))
    reasons = list(dict.fromkeys(str(piece["reason"]) for piece in pieces if piece.get("reason")))
    # Such as the pid in a path; whose it is, is no more than a number here.
    why = reasons if len(reasons) < 2 else [without_own_numbers(reasons[0], "N")]
    folder = [f"{paths[0].rpartition('/')[0]}/, {len(paths):,} files"] if len(paths) > 1 else paths
    where = "; ".join([*folder, *why]) or "in incident.json"
    by = f" by {one['source']}" if one.get("source") else ""
    took = _span([piece.get("seconds") for piece in pieces], ", ", " s", 3)
    return f"{one.get('kind')}: {one.get('status')}{f' of {of}' if of else ''}{by} ({where}{took})"


def _span(values: Iterable[object], before: str, behind: str, digits: int) -> str:
    """Return from where to where numbers lie, between two texts; nothing where none is a number."""
    numbers = [value for value in values if isinstance(value, (int, float))]
    if not numbers:
        return ""
    told = dict.fromkeys(f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return f"{before}{' to '.join(told)}{behind}"


def _step_of(process: Process) -> Mapping[str, Any]:
    return mapping_of(mapping_of(process.get("steps")).get("in_step"))


def _texts(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []
