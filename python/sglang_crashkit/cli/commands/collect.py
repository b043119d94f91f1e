"""``sglang-crashkit collect``: what the SGLang processes on this host are doing, patched or not."""

from __future__ import annotations

import argparse
import os
import pwd
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_crashkit.cli.arguments import command, positive, seconds
from sglang_crashkit.cli.main import Terminated, end_with_reader
from sglang_crashkit.cli.output import say, say_json, say_screen, tell
from sglang_crashkit.errors import CrashkitError, ExitCode, NothingToDoError, RefusedError, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.collect.collection import Collection
    from sglang_crashkit.collect.gather import Transport
    from sglang_crashkit.kernel.discovery import Discovery
    from sglang_crashkit.model.case import Case
    from sglang_crashkit.model.verdict import Verdict

_MAX_TITLES = 8
#: Most lines that are printed of the processes, and of what is missing; the file has all.
_MAX_LINES = 100
_STDOUT = 1
_EXAMPLES = """\
examples:
  sglang-crashkit collect
  sglang-crashkit collect --pid 4711 --native -o hang
  sglang-crashkit collect --when-unhealthy http://127.0.0.1:30000 --wait 86400
  sglang-crashkit collect --slurm-job 1234 --container-name sglang_{job_id}_{node} -o hang
  sglang-crashkit collect --via "kubectl exec {host} -c sglang --" --hosts sglang-0,sglang-0-1
  sglang-crashkit collect --via "ssh {host}" --hosts "$(cat nodes.txt)" --remote-command /opt/sglang/bin/sglang-crashkit
"""
#: Debuggers get this share of a node's timeout, less the seconds in which its step starts and one debugger stops.
_SHARE, _END_SECS = 0.9, 20.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    which = parser.add_argument_group("which processes")
    server = which.add_mutually_exclusive_group()
    server.add_argument("--pid", type=positive, help="the server that this process belongs to or started")
    server.add_argument("--all-servers", action="store_true", help="every server on this host")
    which.add_argument(
        "--all", action="store_true", help="also the main process, tokenizers, detokenizer and controller"
    )
    whose = which.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="NAME", help="this user's processes instead of your own")
    whose.add_argument("--any-user", action="store_true", help="every user's processes")
    when = parser.add_argument_group("when, and how often")
    when.add_argument(
        "--when-unhealthy",
        metavar="URL",
        help="wait until the server there fails its health check or does not answer it",
    )
    when.add_argument(
        "--wait",
        "--wait-seconds",
        metavar="SECONDS",
        dest="wait_seconds",
        type=seconds,
        help="wait first (0); with --when-unhealthy: give up after this time and collect nothing (never)",
    )
    when.add_argument(
        "--snapshots", metavar="K", type=positive, default=3, help="number of snapshots of the Python stacks (3)"
    )
    when.add_argument("--interval", metavar="S", type=seconds, default=5.0, help="seconds between them (5)")
    when.add_argument(
        "--native",
        action=argparse.BooleanOptionalAction,
        help="also take native stacks and CUDA kernels with cuda-gdb or py-spy, which stops each process for seconds;"
        " skipped where the Python stacks leave no question",
    )
    where = parser.add_argument_group("where to")
    where.add_argument("-o", "--output-dir", metavar="DIR", help="folder for the files ({log_dir}/backtraces)")
    where.add_argument("--log-dir", metavar="DIR", type=Path, default=Path(), help="what {log_dir} stands for (.)")
    where.add_argument(
        "--config",
        metavar="YAML",
        type=Path,
        help="a job file with a debug: section; implies --native and --all-servers",
    )
    where.add_argument("--json", action="store_true", help="print a JSON object")
    nodes = parser.add_argument_group("on every node of a Slurm job, or on several hosts")
    transport = nodes.add_mutually_exclusive_group()
    transport.add_argument("--slurm-job", metavar="ID", help="on each node of this job; one result for all")
    transport.add_argument(
        "--via",
        metavar="COMMAND",
        help="on each of --hosts through this command, such as 'kubectl exec {host} -c sglang --', 'docker exec {host}'"
        " or 'ssh {host}'; one result for all. {command} stands for what runs there, quoted for a shell",
    )
    nodes.add_argument(
        "--hosts", metavar="A,B,...", type=_host_names, help="the names that {host} stands for, also one a line"
    )
    nodes.add_argument(
        "--container-name",
        metavar="PATTERN",
        help="in the pyxis container of this name on each node, such as sglang_{job_id}_{node}",
    )
    nodes.add_argument("--fan-out", metavar="N", type=positive, default=32, help="nodes at a time (32)")
    nodes.add_argument(
        "--node-timeout", metavar="S", type=positive, default=300, help="seconds until a node is given up (300)"
    )
    nodes.add_argument(
        "--remote-command",
        metavar="COMMAND",
        type=command,
        help='the kit on the nodes ("python3 -m sglang_crashkit"; in a Slurm job without a container this Python)',
    )
    # --via and --slurm-job give this to the collector on each node. It stops after S seconds, or when its output has
    # no reader; the debuggers stop earlier, so that the answer, which contains the files, is still sent.
    nodes.add_argument("--gathered-within", metavar="S", type=positive, help=argparse.SUPPRESS)


