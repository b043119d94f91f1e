from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_crashkit.kernel import procfs
from unit.support.waiting import LONG, wait_until

#: A program that starts a crash handler, says how that went and what it knows then, and ends when it is told to.
PROGRAM = """
import json, logging, os, sys, threading, time
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", level="INFO")
from sglang_crashkit.srt import handler_process
from sglang_crashkit.srt.hooks import handler_pid
handler_process.READY_SECS = float(os.environ.get("READY_SECS", handler_process.READY_SECS))
began = time.monotonic()
def launch(): handler_process.start(sys.argv[1])
engines = [threading.Thread(target=launch) for _ in range(int(os.environ.get("ENGINES", 1)))]
for engine in engines: engine.start()
for engine in engines: engine.join()
took = time.monotonic() - began
if os.environ.get("TAKEN_BACK"):
    # As a program does that patches its environment for a launch.
    first = handler_pid()
    for name in ("SGLANG_CRASHKIT_SOCKET", "SGLANG_CRASHKIT_SPOOL"): del os.environ[name]
    assert handler_pid() == first
    launch()
    assert handler_pid() == first
if second := os.environ.get("SECOND"):
    os.environ["CUDA_COREDUMP_FILE"] = f"{second}/%h/core"
    handler_process.start(second)
environ = {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "CUDA_COREDUMP"))}
print(json.dumps({"took": took, "pid": handler_pid(), "environ": environ}))
print("ready", flush=True)
sys.stdin.readline()
"""
#: What a seccomp profile of a container does that does not know the system call.
NO_PIDFD = """
import os, sys
def refuse(pid, flags=0): raise PermissionError(1, "Operation not permitted")
if "sglang_crashkit.handler" in sys.orig_argv: os.pidfd_open = refuse
"""
#: What a Python lacks that was built on an older system, as those of uv were until July 2026.
OLDER_SYSTEM = """
import fcntl, os, re, signal
for module in (fcntl, os, signal):
    for name in [name for name in vars(module) if re.search("pidfd|memfd|^MFD_|_SEAL", name, re.IGNORECASE)]:
        delattr(module, name)
"""
BREAKS = """
import sys
if "sglang_crashkit.handler" in sys.orig_argv: raise SystemExit("the kit is broken")
"""
#: A crash folder on a network disk whose server does not answer: mkdir(2) in it never returns.
STANDS_STILL = """
import os, sys, time
if "sglang_crashkit.handler" in sys.orig_argv:
    mkdir = os.mkdir
    def stand_still(path, *args, **kwargs):
        while "/crash" in str(path): time.sleep(1)
        return mkdir(path, *args, **kwargs)
    os.mkdir = stand_still
"""
#: One that is slow for another reason than a disk.
SLOW = """
import os, sys, time
if "sglang_crashkit.handler" in sys.orig_argv:
    fork = os.fork
    def late():
        pid = fork()
        if pid == 0: time.sleep(6)
        os.fork = fork
        return pid
    os.fork = late
"""


@dataclass(frozen=True)
class Started:
    """What a program said that started a crash handler."""

    lines: list[str]  # its log
    took: float  # how long the start took, in seconds
    handler: int | None  # the handler's pid; None if absent
    environ: dict[str, str]  # the variables that its children get


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ck-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def started(temporary: Path, sitecustomize: str = "", *, waits: bool = True, **environ: str) -> Iterator[Started]:
    """Start a crash handler from a program, which has ended afterwards, and the handler where the test `waits`."""
    modules = temporary / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(sitecustomize)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    variables = {"TMPDIR": str(temporary), "HOSTNAME": "host", "PYTHONPATH": str(modules)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(temporary / "crash")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | variables | environ,
    ) as process:
        try:
            lines = []
            while (line := process.stdout.readline()) != "ready\n":
                assert line, lines
                lines.append(line.strip())
            said = json.loads(lines.pop())
            yield Started(lines, said["took"], said["pid"], said["environ"])
            process.stdin.close()
            assert process.wait(LONG) == 0
            if said["pid"] and waits:
                wait_until(lambda: procfs.read_stat(said["pid"]) is None, "the handler leaves")
        finally:
            process.kill()


def left_in(temporary: Path) -> list[str]:
    """Return what is left of a handler at work."""
    run = temporary / f"sglang-crashkit-{os.getuid()}" / "run"
    return [path.name for path in (*run.iterdir(), *temporary.glob("**/.spool-*"), *temporary.glob("**/.partial-*"))]


def test_a_second_server_with_another_crash_folder_is_told_of_the_first(temporary: Path) -> None:
    core = f"{temporary}/crash/%h/core"
    with started(temporary, SECOND=str(temporary / "other"), CUDA_COREDUMP_FILE=core) as program:
        said = f"WARNING crash kit: incidents of this program go to {temporary}/crash, the folder of its first server"
        assert program.lines[1:] == [f"{said}, not to {temporary}/other"]
        assert program.environ["CUDA_COREDUMP_FILE"] == core
    assert not (temporary / "other").exists()


