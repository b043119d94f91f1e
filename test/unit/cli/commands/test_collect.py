from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from incident_schema import assert_fits
from sglang_crashkit.capture.debugger import MAY_TRACE
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel.discovery import find_processes
from sglang_crashkit.kernel.procfs import TreeScanner, is_running, read_title
from sglang_crashkit.model.snapshot import parse
from unit.support.command import Cli
from unit.support.targets import SLEEPER, TITLE, functions_of, settle, settle_in_sleep, state_of
from unit.support.waiting import LONG, child, wait_until

QUICK = ("--snapshots", "2", "--interval", "0")
#: A stand-in for a debugger: it leaves a mark where it ran, and says which process it was asked for.
GDB = '#!/bin/sh\ntouch "$0.ran"\nwhile [ "$1" != -p ]; do shift; done\necho "asked for $2"\n'


@pytest.fixture
def rank() -> Iterator[int]:
    """The pid of a scheduler's stand-in, in its sleep."""
    with child(SLEEPER, title=TITLE) as process:
        settle_in_sleep(process.pid)
        yield process.pid


@pytest.fixture
def gdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for cuda-gdb that is first on PATH."""
    tool = tmp_path / "bin" / "cuda-gdb"
    tool.parent.mkdir()
    tool.write_text(GDB)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tool


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sglang_crashkit", "collect", *arguments]


@pytest.fixture
def collect(cli: Cli) -> Cli:
    """Give the collector, after which come the pid, the folder for the files and more arguments."""
    return lambda pid, output, *more, status=0: cli(
        "collect", "--pid", pid, "--output-dir", output, *more, status=status
    )


def test_every_process_has_two_files_and_every_moment_a_snapshot(
    rank: int, tmp_path: Path, gdb: Path, collect: Cli
) -> None:
    gdb.write_text(f"{GDB}echo 'ptrace: Operation not permitted.'\n")
    output = tmp_path / "deep" / "out"
    printed = collect(rank, output, "--snapshots", "2", "--interval", "0.2", "--native").out.splitlines()
    host = os.uname().nodename
    python, native = output / f"pyspy_{host}_{rank}.txt", output / f"cudagdb_{host}_{rank}.txt"
    snapshots = sorted(output.glob(f"snapshot_{host}_*.json"))
    account = [output / "summary.md", output / "verdict.json"]
    assert sorted(output.iterdir()) == sorted([python, native, *snapshots, *account])
    assert python.read_text().startswith(f"# {TITLE} (pid {rank}) on {host}")
    assert python.read_text().count("    inner_function (") == 2
    assert native.read_text().startswith(f"# {TITLE} (pid {rank}) on {host}")
    assert f"asked for {rank}\n" in native.read_text()
    refused = f"it may not be traced; next: {MAY_TRACE}"
    assert f"# cuda-gdb: 0.0 s: {refused}\n" in native.read_text()
    for path in snapshots:
        (seen,) = parse(path.read_bytes()).processes
        assert (seen.pid, seen.title, seen.role, seen.ranks, seen.state) == (
            *(rank, TITLE, "scheduler", {"tp": 0}),
            "S",
        )
        assert "inner_function" in functions_of(seen.threads)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (output, python, native, snapshots[0])] == [
        *(0o700, 0o600, 0o600, 0o600),
    ]
    assert printed[0] == f"{TITLE} (pid {rank})"
    assert printed[1].startswith("    1-2 S  inner_function (")
    assert printed[2].startswith("by the snapshots (supported): TP0 stays below inner_function (")
    assert printed[3:6] == [f"{printed[0]}: cuda-gdb: {refused}", f"files: {output}", ""]
    assert "first    TP0" in printed


def test_the_verdict_is_there_before_the_debuggers_end(rank: int, tmp_path: Path, gdb: Path) -> None:
    gdb.write_text(f"{GDB}exec sleep 600\n")
    output = tmp_path / "out"
    arguments = ["--pid", str(rank), "--output-dir", str(output), "--snapshots", "1", "--native"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True) as collector:
        assert collector.stdout is not None
        assert any(line.startswith("by the snapshots (") for line in collector.stdout)
        wait_until(lambda: "sleep" in _titles_below(collector.pid), "the debugger sleeps")
        assert not list(output.glob("cudagdb_*.txt"))
        collector.send_signal(signal.SIGINT)
        rest, _nothing = collector.communicate(timeout=LONG)
    assert collector.returncode == ExitCode.INTERRUPTED
    text = next(output.glob("cudagdb_*.txt")).read_text()
    assert f"asked for {rank}\n" in text
    assert "cuda-gdb was called off" in text
    said = [f"{TITLE} (pid {rank}): cuda-gdb: cuda-gdb was called off", f"files: {output}", ""]
    assert rest.splitlines()[:3] == said


@pytest.mark.parametrize("is_debugging", [False, True])
def test_for_another_machine_it_ends_with_its_reader(rank: int, tmp_path: Path, gdb: Path, is_debugging: bool) -> None:
    gdb.write_text(f"{GDB}exec sleep 600\n")
    wanted = ["--native", "--snapshots=1"] if is_debugging else ["--interval=600"]
    arguments = [f"--pid={rank}", f"-o{tmp_path / 'out'}", "--json", "--gathered-within=6000", *wanted]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as collector:
        wait_until(lambda: list((tmp_path / "out").glob("snapshot_*.json")), "there is a snapshot")
        if is_debugging:
            wait_until(lambda: "sleep" in _titles_below(collector.pid), "the debugger sleeps")
        tools = set(TreeScanner(collector.pid).scan()) - {collector.pid}
        collector.stdout.close()
        collector.wait(LONG)
    assert collector.returncode == ExitCode.TERMINATED
    wait_until(lambda: not any(map(is_running, tools)), "the debugger is gone")
    assert state_of(rank) == "S"


def test_what_native_stacks_add_to_the_verdict_is_told(rank: int, tmp_path: Path, gdb: Path, collect: Cli) -> None:
    gdb.write_text(f"{GDB}cat {tmp_path}/listing\n")
    frames = "#0  0x01 in poll () from /lib/libc.so.6\n#1  0x02 in ncclCommInitRank () from /lib/libnccl.so.2\n"
    (tmp_path / "listing").write_text(f'Thread 1 (Thread 0x7f (LWP {rank}) "python"):\n{frames}#2  0x03 in main ()\n')
    screen = collect(rank, tmp_path / "out", "--snapshots", "1", "--native").out.partition("\nclass ")[2]
    assert screen.startswith("   symmetric_stall: ")
    assert "NCCL" in screen


def test_a_program_reads_the_same(rank: int, tmp_path: Path, gdb: Path, collect: Cli) -> None:
    document = collect(rank, tmp_path, *QUICK, "--json").json
    assert_fits(document, "collect")
    # No one asked for native stacks.
    assert not gdb.with_name("cuda-gdb.ran").exists()
    (one,) = document["processes"]
    assert (one["pid"], one["title"], one["ranks"], one["states"]) == (rank, TITLE, {"tp": 0}, ["S", "S"])
    assert [Path(document["output_dir"], name).is_file() for name in (*document["snapshots"], *one["files"])] == (
        [True] * 3
    )
    assert (document["exit_code"], document["verdict"]["class"], document["verdict"]["first"]) == (
        0,
        "rank_stuck",
        "TP0",
    )


def test_a_stopped_process_is_captured_and_left_stopped(tmp_path: Path, gdb: Path, collect: Cli) -> None:
    with child(SLEEPER, title=TITLE) as process:
        settle_in_sleep(process.pid)
        process.send_signal(signal.SIGSTOP)
        settle(process.pid, "T")
        printed = collect(process.pid, tmp_path / "out", "--snapshots", "1", "--native").out
        assert state_of(process.pid) == "T"
    assert "    1   T  inner_function (" in printed
    assert "native stacks: not taken: the verdict is established without it\n" in printed
    (native,) = (tmp_path / "out").glob("cudagdb_*.txt")
    assert "# cuda-gdb: not run: the verdict is established without it\n" in native.read_text()
    assert "asked for" not in native.read_text()
    assert "by the snapshots (established): TP0 is stopped (state T, until somebody sends SIGCONT)" in printed
    assert "class    stopped_process: " in printed
    assert f"`kill -CONT {process.pid}` lets TP0 continue" in printed


def test_a_process_that_gives_nothing_makes_it_a_part(tmp_path: Path, collect: Cli) -> None:
    # GIVEN a scheduler that is no Python process, and one that is
    code = f"import subprocess; subprocess.Popen(['bash', '-c', 'exec -a {TITLE}-none sleep 120']); {SLEEPER}"
    with child(code, title="sglang::scheduler_TP1") as process:
        wait_until(
            lambda: any("none" in one.title for one in find_processes(pid=process.pid).processes), "the other is there"
        )
        try:
            said = collect(process.pid, tmp_path, *QUICK, status=5)
        finally:
            for pid in TreeScanner(process.pid).scan() - {process.pid}:
                os.kill(pid, signal.SIGKILL)
    assert "it is no Python process" in said.out


def test_without_a_process_nothing_is_written_and_status_is_3(tmp_path: Path, collect: Cli) -> None:
    with child(SLEEPER) as process:
        why = f"process {process.pid} is no SGLang server, nor is one below it"
        assert why in collect(process.pid, tmp_path / "out", *QUICK, status=3).err
        assert collect(process.pid, tmp_path / "out", *QUICK, "--json", status=3).json["exit_code"] == 3
    assert not (tmp_path / "out").exists()


def job(folder: Path, text: str) -> str:
    (folder / "job.yaml").write_text(text)
    return str(folder / "job.yaml")


def test_a_jobs_file_names_its_folder_and_its_time(rank: int, tmp_path: Path, cli: Cli) -> None:
    config = job(tmp_path, "name: x\ndebug:\n  enabled: true\n  wait_seconds: 1\n")
    arguments = ["collect", "--pid", str(rank), "--config", config, "--log-dir", str(tmp_path / "logs")]
    assert f"collecting in 1 s: 1 process: {TITLE}\n" in cli(*arguments, *QUICK).err
    assert list((tmp_path / "logs" / "backtraces").glob("pyspy_*.txt"))


@pytest.mark.parametrize(("options", "runs"), [((), True), (("--no-native",), False)])
def test_a_jobs_file_asks_for_native_stacks(
    collect: Cli, rank: int, tmp_path: Path, gdb: Path, options: tuple[str, ...], runs: bool
) -> None:
    # The command line is stronger than the file.
    config = job(tmp_path, "debug: {enabled: true, output_dir: /nonexistent/x}\n")
    collect(rank, tmp_path / "out", *QUICK, "--config", config, "--wait-seconds", "0", *options)
    found = [path.read_text() for path in (tmp_path / "out").glob("cudagdb_*")]
    assert [f"asked for {rank}" in text for text in found] == [True] * runs


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("debug: {enabled: false}", 3, "debug.enabled is not true in"),
        ("name: x", 3, "debug.enabled is not true in"),
        ("debug: {wait_second: 5}", 2, "unknown field `wait_second`"),
    ],
)
def test_a_file_that_asks_for_nothing_or_nonsense_is_answered(
    tmp_path: Path, cli: Cli, text: str, status: int, said: str
) -> None:
    assert said in cli("collect", "--config", job(tmp_path, text), status=status).err


def test_a_folder_that_cannot_be_made_is_named(rank: int, tmp_path: Path, collect: Cli) -> None:
    (tmp_path / "file").touch()
    for path, why in (("file", "file is not a folder"), ("file/below", "file: Not a directory")):
        assert f"{tmp_path}/{why}" in collect(rank, tmp_path / path, *QUICK, status=1).err


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_collected_before_an_interrupt_is_kept_whole(
    rank: int, tmp_path: Path, signum: int, status: int
) -> None:
    output = tmp_path / "out"
    arguments = ["--pid", str(rank), "--output-dir", str(output), "--json", "--interval", "600"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True) as collector:
        wait_until(lambda: list(output.glob("pyspy_*.txt")), "the first moment is there")
        collector.send_signal(signum)
        printed, _nothing = collector.communicate(timeout=LONG)
    document: dict[str, Any] = json.loads(printed)
    assert (collector.returncode, document["exit_code"]) == (status, status)
    (name,) = document["snapshots"]
    assert parse((output / name).read_bytes()).processes[0].pid == rank
    assert "inner_function" in next(output.glob("pyspy_*.txt")).read_text()


def _titles_below(pid: int) -> set[str]:
    return {read_title(one) for one in TreeScanner(pid).scan()}


def test_an_interrupt_while_it_waits_ends_it_at_once(rank: int, tmp_path: Path) -> None:
    arguments = ["--pid", str(rank), "--output-dir", str(tmp_path / "out"), "--wait-seconds", "600"]
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as collector:
        assert collector.stderr.readline() == f"collecting in 600 s: 1 process: {TITLE}\n"
        collector.terminate()
        assert collector.wait(LONG) == 143
    assert not (tmp_path / "out").exists()
