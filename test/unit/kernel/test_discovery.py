from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel.discovery import FoundProcess, Place, find_processes, place_of, runs_sglang
from sglang_crashkit.kernel.procfs import read_title
from unit.support.launching import STARTS
from unit.support.waiting import LONG, child, spawned, wait_until

SLEEP = "ready(); pause()"
#: A process that starts one Python process for each further argument, with that title, and tells their pids.
FAMILY = STARTS + "ready(' '.join(str(start_titled(title)) for title in sys.argv[1:])); pause()"


@contextlib.contextmanager
def family(*titles: str, title: str | None = None) -> Iterator[tuple[int, dict[str, int]]]:
    """A process with children that have titles; gives its pid and theirs."""
    with child(FAMILY, *titles, title=title) as process:
        pids = [int(pid) for pid in process.first_line.split()]  # type: ignore[attr-defined]
        yield process.pid, dict(zip(titles, pids, strict=True))


LAUNCH = "sglang.launch_server"
#: Spawns one process by multiprocessing.
SPAWNS = """
import multiprocessing, time
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(120,), daemon=True)
    process.start()
    print(flush=True)
    try:
        input()
    finally:
        process.kill()
"""
#: Runs one Python process more, with its own arguments, and prints its pid.
RUNS = """
import subprocess, sys
process = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(process.pid, flush=True)
process.wait()
"""