def test_a_program_that_takes_its_environment_back_keeps_its_handler(temporary: Path) -> None:
    with started(temporary, TAKEN_BACK="1") as program:
        assert program.handler is not None
        # A later launch publishes it anew, for its own children.
        assert "SGLANG_CRASHKIT_SPOOL" in program.environ


#: Starts a crash handler without standard streams, and writes its pid.
CLOSED = """
import os, sys
for number in range(3): os.close(number)
from sglang_crashkit.srt import handler_process
from sglang_crashkit.srt.hooks import handler_pid
handler_process.start(sys.argv[1])
with open(sys.argv[2], "w") as file: file.write(f"{handler_pid()}")
"""


def test_a_program_without_standard_streams_has_a_handler(temporary: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    command = [sys.executable, "-c", CLOSED, str(temporary / "crash"), str(temporary / "pid")]
    subprocess.run(command, env=environ | {"TMPDIR": str(temporary)}, timeout=LONG, check=True)
    pid = int((temporary / "pid").read_text())
    wait_until(lambda: procfs.read_stat(pid) is None, "the handler leaves")


@pytest.mark.parametrize("python", ["", OLDER_SYSTEM], ids=["this Python", "an older system's"])
def test_a_ready_handler_says_where_incidents_go(temporary: Path, python: str) -> None:
    with started(temporary, python) as program:
        assert program.lines == [f"INFO crash kit: incidents of this server go to {temporary}/crash/host/incidents"]
        assert program.handler is not None
        assert procfs.read_title(program.handler) == "sglang::crash_handler"
        spool = Path(program.environ["SGLANG_CRASHKIT_SPOOL"])
        assert spool.parent == temporary / "crash" / "host" / "incidents"
        assert spool.is_dir()
    assert left_in(temporary) == []


def test_engines_that_are_launched_at_once_share_a_handler(temporary: Path) -> None:
    with started(temporary, ENGINES="3", SGLANG_CRASHKIT_QUARANTINED="refuse", SGLANG_CRASHKIT_HANG_SEC="5") as program:
        # Variables of another version are named once.
        unknown = "SGLANG_CRASHKIT_HANG_SEC, SGLANG_CRASHKIT_QUARANTINED"
        assert program.lines == [
            f"WARNING crash kit: unknown variables have no effect: {unknown}",
            f"INFO crash kit: incidents of this server go to {temporary}/crash/host/incidents",
        ]
        assert program.handler is not None
    assert left_in(temporary) == []


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(NO_PIDFD, "PermissionError: [Errno 1] Operation not permitted"), (BREAKS, "SystemExit: the kit is broken")],
    ids=["pidfd", "kit"],
)
def test_one_line_says_why_a_handler_died(temporary: Path, broken: str, reason: str) -> None:
    # GIVEN a program that a server started: what it inherited is not its own
    inherited = {"SGLANG_CRASHKIT_SOCKET": "/theirs/handler.sock", "SGLANG_CRASHKIT_SPOOL": "/theirs/spool"}
    with started(temporary, broken, **inherited) as program:
        assert program.lines == [
            f"WARNING crash kit: no crash handler, so a crash of this server leaves no incident: {reason}"
        ]
        assert program.handler is None
        assert program.environ == {}
    assert left_in(temporary) == []


@pytest.mark.wide
def test_a_crash_folder_that_does_not_answer_holds_no_launch(temporary: Path) -> None:
    with started(temporary, STANDS_STILL) as program:
        # For ever, if it waited for the folder.
        assert program.took < LONG
        warning, place = program.lines
        assert warning.startswith(f"WARNING crash kit: crash folder {temporary}/crash/host cannot be used (it did not")
        assert place.endswith(f"go to {temporary}/sglang-crashkit-{os.getuid()}/host/incidents")
        assert program.handler is not None
    assert left_in(temporary) == []


@pytest.mark.wide
def test_a_handler_that_is_ready_too_late_ends(temporary: Path) -> None:
    with started(temporary, SLOW, READY_SECS="3") as program:
        (line,) = program.lines
        assert line.endswith("leaves no incident: it was not ready within 3 s")
        (handler,) = handlers_in(temporary)
    wait_until(lambda: procfs.read_stat(handler) is None, "the handler leaves")
    assert left_in(temporary) == []


def handlers_in(temporary: Path) -> list[int]:
    """Return the processes of this temporary folder that no one waits for."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"TMPDIR={temporary}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    stats = [procfs.read_stat(pid) for pid in found]
    return [stat.pid for stat in stats if stat is not None and stat.ppid != os.getpid()]


@pytest.mark.wide
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stuck_handler_does_not_hold_the_end(temporary: Path, signum: signal.Signals) -> None:
    with started(temporary, waits=False) as program:
        assert program.handler is not None
        os.kill(program.handler, signum)
        began = time.monotonic()
    took = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        os.kill(program.handler, signal.SIGKILL)
    # A second, and what an interpreter takes to end on a busy machine; the handler is stuck for ever.
    assert took < LONG / 2
