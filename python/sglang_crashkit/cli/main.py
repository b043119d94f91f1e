"""Parse the arguments, run one command, and turn its outcome into an exit status.

SIGTERM ends a command as Ctrl-C does; `end_with_reader` sends it when the command's output has no reader any more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import select
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType

from sglang_crashkit import __version__
from sglang_crashkit.cli.output import guarded, problem_of, say, say_json, say_text
from sglang_crashkit.errors import CrashkitError, ExitCode

#: What each command does. Its module has the same name, or the one in `_MODULES`, and is imported when it is called.
COMMANDS = {
    "apply": "patch the installed SGLang",
    "revert": "take the patches out again: the files have their exact bytes back",
    "status": "say whether the installed SGLang is patched, and which running servers have a crash handler",
    "doctor": "check this host: what would keep a crash from being recorded, and how to fix it",
    "wheel": "build a patched SGLang wheel, and the kit's own beside it",
    "explain": "explain a failure from a log, stacks or kernel messages; needs no kit on the server",
    "incidents": "list the incidents in a crash folder, newest first",
    "show": "show one incident on one screen, or one part of it in full",
    "bundle": "pack an incident and a report of it into one file, for a bug report",
    "replay": "send the requests of an incident again, and find those that reproduce the fault",
    "steps": "show the last steps of the ranks side by side, and where they diverged",
    "core": "read a GPU core: which kernels ran, and what failed",
    "collect": "take the stacks of all ranks of a hung server, patched or not, and name the one to look at",
}
_MODULES = {"revert": "apply"}
_EXAMPLES = """\
examples:
  sglang-crashkit show latest --folder /var/crash/sglang   it crashed
  sglang-crashkit collect                                  it hangs
  sglang-crashkit explain server.log                       there is only a log
  sglang-crashkit doctor                                   nothing is wrong yet
"""
#: The end of each command's help.
_STATUSES = """\
exit status: 0 done, 1 failed, 2 the arguments make no sense, 3 nothing to do it on, 4 refused, 5 done in part,
130 interrupted, 143 ended by SIGTERM
"""


def load_command(name: str) -> ModuleType:
    """Return the module of the command called `name`.

    It has ``configure(parser)``, which adds its arguments, and ``run(args)``, which returns an `ExitCode`, or raises a
    `CrashkitError` for `main` to print.
    """
    return importlib.import_module(f"sglang_crashkit.cli.commands.{_MODULES.get(name, name)}")


def build_parser(called: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the arguments of the command that is called: no other is imported."""
    parser = argparse.ArgumentParser(
        prog="sglang-crashkit",
        description="Evidence from crashed and hung SGLang servers.",
        epilog=f"{_EXAMPLES}\nnext: sglang-crashkit COMMAND --help\n\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=words, description=words, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == called:
            load_command(name).configure(sub)
            sub.set_defaults(refuse=sub.error)
            # The formatter keeps the lines of the examples as they are.
            sub.epilog = f"{(sub.epilog or '').rstrip()}\n\n{_STATUSES}"
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, the process's own by default, and return the exit status."""
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
    except SystemExit as ended:
        # argparse ends so: after an error in the arguments, and after it printed the help.
        status = ended.code if isinstance(ended.code, int) else ExitCode.FAILED
        if not problem_of(sys.stdout):
            raise
    if problem := problem_of(sys.stdout):
        say(f"sglang-crashkit: the standard output cannot be written: {problem}", error=True)
        return int(ExitCode.FAILED)
    return status


def _run(argv: Sequence[str]) -> int:
    """Run one command; raises SystemExit where the arguments are wrong, and after the help was printed."""
    parser = build_parser(next((word for word in argv if word in COMMANDS), None))
    if not argv:
        parser.print_help(sys.stderr)
        raise SystemExit(int(ExitCode.USAGE))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # The command's own parser reports it, so that the user reads the usage of that command.
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    # Imported here, so that errors in the arguments are reported at once.
    from sglang_crashkit.kernel.guarded_read import GuardedReader, guard_reads

    guard_reads(GuardedReader())
    try:
        with terminable():
            return int(load_command(args.command).run(args))
    except (CrashkitError, OSError) as raised:
        if isinstance(raised, CrashkitError):
            error = raised
        else:
            # An OSError of the system is reported with the name of its file.
            name = str(raised.filename or "")
            told = f"{name[:200]}: {raised.strerror}" if name else str(raised.strerror or raised)
            error = CrashkitError(told, next_step=f"ls -ld {shlex.quote(name[:200])}" if name else None)
        if getattr(args, "json", False):
            failure = {"error": error.message, "next": error.next_step}
            say_json(failure | {"exit_code": int(error.exit_code)})
        say_text(f"sglang-crashkit {args.command}: {error}", error=True)
        return int(error.exit_code)
    except KeyboardInterrupt as error:
        say(f"sglang-crashkit {args.command}: interrupted", error=True)
        return int(ExitCode.TERMINATED if isinstance(error, Terminated) else ExitCode.INTERRUPTED)
    finally:
        guard_reads(None)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: from outside, or from `end_with_reader`."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise Terminated

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def end_with_reader(descriptor: int, secs: float) -> None:
    """End this command as SIGTERM does once `descriptor` has no reader any more, and after `secs` seconds in any case.

    A local ssh that ends does not end the command that it runs on another machine. All that the command can see there
    is that the pipe of its output has no reader.
    """
    pipe, main_thread = select.poll(), threading.main_thread().ident
    # poll() reports POLLHUP and POLLERR without being asked for them.
    pipe.register(descriptor, 0)

    def wait() -> None:
        pipe.poll(secs * 1000)
        signal.pthread_kill(main_thread or 0, signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
