"""``sglang-crashkit collect``: what the SGLang processes on this host are doing, patched or not."""

from __future__ import annotations

import argparse
import functools
import os
import pwd
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sglang_crashkit.cli import slurm_collect
from sglang_crashkit.cli.argument_types import positive, seconds
from sglang_crashkit.cli.ending import Terminated, terminable
from sglang_crashkit.errors import CrashkitError, ExitCode, NothingToDoError, RefusedError, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.collect.collection import Collection
    from sglang_crashkit.kernel.discovery import Discovery

HELP = "take the stacks of the SGLang processes on this host, of a server that hangs"

#: Seconds between two lines of the overview while it waits, on a terminal and elsewhere.
_REDRAW_SECS, _REPEAT_SECS = 2.0, 60.0
_MOST_TITLES = 8


class Report(Protocol):
    """What is printed, when."""

    def snapshots_taken(self, status: ExitCode) -> None:
        """Print what is to be known before the debuggers run.

        Args:
            status: what the exit status would be.
        """

    def ended(self, status: ExitCode) -> None:
        """Print the rest, or all of it where it was interrupted before."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    which = parser.add_argument_group("which processes")
    server = which.add_mutually_exclusive_group()
    server.add_argument("--pid", type=positive, help="of the server that this process belongs to, or is above")
    server.add_argument("--all-servers", action="store_true", help="of each server, where there are several")
    which.add_argument("--all", action="store_true", help="also main process, tokenizers, detokenizer, controller")
    which.add_argument("--routers", action="store_true", help="also what passes requests on to servers")
    whose = which.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="NAME", help="of this user instead of your own")
    whose.add_argument("--any-user", action="store_true", help="of every user")
    when = parser.add_argument_group("when, and how often")
    when.add_argument("--wait-seconds", metavar="N", type=seconds, help="wait before (0)")
    when.add_argument("--snapshots", metavar="K", type=positive, default=3, help="Python stacks of K moments (3)")
    when.add_argument("--interval", metavar="S", type=seconds, default=5.0, help="seconds between them (5)")
    when.add_argument(
        "--native",
        action=argparse.BooleanOptionalAction,
        help="also native stacks and CUDA kernels, by cuda-gdb or gdb, which stop each process for seconds; not where"
        " the stacks show no hang, or for certain who it is",
    )
    # Its name until 0.1; in the release after this one it goes.
    when.add_argument("--no-debugger", action="store_true", help=argparse.SUPPRESS)
    where = parser.add_argument_group("where to")
    where.add_argument("--output-dir", metavar="DIR", help="folder for the files ({log_dir}/backtraces)")
    where.add_argument("--log-dir", metavar="DIR", type=Path, default=Path(), help="what {log_dir} stands for (.)")
    where.add_argument(
        "--config",
        metavar="YAML",
        type=Path,
        help="a job's file, with a debug: section, which asks for --native and --all-servers",
    )
    where.add_argument("--json", action="store_true", help="print a JSON object")
    where.add_argument(
        "--with-snapshots", action="store_true", help="with the snapshots, and these merged, in the JSON object"
    )
    slurm_collect.configure(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Wait, collect, and print what there is.

    Raises:
        UsageError: the configuration makes no sense.
        NothingToDoError: there is no such process, or the configuration says that nothing is to be done.
        RefusedError: there are several servers, and it is not said which.
        CrashkitError: the output folder cannot be written to.
    """
    wait_secs, output = _read_config(args)
    _settle_native(args)
    user = _user_of(args)
    try:
        with terminable():
            return _collect(args, wait_secs, output, user)
    except Terminated:
        _say("asked to end before anything was collected")
        return ExitCode.TERMINATED
    except OSError as error:
        raise CrashkitError(
            f"cannot write to {output}: {error.strerror or error}", next_step="name another: --output-dir DIR"
        ) from error


