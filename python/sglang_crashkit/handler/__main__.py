"""The crash handler's process: ``python -m sglang_crashkit.handler``, started by the engine and never by hand.

It leaves the server's process tree first, so that nothing that kills the tree kills the evidence.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
from pathlib import Path

import setproctitle

from sglang_crashkit.core import journal_place
from sglang_crashkit.core.armed import HANDLER_PID
from sglang_crashkit.core.channel import Mailbox
from sglang_crashkit.core.private_files import write_private
from sglang_crashkit.core.recovery import finish_abandoned
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.handler.place import Place
from sglang_crashkit.handler.request_journals import take_for_incident, take_in_left_behind

#: The first child has nothing to do but to write a small file, in seconds.
_FIRST_CHILD_SECS = 5.0


def main() -> int:
    """Run until the server is gone and its incident is whole."""
    parser = argparse.ArgumentParser(prog="sglang_crashkit.handler", description=__doc__)
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--host-folder", type=Path, required=True)
    parser.add_argument("--spool", type=Path, required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--journal", type=Path)
    args = parser.parse_args()
    if args.journal is not None:
        # Held until this process ends: a journal that nobody holds was left behind.
        journal_place.lock(args.journal)
    alive, closed_at_its_end = os.pipe()
    handler_pid = os.fork()
    if handler_pid:
        # The first child ends at once, and the handler has another parent than the server, which waits for that end:
        # from then on the server's processes know whom they let trace them.
        with contextlib.suppress(OSError):
            write_private(args.runtime / HANDLER_PID, str(handler_pid).encode())
        os._exit(0)
    # An orchestrator that ends the server signals the whole group or container; the evidence is written after that.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    setproctitle.setproctitle("sglang::crash_handler")
    os.close(closed_at_its_end)
    # What it writes may not come into a folder that is being removed: the server may be gone by now.
    select.select([alive], [], [], _FIRST_CHILD_SECS)
    os.close(alive)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="[%(asctime)s crash_handler] %(levelname)s %(message)s",
    )
    place = Place(host_folder=args.host_folder, spool=args.spool, runtime=args.runtime, journal=args.journal)
    mailbox = Mailbox(socket.socket(fileno=args.socket_fd))
    try:
        handler = CrashHandler(args.server_pid, mailbox, place, Settings.from_environ())
        for folder in place.earlier():
            for path in finish_abandoned(folder / "incidents", take_for_incident(place.earlier())):
                logging.getLogger(__name__).info("incident %s of a killed crash handler is finished", path)
        for folder in place.earlier():
            take_in_left_behind(folder, args.host_folder / "incidents")
    except ProcessLookupError:
        logging.getLogger(__name__).info("server %d was gone before the handler began", args.server_pid)
        place.clean_up()
        return 0
    handler.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
