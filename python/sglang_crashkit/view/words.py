"""Phrases for the facts of an incident, which its screens, its summary and its page share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from sglang_crashkit.incident.names import without_own_numbers
from sglang_crashkit.model import IN_LAST, IN_SEVERAL, UNANSWERED
from sglang_crashkit.model.incident import Entry, Evidence, Incident, InStep, LastSign, ProcessReport, Requests
from sglang_crashkit.model.step import Step
from sglang_crashkit.visible import visible

#: Most characters of an event's message, and most entries of a list that are shown.
MAX_MESSAGE, _MAX_LIST = 100, 8
#: Source file and line in a C++ library's exception, as a path on the machine that built the library.
_BUILD_PATH = re.compile(r"\[?/[^\s\]]{1,200}\.(?:cc|cpp|cu|cuh|h|hpp):\d+\]?:? ?")
_SECONDS = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d{3})?")
_LIBRARY = re.compile(r"\((?:torch|zmq|multiprocessing|concurrent|asyncio)/|\(<|\((?:threading|queue)\.py:")
#: Where the suspected requests are, by the reason of the suspicion.
_PLACES = {UNANSWERED: "under way", IN_SEVERAL: "in the unfinished steps", IN_LAST: "in the last step"}


def cut(text: str, most: int) -> str:
    """Return `text`, with an ellipsis at its end where it is longer than `most` characters."""
    return text if len(text) <= most else text[: max(0, most - 3)].rstrip() + "..."


def one_line(text: str) -> str:
    """Return a text as one line."""
    return " ".join(visible(text).split())


def without_build_paths(text: str) -> str:
    """Return a text without the source paths of C++ libraries, which are of the machine that built them."""
    return _BUILD_PATH.sub("", text)


def message(text: str) -> str:
    """Return a message as one line of at most `MAX_MESSAGE` characters, `without_build_paths`."""
    return cut(one_line(without_build_paths(text)), MAX_MESSAGE)


def count(number: int, noun: str) -> str:
    """Return a number of things: ``1 request``, ``3 requests``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[object], number: int | None = None) -> str:
    """Return the first few names, and how many more there are of `number` in all, by default `len(names)`."""
    number = len(names) if number is None else number
    shown = names[:_MAX_LIST]
    return ", ".join(map(str, shown)) + (f" and {number - len(shown):,} more" if number > len(shown) else "")


def span(numbers: Sequence[float], before: str, behind: str, digits: int) -> str:
    """Return ``MIN to MAX`` of the numbers between the texts `before` and `behind`; empty without a number."""
    told = dict.fromkeys(f"{number:.{digits}f}" for number in (min(numbers), max(numbers))) if numbers else ()
    return f"{before}{' to '.join(told)}{behind}" if told else ""


def moment(time: str) -> str:
    """Return an ISO time as ``2026-01-02 03:04:05``; any other text as it is."""
    found = _SECONDS.match(time)
    return f"{found[1]} {found[2]}" if found else time


