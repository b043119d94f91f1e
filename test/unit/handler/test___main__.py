from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_crashkit.protocol import Mailbox
from unit.support.server_driver import Server
from unit.support.waiting import LONG, child, wait_until

Start = Callable[..., Server]


def test_it_has_nothing_of_the_servers_tree_and_descriptors(start_server: Start) -> None:
    server = start_server()
    children = {process.pid for process in psutil.Process(server.pid).children(recursive=True)}
    assert set(server.ranks.values()) <= children
    assert server.handler.pid not in children
    assert os.getsid(server.handler.pid) != os.getsid(server.pid)
    output = os.fstat(server.process.stdout.fileno()).st_ino
    held = set()
    for entry in Path(f"/proc/{server.handler.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.add(entry.stat().st_ino)
    assert held
    assert output not in held


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_no_signal_ends_it_before_the_server(quiet_server: Server, signum: signal.Signals) -> None:
    quiet_server.handler.send_signal(signum)
    quiet_server.settle()


#: Runs the handler, with a first child that is slow to write its file into the folder, which it makes anew if need be.
SLOW_CHILD = """
import sys, time
from sglang_crashkit.handler import __main__ as program
write = program.write_private

def write_late(path, data):
    time.sleep(0.3)
    path.parent.mkdir(exist_ok=True)
    write(path, data)

program.write_private = write_late
sys.exit(program.main())
"""


@pytest.mark.parametrize("program", [("-m", "sglang_crashkit.handler"), ("-c", SLOW_CHILD)], ids=["itself", "slow"])
def test_a_handler_without_a_server_leaves_no_folder(short_folder: Path, program: tuple[str, str]) -> None:
    with child("ready()") as process:
        process.wait(LONG)
    runtime, crash = short_folder / "runtime", short_folder / "crash"
    runtime.mkdir()
    options = {"server-pid": process.pid, "crash-folder": crash, "runtime": runtime}
    with Mailbox.bind(runtime / "handler.sock") as receiver:
        options |= {"socket-fd": receiver.fileno()}
        subprocess.run(
            [sys.executable, *program, *(f"--{name}={value}" for name, value in options.items())],
            pass_fds=[receiver.fileno()],
            check=True,
            timeout=LONG,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"SGLANG_CRASHKIT_JOURNAL": "0"},
        )
    wait_until(lambda: not runtime.exists() and not list(crash.glob("*/incidents/.*")), "both folders are removed")


LOGS = """
import logging, sys
from pathlib import Path
from sglang_crashkit.handler.__main__ import LogFile
logging.basicConfig(handlers=[LogFile(Path(sys.argv[1]))], format="%(levelname)s %(message)s")
for number in range(int(sys.argv[2])):
    logging.error("%d %s", number, "x" * 1000)
print("the last word", flush=True)
"""


def log_of(folder: Path, records: int) -> list[str]:
    argv = [sys.executable, "-c", LOGS, str(folder / "log"), str(records)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    return (folder / "log").read_text().splitlines()


def test_all_that_it_prints_is_in_its_log(tmp_path: Path) -> None:
    lines = log_of(tmp_path, 3)
    assert [line.split(" x")[0] for line in lines] == ["ERROR 0", "ERROR 1", "ERROR 2", "the last word"]
    assert log_of(tmp_path, 0) == [*lines, "the last word"]


def test_what_fails_every_second_for_a_day_fills_no_disk(tmp_path: Path) -> None:
    lines = log_of(tmp_path, 86_400 // 20)
    assert lines[-2].startswith("ERROR 4319 ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 << 20
