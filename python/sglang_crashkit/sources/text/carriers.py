"""Removes the prefixes that carriers put in front of log lines, and distinguishes programs by them.

Carriers are kubectl, CRI, Docker (JSON and compose), Slurm, journald, syslog, Ray, terminals and pasted issues. A line
may have several prefixes, one inside the other.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

#: Longer lines are cut: a log may contain a prompt of a megabyte.
MAX_LINE = 20_000
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[A-Za-z]|\][^\x07]{0,200}\x07|[()][A-Z0-9])")
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d"
_CRI = re.compile(rf"({_TIME}\S{{0,16}}) (stdout|stderr) ([FP]) ?")
_KUBECTL = re.compile(r"\[?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))\]? ")
_POD = re.compile(r"\[?(?:pod/)?([\w.-]{1,120})/([\w.-]{1,80})\]? (?=\S)")
_COMPOSE = re.compile(r"([A-Za-z][\w.-]{0,79}) *\| ?")
_TASK = re.compile(r" {0,5}(\d{1,5}): ?")
#: The line number of ``cat -n``, ``grep -n`` or an editor; and the beginning of a log line.
_NUMBER, _LOG = re.compile(r" {0,8}(\d{1,9})(?:[:|\t] ?| {1,2})"), re.compile(r"\[|\d{4}-\d\d-\d\d[ T]|[A-Z]{4,8}\b")
_JOURNAL = re.compile(
    r"((?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?)|(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S{0,16})) "
    r"([\w.-]{1,120}) ([\w./@:-]{1,120}?)(?:\[(\d{1,8})\])?: ?"
)
_RAY = re.compile(r"\(([\w.:-]{1,80}) pid=(\d{1,8})(?:, ip=([\d.a-f:]{3,45}))?(?:, \w+=[\w.-]{1,80})*\) ?")
#: Ray's suffix of a line that several actors printed.
_REPEATED = re.compile(r" ?\[repeated \d{1,6}x across cluster\].{0,200}$")
#: The prefix of a trainer's console before Ray's name of an actor.
_BEFORE_RAY = re.compile(rf"\[({_TIME})[.,\d]{{0,10}}\] (?=\([\w.:-]{{1,80}} pid=\d)")
_KERNEL = re.compile(
    r"(?:<\d{1,3}>)?\[ *(\d{1,9}\.\d{1,6}|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] "
)
#: The journal's prefix without its time.
_KERNEL_WORD = re.compile(r"^\s{0,12}kernel ?: ")
_QUOTE = re.compile(r"(?:> ?){1,4}")
#: The prefix of another program's logger that repeats a line of the server.
_LOGGER = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S{0,20} (?:- )?(?:[\w.]{1,80} )?(?:- )?(?:DEBUG|INFO|WARNING|ERROR) (?:- )?"
    r"(?=\[20\d\d-|Traceback \(|   |  File \"|[\w.]{1,80}(?:Error|Exception)\b)"
)
#: The time of a row in the web page of a log store.
_TABLE = re.compile(r"([A-Z][a-z]{2}) (\d{1,2}), (\d{4}) @ (\d\d:\d\d:\d\d(?:\.\d{1,9})?)\s{1,8}")
_PRIORITY = re.compile(r"<\d{1,3}>(?=\S)")
#: The number of first lines that decide which prefixes a file has.
_LOOKED_AT = 400
#: Fewer consecutive numbers may be something else than line numbers.
_LEAST_NUMBERED = 10
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Carried:
    """A line without the prefixes of its carriers."""

    text: str
    at: float = 0.0  # the carrier's time, in seconds since the epoch; 0.0 without one
    stream: str = ""  # distinguishes the lines of several programs: a pod, a service, a task, an actor
    program: str = ""  # the journal's name of the program: ``kernel``, ``systemd``
    is_kernel: bool = False


class Carrier:
    """Removes the prefixes of one file's lines, which its first lines show; `year` completes the journal's times."""

    def __init__(self, lines: Iterable[str], year: int = 0) -> None:
        self._is_compose = self._is_srun = self._is_quoted = self._is_numbered = False
        self.year = year
        # Remove times first: they hide the prefixes that the lines share.
        plain = [self.strip(line).text for line in lines if line.strip()][:_LOOKED_AT]
        enough = max(2 if len(plain) < 3 else 3, len(plain) // 3)
        # A single such prefix may be text of the program, so a third of the lines must have it.
        self._is_compose = sum(bool(_COMPOSE.match(line)) for line in plain) >= enough
        numbers = [match for line in plain if (match := _NUMBER.match(line))]
        steps = [int(after[1]) - int(one[1]) for one, after in itertools.pairwise(numbers)]
        # Unlike line numbers, task numbers and pids do not increase by one from line to line before log lines.
        self._is_numbered = (
            len(numbers) >= max(enough, _LEAST_NUMBERED)
            and min(steps) > 0
            and steps.count(1) * 2 > len(steps)
            and sum(bool(_LOG.match(match.string, match.end())) for match in numbers) > 1
        )
        self._is_srun = not self._is_numbered and sum(bool(_TASK.match(line)) for line in plain) >= enough
        self._is_quoted = sum(line.startswith(">") for line in plain) >= enough

    def strip(self, line: str) -> Carried:
        """Return a line without its carriers."""
        line = line[:MAX_LINE].rstrip("\r\n")
        line = line.rstrip(" │") if line.endswith("│") else line
        text, at, stream, program = _ESCAPES.sub("", line) if "\x1b" in line else line, 0.0, "", ""
        if self._is_numbered and (match := _NUMBER.match(text)):
            text = text[match.end() :]
        if self._is_quoted and (match := _QUOTE.match(text)):
            text = text[match.end() :]
        for _ in range(4):
            before = text
            if text.startswith('{"') and (inner := _from_json(text)) is not None:
                text, at = _ESCAPES.sub("", inner[0]), inner[1] or at
            elif (match := _CRI.match(text)) or (match := _KUBECTL.match(text)) or (match := _BEFORE_RAY.match(text)):
                text, at = text[match.end() :], seconds(match[1]) or at
            elif match := _RAY.match(text):
                text, stream = _REPEATED.sub("", text[match.end() :]), f"{match[3] or ''}/{match[2]}".strip("/")
            elif (
                (text[:1] in "[p" and (match := _POD.match(text)) and ("pod/" in match[0] or match[0][0] == "["))
                or (self._is_compose and (match := _COMPOSE.match(text)))
                or (self._is_srun and (match := _TASK.match(text)))
            ):
                text, stream = text[match.end() :], match[1]
            elif match := _JOURNAL.match(text):
                text, at, program = text[match.end() :], self._journal_time(match[1]) or at, match[3]
            elif (match := _TABLE.match(text)) and match[1] in _MONTHS:
                month = _MONTHS.index(match[1]) + 1
                text, at = text[match.end() :], seconds(f"{match[3]}-{month:02d}-{int(match[2]):02d} {match[4]}")
            elif match := _PRIORITY.match(text) or _LOGGER.match(text):
                text = text[match.end() :]
            if text == before:
                break
        if match := _KERNEL.match(text):
            return Carried(text[match.end() :], kernel_time(match[1]) or at, stream, "kernel", is_kernel=True)
        text, cut = _KERNEL_WORD.subn("", text, count=1)
        return Carried(text, at, stream, program, is_kernel=program == "kernel" or bool(cut))

    def _journal_time(self, text: str) -> float:
        if text[0].isdigit():
            return seconds(text)
        month, day, clock = text.split(None, 2)
        if month not in _MONTHS:
            return 0.0
        return seconds(f"{self.year or 1970:04d}-{_MONTHS.index(month) + 1:02d}-{int(day):02d} {clock}")


@functools.lru_cache(maxsize=256)
def seconds(text: str) -> float:
    """Return a time of a log in seconds since the epoch, UTC if it has no zone; 0.0 for any other text."""
    text = text.strip().replace(",", ".").replace("Z", "+00:00")
    # Python 3.10 only reads fractions of a second with three or six digits.
    text = re.sub(r"\.(\d{1,9})", lambda match: f".{match[1][:6]:0<6}", text)
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def kernel_time(text: str) -> float:
    """Return the time of a line of ``dmesg -T``; 0.0 for seconds since an unknown boot."""
    words = text.split()
    if len(words) != 5 or words[1] not in _MONTHS:
        return 0.0
    return seconds(f"{words[4]}-{_MONTHS.index(words[1]) + 1:02d}-{int(words[2]):02d} {words[3]}")


def _from_json(line: str) -> tuple[str, float] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if entry.get("object") == "error":
        return None  # an answer of the server
    text = next((entry[key] for key in ("log", "message", "msg", "MESSAGE") if isinstance(entry.get(key), str)), None)
    if text is None:
        return None
    time = next(
        (entry[key] for key in ("time", "timestamp", "ts", "@timestamp") if isinstance(entry.get(key), str)), ""
    )
    return text.rstrip("\n"), seconds(time)