def duration(secs: float) -> str:
    """Return a number of seconds as text, in the unit that a person would use."""
    minutes = int(secs // 60)
    if secs < 120:
        return f"{secs:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes // 1440} days"


# -- processes


def state(process: ProcessReport) -> str:
    """Return how a process ended; or else that it was stopped, had raised, or was alive when it was sampled."""
    end = process.exit
    if end is None:
        return process.stopped or ("raised an exception" if process.has("exception") else "alive then")
    # A signal's name already says that the cause was a signal.
    cause = "" if end.cause == "signal" else f"{end.cause}: "
    return f"dead, {end.signal or f'exit status {end.code}'} ({cause}{end.detail})"


def short_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame in SGLang, or else outside of libraries, with only the file name of its path."""
    own = next((text for text in frames if "(sglang/" in text), None)
    # Older kits wrote the paths of some of SGLang's modules without the leading ``sglang/``.
    told = own or next((text for text in frames if not _LIBRARY.search(text)), frames[0])
    function, _, place = told.rpartition(" (")
    return f"{function} ({place.rpartition('/')[2]}" if function else told


def batch(step: InStep | Step) -> str:
    """Return the batch that a step runs, such as ``decode of 3``."""
    return f"{step.mode} of {step.size:,}" if step.mode else "not yet scheduled"


def in_step(*steps: InStep) -> str:
    """Describe the step that a group of processes is in: its number, batch and phase, and how long it ran."""
    ran = span([step.seconds for step in steps], ", for ", " s", 3)
    return f"step {steps[0].number:,}: {batch(steps[0])}, {steps[0].phase.replace('_', ' ')}{ran}"


def step_done(step: Step | None) -> str:
    """Return what a rank did in a step; a dash where it is not known."""
    if step is None:
        return "-"
    took = f"{(step.ended - step.began) * 1000:.1f} ms" if step.ended is not None else step.phase.replace("_", " ")
    ran = [step.mode, f"{step.size} req", f"{step.tokens:,} tok"] if step.mode else []
    # A decision's value is a hash or a count, which says nothing without another rank's: show only the names.
    return ", ".join([*ran, *sorted(name for name, number in step.decisions.items() if number), took])


def last_sign(*signs: LastSign) -> str:
    """Return what schedulers that agree did at their last heartbeat, and how long before their end or sample."""
    collecting = ", in a garbage collection" if signs[0].collecting_secs else ""
    return f"{signs[0].doing}{collecting}{span([sign.seconds_before for sign in signs], ', ', ' s before', 1)}"


def evidence(*pieces: Evidence, of: str = "") -> str:
    """Describe the same piece of evidence of several processes; `of` names them where not all of a group have it."""
    one = pieces[0]
    paths = list(dict.fromkeys(piece.path for piece in pieces if piece.path))
    reasons = list(dict.fromkeys(piece.reason for piece in pieces if piece.reason))
    # The reasons of several processes differ only in numbers, such as the pid in a path: show ``N`` instead.
    why = reasons if len(reasons) < 2 else [without_own_numbers(reasons[0], "N")]
    folder = [f"{paths[0].rpartition('/')[0]}/, {len(paths):,} files"] if len(paths) > 1 else paths
    where = "; ".join([*folder, *why]) or "in incident.json"
    by = f" by {one.source}" if one.source else ""
    took = span([piece.seconds for piece in pieces if piece.seconds is not None], ", ", " s", 3)
    return f"{one.kind}: {one.status}{f' of {of}' if of else ''}{by} ({where}{took})"


def details(event: Entry) -> str:
    """Return an event's fields as text, without its time, name and process."""
    hidden = ("time", "event", "pid", "title")
    return ", ".join(_detail(name, value) for name, value in event.items() if name not in hidden and value is not None)


def _detail(name: str, value: object) -> str:
    if name == "message":
        # The verdict, or the process's own record, has the whole message.
        return message(str(value))
    if name == "segments" and isinstance(value, list):
        segments = [one for one in value if isinstance(one, dict)]
        size = sum(one["bytes"] for one in segments if isinstance(one.get("bytes"), int))
        told = some([f"{one.get('name')} ({one.get('why')})" for one in segments])
        return f"{count(len(segments), 'segment')} left, {size / 1e3:,.0f} kB: {told}"
    return f"{name} {some(value) if isinstance(value, list) else value}"


# -- requests


def undecided(incident: Incident) -> str:
    """Return a sentence where no suspect is likelier than the others, else an empty text."""
    suspects, number = incident.suspects, len(incident.suspects) + incident.suspects_left_out
    if not suspects or suspects[0].level != "unknown" or number < 2:
        return ""
    reasons = " ".join(reason for one in suspects for reason in one.reasons)
    where = next((words for reason, words in _PLACES.items() if reason in reasons), "in that step")
    return f"none of the {number:,} requests {where} is likelier than the others"


def suspect(incident: Incident, most: int) -> str:
    """Return the likeliest suspect, its id cut to `most` characters; or `undecided`; empty without suspects."""
    if (told := undecided(incident)) or not incident.suspects:
        return told
    first = incident.suspects[0]
    return f"request {cut(first.rid, most)} ({first.level}): {'; '.join(first.reasons)}"


def requests(requests: Requests) -> str:
    """Return how many requests finished, and where they are saved or why they are not."""
    number, journal = requests.counts, requests.journal
    finished, unfinished = (number.finished, number.unfinished) if number is not None else (None, None)
    counts = f"{finished} finished and {unfinished} unfinished"
    if requests.path is not None:
        return f"{counts} in {requests.path}"
    if requests.source != "journal" or journal is None:
        return f"not saved: {requests.reason}"
    lost = f", {journal.lost} more found no room in it" if journal.lost else ""
    return f"{counts}, from the journal, in {journal.path}{lost} (the server saved none: {requests.reason})"


def sizes(parallel: Mapping[str, int]) -> Iterator[str]:
    """Yield the parallel sizes other than 1, and ``tp`` in any case; ``node_rank`` is not a size."""
    yield from (f"{name} {n}" for name, n in parallel.items() if name == "tp" or (name != "node_rank" and n != 1))
