from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_crashkit.policy import Mode
from sglang_crashkit.settings import MODE_VARIABLE
from sglang_crashkit.srt.managers.multi_tokenizer_mixin import on_tokenizer_router
from unit.srt.conftest import Listener
from unit.support.waiting import LONG, wait_until

WORKER = """
import ctypes, os, setproctitle, signal, sys, time
from pathlib import Path
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when the server ends, so that no test leaves one behind
def save(*_):
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1]).write_text("saved")
    os._exit(0)
signal.signal(signal.SIGQUIT, save)
setproctitle.setproctitle(f"sglang::tokenizer_worker:{os.getpid()}")
from sglang_crashkit.srt.supervisor import join
join()
print(flush=True)
time.sleep(60)
"""
MAIN = f"""
import os, signal, subprocess, sys, threading, time
from sglang_crashkit.policy import Mode
from sglang_crashkit.settings import MODE_VARIABLE
from sglang_crashkit.srt.managers.multi_tokenizer_mixin import on_tokenizer_router

def kill_process_tree(pid, include_parent):
    print("killed", pid == os.getpid(), include_parent, flush=True)
    os._exit(41)

@on_tokenizer_router
class MultiTokenizerRouter:
    def __init__(self, name):
        self.name = name

signal.signal(signal.SIGQUIT, lambda *_: os.write(1, b"launch phase\\n"))
router = MultiTokenizerRouter("router")
assert router.name == "router"
folder, seconds = sys.argv[1:3]
workers = [
    subprocess.Popen([sys.executable, "-c", {WORKER!r}, f"{{folder}}/{{n}}", seconds], stdout=subprocess.PIPE)
    for n in range(2)
]
for worker in workers:
    worker.stdout.readline()
if "supervised" in sys.argv:
    signal.signal(signal.SIGQUIT, lambda *_: os.write(1, b"its own\\n") if "loud" in sys.argv else None)
print("ready", flush=True)
if "exception" in sys.argv:
    def handle():
        try:
            raise KeyError("rid")
        except KeyError:
            router.dump_requests_before_crash()
            kill_process_tree(os.getpid(), True)
    threading.Thread(target=handle).start()
while True:
    time.sleep(60)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv(MODE_VARIABLE, Mode.SERVER)
    started: list[subprocess.Popen[str]] = []

    def start_main(*options: str, seconds: float = 0.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN, str(tmp_path), str(seconds), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_main
    for process in started:
        process.kill()
        process.wait(LONG)
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    assert select.select([process.stdout], [], [], LONG)[0], "it says nothing"
    return process.stdout.readline()


@pytest.mark.parametrize(
    ("options", "seconds", "environ", "says", "saved"),
    [
        # The workers save their requests first, and one that does not end delays it only so long.
        (["supervised"], 0.2, {}, "killed True True\n", ["0", "1"]),
        (["supervised"], 50, {"SGLANG_CRASHKIT_BUDGET_SECS": "0.3"}, "killed True True\n", []),
        # One of the launch phase, and one to a user's program, is left to these.
        ([], 0, {}, "launch phase\n", []),
        (["supervised", "loud"], 0, {MODE_VARIABLE: Mode.LIBRARY}, "its own\n", []),
    ],
)
def test_a_supervisors_sigquit_ends_the_server(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    seconds: float,
    environ: dict[str, str],
    says: str,
    saved: list[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    process = start(*options, seconds=seconds)
    os.kill(process.pid, signal.SIGQUIT)
    assert said(process) == says
    if says.startswith("killed"):
        assert process.wait(LONG) == 41
    else:
        assert not select.select([process.stdout], [], [], 0.5)[0]
        assert process.poll() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == saved


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_other_signals_do_what_they_did(start: Start, tmp_path: Path, signum: signal.Signals) -> None:
    process = start("supervised")
    os.kill(process.pid, signum)
    assert process.wait(LONG) != 41
    assert list(tmp_path.iterdir()) == []


def test_the_routers_exception_is_told_and_the_workers_save(listener: Listener, start: Start, tmp_path: Path) -> None:
    process = start("supervised", "exception")
    told = listener.heard()
    assert (told["event"], told["message"], told["pid"]) == ("exception", "KeyError: 'rid'", process.pid)
    assert listener.heard()["event"] == "crash_dump_begun"
    ended = listener.heard()
    assert (ended["event"], ended["workers"]) == ("crash_dump_ended", 2)
    assert said(process) == "killed True True\n"
    assert (tmp_path / "0").exists()


def test_with_the_kit_off_nothing_hears_of_sigquit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_ENABLED", "0")
    process = start("supervised", "exception")
    os.kill(process.pid, signal.SIGQUIT)
    # That of the exception, which upstream calls itself.
    wait_until(lambda: process.poll() is not None, "the exception ends it")
    assert list(tmp_path.iterdir()) == []


def test_an_event_loop_in_the_main_thread_keeps_its_descriptor() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    descriptors = set(Path("/proc/self/fd").iterdir())
    try:
        on_tokenizer_router(type("Router", (), {}))()
        assert signal.set_wakeup_fd(before) == writer
        assert set(Path("/proc/self/fd").iterdir()) == descriptors
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