def _collect(args: argparse.Namespace, wait_secs: float, output: Path, user: int | None) -> ExitCode:
    # Imported here, so that every command starts without what the others need.
    from sglang_crashkit.cli import collect_report, node_answer
    from sglang_crashkit.collect.collection import Collection, Plan
    from sglang_crashkit.kernel.discovery import find_processes
    from sglang_crashkit.kernel.slurm_place import Place

    if args.slurm_job is not None:
        wait = functools.partial(_wait, wait_secs, lambda: f"the nodes of job {args.slurm_job}")
        return slurm_collect.run(args, output, wait, _say)
    began, node_secs = time.monotonic(), args.gathered_within
    if node_secs is not None:
        node_answer.greet()
    if args.with_snapshots or node_secs is not None:
        output = node_answer.folder_or_substitute(output)

    # In a step of a Slurm job, those of another job on the same node are not asked for.
    here = Place.of_environ(os.environ) if args.pid is None else None

    def find() -> Discovery:
        return find_processes(pid=args.pid, user=user, everything=args.all, routers=args.routers, here=here)

    several = args.pid is not None or args.all_servers or args.config is not None or here is not None
    if wait_secs and not several:
        # Better told before a long wait than after it.
        require_one_server(find())
    _wait(wait_secs, lambda: _overview(find()))
    found = find()
    for line in _passed_over(found):
        _say(line)
    if not found.processes:
        raise _nothing(args, found)
    if not several:
        require_one_server(found)
    plan = Plan(output, args.snapshots, args.interval, native=args.native)
    collection = Collection(found.processes, plan, _say)
    report: Report
    if node_secs is not None:
        report = node_answer.NodeReport(collection, output)
    elif args.json:
        report = collect_report.JsonReport(collection, output, found, with_snapshots=args.with_snapshots)
    else:
        report = collect_report.TextReport(collection, output)
    interrupt: KeyboardInterrupt | None = None
    try:
        collection.take_snapshots()
        if plan.native:
            report.snapshots_taken(_status_of(collection, None))
            used = time.monotonic() - began
            collection.debug(node_answer.debugger_secs(node_secs, used) if node_secs is not None else None)
    except KeyboardInterrupt as error:
        interrupt = error
        _say("interrupted; what was collected until then is kept")
    status = _status_of(collection, interrupt)
    report.ended(status)
    return status


def _read_config(args: argparse.Namespace) -> tuple[float, Path]:
    """Return how long to wait, in seconds, and the output folder: the command line's, else the file's."""
    from sglang_crashkit.capture.debug_config import DEFAULT_OUTPUT, expand_output, read_debug_config

    wait_secs, template = 0.0, DEFAULT_OUTPUT
    if args.config is not None:
        config = read_debug_config(args.config)
        if not config.enabled:
            raise NothingToDoError(
                f"debug.enabled is not true in {args.config}, so nothing is collected",
                next_step="set it, or leave --config out",
            )
        wait_secs, template = config.wait_seconds, config.output_dir
    if args.wait_seconds is not None:
        wait_secs = args.wait_seconds
    return wait_secs, expand_output(args.output_dir or template, args.log_dir)


def _settle_native(args: argparse.Namespace) -> None:
    """Say once what of the older option is left, and let a job's file ask for native stacks."""
    if args.no_debugger and args.gathered_within is None:
        _say("--no-debugger is what happens anyway, and goes with the next release; next: leave it out, or --no-native")
    if args.native is None:
        args.native = args.config is not None and not args.no_debugger


