from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_crashkit.capture.responder import ask_exit
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.kernel.stack_hooks import DEFAULT_SIGNAL, HANDLER_PID, HookFiles, read_stack_hooks
from sglang_crashkit.model.sample import parse_pyspy
from sglang_crashkit.protocol import notify
from sglang_crashkit.settings import SOCKET_VARIABLE, runtime_folder
from sglang_crashkit.srt import stack_hooks, supervisor
from sglang_crashkit.srt.stack_hooks import start_answering, stop_answering
from sglang_crashkit.srt.supervisor import MEMBERS_VARIABLE, Serving
from unit.support.targets import INSTALL, SLEEPER, TITLE, hooked, start_ticks
from unit.support.waiting import LONG, child, descriptors, wait_until

FORK = """
pid = os.fork()
if pid == 0:
    sys.stdin.read(1)
    os.abort() if sys.argv[2] == "abort" else pause()
ready(pid)
pause()
"""


def files_of(folder: Path, pid: int) -> HookFiles:
    return HookFiles.of(folder, pid, start_ticks(pid))


def run(folder: Path, code: str, *, title: str = TITLE, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python `code` to its end in a process with a title that has a crash handler in `folder`."""
    head = f"import os, signal, sys, time, setproctitle; setproctitle.setproctitle({title!r})\n"
    return subprocess.run(
        [sys.executable, "-c", head + code, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONFAULTHANDLER": "", "MALLOC_ARENA_MAX": "1"} | environ,
    )


def test_a_workers_files_are_private_and_not_inherited(runtime: Path) -> None:
    before = "import pathlib\nsys.path.insert(0, pathlib.Path('/opt/program'))\n"
    with hooked(runtime, SLEEPER, before=before) as target:
        # What is no text there leaves the stacks as they are.
        assert "/opt/program" not in target.roots
        assert procfs.catches_signal(target.pid, DEFAULT_SIGNAL)
        files = files_of(runtime, target.pid)
        for path in (files.description, files.stack, files.fault):
            assert path.stat().st_mode & 0o777 == 0o600, path
        # It takes nothing for the log.
        assert not files.say.exists()
        opened = {number for number, name in descriptors(target.pid).items() if name.startswith(str(runtime))}
        assert len(opened) == 2
        for number in opened:
            flags = int(Path(f"/proc/{target.pid}/fdinfo/{number}").read_text().split("flags:")[1].split()[0], 8)
            assert flags & os.O_CLOEXEC
            assert flags & os.O_APPEND


def test_stack_hooks_follow_a_new_crash_handler(runtime: Path) -> None:
    (runtime / "next").mkdir()
    again = "os.environ['SGLANG_CRASHKIT_SOCKET'] = sys.argv[1] + '/next/handler.sock'\ninstall_in_worker()\n"
    with hooked(runtime, again + SLEEPER) as target:
        assert read_stack_hooks(runtime / "next", target.pid, target.start_ticks) is not None
        wait_until(lambda: len(procfs.thread_states(target.pid)) == 2, "the first one's thread has ended")
        opened = [name for name in descriptors(target.pid).values() if name.startswith(str(runtime))]
        assert all("/next/" in name for name in opened)


@pytest.mark.parametrize(
    ("folder", "title", "environ"),
    [
        (".", TITLE, {"SGLANG_CRASHKIT_ENABLED": "0"}),
        (".", TITLE, {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}),
        (".", "python user_program.py", {}),
        ("absent", TITLE, {}),
    ],
    ids=["kit off", "stacks off", "no worker", "no crash handler"],
)
def test_where_nothing_is_to_be_armed_nothing_is(
    runtime: Path, folder: str, title: str, environ: dict[str, str]
) -> None:
    code = "from sglang_crashkit.kernel.procfs import catches_signal\n"
    code += "print(catches_signal(os.getpid(), 45), __import__('faulthandler').is_enabled())"
    done = run(runtime / folder, INSTALL + code, title=title, **environ)
    assert (done.stdout.split(), done.stderr) == (["False", "False"], "")
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("use", ["signal.signal(45, lambda *_: None)", "signal.signal(45, signal.SIG_IGN)"])
def test_a_signal_that_is_in_use_is_left_alone(runtime: Path, use: str) -> None:
    done = run(runtime, f"{use}\nbefore = signal.getsignal(45)\n{INSTALL}print(signal.getsignal(45) is before)")
    assert done.stdout == "True\n"
    assert "signal 45 is already in use in this process, so it writes no stacks" in done.stderr


@pytest.mark.parametrize("end", ["abort", "pause"])
def test_a_forked_child_does_not_touch_its_parents_files(runtime: Path, end: str) -> None:
    with child(INSTALL + FORK, str(runtime), end, title=TITLE) as parent:
        forked = int(parent.first_line)  # type: ignore[attr-defined]
        files = files_of(runtime, parent.pid)
        try:
            wait_until(
                lambda: not any(name.startswith(str(runtime)) for name in descriptors(forked).values()),
                "the child lets go of its parent's files",
            )
            assert not procfs.catches_signal(forked, DEFAULT_SIGNAL)
            assert not procfs.catches_signal(forked, signal.SIGSEGV)
            assert procfs.catches_signal(parent.pid, DEFAULT_SIGNAL)
            if end == "abort":
                parent.stdin.write(b"x")
                parent.stdin.flush()
                wait_until(lambda: not procfs.is_running(forked), "the child has died")
            assert files.fault.read_bytes() == files.stack.read_bytes() == b""
            assert not HookFiles.of(runtime, forked, start_ticks(forked)).description.exists()
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_full_disk_costs_the_worker_nothing(runtime: Path) -> None:
    # GIVEN a folder in which the worker may create nothing
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    done = run(runtime, code + INSTALL + "print('on')")
    assert done.stdout == "on\n"
    assert "install_in_worker failed" in done.stderr
    assert not list(runtime.glob("*.json"))


def test_the_crash_handler_may_trace_it_where_yama_is(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No Yama here; what it is asked for is what can be seen.
    asked: list[tuple[int, int]] = []

    class Library:
        def prctl(self, option: int, pid: object, *_zeros: int) -> int:
            asked.append((option, pid.value))  # type: ignore[attr-defined]
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda _name: Library())
    stack_hooks.allow_tracing(runtime)
    assert asked == []
    (runtime / HANDLER_PID).write_text("4711")
    stack_hooks.allow_tracing(runtime)
    assert asked == [(int.from_bytes(b"Yama", "big"), 4711)]


@pytest.fixture
def own_folder(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime folder of this process, were it a server."""
    monkeypatch.setattr("tempfile.tempdir", str(runtime))
    folder = runtime_folder(os.getpid(), start_ticks(os.getpid()))
    folder.mkdir(parents=True)
    monkeypatch.setenv(SOCKET_VARIABLE, str(folder / "handler.sock"))
    return folder


def test_the_server_says_once_what_its_dead_wrote(own_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own_folder / "11-1.fault").write_text("Fatal Python error: Aborted\n" + "x" * 10_000 + "\n")
    (own_folder / "12-1.fault").write_text("")
    stack_hooks.report_faults()
    said = capfd.readouterr().err
    assert said.startswith("crash kit: process 11 of this server wrote before it died:\nFatal Python error: Aborted\n")
    assert said.endswith("x" * 10_000 + "\n")
    assert "12" not in said.split("\n")[0]
    stack_hooks.report_faults()
    assert capfd.readouterr().err == ""


SERVER = INSTALL.replace("install_in_worker", "install_in_server")
OWN = "import faulthandler\nown = open(sys.argv[1] + '/own', 'w')\nfaulthandler.enable(file=own)\n"


@pytest.mark.parametrize(("is_program", "own"), [(False, ""), (False, OWN), (True, ""), (True, OWN)])
def test_a_users_program_handles_its_own_faults_and_a_servers_writes_them(
    runtime: Path, is_program: bool, own: str
) -> None:
    # A runtime that a program embeds, such as a JVM, lives by faults that it mends.
    code = f"from sglang_crashkit.srt import crash_exit\ncrash_exit.state.is_program = {is_program}\n{own}"
    done = run(runtime, code + SERVER + "os.kill(os.getpid(), signal.SIGSEGV)", title="python user_program.py")
    assert done.returncode == -signal.SIGSEGV
    written = [*runtime.glob("*.fault"), *runtime.glob("own")]
    assert [path.suffix for path in written] == ([""] if own else [".fault"] if is_program else [])
    assert all(path.read_text().startswith("Fatal Python error: Segmentation fault\n") for path in written)
    # Its stacks can be had all the same.
    assert len(list(runtime.glob("*.stack"))) == len(list(runtime.glob("*.json"))) == 1


def test_the_server_writes_the_handlers_lines_one_by_one(runtime: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with child(SERVER + SLEEPER, str(runtime)) as server:
        path = files_of(runtime, server.pid).say
        for fields in ({}, {"text": 7}, {"text": "a\nb\x1b[31m\udcff"}, {"text": "x" * 10_000}):
            notify(str(path), "say", **fields)
        said = ""

        def lines() -> list[str]:
            nonlocal said
            said += capfd.readouterr().err
            return found if len(found := said.splitlines()) > 1 and said.endswith("\n") else []

        first, second = wait_until(lines, "it says both")
    assert first.startswith("crash kit: a")
    assert first.isprintable()
    assert second.startswith("crash kit: xxx")
    assert len(second) == 4000


def ask(path: Path, question: bytes = b"stacks") -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LONG)
        connection.connect(str(path))
        connection.sendall(question + b"\n")
        answer = b""
        while chunk := connection.recv(1 << 16):
            answer += chunk
        return answer


@pytest.fixture
def path(short_folder: Path):
    listener = start_answering(short_folder / "sock")
    yield short_folder / "sock"
    stop_answering(listener)


def test_whatever_goes_wrong_it_answers_the_next_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(stack_hooks, "describe_threads", lambda: 1 / 0)
        assert ask(path) == b""
    assert parse_pyspy(ask(path).decode())


@pytest.mark.parametrize(("code", "status"), [("exit 3", 3 << 8), ("kill -9 $$", 9), ("kill -37 $$", 37)])
def test_a_childs_end_is_told_and_left_to_reap(path: Path, code: str, status: int) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {code}"], stdin=subprocess.PIPE) as process:
        # That it lives, or is no child, is no answer.
        assert ask(path, b"exit %d" % process.pid) == b""
        assert ask(path, b"exit 1") == b""
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ask(path, b"exit %d" % process.pid) == b"%d" % status
        assert ask_exit(path, os.getpid(), process.pid, LONG) == ExitStatus.from_wait_status(status)
        assert process.wait(LONG) == (status >> 8 or -status)
    assert ask_exit(path, os.getpid(), process.pid, LONG) is None


def test_a_childs_end_is_told_after_multiprocessing_reaped_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMBERS_VARIABLE, "")
    monkeypatch.setattr(supervisor, "current", Serving())
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    supervisor.register([process])
    process.kill()
    process.join(LONG)
    assert ask_exit(path, os.getpid(), process.pid, LONG) == ExitStatus(signal="SIGKILL")