@contextlib.contextmanager
def program(folder: Path, module: str, source: str = SPAWNS, *arguments: str) -> Iterator[tuple[int, str]]:
    """Run a module of that name, until its standard input is closed; gives its pid and the line that it prints."""
    path = folder / "modules" / Path(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(source)
    environ = os.environ | {"PYTHONPATH": str(folder / "modules")}
    argv = [sys.executable, "-m", module, *arguments]
    with spawned(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
        try:
            yield process.pid, process.first_line  # type: ignore[attr-defined]
        finally:
            process.stdin.close()
            process.wait(LONG)


def titles_of(pid: int, **options) -> list[str]:
    return [process.title for process in find_processes(pid=pid, **options).processes]


RANKS = ("sglang::scheduler_DP1_PP0_TP0_EP0", "sglang::scheduler_TP1")
OTHERS = ("sglang::detokenizer", "sglang::tokenizer_worker:0", "sglang::data_parallel_controller")


def test_processes_are_found_by_their_titles_with_their_ranks() -> None:
    with family(*RANKS, *OTHERS, "sglang::crash_handler", "python") as (server, pids):
        found = find_processes(pid=server).processes
        everything = {process.title: process.role for process in find_processes(pid=server, everything=True).processes}
        title = read_title(server)
    assert {process.title: process.pid for process in found} == {title: pids[title] for title in RANKS}
    assert [dict(process.ranks) for process in found] == [{"dp": 1, "pp": 0, "tp": 0, "ep": 0}, {"tp": 1}]
    assert {(process.role, process.server, process.user, process.way) for process in found} == {
        ("scheduler", server, os.geteuid(), "title")
    }
    assert everything.pop(title) == "server"
    assert everything.keys() == {*RANKS, *OTHERS}


def test_any_process_of_a_server_stands_for_it() -> None:
    with family(*RANKS) as (one, pids), family("sglang::scheduler_TP0") as (other, _others):
        for pid in (one, *pids.values()):
            assert titles_of(pid) == list(RANKS)
        assert titles_of(other) == ["sglang::scheduler_TP0"]
        assert {one, other} <= {process.server for process in find_processes().processes}


def test_without_titles_sglang_is_found_with_what_it_spawned(tmp_path: Path) -> None:
    with program(tmp_path, LAUNCH, SPAWNS, "--disaggregation-mode", "prefill") as (server, _line):
        found = wait_until(
            lambda: [
                one for one in find_processes(pid=server).processes if len(find_processes(pid=server).processes) > 1
            ],
            "the spawned process is there",
        )
    assert {process.way for process in found} == {"command line"}
    assert {process.role for process in found} >= {"server", "starting"}
    assert {process.server for process in found} == {server}
    assert found[0].server_arguments[-2:] == ("--disaggregation-mode", "prefill")


def test_a_server_without_titles_is_found_beside_one_that_has_them(tmp_path: Path) -> None:
    with family(*RANKS), program(tmp_path, LAUNCH, SPAWNS) as (server, _line):
        found = {one.pid: one.way for one in find_processes().processes}
    assert found[server] == "command line"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_processes_are_passed_over_and_told_of() -> None:
    with family(*RANKS) as (_server, pids), child(f"os.setuid(65534); {SLEEP}", title="sglang::scheduler_TP7") as other:
        found = find_processes(pid=os.getpid(), user=os.geteuid())
        assert {process.pid for process in found.processes} == set(pids.values())
        assert found.others == {65534: (other.pid,)}
        assert find_processes(pid=other.pid, user=65534).processes[0].pid == other.pid
        assert {process.user for process in find_processes(pid=os.getpid()).processes} == {os.geteuid(), 65534}


def test_a_title_of_another_slurm_job_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with family(*RANKS) as (_server, pids):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        with program(tmp_path, LAUNCH) as (untitled, _line):
            found = find_processes(pid=os.getpid(), here=Place("7", "n2"))
            assert untitled in {process.pid for process in found.processes}
            assert {process.way for process in found.processes} == {"command line"}
            # What was left out is told of.
            assert {place: set(those) for place, those in found.elsewhere.items()} == {
                Place("8", "n2"): set(pids.values())
            }
            assert find_processes(pid=os.getpid()).elsewhere == {}


@pytest.mark.parametrize("place", [("SLURMD_NODENAME", "n2"), ("SLURM_CONTAINER", "/bundle")])
def test_ranks_of_no_job_are_left_alone_where_the_jobs_own_are_found(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    with family(*RANKS) as (_server, without), monkeypatch.context() as job:
        here = Place("7", "n2")
        assert {one.pid for one in find_processes(pid=os.getpid(), here=here).processes} == set(without.values())
        job.setenv("SLURM_JOB_ID", "7")
        job.setenv(*place)
        with family(*RANKS) as (_its_server, within):
            found = find_processes(pid=os.getpid(), here=here)
            assert {one.pid for one in found.processes} == set(within.values())
            assert {place: set(those) for place, those in found.elsewhere.items()} == {None: set(without.values())}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_ranks_are_known_by_their_titles(tmp_path: Path) -> None:
    rank = "import os, setproctitle; os.setuid(65534); setproctitle.setproctitle('sglang::scheduler_TP0'); input()"
    with program(tmp_path, LAUNCH, RUNS, "-c", rank) as (_server, line):
        pid = int(line)
        wait_until(lambda: read_title(pid).startswith("sglang::"), "it has its title")
        assert [process.pid for process in find_processes(pid=os.getpid()).processes] == [pid]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--port 8000", "port", 8000),
        ("--port=8000", "port", 8000),
        ("", "port", 30000),
        ("--port x", "port", 30000),
        ("--port", "port", 30000),
        ("--dist-init-addr 10.0.0.1:5000", "rendezvous", "10.0.0.1:5000"),
        ("--nccl-init-addr=[::1]:5000", "rendezvous", "[::1]:5000"),
        ("--dist-init-addr", "rendezvous", None),
        ("", "rendezvous", None),
        ("--disaggregation-mode prefill", "side", "prefill"),
        ("--disaggregation-mode=decode", "side", "decode"),
        ("--disaggregation-mode null", "side", None),
        ("", "side", None),
    ],
)
def test_a_servers_command_line_tells_of_it(arguments: str, field: str, value: object) -> None:
    words = ("python", "-m", LAUNCH, "--tp", "16", *arguments.split())
    assert getattr(FoundProcess(1, 1, "", "server", {}, 1, words, 0, "title"), field) == value


@pytest.mark.parametrize(
    ("runs", "cmdlines"),
    [
        (
            True,
            """
            python3 -m sglang.launch_server --tp 2
            /venv/bin/python3.11 -u -X dev -m sglang.launch_server
            /venv/bin/python /venv/bin/sglang serve
            python /opt/tests/sglang/launch_server.py
            python3 -m dynamo.sglang.worker --tp 2
            python3 /opt/run_sglang.py
            """,
        ),
        # What has no model, or is no Python.
        (
            False,
            """
            python -m sglang.bench_serving
            python -m sglang_router.launch_router
            python -m sglang.srt.disaggregation.launch_lb
            /venv/bin/python /venv/bin/sglang-crashkit collect --pid 1
            python /venv/bin/pytest -k sglang
            python test_sglang.py
            python train.py --engine sglang
            python /home/me/sglang/notes.py
            python -c import_sglang
            python
            vim sglang/launch_server.py
            bash -c 'python run_sglang.py'

            """,
        ),
    ],
    ids=["sglang", "not"],
)
def test_only_pythons_own_module_or_script_tells_that_sglang_runs(runs: bool, cmdlines: str) -> None:
    for cmdline in map(str.strip, cmdlines.split("\n")[1:-1]):
        # setproctitle may leave the whole command line as one argument.
        for words in (cmdline.split(" "), [cmdline]):
            assert runs_sglang(words) is runs, cmdline


def test_a_process_with_an_overwritten_environment_is_with_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    # The launcher keeps its environment; its fork sets a title.
    titled = """
import ctypes, setproctitle
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    setproctitle.setproctitle("sglang::scheduler_TP0")
    ready(os.getpid())
pause()
"""
    with child(titled) as process:
        pid = int(process.first_line)  # type: ignore[attr-defined]
        assert b"SLURM_JOB_ID" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert place_of(pid) == Place("7", "n2")