def _host_names(text: str) -> list[str]:
    """Return the names in a list, separated by commas, blanks or new lines; ``#`` begins a comment."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [host for line in lines for host in line.replace(",", " ").split()]


def run(args: argparse.Namespace) -> ExitCode:
    """Wait, collect, and print what was collected."""
    from sglang_crashkit.capture.debug_config import DebugConfig, expand_output, read_debug_config

    # The command line overrides the file.
    config = DebugConfig(enabled=True, wait_seconds=0) if args.config is None else read_debug_config(args.config)
    if not config.enabled:
        raise NothingToDoError(
            f"debug.enabled is not true in {args.config}, so nothing is collected",
            next_step="set it, or leave --config out",
        )
    wait_secs = config.wait_seconds if args.wait_seconds is None else args.wait_seconds
    output = expand_output(args.output_dir or config.output_dir, args.log_dir)
    if args.native is None:
        args.native = args.config is not None
    if args.slurm_job is not None or args.via is not None or args.hosts is not None:
        return _collect_nodes(args, wait_secs, output.absolute())
    if args.gathered_within is not None:
        end_with_reader(_STDOUT, args.gathered_within)
    return _collect_here(args, wait_secs, output)


def _collect_here(args: argparse.Namespace, wait_secs: float, output: Path) -> ExitCode:
    from sglang_crashkit.collect.collection import Collection, Plan
    from sglang_crashkit.kernel.discovery import Place, find_processes
    from sglang_crashkit.kernel.private_files import make_private_folder

    began, user = time.monotonic(), _user_of(args)
    # Within a Slurm job, the servers of other jobs on the same node are left out.
    here = Place.of_environ(os.environ) if args.pid is None else None

    def find() -> Discovery:
        return find_processes(pid=args.pid, user=user, everything=args.all, here=here)

    several = args.pid is not None or args.all_servers or args.config is not None or here is not None
    if args.when_unhealthy is not None:
        args.pid = _wait_until_unhealthy(args, wait_secs, is_one=not several) or args.pid
    elif wait_secs:
        if not several:
            # Several servers are an error: report it before the wait, not after it.
            _require_one_server(find())
        _wait(wait_secs, _overview(find()))
    found = find()
    for line in _skipped_lines(found):
        tell(line)
    if not found.processes:
        raise _nothing(args, found)
    if not several and args.pid is None:
        _require_one_server(found)
    if args.gathered_within is not None:
        try:
            output = make_private_folder(output.absolute())
        except (CrashkitError, OSError):
            # A container may not have that folder. The answer contains the files, so any folder will do.
            output = Path(tempfile.mkdtemp(prefix="sglang-crashkit-collect-"))
    collection = Collection(found.processes, Plan(output, args.snapshots, args.interval, native=args.native), tell)
    interrupt: KeyboardInterrupt | None = None
    is_said = args.json
    try:
        collection.take_snapshots()
        if args.native and not is_said:
            # The debuggers take minutes.
            _say_snapshots(collection)
            is_said = True
        limit = None
        if args.gathered_within is not None:
            limit = max(0.0, _SHARE * args.gathered_within - _END_SECS - (time.monotonic() - began))
        collection.debug(limit)
    except KeyboardInterrupt as error:
        interrupt = error
        tell("interrupted; what was collected until then is kept")
    has_stacks = [any(each.threads or each.native for each in one.moments) for one in collection.collected]
    status = _status_of({ExitCode.DONE if its else ExitCode.FAILED for its in has_stacks}, interrupt)
    if args.json:
        is_far = args.gathered_within is not None
        say_json(collection.to_json(status, found, whole=is_far), indent=None if is_far else 2)
        return status
    if not is_said:
        _say_snapshots(collection)
    _say_end(collection, output)
    return status


def _say_snapshots(collection: Collection) -> None:
    """Print what the processes did, and the verdict in one sentence."""
    from sglang_crashkit.view.collected import moment_lines

    for one in collection.collected:
        say(f"{one.process.title} (pid {one.process.pid})", *moment_lines(one.moments))
    verdict, _case = collection.judged()
    if collection.rounds:
        found = collection.divergence
        told = "; ".join([verdict.headline, *([found.statement] if found else [])])
        say(f"by the snapshots ({verdict.level}): {told}")


def _say_end(collection: Collection, output: Path) -> None:
    """Print what the debuggers added, and the verdict."""
    from sglang_crashkit.view.collected import debugged_line

    if collection.skipped:
        say(f"native stacks: not taken: {collection.skipped}")
    for one in collection.collected:
        if one.debugged is not None and not collection.skipped:
            say(f"{one.process.title} (pid {one.process.pid}): {debugged_line(one.debugged)}")
    say(*filter(None, [collection.missing]), f"files: {output}")
    _say_verdict(*collection.judged())


def _say_verdict(verdict: Verdict, case: Case) -> None:
    """Print the verdict as ``sglang-crashkit explain`` does, if any stack was taken."""
    from sglang_crashkit.redact import redact_text
    from sglang_crashkit.view.verdict import screen

    if any(process.stacks for process in case.processes.values()):
        say("")
        say_screen(map(redact_text, screen(verdict, case)))


def _collect_nodes(args: argparse.Namespace, wait_secs: float, output: Path) -> ExitCode:
    # Imported here, so that collecting on this host alone does not import it.
    from sglang_crashkit.collect.collection import judged
    from sglang_crashkit.collect.gather import EXPLANATION, gather
    from sglang_crashkit.redact import redact_text
    from sglang_crashkit.view.verdict import screen

    if args.pid is not None:
        raise UsageError(
            "--pid names a process of one machine", next_step="leave it out, or leave --slurm-job and --via out"
        )
    transport = _transport(args)
    command = _remote_command(args)
    # The transport is checked above: report its errors before a long wait, not after it.
    if args.when_unhealthy is not None:
        _wait_until_unhealthy(args, wait_secs, is_one=False)
    elif wait_secs:
        _wait(wait_secs, transport.title)
        transport = transport if args.via is not None else _transport(args)
    names = ", ".join(transport.nodes[:_MAX_TITLES])
    tell(f"collecting: {transport.title}, {args.fan_out} at a time: {names}")
    result = gather(transport, command, output, tell, at_once=args.fan_out, node_secs=args.node_timeout)
    status = _status_of({node.status for node in result.nodes}, result.interrupt)
    verdict, case = judged(result.rounds)
    try:
        result.write(verdict, map(redact_text, screen(verdict, case)), output)
    except OSError as error:
        tell(f"cannot write {output / EXPLANATION}: {error.strerror or error}")
    if args.json:
        say_json(result.to_json(verdict, output, status), indent=2)
    else:
        say(transport.title)
        for lines in result.lines():
            say(*lines[:_MAX_LINES])
            if len(lines) > _MAX_LINES:
                say(f"... and {len(lines) - _MAX_LINES} lines more in {output / EXPLANATION}")
        say(f"files: {output}/<{transport.noun}>/, {output / EXPLANATION}")
        _say_verdict(verdict, case)
    if result.interrupt is not None:
        tell("interrupted; what was collected until then is kept")
    return status


def _transport(args: argparse.Namespace) -> Transport:
    """Return the transport to the nodes that the arguments name."""
    from sglang_crashkit.collect.via import hosts_via, job_via

    if args.slurm_job is not None:
        if args.hosts is not None:
            raise UsageError("a Slurm job has its own hosts", next_step="leave --hosts out, or --slurm-job")
        return job_via(args.slurm_job, args.container_name)
    if args.via is None or args.hosts is None:
        missing = "--via" if args.via is None else "--hosts"
        raise UsageError(
            f"{missing} is missing: --via and --hosts belong together", next_step="sglang-crashkit collect --help"
        )
    if args.container_name is not None:
        raise UsageError("--container-name is for a Slurm job", next_step="say it in --via, or name --slurm-job")
    return hosts_via(args.via, args.hosts)


def _remote_command(args: argparse.Namespace) -> list[str]:
    # Another host or container has its own Python, whose path differs from this one's.
    same_image = args.slurm_job is not None and args.container_name is None
    command = args.remote_command or [sys.executable if same_image else "python3", "-m", "sglang_crashkit"]
    command = [*command, "collect", "--json", f"--gathered-within={args.node_timeout}"]
    # Within a Slurm job, the collector takes the servers of that job, so it needs no --all-servers.
    every = args.slurm_job is None and (args.all_servers or args.config is not None)
    command += ["--all-servers"] if every else []
    command += [f"--snapshots={args.snapshots}", f"--interval={args.interval:g}"]
    command += [f"--{name.replace('_', '-')}" for name in ("all", "any_user") if getattr(args, name)]
    command += [f"--user={args.user}"] if args.user is not None else []
    return [*command, "--native" if args.native else "--no-native"]


def _require_one_server(found: Discovery) -> None:
    """Raise RefusedError where the processes belong to several servers."""
    of_server = {one.server or one.pid: one for one in found.processes}
    if len(of_server) < 2:
        return
    listed = ""
    for pid, one in of_server.items():
        ranks = sum(each.server == one.server and each.role == "scheduler" for each in found.processes)
        what = _counted(ranks, "scheduler", "schedulers") if ranks else one.title
        listed += f"\n  --pid {pid}: {what}, {f'{one.side} side, ' if one.side else ''}port {one.port}"
    raise RefusedError(
        f"there are {len(of_server)} SGLang servers on this host, so name one:{listed}",
        next_step=f"sglang-crashkit collect --pid {next(iter(of_server))}, or --all-servers",
    )


def _counted(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun if number == 1 else plural}"


def _user_of(args: argparse.Namespace) -> int | None:
    if args.any_user:
        return None
    if args.user is None:
        return os.geteuid()
    try:
        return int(args.user) if re.fullmatch(r"\d{1,10}", args.user, re.ASCII) else pwd.getpwnam(args.user).pw_uid
    except KeyError:
        raise UsageError(f"there is no user {args.user}", next_step="name one, or a user id") from None


def _wait(seconds: float, overview: str) -> None:
    """Print what there is to collect, and wait."""
    tell(f"collecting in {seconds:.0f} s: {overview}")
    time.sleep(seconds)


def _wait_until_unhealthy(args: argparse.Namespace, wait_secs: float, *, is_one: bool) -> int | None:
    """Wait until the server is unhealthy; with `is_one`, for a single server, return the process that listens there."""
    from sglang_crashkit.collect.unhealthy import process_at, wait_until_unhealthy
    from sglang_crashkit.kernel.server_address import Address

    address = Address.parse(args.when_unhealthy)
    if is_one and not address.is_here:
        raise UsageError(f"{address} is on another host", next_step="run it there, or name that by --via and --hosts")
    is_limited = args.wait_seconds is not None or args.config is not None
    reason = wait_until_unhealthy(address, wait_secs if is_limited else float("inf"), tell)
    if not reason:
        raise NothingToDoError(
            f"{address} was not unhealthy within {wait_secs:g} s, so nothing is collected", next_step="a longer --wait"
        )
    tell(f"{address} is unhealthy: {reason}")
    return process_at(address) if is_one else None


def _overview(found: Discovery) -> str:
    titles = [process.title for process in found.processes]
    return f"{_counted(len(titles), 'process', 'processes')}: {', '.join(titles[:_MAX_TITLES]) or 'none yet'}"


def _skipped_lines(found: Discovery) -> Iterator[str]:
    from sglang_crashkit.collect.collection import name_of

    for user, pids in found.others.items():
        name = name_of(user)
        which = ", ".join(str(pid) for pid in pids[:_MAX_TITLES])
        yield f"user {name}'s processes were left alone (pid {which}); next: --user {name}, or --any-user"
    for place, pids in found.elsewhere.items():
        which = ", ".join(str(pid) for pid in pids[:_MAX_TITLES])
        number = _counted(len(pids), "process", "processes")
        job = f"Slurm job {place.job_id} on {place.node or 'this node'}" if place else "no Slurm job"
        yield f"{number} of {job} left alone (pid {which}); next: --pid {pids[0]}"


def _nothing(args: argparse.Namespace, found: Discovery) -> NothingToDoError:
    if found.elsewhere or found.others:
        what = "there are only SGLang processes of other users, or of other Slurm jobs than this shell's"
        return NothingToDoError(what, next_step="name one with --pid, or as root --any-user")
    if args.pid is not None:
        return NothingToDoError(
            f"process {args.pid} is no SGLang server, nor is one below it",
            next_step="sglang-crashkit collect   # finds all of yours",
        )
    return NothingToDoError(
        "there is no SGLang process on this host",
        next_step="run it where the server runs: on its node, in its container",
    )


def _status_of(statuses: Set[int | None], interrupt: KeyboardInterrupt | None) -> ExitCode:
    """Return the exit status of a command from those of its processes or nodes."""
    if interrupt is not None:
        return ExitCode.TERMINATED if isinstance(interrupt, Terminated) else ExitCode.INTERRUPTED
    if statuses == {ExitCode.NOTHING}:
        return ExitCode.NOTHING
    # A node without SGLang is no failure: the router may have a node of its own.
    if statuses <= {ExitCode.DONE, ExitCode.NOTHING}:
        return ExitCode.DONE
    return ExitCode.PARTIAL if statuses & {ExitCode.DONE, ExitCode.PARTIAL} else ExitCode.FAILED
