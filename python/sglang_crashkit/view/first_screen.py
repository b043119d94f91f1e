"""The first screen of an incident: what happened, and what to do now.

``summary.md``, ``sglang-crashkit show`` and the server's own log begin with it.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_crashkit.incident.names import Names, join_some_names, stopped_state, without_own_numbers
from sglang_crashkit.model import IN_LAST, IN_SEVERAL, UNANSWERED
from sglang_crashkit.model.incident import Incident, ProcessReport, Requests, Suspect
from sglang_crashkit.visible import visible

#: Columns of a line; with the heading of ``summary.md``, its blank line and its fence there are at most 20 lines.
WIDTH, MAX_LINES = 80, 17
#: So much of it stands in the server's own log.
LOG_LINES = 5
#: A message of a consequence is no longer than this.
MAX_MESSAGE = 100
_LABEL = 8
_MAX_GROUPS, _MAX_CONSEQUENCES, _MAX_STEPS = 2, 2, 2
#: So much of a line may be names, and what a user may choose: the id of a request, the name of a model.
_MAX_NAMES, _MAX_RID, _MAX_MODEL = 36, 40, 40
#: Behind a character that takes two columns.
_SECOND_COLUMN = "\0"
#: Where a C++ library says that its own source raised an exception; a path on the machine that built it.
_BUILD_PATH = re.compile(r"\[?/[^\s\]]{1,200}\.(?:cc|cpp|cu|cuh|h|hpp):\d+\]?:? ?")
#: Where a container's counter lies, of which the last part tells.
_COUNTER_FOLDER = re.compile(r"/\S{1,200}/(?=memory\.)")
_SECONDS = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d{3})?")
_OWN_COMMAND, _COMMENT = "sglang-crashkit ", "   # "
_REPLAY = f"{_OWN_COMMAND}replay"
#: What the screen has in words of its own, where the cause has it.
_TOLD_ANYWAY = (f"`{_REPLAY} ", f"`{_OWN_COMMAND}steps ", f"`{_OWN_COMMAND}show ")
#: A command with its arguments; a word alone may be anything.
_COMMAND = re.compile(r"`([^` ]+ [^`]+)`")
_LIBRARY = re.compile(r"\((?:torch|zmq|multiprocessing|concurrent|asyncio)/|\(<|\((?:threading|queue)\.py:")
#: Verdicts whose first sentence says more behind its colon than the headline has room for.
_BY_DEATH = frozenset({"signal", "oom_kill", "exit_status", "parent_ended"})
#: Events by which a server tells of its ranks that it had not served yet.
_FAILED_STARTS = ("launch_failed", "startup_timeout")
_LEVELS = frozenset({"established", "supported"})
_IN_STEP = "in that step"
#: Classes whose cause C++ code or the C library wrote to stderr, which no log handler sees.
_ON_STDERR = frozenset({"aborted", "exited", "fatal_signal", "segfault"})
#: Why there are no requests of an incident that was only observed.
SERVER_WENT_ON = "the server went on"


@dataclass(frozen=True)
class Counts:
    """How many requests an incident has: the one count of all its words."""

    finished: int  # those that were answered within the last five minutes
    unfinished: int  # those in flight
    others: int = 0  # how many more the saved file has: health checks, and what takes no metrics


def counts_of(requests: Requests) -> Counts | None:
    """Return how many requests there were; None where nobody counted.

    The journal leaves health checks out, which the server saves like any other request. So it counts where it is whole.
    """
    saved, journal = _pair(requests), requests.journal
    is_whole = journal is not None and bool(journal.path) and not (journal.left_out or journal.lost)
    if requests.source == "pickle" and saved is not None and journal is not None and is_whole:
        others = sum(saved) - journal.finished - journal.unfinished
        if others >= 0 and journal.unfinished <= saved[1]:
            return Counts(journal.finished, journal.unfinished, others)
    return Counts(*saved) if saved is not None else None


def _pair(counts: Requests) -> tuple[int, int] | None:
    if counts.finished is None or counts.unfinished is None:
        return None
    return counts.finished, counts.unfinished


def first_screen(incident: Incident, *, ends_with: int | None = None, where: str = "", wraps: bool = True) -> list[str]:
    """Return at most `MAX_LINES` lines of `WIDTH` columns.

    Args:
        incident: as it is shown; see `Incident.shown`.
        ends_with: the exit status that the server is about to end with; None where it is not, or has ended.
        where: what the commands of the last lines name the incident by; its id by default.
        wraps: a text may take a second line.
    """
    screen = _Screen(incident, ends_with, where or incident.id or "latest")
    head, rows = screen.headline(2 if wraps else 1), list(screen.rows())
    told = [list(_lines(label, text, most if wraps else 1)) for label, text, most in rows]
    # Where there is no room, what stands last gives up its second line first.
    for place in reversed(range(len(rows))):
        if len(head) + sum(map(len, told)) > MAX_LINES:
            told[place] = list(_lines(*rows[place][:2], 1))
    if len(head) + sum(map(len, told)) > MAX_LINES:
        head = screen.headline(1)
    # The commands stand at the end: they are worth more than what is one of several.
    for label in ("then", "ranks"):
        for place in reversed([place for place, row in enumerate(rows) if row[0] == label][1:]):
            if len(head) + sum(map(len, told)) > MAX_LINES:
                told[place] = []
    return [*head, *(line for lines in told for line in lines)][:MAX_LINES]


def failed_at_start(incident: Incident) -> bool:
    """Say whether the server of an incident had not served yet."""
    return incident.kind == "failed_start" or any(one.event in _FAILED_STARTS for one in incident.timeline)


def consequence_in_words(message: str) -> str:
    """Return a message in one line of at most `MAX_MESSAGE` characters, without the path of who built a library."""
    return cut(_one_line(without_build_paths(message)), MAX_MESSAGE)


def without_build_paths(text: str) -> str:
    """Return a text without the paths of who built a library, which say nothing of this machine."""
    return _BUILD_PATH.sub("", text)


def is_suspected(suspects: Sequence[Suspect]) -> bool:
    """Say whether more speaks for the first of the suspects than that it was in the step."""
    return bool(suspects) and suspects[0].level in _LEVELS


def undecided_in_words(incident: Incident) -> str:
    """Say that there is nothing between the several suspects of an incident; empty where there is, or there is one."""
    suspects, count = incident.suspects, len(incident.suspects) + incident.suspects_left_out
    if not suspects or is_suspected(suspects) or count < 2:
        return ""
    reasons = " ".join(reason for one in suspects for reason in one.reasons)
    places = {UNANSWERED: "under way", IN_SEVERAL: "in the unfinished steps", IN_LAST: "in the last step"}
    where = next((words for reason, words in places.items() if reason in reasons), _IN_STEP)
    return f"none of the {count:,} requests {where} is likelier than the others"


def cut(text: str, most: int) -> str:
    """Return `text`, with an ellipsis at its end where it is longer than `most` characters."""
    return text if len(text) <= most else text[: max(0, most - 3)].rstrip() + "..."


def _one_line(text: str) -> str:
    return " ".join(visible(text).split())


class _Screen:
    def __init__(self, incident: Incident, ends_with: int | None, where: str) -> None:
        self._incident, self._ends_with, self._where = incident, ends_with, where
        self._names = Names(incident)
        self._first = incident.first_failure
        self._environment = incident.surroundings
        verdict = incident.verdict
        #: The first of what the verdict rests on, and the kind of failure.
        self._basis = (verdict.basis[0] if verdict.basis else verdict.text) if verdict is not None else ""
        self._kind = verdict.kind if verdict is not None else ""

    def headline(self, most: int) -> list[str]:
        """Return who failed of what, what became of the server, and how many requests it cost, in one line or two.

        Args:
            most: how many lines the first of these may take where it is alone in its line.
        """
        what, behind = self._what(), "; ".join([*self._end(), *self._lost()])
        if self._kind in _BY_DEATH and _columns_of(f"{what}; {behind}") > WIDTH:
            what = what.partition(":")[0]
        told = "; ".join(filter(None, (what, behind)))
        if _columns_of(told) <= WIDTH:
            return [told]
        whole = _wrapped(what, WIDTH, most) if most > 1 else [_cut_columns(what, WIDTH)]
        return [*whole, *([_cut_columns(behind, WIDTH)] if behind else [])]

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Yield the rest: a label, a text, and how many lines that may take."""
        yield "when", self._when(), 2
        yield "run", self._run(), 2
        yield "host", self._host(), 1
        yield "first", self._first_failure(), 2
        yield from (("then", words, 1) for words in self._consequences())
        yield "steps", self._divergence(), 2
        yield from (("ranks", words, 1) for words in self._ranks())
        yield from self._cause()
        yield "suspect", self._suspect(), 2
        yield from self._next_steps()

    # -- the headline

    def _what(self) -> str:
        if not self._basis:
            trigger = self._incident.trigger
            told = f" (reported by {self._names.short(trigger)})" if trigger.title else ""
            return f"{self._incident.kind or 'incident'}: who failed first is not known{told}"
        words = _one_line(without_build_paths(self._names.in_words(self._basis))).rstrip(".")
        return words[:1].upper() + words[1:]

    def _end(self) -> Iterator[str]:
        events = {one.event: one for one in reversed(self._incident.timeline)}
        end, back = events.get("server_exited"), events.get("progress_returned")
        if back is not None:
            yield f"it went on after {back.get('hung_secs')} s"
        if end is not None:
            signal, code = end.get("signal"), end.get("code")
            if signal or code is not None:
                yield f"server killed by {signal}" if signal else f"exit status {code}"
        elif self._ends_with is not None:
            yield f"exit status {self._ends_with}"
        elif self._incident.requests.reason == SERVER_WENT_ON:
            yield "the server was left running"

    def _lost(self) -> Iterator[str]:
        counts = counts_of(self._incident.requests)
        if failed_at_start(self._incident):
            yield "it was not ready yet"
        elif counts is not None:
            went_on = self._incident.requests.reason == SERVER_WENT_ON
            many = "" if counts.unfinished == 1 else "s"
            yield f"{counts.unfinished} request{many} {'in flight' if went_on else 'lost'}"

    # -- where

    def _when(self) -> str:
        fault, time, place = self._incident.fault, self._incident.trigger.time, self._environment.place
        words = [f"{_moment(time)} UTC on {self._incident.server.hostname}"] if time else []
        if (secs := self._environment.uptime_secs) is not None:
            words.append("never ready" if failed_at_start(self._incident) else f"up {_duration(secs)}")
        if fault is not None:
            words.append(
                f"seen {fault.count} times since {_moment(fault.first)[:10]}" if fault.count > 1 else "first time"
            )
        if not self._incident.complete:
            words.append("not complete")
        if pod := place.kubernetes.get("pod_name"):
            words.append(f"pod {pod}")
        if job := place.slurm.get("job_id"):
            words.append(f"Slurm job {job}")
        return ", ".join(words)

    def _run(self) -> str:
        server, environment = self._incident.server, self._environment
        words = [f"SGLang {server.sglang_version}"] if server.sglang_version else []
        if environment.model:
            words.append(cut(environment.model.rstrip("/").rpartition("/")[2], _MAX_MODEL))
        main = [f"main process {server.pid}"] if server.pid else []
        return ", ".join([*words, *sizes_in_words(environment.parallel), *main])

    def _host(self) -> str:
        gpus, memory = self._incident.gpus, self._environment.memory
        devices, xids = (gpus.devices, gpus.xids) if gpus is not None else ([], [])
        words = []
        if devices:
            words.append(f"{len(devices)} x {', '.join(sorted({str(device.name) for device in devices}))}")
        elif self._incident.environment is not None:
            words.append("no GPU seen")
        if driver := self._environment.versions.get("driver"):
            words.append(f"driver {driver}")
        if xids:
            words.append(f"Xid {', '.join(list(dict.fromkeys(str(one.xid) for one in xids))[:3])}")
        elif devices:
            words.append("no Xid")
        if memory.used_bytes is not None:
            of = f" of {memory.limit_bytes / (1 << 30):.1f}" if memory.limit_bytes is not None else ""
            words.append(f"cgroup memory {memory.used_bytes / (1 << 30):.1f}{of} GiB")
            kills = memory.events.get("oom_kill")
            words.append(f"{kills} OOM kill{'' if kills == 1 else 's'}" if kills else "no OOM kill")
        return ", ".join(words)

    # -- what happened

    def _first_failure(self) -> str:
        first = self._first
        if first is None:
            return ""
        end, step = first.exit, first.in_step
        raised = next(
            (one for one in self._incident.timeline if one.event == "exception" and one.pid == first.pid), None
        )
        time = ""
        if raised is not None:
            time, how = raised.time, f"exception{f' in {short_frame(first.doing)}' if first.doing else ''}"
        elif end is not None:
            time, how = end.time, end.signal or f"exit status {end.code}"
            how += f" ({_COUNTER_FOLDER.sub('', end.detail)})" if end.detail else ""
        else:
            how = ", ".join(self._doing_of(first))
        in_step = ""
        if first.control:
            in_step = f", while it worked on {cut(first.control, _MAX_RID)}"
        elif step is not None:
            batch = f"{step.mode} of {step.size}" if step.mode else "not yet scheduled"
            in_step = f", in step {step.number} ({batch})"
        at = f" at {_moment(time)[11:]}" if time else ""
        return f"{self._names.short(first)} (pid {first.pid}){at}: {how}{in_step}"

    def _consequences(self) -> Iterator[str]:
        """Yield a line for those that made no progress, and one for those that then raised in the same way."""
        events, pid = self._incident.timeline, self._first.pid if self._first is not None else None
        silent = [one for one in events if one.event in ("no_progress", "watchdog_timeout")]
        secs = sorted({one.silent_secs for one in silent if one.silent_secs is not None})
        if secs:
            who = join_some_names(map(self._names.short, silent), _MAX_NAMES)
            yield f"{who} made no progress for {secs[0]} s{' or more' if len(secs) > 1 else ''}"
        groups: dict[str, tuple[str, list[str]]] = {}
        # What came before the first failure's own event is none of its consequences.
        own = ("exception", "process_exited")
        ends = (place for place, one in enumerate(events) if one.pid == pid and one.event in own)
        since = next(ends, -1) + 1 if pid is not None else 0
        for event in events[since:]:
            if event.event == "exception" and (event.pid is None or event.pid != pid):
                message = event.message
                _words, names = groups.setdefault(without_own_numbers(message), (consequence_in_words(message), []))
                names.append(self._names.short(event))
        for message, names in list(groups.values())[:_MAX_CONSEQUENCES]:
            yield f"{join_some_names(names, _MAX_NAMES)} raised {message}"

    def _ranks(self) -> Iterator[str]:
        """Yield what the other ranks did, those that agree in one line."""
        groups: dict[str, list[str]] = {}
        for process in self._incident.processes:
            # In the end all are dead; what they did before is what tells.
            if process.is_rank and process is not self._first:
                groups.setdefault(", ".join(self._doing_of(process)), []).append(self._names.short(process))
        # Of more groups than there is room for those of most ranks.
        told = sorted(((names, doing) for doing, names in groups.items() if doing), key=lambda one: -len(one[0]))
        # Where they diverged says more than where they are now.
        most = _MAX_GROUPS - bool(self._divergence())
        yield from (f"{join_some_names(names, _MAX_NAMES)}: {doing}" for names, doing in told[:most])

    def _divergence(self) -> str:
        """Return at which step the ranks went different ways; empty where they did not, or the headline says so."""
        found = self._incident.divergence
        is_told = found is None or not found.is_one or found.statement == self._basis
        return "" if found is None or is_told else self._names.in_words(found.statement)

    def _doing_of(self, process: ProcessReport) -> list[str]:
        words = [stopped] if (stopped := stopped_state(process)) else []
        return words + ([short_frame(process.doing)] if process.doing else [])

    # -- why, and what now

    def _cause(self) -> Iterator[tuple[str, str, int]]:
        cause = self._incident.cause
        if cause is None:
            return
        helps = f"; a restart helps: {cause.restart_helps}" if cause.restart_helps in ("yes", "no") else ""
        yield "cause", f"{cause.words or cause.kind} ({cause.kind}, {cause.level}){helps}", 2
        for issue in cause.known_issues[:1]:
            fixed = f"fixed in {issue.fixed_in}" if issue.fixed_in else "no fix known"
            yield "known", f"sgl-project/sglang #{issue.issue} ({fixed}): {issue.title}", 2

    def _suspect(self) -> str:
        if not self._incident.suspects:
            return ""
        if undecided := undecided_in_words(self._incident):
            return undecided
        first = self._incident.suspects[0]
        return f"request {cut(first.rid, _MAX_RID)} ({first.level}): {'; '.join(first.reasons)}"

    def _next_steps(self) -> Iterator[tuple[str, str, int]]:
        """Yield what the cause asks for, commands as such, and the commands that show more and hand it on."""
        cause = self._incident.cause
        kind, steps = (cause.kind, cause.next_steps) if cause is not None else ("", [])
        others = [step for step in steps if not step.startswith(_TOLD_ANYWAY)]
        most = _MAX_STEPS
        if any(step.startswith(_TOLD_ANYWAY[0]) for step in steps) or is_suspected(self._incident.suspects):
            most -= 1
            yield "next", f'{_REPLAY} {self._where} --bisect --serve "COMMAND"{_COMMENT}finds the request', 1
        for step in others[:most]:
            text = self._names.in_words(step)
            if self._first is not None:
                text = text.replace("kill -CONT PID", f"kill -CONT {self._first.pid}")
            found = _COMMAND.search(text)
            if found and found.start() < _LABEL:
                # The command first, so that it can be copied.
                rest = (text[: found.start()] + text[found.end() :]).strip(" :,;")
                text = f"{found[1]}{_COMMENT}{rest}" if rest else found[1]
            yield "next", text, 2
        if kind in _ON_STDERR:
            yield "next", self._log_command(), 2
        section = "steps" if kind == "rank_divergence" else "stacks"
        yield "next", f"{_OWN_COMMAND}show {self._where} --{section}", 1
        yield "next", f"{_OWN_COMMAND}bundle {self._where} --no-prompts{_COMMENT}for a bug report", 1

    def _log_command(self) -> str:
        kubernetes, container = self._environment.place.kubernetes, self._environment.place.container or ""
        explain, why = f"{_OWN_COMMAND}explain {self._where}", f"{_COMMENT}reads why in what it wrote to stderr"
        if pod := kubernetes.get("pod_name"):
            namespace = f" -n {kubernetes['pod_namespace']}" if kubernetes.get("pod_namespace") else ""
            return f"kubectl logs --previous {pod}{namespace} | {explain} -{why}"
        if container:
            return f"docker logs {container[:12]} 2>&1 | {explain} -{why}"
        return f"{explain} SERVER.log{why}"


