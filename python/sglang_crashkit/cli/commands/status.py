"""``sglang-crashkit status``: print the state of an installed SGLang, and which servers here have a crash handler."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_crashkit import protocol
from sglang_crashkit.cli.arguments import add_python
from sglang_crashkit.cli.output import say, say_json
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.discovery import FoundProcess, find_processes
from sglang_crashkit.kernel.stack_hooks import HookFiles, read_handler_pid
from sglang_crashkit.settings import SOCKET

_PROC = Path("/proc")
_DELETED = " (deleted)"

_EXAMPLES = """\
examples:
  sglang-crashkit status
  sglang-crashkit status --python /opt/sglang/bin/python --check && start the server
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EXAMPLES
    add_python(parser)
    parser.add_argument(
        "--check", action="store_true", help="end with 1 unless SGLang is patched and each running server is watched"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Print the status."""
    from sglang_crashkit.installer.environment import open_session
    from sglang_crashkit.installer.status import State, read_tree

    environment, _patches, lock = open_session(args.python)
    tree = read_tree(environment, lock.find(environment.version))
    servers = find_running_servers()
    if args.json:
        say_json(tree.to_json(lock) | {"servers": [asdict(server) for server in servers]}, indent=1)
    else:
        say(*tree.lines(lock), *map(format_server, servers))
    is_patched = tree.overall is State.PATCHED and tree.next_step is None
    is_well = is_patched and not any(server.problem for server in servers)
    return ExitCode.DONE if is_well or not args.check else ExitCode.FAILED


@dataclass(frozen=True)
class RunningServer:
    """A server, named by one of its processes."""

    pid: int  # of a worker, or of the main process where no worker is known
    title: str  # title of that process
    runtime: str  # the runtime folder of its crash handler; empty where it has none
    handler: int | None  # the crash handler's pid; None if unknown
    problem: str  # why a crash would not reach the handler; empty where it would


def find_running_servers() -> list[RunningServer]:
    """Return the servers of this user, or of all where this is root; those that never had a crash handler come last.

    A server whose runtime folder was removed, or whose handler was killed, serves on, but its crash leaves no incident.
    The runtime folder is found by a file that a worker holds open: setproctitle overwrites the environment that the
    kernel shows.
    """
    servers: dict[int, list[FoundProcess]] = {}
    for one in find_processes(user=os.geteuid() or None, everything=True).processes:
        servers.setdefault(one.server or one.pid, []).append(one)
    found: dict[str, RunningServer] = {}
    for main, members in servers.items():
        worker = next((one for one in members if one.role == "scheduler"), members[0])
        pids = dict.fromkeys([worker.pid, *(one.pid for one in members if one.pid != main), main])
        hooked = next(((pid, folder) for pid in pids if (folder := _runtime_of(pid))), None)
        if hooked is not None:
            pid, folder = hooked
            found.setdefault(folder, _look(pid, procfs.read_title(pid), folder))
        else:
            # A server that is known only by its command line has ranks without titles: it may still be starting.
            is_new = worker.way == "command line"
            problem = "" if is_new else "it was started without the kit, or by a launch that has none"
            found[f"none of {main}"] = RunningServer(worker.pid, worker.title, "", None, problem)
    return sorted(found.values(), key=lambda one: not one.runtime)


def _look(pid: int, title: str, folder_path: str) -> RunningServer:
    # The path is the server's: in a container it may have another temporary folder than this command.
    inside = _PROC / str(pid) / "root" / folder_path.lstrip("/")
    try:
        folder = os.open(inside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        problem = f"its runtime folder is gone ({error.strerror}), as after a cleaner of the temporary folder"
        return RunningServer(pid, title, folder_path, None, problem)
    try:
        # A socket's path has at most 107 bytes, which the path through /proc/PID/root may exceed.
        runtime = _PROC / "self" / "fd" / str(folder)
        problem = "" if protocol.is_reachable(str(runtime / SOCKET)) else "its crash handler has ended"
        return RunningServer(pid, title, folder_path, read_handler_pid(runtime), problem)
    finally:
        os.close(folder)


def _runtime_of(pid: int) -> str:
    """Return the runtime folder with a process's stack hooks; empty where it has none or cannot be inspected."""
    stat = procfs.read_stat(pid)
    if stat is None:
        return ""
    # Compare without the pid in the name, which differs inside and outside of a container.
    ending = HookFiles.of(Path(), pid, stat.start_ticks).fault.name.removeprefix(str(pid))
    paths = (Path(str(path).removesuffix(_DELETED)) for _link, path in procfs.open_files(pid))
    return next((str(path.parent) for path in paths if path.name.endswith(ending)), "")


def format_server(server: RunningServer) -> str:
    """Return a line on the server for a person."""
    name = f"running: the server of {server.title} (pid {server.pid})"
    if not server.problem:
        return f"{name} is watched by crash handler {server.handler}" if server.runtime else f"{name} is still starting"
    return f"{name} has no crash handler: {server.problem}; a crash of it leaves no incident; next: restart it"
