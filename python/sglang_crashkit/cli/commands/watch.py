"""``sglang-crashkit watch``: see a server hang or crash from outside, patched or not, and take its snapshots."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit.cli.output import say, say_json, show_progress
from sglang_crashkit.cli.running import Terminated, terminable
from sglang_crashkit.errors import CrashkitError, ExitCode, NothingToDoError, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.collect.collection import Collection
    from sglang_crashkit.kernel.discovery import FoundProcess
    from sglang_crashkit.watch.health import Health, HealthProbe
    from sglang_crashkit.watch.server import Death, WatchedServer
    from sglang_crashkit.watch.watching import Event, Observation

_HANG_VARIABLE = "SGLANG_CRASHKIT_HANG_SECS"
_HANG_SECS = 60.0
_OUTPUT = Path("sglang-crashkit-watch")
#: Rounds of an idle server take up to a second; no silence that is shorter than this, in seconds, is a hang.
_SHORTEST_SECS = 2.0
_LONGEST_INTERVAL_SECS, _LONGEST_TICK_SECS = 5.0, 1.0
#: From one search for what is not known yet to the next, in seconds.
_CONNECT_SECS = 2.0
#: The server gives up a health check by itself, by default after 20 s.
_HEALTH_TIMEOUT_SECS = 30.0
#: The crash handler of a patched server has finished its incident by then, in seconds.
_INCIDENT_SECS = 30.0
_RANK = "sglang::scheduler_"
#: Seconds between two lines that say what is waited for, where there is no terminal.
_REPEAT_SECS = 60.0
_AWAITED = {
    "starting": "the server to get ready",
    "serving": "a hang or a crash",
    "suspect": "an answer, or more signs of a hang",
    "hung": "progress, or the server's end",
    "crashed": "the server's end",
}
_EXAMPLES = """\
examples:
  sglang-crashkit watch --pid 4711
  sglang-crashkit watch --url http://127.0.0.1:30000 --once -o /var/crash/watch