def _lines(label: str, text: str, most: int) -> Iterator[str]:
    """Yield a row in at most so many lines; nothing where there is no text."""
    if text.startswith(_OWN_COMMAND):
        # A path may be longer than the line, and half a command is none; the words behind it can be missed.
        yield f"{label:<{_LABEL}}{text if len(text) <= WIDTH - _LABEL else text.partition(_COMMENT)[0]}"
        return
    words = text if _COMMENT in text else _one_line(text)
    for number, line in enumerate(_wrapped(words, WIDTH - _LABEL, most)):
        yield f"{'' if number else label:<{_LABEL}}{line}"


def _wrapped(text: str, columns: int, most: int) -> list[str]:
    """Return a text in at most so many lines; the last one ends with an ellipsis where there is more."""
    padded = _padded(text)
    # A character of two columns may stand where a line is broken.
    width = columns - (len(padded) > len(text))
    every = textwrap.wrap(padded, width)
    lines = textwrap.wrap(padded, width, max_lines=most, placeholder="...")
    if len(every) > most and len(lines[-1]) < columns // 2:
        # The next word is as long as a line.
        lines = [*every[: most - 1], every[most - 1][: width - 3].rstrip() + "..."]
    return [line.replace(_SECOND_COLUMN, "") for line in lines]


