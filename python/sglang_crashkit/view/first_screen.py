"""The first screen of an incident: what happened, and what to do now.

``summary.md``, ``sglang-crashkit show`` and the server's own log begin with it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from sglang_crashkit.incident.names import Names, join_some_names, without_own_numbers
from sglang_crashkit.model.incident import SERVER_WENT_ON, Incident, ProcessReport
from sglang_crashkit.view import words

#: Most columns and lines of the screen; ``summary.md`` puts three lines above it: heading, blank line and fence.
WIDTH, MAX_LINES = 80, 17
#: Lines of the screen that the server's own log gets.
LOG_LINES = 5
_LABEL = 8
_MAX_GROUPS, _MAX_CONSEQUENCES, _MAX_STEPS = 2, 2, 2
#: Most characters of a list of names, and of what users choose: the id of a request, the name of a model.
_MAX_NAMES, _MAX_RID, _MAX_MODEL = 36, 40, 40
#: The folder of a cgroup's counter file, such as ``memory.events``; only the file's name is shown.
_COUNTER_FOLDER = re.compile(r"/\S{1,200}/(?=memory\.)")
_OWN_COMMAND, _COMMENT = "sglang-crashkit ", "   # "
_REPLAY = f"{_OWN_COMMAND}replay"
#: Next steps of a cause that the screen leaves out, because it shows these commands in its own words.
_OWN_STEPS = (f"`{_REPLAY} ", f"`{_OWN_COMMAND}steps ", f"`{_OWN_COMMAND}show ")
#: A command with its arguments, in backticks; a single word in backticks need not be a command.
_COMMAND = re.compile(r"`([^` ]+ [^`]+)`")
#: Kinds of verdicts whose headline drops the text after its first colon where the line would be too long.
_BY_DEATH = frozenset({"signal", "oom_kill", "exit_status", "parent_ended"})
#: Classes whose cause C++ code or the C library wrote to stderr, which no log handler sees.
_ON_STDERR = frozenset({"aborted", "exited", "fatal_signal", "segfault"})


class Row(NamedTuple):
    """A row of a screen."""

    label: str
    text: str
    most: int = 2  # how many lines the text may take


def first_screen(incident: Incident, *, ends_with: int | None = None, where: str = "", wraps: bool = True) -> list[str]:
    """Return at most `MAX_LINES` lines of `WIDTH` characters; with `wraps` a row's text may take a second line.

    `ends_with` is the exit status that the server is about to end with; None where it goes on or has ended. `where`
    names the incident in the commands of the last lines: its id by default.
    """
    screen = _Screen(incident, ends_with, where or incident.id or "latest")
    head, rows = screen.headline(2 if wraps else 1), list(screen.rows())
    told = [list(_lines(row if wraps else row._replace(most=1))) for row in rows]

    def is_too_long() -> bool:
        return len(head) + sum(map(len, told)) > MAX_LINES

    # Where there is no room, the last rows lose their second line first.
    for place in reversed(range(len(rows))):
        if is_too_long():
            told[place] = list(_lines(rows[place]._replace(most=1)))
    if is_too_long():
        head = screen.headline(1)
    # Then drop the `then` and `ranks` rows but the first of each: the commands at the end are worth more.
    for label in ("then", "ranks"):
        for place in reversed([place for place, row in enumerate(rows) if row.label == label][1:]):
            if is_too_long():
                told[place] = []
    return [*head, *(line for lines in told for line in lines)][:MAX_LINES]


class _Screen:
    def __init__(self, incident: Incident, ends_with: int | None, where: str) -> None:
        self._incident, self._ends_with, self._where = incident, ends_with, where
        self._names = Names(incident)
        self._first, self._environment = incident.first_failure, incident.surroundings
        verdict = incident.verdict
        #: The first sentence that the verdict rests on, or its text without one; and the kind of failure.
        self._basis = (verdict.basis[0] if verdict.basis else verdict.text) if verdict is not None else ""
        self._kind = verdict.kind if verdict is not None else ""

    def headline(self, most: int) -> list[str]:
        """Return who failed and why, in at most `most` lines; then what became of the server and its requests."""
        what, behind = self._what(), "; ".join(self._outcome())
        if self._kind in _BY_DEATH and len(f"{what}; {behind}") > WIDTH:
            what = what.partition(":")[0]
        told = "; ".join(filter(None, (what, behind)))
        if len(told) <= WIDTH:
            return [told]
        whole = _wrapped(what, WIDTH, most) if most > 1 else [words.cut(what, WIDTH)]
        return [*whole, *([words.cut(behind, WIDTH)] if behind else [])]

    def rows(self) -> Iterator[Row]:
        """Yield the rows below the headline; a row without text is not shown."""
        yield Row("when", ", ".join(self._when()))
        yield Row("run", ", ".join(self._run()))
        yield Row("host", ", ".join(self._host()), 1)
        yield Row("first", self._first_failure())
        yield from (Row("then", text, 1) for text in self._consequences())
        yield Row("steps", self._divergence())
        yield from (Row("ranks", text, 1) for text in self._ranks())
        yield from self._cause()
        yield Row("suspect", words.suspect(self._incident, _MAX_RID))
        yield from self._next_steps()

    # -- the headline

    def _what(self) -> str:
        if not self._basis:
            trigger = self._incident.trigger
            told = f" (reported by {self._names.short(trigger)})" if trigger.title else ""
            return f"{self._incident.kind or 'incident'}: who failed first is not known{told}"
        text = words.one_line(words.without_build_paths(self._names.shorten(self._basis))).rstrip(".")
        return text[:1].upper() + text[1:]

    def _outcome(self) -> Iterator[str]:
        requests = self._incident.requests
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
        elif requests.reason == SERVER_WENT_ON:
            yield "the server was left running"
        if self._incident.failed_at_start:
            yield "it was not ready yet"
        elif requests.counts is not None:
            what = "in flight" if requests.reason == SERVER_WENT_ON else "lost"
            yield f"{words.count(requests.counts.unfinished, 'request')} {what}"

    # -- where

    def _when(self) -> Iterator[str]:
        fault, time, place = self._incident.fault, self._incident.trigger.time, self._environment.place
        if time:
            yield f"{words.moment(time)} UTC on {self._incident.server.hostname}"
        if (secs := self._environment.uptime_secs) is not None:
            yield "never ready" if self._incident.failed_at_start else f"up {words.duration(secs)}"
        if fault is not None:
            since = words.moment(fault.first)[:10]
            yield f"seen {fault.count} times since {since}" if fault.count > 1 else "first time"
        if not self._incident.complete:
            yield "not complete"
        if pod := place.kubernetes.get("pod_name"):
            yield f"pod {pod}"
        if job := place.slurm.get("job_id"):
            yield f"Slurm job {job}"

    def _run(self) -> Iterator[str]:
        server, environment = self._incident.server, self._environment
        if server.sglang_version:
            yield f"SGLang {server.sglang_version}"
        if environment.model:
            yield words.cut(environment.model.rstrip("/").rpartition("/")[2], _MAX_MODEL)
        yield from words.sizes(environment.parallel)
        if server.pid:
            yield f"main process {server.pid}"

    def _host(self) -> Iterator[str]:
        gpus, memory = self._incident.gpus, self._environment.memory
        devices, xids = (gpus.devices, gpus.xids) if gpus is not None else ([], [])
        if devices:
            yield f"{len(devices)} x {', '.join(sorted({str(device.name) for device in devices}))}"
        elif self._incident.environment is not None:
            yield "no GPU seen"
        if driver := self._environment.versions.get("driver"):
            yield f"driver {driver}"
        if xids:
            yield f"Xid {', '.join(list(dict.fromkeys(str(one.xid) for one in xids))[:3])}"
        elif devices:
            yield "no Xid"
        if memory.used_bytes is not None:
            of = f" of {memory.limit_bytes / (1 << 30):.1f}" if memory.limit_bytes is not None else ""
            kills, peak = memory.events.get("oom_kill"), memory.peak_bytes
            # The process that the kernel killed has freed its memory: show the peak, too.
            most = f" (at most {peak / (1 << 30):.1f})" if kills and peak is not None else ""
            yield f"cgroup memory {memory.used_bytes / (1 << 30):.1f}{of} GiB{most}"
            yield words.count(kills, "OOM kill") if kills else "no OOM kill"

    # -- what happened

    def _first_failure(self) -> str:
        first = self._first
        if first is None:
            return ""
        end, step = first.exit, first.in_step
        events = self._incident.timeline
        raised = next((one for one in events if one.event == "exception" and one.pid == first.pid), None)
        time, how = "", ", ".join(self._doing_of(first))
        if raised is not None:
            time, how = raised.time, f"exception{f' in {words.short_frame(first.doing)}' if first.doing else ''}"
        elif end is not None:
            time, how = end.time, end.signal or f"exit status {end.code}"
            how += f" ({_COUNTER_FOLDER.sub('', end.detail)})" if end.detail else ""
        in_step = f", in step {step.number} ({words.batch(step)})" if step is not None else ""
        if first.control:
            in_step = f", while it worked on {words.cut(first.control, _MAX_RID)}"
        at = f" at {words.moment(time)[11:]}" if time else ""
        return f"{self._names.short(first)} (pid {first.pid}){at}: {how}{in_step}"

    def _consequences(self) -> Iterator[str]:
        """Yield a line for the processes that made no progress, and one for each message that others then raised."""
        events, pid = self._incident.timeline, self._first.pid if self._first is not None else None
        silent = [one for one in events if one.event in ("no_progress", "watchdog_timeout")]
        secs = sorted({one.silent_secs for one in silent if one.silent_secs is not None})
        if secs:
            who = join_some_names(map(self._names.short, silent), _MAX_NAMES)
            yield f"{who} made no progress for {secs[0]} s{' or more' if len(secs) > 1 else ''}"
        groups: dict[str, tuple[str, list[str]]] = {}
        # An exception before the first failure's own event is no consequence of it.
        own = ("exception", "process_exited")
        ends = (place for place, one in enumerate(events) if one.pid == pid and one.event in own)
        since = next(ends, -1) + 1 if pid is not None else 0
        for event in events[since:]:
            if event.event == "exception" and (event.pid is None or event.pid != pid):
                text = event.message
                _text, names = groups.setdefault(without_own_numbers(text), (words.message(text), []))
                names.append(self._names.short(event))
        for text, names in list(groups.values())[:_MAX_CONSEQUENCES]:
            yield f"{join_some_names(names, _MAX_NAMES)} raised {text}"

    def _ranks(self) -> Iterator[str]:
        """Yield a line for each group of other ranks that did the same."""
        groups: dict[str, list[str]] = {}
        for process in self._incident.processes:
            # At the end all are dead, so group them by what they did before.
            if process.is_rank and process is not self._first:
                groups.setdefault(", ".join(self._doing_of(process)), []).append(self._names.short(process))
        # The largest groups come first; there may not be room for all.
        told = sorted(((names, doing) for doing, names in groups.items() if doing), key=lambda one: -len(one[0]))
        # The row of the divergence says more than where the ranks are: it takes the place of a group.
        most = _MAX_GROUPS - bool(self._divergence())
        yield from (f"{join_some_names(names, _MAX_NAMES)}: {doing}" for names, doing in told[:most])

    def _divergence(self) -> str:
        """Return at which step the ranks went different ways; empty where they did not, or the headline says so."""
        found = self._incident.divergence
        is_told = found is None or not found.is_one or found.statement == self._basis
        return "" if found is None or is_told else self._names.shorten(found.statement)

    def _doing_of(self, process: ProcessReport) -> list[str]:
        return [*filter(None, [process.stopped]), *([words.short_frame(process.doing)] if process.doing else [])]

    # -- why, and what now

    def _cause(self) -> Iterator[Row]:
        cause = self._incident.cause
        if cause is None:
            return
        helps = f"; a restart helps: {cause.restart_helps}" if cause.restart_helps in ("yes", "no") else ""
        yield Row("cause", f"{cause.words or cause.kind} ({cause.kind}, {cause.level}){helps}")
        for issue in cause.known_issues[:1]:
            fixed = f"fixed in {issue.fixed_in}" if issue.fixed_in else "no fix known"
            yield Row("known", f"sgl-project/sglang #{issue.issue} ({fixed}): {issue.title}")

    def _next_steps(self) -> Iterator[Row]:
        """Yield the next steps of the cause, and the commands that find the request, show more, and pack a report."""
        cause, most = self._incident.cause, _MAX_STEPS
        kind, steps = (cause.kind, cause.next_steps) if cause is not None else ("", [])
        is_suspected = any(one.level != "unknown" for one in self._incident.suspects[:1])
        if is_suspected or any(step.startswith(_OWN_STEPS[0]) for step in steps):
            most -= 1
            yield Row("next", f'{_REPLAY} {self._where} --bisect --serve "COMMAND"{_COMMENT}finds the request', 1)
        for step in [step for step in steps if not step.startswith(_OWN_STEPS)][:most]:
            text = self._names.shorten(step)
            if self._first is not None:
                text = text.replace("kill -CONT PID", f"kill -CONT {self._first.pid}")
            found = _COMMAND.search(text)
            if found and found.start() < _LABEL:
                # The command first, so that it can be copied.
                rest = (text[: found.start()] + text[found.end() :]).strip(" :,;")
                text = f"{found[1]}{_COMMENT}{rest}" if rest else found[1]
            yield Row("next", text)
        if kind in _ON_STDERR:
            yield Row("next", f"{self._log_command()}{_COMMENT}reads why in what it wrote to stderr")
        section = "steps" if kind == "rank_divergence" else "stacks"
        yield Row("next", f"{_OWN_COMMAND}show {self._where} --{section}", 1)
        yield Row("next", f"{_OWN_COMMAND}bundle {self._where} --no-prompts{_COMMENT}for a bug report", 1)

    def _log_command(self) -> str:
        kubernetes, container = self._environment.place.kubernetes, self._environment.place.container
        explain = f"{_OWN_COMMAND}explain {self._where}"
        if pod := kubernetes.get("pod_name"):
            namespace = f" -n {kubernetes['pod_namespace']}" if kubernetes.get("pod_namespace") else ""
            return f"kubectl logs --previous {pod}{namespace} | {explain} -"
        return f"docker logs {container[:12]} 2>&1 | {explain} -" if container else f"{explain} SERVER.log"


def _lines(row: Row) -> Iterator[str]:
    """Yield the lines of a row; nothing where there is no text."""
    label, text, most = row
    if text.startswith(_OWN_COMMAND):
        # A command is never cut, even where a path makes it longer than the line; the comment behind it is dropped.
        yield f"{label:<{_LABEL}}{text if len(text) <= WIDTH - _LABEL else text.partition(_COMMENT)[0]}"
        return
    told = text if _COMMENT in text else words.one_line(text)
    for number, line in enumerate(_wrapped(told, WIDTH - _LABEL, most)):
        yield f"{'' if number else label:<{_LABEL}}{line}"


def _wrapped(text: str, columns: int, most: int) -> list[str]:
    """Return a text as at most `most` lines; the last line ends with an ellipsis where text is left out."""
    every = textwrap.wrap(text, columns)
    lines = textwrap.wrap(text, columns, max_lines=most, placeholder="...")
    if len(every) > most and len(lines[-1]) < columns // 2:
        # The next word is as long as a line: show its beginning.
        lines = [*every[: most - 1], every[most - 1][: columns - 3].rstrip() + "..."]
    return lines