"""
_OUTPUT_HINT = "next: name another folder with --output-dir"
#: Incidents that are none of a crash.
_NO_CRASH = ("hang", "peer_lost")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    which = parser.add_argument_group("which server; at least one of them")
    which.add_argument("--pid", type=int, help="the server that this process belongs to")
    which.add_argument("--url", help="where it answers, as http://HOST:PORT; of another host there are no stacks")
    which.add_argument("--api-key-file", metavar="FILE", type=Path, help="holds its API key, where it has one")
    when = parser.add_argument_group("when it hangs")
    when.add_argument(
        "--hang-secs", metavar="N", type=float, help=f"after N seconds without an answer ({_HANG_VARIABLE}, or 60)"
    )
    when.add_argument(
        "--start-secs", metavar="N", type=float, default=1800.0, help="after N seconds to get ready (1800); 0: never"
    )
    when.add_argument("--once", action="store_true", help="end after the first hang or crash")
    what = parser.add_argument_group("what is taken then")
    what.add_argument("--snapshots", metavar="K", type=int, default=3, help="Python stacks of K moments (3)")
    what.add_argument("--interval", metavar="S", type=float, default=2.0, help="seconds between them (2)")
    what.add_argument(
        "--native",
        action="store_true",
        help="also native stacks and CUDA kernels, by cuda-gdb or gdb, which stop each process for seconds; not where"
        " the stacks show no hang, or for certain who it is",
    )
    what.add_argument(
        "-o",
        "--output-dir",
        metavar="DIR",
        type=Path,
        default=_OUTPUT,
        help=f"a folder in it for each event ({_OUTPUT})",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line for each event")


def run(args: argparse.Namespace) -> ExitCode:
    """Watch until the server is gone, until the first hang where that is asked for, or until it is interrupted."""
    hang_secs = _check(args)
    try:
        with terminable():
            return _Watch(args, hang_secs).run()
    except Terminated:
        return ExitCode.TERMINATED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _check(args: argparse.Namespace) -> float:
    """Return after how many seconds without an answer a server hangs."""
    if args.pid is None and args.url is None:
        raise UsageError("neither --pid nor --url says which server", next_step="sglang-crashkit watch --pid PID")
    from sglang_crashkit.settings import read_seconds

    # To the crash handler 0 means that hangs are not looked for, which is what this command is called to do.
    told = read_seconds(os.environ, _HANG_VARIABLE, _HANG_SECS) or _HANG_SECS
    seconds = args.hang_secs if args.hang_secs is not None else max(told, _SHORTEST_SECS)
    if not _SHORTEST_SECS <= seconds < 1e6:
        raise UsageError(
            f"a hang of {seconds:g} s cannot be told from a server that is idle", next_step="--hang-secs 60"
        )
    if args.snapshots < 1 or not 0 <= args.interval < 1e6 or not 0 <= args.start_secs < 1e9:
        raise UsageError("--snapshots is at least 1, --interval and --start-secs are at least 0")
    return float(seconds)


class _Watch:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, hang_secs: float) -> None:
        from sglang_crashkit.watch.health import Address, read_api_key
        from sglang_crashkit.watch.server import is_here
        from sglang_crashkit.watch.watching import Watching

        self._args, self._hang_secs = args, hang_secs
        self._tick_secs = min(_LONGEST_TICK_SECS, hang_secs / 10)
        self._watching = Watching(hang_secs, args.start_secs)
        self._url = Address.parse(args.url) if args.url is not None else None
        self._api_key = read_api_key(args.api_key_file) if args.api_key_file is not None else ""
        self._is_here = self._url is not None and is_here(self._url)
        self._server: WatchedServer | None = None
        self._probe: HealthProbe | None = None
        self._told_problem = ""
        self._connected_at = -_CONNECT_SECS
        self._is_terminal = sys.stderr.isatty() and not args.json
        self._began, self._said_at = time.time(), time.monotonic()
        self._told_incidents: set[str] = set()
        self._folder: Path = args.output_dir

    def run(self) -> ExitCode:
        if self._args.pid is not None:
            self._find(self._args.pid)
        self._connect()
        self._tell("watching", self._introduction())
        if self._server is None and self._url is not None and not self._is_here:
            self._tell("no_stacks", f"{self._url} is not on this host, so no stacks can be taken; next: watch it there")
        try:
            return self._follow()
        finally:
            self._clear()
            if self._server is not None:
                self._server.close()

    def _follow(self) -> ExitCode:
        while True:
            seen = self._observe()
            for event in self._watching.observe(seen):
                if event.kind == "gone":
                    self._tell_incident(is_crash=self._watching.phase == "crashed", wait_secs=_INCIDENT_SECS)
                self._tell_event(event)
                if event.kind == "gone":
                    return ExitCode.NOTHING
                if event.kind in ("crash", "hang"):
                    is_crash = event.kind == "crash"
                    status = self._capture_survivors() if is_crash else self._capture_hang()
                    self._watching.skip(time.monotonic())
                    if self._args.once and is_crash:
                        self._tell_incident(is_crash=True, wait_secs=_INCIDENT_SECS)
                    if self._args.once:
                        return status
            self._overview(seen)
            if self._watching.phase == "crashed":
                self._tell_incident(is_crash=True)
            if self._server is not None:
                self._server.ends.wait(self._tick_secs)
            else:
                time.sleep(self._tick_secs)

    def _find(self, pid: int) -> None:
        from sglang_crashkit.watch.server import WatchedServer

        try:
            self._server = WatchedServer(pid)
        except ProcessLookupError:
            raise NothingToDoError(f"there is no process {pid}", next_step="ps -ef | grep sglang") from None
        except OSError as error:
            raise CrashkitError(f"process {pid} cannot be watched: {error.strerror or error}") from error
        if not self._server.is_known:
            self._server.close()
            raise NothingToDoError(
                f"process {pid} is no SGLang server, nor does it belong to one",
                next_step="sglang-crashkit watch --pid PID   # of its main process, or --url",
            )

    def _connect(self) -> None:
        """Find by the one what of process and address was not given, as soon as it is there."""
        from sglang_crashkit.watch.health import HealthProbe
        from sglang_crashkit.watch.server import WatchedServer, find_listener

        if time.monotonic() < self._connected_at + _CONNECT_SECS:
            return
        self._connected_at = time.monotonic()
        if self._server is None and self._url is not None and self._is_here:
            pid = find_listener(self._url)
            found = WatchedServer(pid) if pid is not None else None
            if found is not None and not found.is_known:
                found.close()
            else:
                self._server = found
        if self._probe is None:
            address = self._url or (self._server.address() if self._server is not None else None)
            if address is not None:
                interval_secs = min(_LONGEST_INTERVAL_SECS, self._hang_secs / 10)
                timeout_secs = max(_HEALTH_TIMEOUT_SECS, self._hang_secs)
                self._probe = HealthProbe(address, interval_secs, timeout_secs, self._api_key)

    def _observe(self) -> Observation:
        from sglang_crashkit.watch.watching import Observation

        if self._server is None or self._probe is None:
            self._connect()
        health = self._health()
        answers, asking = None, False
        if self._probe is not None and self._watching.wants_answer:
            answers, asking = self._probe.answers(), self._probe.is_asking
        elif self._probe is not None:
            self._probe.forget_answer(is_well=health == "ok")
        if self._server is None:
            return Observation(time.monotonic(), health, answers=answers, asking=asking)
        samples = self._server.sample(stacks=self._watching.wants_stacks(time.monotonic()))
        state, gone, deaths = self._server.state, self._server.is_gone, tuple(self._server.ends.deaths)
        return Observation(time.monotonic(), health, samples, state, answers, asking, gone, deaths)

    def _health(self) -> Health:
        if self._probe is None:
            # Either it does not listen yet, or it never will.
            return "refused" if self._server is None or self._server.serves_http else "none"
        health = self._probe.look()
        if self._probe.problem and self._probe.problem != self._told_problem:
            self._told_problem = self._probe.problem
            self._tell("problem", self._probe.problem)
        return health

    def _capture_hang(self) -> ExitCode:
        """Take the snapshots of a hang, tell the verdict, and only then run the debugger, which takes minutes."""
        from sglang_crashkit.kernel.discovery import find_processes

        found = find_processes(pid=self._server.pid, everything=True).processes if self._server is not None else ()
        native, count = self._args.native, self._args.snapshots
        what = f"{count} snapshots of {len(found)} processes"
        collection = self._take_snapshots(found, count, what, "its processes are not on this host", native=native)
        if collection is None:
            return ExitCode.PARTIAL
        verdict = self._tell_verdict(collection)
        if native:
            self._debug(collection, verdict)
        return ExitCode.PARTIAL if _without(collection) else ExitCode.DONE

    def _capture_survivors(self) -> ExitCode:
        """Take one snapshot of those that are left of a crash, for they will not be for long.

        There is no verdict on them: who failed first is known by then, and they stand still because of it.
        """
        # Those that were known before: they may be gone by the time that it takes to look for them anew.
        known, deaths = (self._server.processes, self._server.ends.deaths) if self._server is not None else ((), ())
        ended = {death.pid for death in deaths}
        left = [one for one in known if one.pid not in ended]
        what = f"the stacks of {len(left)} processes that were left"
        collection = self._take_snapshots(left, 1, what, "none of its processes is left")
        return ExitCode.PARTIAL if collection is None or _without(collection) else ExitCode.DONE

    def _take_snapshots(
        self, processes: Sequence[FoundProcess], count: int, what: str, without_any: str, *, native: bool = False
    ) -> Collection | None:
        """Take so many snapshots and tell of them; None, which is told, where there are none."""
        if not processes:
            self._tell("snapshots", f"there are no snapshots: {without_any}", files=[])
            return None
        from sglang_crashkit.collect.collection import Collection, Plan

        self._folder = self._args.output_dir / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        plan = Plan(self._folder, count, self._args.interval, native=native)
        try:
            collection = Collection(processes, plan, lambda _line: None)
            collection.take_snapshots()
        except (OSError, CrashkitError) as error:
            self._tell("problem", f"no snapshots in {self._folder}: {error}; {_OUTPUT_HINT}")
            return None
        files = [*collection.snapshot_files, *_files_of(collection)]
        self._tell_files("snapshots", what, files, _without(collection))
        return collection

    def _debug(self, collection: Collection, verdict: tuple[str, str]) -> None:
        before = _files_of(collection)
        try:
            collection.debug()
        except OSError as error:
            self._tell("problem", f"no native stacks in {self._folder}: {error}; {_OUTPUT_HINT}")
            return
        files = [name for name in _files_of(collection) if name not in before]
        if collection.spared:
            self._tell("native_stacks", f"not taken: {collection.spared}", files=files)
            return
        processes = collection.collected
        without = [one.process.title for one in processes if one.debugged is None or not one.debugged.threads]
        self._tell_files("native_stacks", f"native stacks of {len(processes) - len(without)} processes", files, without)
        self._tell_verdict(collection, verdict)

    def _tell_files(self, kind: str, what: str, files: list[str], without: list[str]) -> None:
        text = f"{what} in {self._folder}" + (f"; none of {', '.join(without)}" if without else "")
        self._tell(kind, text, output_dir=str(self._folder.absolute()), files=files, missing=without)

    def _tell_verdict(self, collection: Collection, told: tuple[str, str] = ("", "")) -> tuple[str, str]:
        """Tell and return the verdict, unless it is the one that was told."""
        explanation = collection.explain()
        verdict = (explanation.statement, explanation.level)
        if verdict != told:
            details = {"explanation": explanation.to_json()} if self._args.json else {}
            self._tell("verdict", explanation.statement, level=explanation.level, **details)
        return verdict

    def _tell_incident(self, *, is_crash: bool, wait_secs: float = 0.0) -> None:
        """Tell once what the server's own crash handler found, where it has one, and wait while that is at work."""
        if self._server is None:
            return
        from sglang_crashkit.incident.store import find_incident_of
        from sglang_crashkit.incident.summary import headline
        from sglang_crashkit.model.checked_json import mapping_of
        from sglang_crashkit.watch.server import first_death

        found = find_incident_of(self._server.pid, self._began, self._server.arguments, wait_secs)
        document = found.document if found is not None else None
        if found is None or document is None or found.name in self._told_incidents:
            return
        self._told_incidents.add(found.name)
        verdict = mapping_of(document.get("verdict"))
        if not is_crash and document.get("kind") not in _NO_CRASH:
            # All of it had ended before the watcher looked again: only the handler saw who was first.
            level, first = str(verdict.get("level", "unknown")), first_death(document)
            text = f"{first}; the whole server has ended" if first is not None else headline(document)
            self._tell("crash", text, level=level, first=_death_json(first))
            self._tell("snapshots", "there are no snapshots: none of its processes is left", files=[])
        text = f"{verdict.get('text') or headline(document)} Incident: {found.path}"
        more = {"path": str(found.path), "headline": headline(document), "first_failure": verdict.get("first_failure")}
        self._tell("incident", text, level=str(verdict.get("level", "unknown")), **more)

    def _introduction(self) -> str:
        where = f" at {self._probe.address}" if self._probe is not None else ""
        who = f"server {self._server.pid}" if self._server is not None else "the server"
        return f"{who}{where}; {self._hang_secs:g} s without an answer are a hang"

    def _tell_event(self, event: Event) -> None:
        from sglang_crashkit.analysis.member import describe

        more: dict[str, Any] = {"secs": round(event.secs, 1)} if event.secs else {}
        if event.kind in ("crash", "hang"):
            more["level"] = event.level
        if event.kind == "crash":
            more["first"] = _death_json(event.first)
        if event.kind == "hang":
            more["ranks"] = [
                {"pid": one.source.pid, "title": one.source.title, "manner": one.manner(), "seen": describe(one)}
                for one in event.ranks
            ]
        self._tell(event.kind, event.text, **more)

    def _tell(self, kind: str, text: str, **more: Any) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._clear()
        if self._args.json:
            say_json({"time": now, "event": kind, "text": text} | more)
        else:
            level = f" [{more['level']}]" if "level" in more else ""
            say(f"{now} {kind}: {text}{level}")

    def _overview(self, seen: Observation) -> None:
        """Say what is waited for, and what is seen: on a terminal all the time, elsewhere every `_REPEAT_SECS`."""
        if not self._is_terminal and time.monotonic() < self._said_at + _REPEAT_SECS:
            return
        self._said_at = time.monotonic()
        titles = {one.title.removeprefix(_RANK): one.state for one in seen.samples if one.title.startswith(_RANK)}
        ranks = "".join(f", {title} {state}" for title, state in list(titles.items())[:8])
        silent = f" for {self._watching.silent_secs:.0f} s" if self._watching.silent_secs else ""
        line = f"{self._watching.phase}: health {seen.health}{silent}{ranks}"
        if self._is_terminal:
            # What takes a second line is not written over by the next one.
            columns = shutil.get_terminal_size((80, 24)).columns - 1
            show_progress(line[:columns])
        else:
            say(f"waiting for {_AWAITED[self._watching.phase]}; {line}", error=True)

    def _clear(self) -> None:
        if self._is_terminal:
            show_progress("")


def _death_json(death: Death | None) -> dict[str, Any] | None:
    return {"pid": death.pid, "title": death.title, **vars(death.end)} if death is not None else None


def _files_of(collection: Collection) -> list[str]:
    return [name for one in collection.collected for name in one.files]


def _without(collection: Collection) -> list[str]:
    """Return the titles of those of which there is no stack."""
    return [one.process.title for one in collection.collected if not one.has_stacks]