def require_one_server(found: Discovery) -> None:
    """Refuse where the processes are of several servers.

    Raises:
        RefusedError: they are; it names each server, and the command for one and for all of them.
    """
    from sglang_crashkit.capture.server_arguments import port_of, side_of

    servers = {one.server: one for one in found.processes if one.role != "router"}
    if len(servers) < 2:
        return
    lines = []
    for server, one in servers.items():
        ranks = [process for process in found.processes if process.server == server and process.role == "scheduler"]
        what = f"{len(ranks)} scheduler{'' if len(ranks) == 1 else 's'}" if ranks else one.title
        side = side_of(one.server_arguments)
        words = [what, *([f"{side} side"] if side else []), f"port {port_of(one.server_arguments)}"]
        lines.append(f"  --pid {server if server is not None else one.pid}: {', '.join(words)}")
    first = next(iter(servers.values()))
    raise RefusedError(
        "\n".join([f"there are {len(servers)} SGLang servers on this host, and it is not said which:", *lines]),
        next_step=f"sglang-crashkit collect --pid {first.server if first.server is not None else first.pid}, or "
        "--all-servers",
    )


def _user_of(args: argparse.Namespace) -> int | None:
    if args.any_user:
        return None
    if args.user is None:
        return os.geteuid()
    try:
        return int(args.user) if args.user.isdigit() else pwd.getpwnam(args.user).pw_uid
    except KeyError:
        raise UsageError(f"there is no user {args.user}", next_step="name one, or a user id") from None


def _wait(seconds: float, overview: Callable[[], str]) -> None:
    """Wait, and say what there is to collect meanwhile."""
    deadline, said = time.monotonic() + seconds, -_REPEAT_SECS
    is_terminal = sys.stderr.isatty()
    while (left := deadline - time.monotonic()) > 0:
        if is_terminal or time.monotonic() - said >= _REPEAT_SECS:
            said = time.monotonic()
            line = f"collecting in {left:.0f} s: {overview()}"
            print(f"\r\033[K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr)
            sys.stderr.flush()
        time.sleep(min(left, _REDRAW_SECS))
    if is_terminal and seconds:
        print(file=sys.stderr)


def _overview(found: Discovery) -> str:
    titles = [process.title for process in found.processes]
    more = f" and {len(titles) - _MOST_TITLES} more" if len(titles) > _MOST_TITLES else ""
    names = f": {', '.join(titles[:_MOST_TITLES])}{more}" if titles else " yet"
    return f"{len(titles)} process{'' if len(titles) == 1 else 'es'}{names}"


def _passed_over(found: Discovery) -> Iterator[str]:
    from sglang_crashkit.cli import collect_report

    for user, pids in found.others.items():
        name = collect_report.name_of(user)
        which = ", ".join(str(pid) for pid in pids[:_MOST_TITLES])
        yield f"user {name}'s processes were left alone (pid {which}); next: --user {name}, or --any-user"
    for place, pids in found.elsewhere.items():
        which = ", ".join(str(pid) for pid in pids[:_MOST_TITLES])
        count = f"{len(pids)} process{'' if len(pids) == 1 else 'es'}"
        yield f"{count} of Slurm job {place.job_id} on {place.node} left alone (pid {which}); next: --pid {pids[0]}"


def _nothing(args: argparse.Namespace, found: Discovery) -> NothingToDoError:
    if found.elsewhere:
        pids = [pid for those in found.elsewhere.values() for pid in those]
        return NothingToDoError(
            f"there are only SGLang processes of other Slurm jobs than this shell's: {len(pids)}",
            next_step=f"--pid {pids[0]}, or any process of the server that is meant",
        )
    if found.others:
        return NothingToDoError("there are only other users' SGLang processes", next_step="--any-user, as root")
    if args.pid is not None:
        return NothingToDoError(
            f"process {args.pid} is no SGLang server, nor is one below it", next_step="leave --pid out to find all"
        )
    return NothingToDoError(
        "there is no SGLang process on this host",
        next_step="run it where the server runs: on its node, in its container",
    )


def _status_of(collection: Collection, interrupt: KeyboardInterrupt | None) -> ExitCode:
    if interrupt is not None:
        return ExitCode.TERMINATED if isinstance(interrupt, Terminated) else ExitCode.INTERRUPTED
    gave = [one.gave_something for one in collection.collected]
    if all(gave):
        return ExitCode.DONE
    return ExitCode.PARTIAL if any(gave) else ExitCode.FAILED


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