def _padded(text: str) -> str:
    """Return a text in which there is a character for each column that a terminal shows it in."""
    if text.isascii():
        return text
    wide = ("W", "F")
    return "".join(char + _SECOND_COLUMN * (unicodedata.east_asian_width(char) in wide) for char in text)


def _columns_of(text: str) -> int:
    return len(_padded(text))


def _cut_columns(text: str, most: int) -> str:
    return cut(_padded(text), most).replace(_SECOND_COLUMN, "")


def _moment(value: str) -> str:
    """Return a time of the incident to the second, or the millisecond where it has one, as a person writes it."""
    found = _SECONDS.match(value)
    return f"{found[1]} {found[2]}" if found else value


def _duration(secs: float) -> str:
    if secs < 120:
        return f"{secs:.0f} s"
    minutes = int(secs // 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes // 1440} days"


def sizes_in_words(sizes: Mapping[str, int]) -> list[str]:
    """Return the parallel sizes that tell something; only the first one does where there is one rank."""
    return [f"{name} {size}" for name, size in sizes.items() if name == "tp" or (name != "node_rank" and size != 1)]


def short_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame that is SGLang's own, with the last part of its path; any where none is."""
    own = next((text for text in frames if "(sglang/" in text), None)
    # Older kits wrote paths of some of SGLang's own modules without its name.
    told = own or next((text for text in frames if not _LIBRARY.search(text)), frames[0])
    function, _, place = told.rpartition(" (")
    return f"{function} ({place.rpartition('/')[2]}" if function else told
