"""A server that was killed with its crash handler: the marker that it leaves, and what the next start makes of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from incident_schema import assert_fits
from sglang_crashkit.handler.unfinished import SPOOL, finish_abandoned
from sglang_crashkit.incident import marker as markers
from sglang_crashkit.incident.folder import IncidentFolder
from sglang_crashkit.incident.marker import MARKER, TOUCH_SECS, ServerMarker
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.judge.verdict import judge
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.guarded_read import GuardedReader, guard_reads
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.kernel.procfs import server_key
from sglang_crashkit.model.case import case_of
from sglang_crashkit.settings import ENDED
from sglang_crashkit.sources.incident import read_incident
from sglang_crashkit.sources.text.reader import read
from unit.support.killing import run_and_kill
from unit.support.small_disk import fill, mounted
from unit.support.stored import finish_at_once, make_incident
from unit.support.waiting import LONG, wait_until

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
GONE = subprocess.Popen([sys.executable, "-c", ""])
GONE.wait(LONG)


def leave(incidents: Path, *, pid: int = GONE.pid, ticks: int = 1, age: float = 600.0, **told: Any) -> Path:
    """Leave the spool of a server that was killed `age` seconds ago with its crash handler."""
    namespace = told.pop("pid_namespace", procfs.own_namespace())
    spool = incidents / f"{SPOOL}{pid}-{ticks}-{namespace}"
    spool.mkdir(parents=True)
    server = {"pid": pid, "sglang_version": "0.5.23", "kit_version": "1", "hostname": "h", "start_ticks": ticks}
    touched = time.time() - age
    line = {"server": server | {"pid_namespace": namespace}, "title": "python -m sglang.launch_server"}
    line |= {"started": touched - 60, "boot_id": BOOT_ID, "arguments": "0123"} | told
    (spool / MARKER).write_text(json.dumps(line) + "\n")
    os.utime(spool / MARKER, (touched, touched))
    return spool


def told(incidents: Path) -> dict[str, Any]:
    """Return the only incident there is."""
    (found,) = find_incidents(incidents)
    assert found.finished
    assert_fits(found.document)
    return found.document


def vanished(incidents: Path, **options: Any) -> dict[str, Any]:
    """Leave the spool of a server, and return the incident that the next start makes of it."""
    leave(incidents, **options)
    assert len(finish_abandoned(incidents)) == 1
    return told(incidents)


def test_a_server_that_was_killed_as_a_whole_is_an_incident_of_its_own(tmp_path: Path) -> None:
    spool = leave(tmp_path)
    (path,) = finish_abandoned(tmp_path)
    document = told(tmp_path)
    assert (document["kind"], document["complete"]) == ("vanished", True)
    assert (document["cause"]["class"], document["cause"]["level"]) == ("vanished", "established")
    assert (document["verdict"]["kind"], document["verdict"]["first_failure"]) == ("vanished", None)
    text = document["verdict"]["text"]
    assert "and its crash handler ended without a report, after 2" in text
    assert "The machine has run on since." in text
    events = {entry["event"]: entry for entry in document["timeline"]}
    assert document["trigger"]["time"] < events["found_gone"]["time"]
    assert events["server_started"]["arguments"] == "0123"
    assert any("docker inspect" in step for step in document["cause"]["next_steps"])
    summary = (path / "summary.md").read_text()
    assert summary.startswith("# vanished: python -m sglang.launch_server (pid ")
    assert "kubectl describe pod" in summary
    assert not spool.exists()
    assert finish_abandoned(tmp_path) == []


def test_what_docker_says_of_its_end_explains_it(tmp_path: Path) -> None:
    leave(tmp_path)
    (path,) = finish_abandoned(tmp_path)
    (tmp_path / "state").write_text('{"Status":"exited","OOMKilled":true,"ExitCode":137}')
    verdict = judge(case_of([*read_incident(path), *read([tmp_path / "state"], [])]))
    assert (verdict.kind, verdict.level) == ("host_oom", "supported")
    assert verdict.headline.startswith("the container of the server was killed at its memory limit")


@pytest.mark.parametrize("age", [600.0, 0.0], ids=["at-once", "at-a-later-start"])
def test_an_incident_that_was_just_begun_is_told_by_that_of_its_server(tmp_path: Path, age: float) -> None:
    leave(tmp_path, age=age + 20.0)
    folder = IncidentFolder(tmp_path, "killed", "0123abcd", time.time() - age)
    folder.ownership.release()
    os.utime(folder.path, (time.time() - age,) * 2)
    (vanished,) = finish_abandoned(tmp_path)
    if folder.path.exists():
        # It was too young.
        os.utime(folder.path, (1.0, 1.0))
    assert finish_abandoned(tmp_path) == []
    assert [found.path for found in find_incidents(tmp_path)] == [vanished]


def test_of_another_container_nothing_but_the_lock_tells(tmp_path: Path) -> None:
    assert vanished(tmp_path, pid=1, pid_namespace=1)["cause"]["level"] == "supported"


def test_a_node_that_was_started_anew_is_told(tmp_path: Path) -> None:
    document = vanished(tmp_path, boot_id="another", age=1e9)
    assert "The machine was started anew at " in document["verdict"]["text"]
    assert "The kernel's log" not in document["verdict"]["text"]
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    gone = next(entry for entry in document["timeline"] if entry["event"] == "found_gone")
    assert gone["time"][:16] == time.strftime("%Y-%m-%dT%H:%M", time.gmtime(booted))
    assert document["cause"]["level"] == "established"


def test_one_that_was_asked_to_end_before_says_so(tmp_path: Path) -> None:
    spool = leave(tmp_path)
    with (spool / MARKER).open("a") as file:
        # The first line was cut off, as on a full disk.
        file.write(f'{{"asked_\n{json.dumps({"asked_to_end": time.time() - 630})}\n')
    os.utime(spool / MARKER, (time.time() - 600,) * 2)
    finish_abandoned(tmp_path)
    document = told(tmp_path)
    assert "It had been asked to end (SIGTERM) at " in document["verdict"]["text"]
    assert ", 30 s or more before." in document["verdict"]["text"]
    assert document["cause"]["class"] == "vanished"


def test_the_cgroup_and_the_kernel_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.events").write_text("low 0\noom_kill 5\n")
    (group / "pids.events").write_text("max 2\n")
    inode = group.stat().st_ino
    counts = [
        {"path": str(group / "memory.events"), "name": "oom_kill", "inode": inode, "count": 3},
        {"path": str(group / "pids.events"), "name": "max", "inode": inode + 1, "count": 0},
    ]
    now = int(time.monotonic() * 1e6)
    log = tmp_path / "kmsg"
    killed = "Memory cgroup out of memory: Killed process 7 (python)"
    log.write_text(f"4,1,{now - 9_000_000},-;segfault at 0\n6,2,{now},-;eth0: up\n4,3,{now},-;{killed}\n SUBSYSTEM=x\n")
    monkeypatch.setattr(markers, "KERNEL_LOG", str(log))
    document = vanished(tmp_path / "incidents", counts=counts, age=1.0 - TOUCH_SECS)
    text = document["verdict"]["text"]
    assert f"Its cgroup counts 2 OOM kills since it was launched ({group / 'memory.events'})." in text
    # Another cgroup at the same path, as another container's, counts something else.
    assert "pids.events" not in text
    assert f'The kernel\'s log has from then on: "{killed}".' in text
    # What they say is told, and nothing is concluded from it.
    assert document["cause"]["class"] == "vanished"


def test_a_server_at_work_has_not_vanished(tmp_path: Path) -> None:
    own = procfs.read_stat(os.getpid())
    spool = leave(tmp_path, pid=1, pid_namespace=1)
    # Of another container, and its handler holds the lock; and one in this namespace that lost its handler.
    lock = FolderLock(spool)
    assert lock.acquire() == "held"
    leave(tmp_path, pid=own.pid, ticks=own.start_ticks)
    assert finish_abandoned(tmp_path) == []
    assert len(list(tmp_path.glob(f"*/{MARKER}"))) == 2
    lock.release()
    assert len(finish_abandoned(tmp_path)) == 1


@pytest.mark.parametrize(("age", "count"), [(60.0, 0), (600.0, 1)])
def test_without_locks_a_marker_that_is_touched_is_a_servers_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, count: int
) -> None:
    leave(tmp_path, pid=1, pid_namespace=1, age=age)
    monkeypatch.setattr(FolderLock, "acquire", lambda *_: "unsupported")
    assert len(finish_abandoned(tmp_path)) == count


def test_one_that_ended_well_without_its_handler_is_no_incident(tmp_path: Path) -> None:
    spool = leave(tmp_path / "incidents")
    ended = tmp_path / "run" / spool.name.removeprefix(SPOOL) / ENDED
    ended.parent.mkdir(parents=True)
    ended.touch()
    assert finish_abandoned(tmp_path / "incidents", tmp_path / "run") == []
    assert not (spool / MARKER).exists()


def test_an_unfinished_incident_of_the_same_server_tells_of_its_end(tmp_path: Path) -> None:
    spool = leave(tmp_path)
    server = {"pid": GONE.pid, "start_ticks": 1, "pid_namespace": procfs.own_namespace(), "hostname": "h"}
    make_incident(tmp_path, publish=False, server=server)
    assert len(finish_abandoned(tmp_path)) == 1
    assert told(tmp_path)["kind"] == "killed"
    assert not (spool / MARKER).exists()


@pytest.mark.parametrize("content", ["", "{", "[]\n7\n", '{"server": 3}', "\0" * 100, '{"counts": "x"}'])
def test_a_marker_that_says_nothing_costs_nothing(tmp_path: Path, content: str) -> None:
    spool = leave(tmp_path)
    (spool / MARKER).write_text(content)
    os.utime(spool / MARKER, (time.time() - 600,) * 2)
    for path in finish_abandoned(tmp_path):
        assert_fits(json.loads((path / "incident.json").read_text()))
    assert not (spool / MARKER).exists()


def test_two_starts_at_once_make_one_incident_of_each(tmp_path: Path) -> None:
    for ticks in range(12):
        leave(tmp_path, ticks=ticks + 1, age=600.0 + ticks)
    assert finish_at_once(tmp_path) == 12
    assert len(find_incidents(tmp_path)) == 12


def test_a_start_that_is_killed_leaves_one_incident_for_the_next(tmp_path: Path) -> None:
    for step in range(1000):
        incidents = tmp_path / str(step)
        leave(incidents)
        was_killed = run_and_kill(lambda folder=incidents: finish_abandoned(folder), incidents, step)
        for partial in incidents.glob(".partial-*"):
            os.utime(partial, (1, 1))
        finish_abandoned(incidents)
        assert not list(incidents.glob(f"*/{MARKER}"))
        (found,) = [found for found in find_incidents(incidents) if found.document and found.document["verdict"]]
        assert found.document["cause"]["class"] == "vanished"
        if not was_killed:
            break
    assert step > 5


def test_no_more_than_a_handful_of_markers_is_told(tmp_path: Path) -> None:
    for ticks in range(20):
        leave(tmp_path, ticks=ticks + 1, age=600.0 + ticks)
    assert len(finish_abandoned(tmp_path)) == 16
    assert not list(tmp_path.glob(f"*/{MARKER}"))


class Handler:
    """What keeps the marker of this process, on a clock of its own."""

    def __init__(self, spool: Path) -> None:
        self.now, self.said = 0.0, list[str]()
        self.touching: list[psutil.Process] = []
        self.marker = ServerMarker(spool, self.said.append, lambda: self.now)
        self.path = spool / MARKER

    def begin(self) -> None:
        stat = procfs.read_stat(os.getpid())
        self.marker.begin(stat.pid, stat.start_ticks)

    def advance(self, secs: float = TOUCH_SECS) -> None:
        before = psutil.Process().children()
        self.now += secs
        self.marker.act_on_time()
        self.touching = [one for one in psutil.Process().children() if one not in before]

    def settle(self) -> None:
        """Wait until the child that touches it has ended, for which this clock gives it no time."""
        wait_until(lambda: all(map(has_ended, self.touching)), "the child has ended")


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    stat = procfs.read_stat(os.getpid())
    spool = tmp_path / f"{SPOOL}{server_key(stat.pid, stat.start_ticks)}"
    spool.mkdir()
    return spool


def test_a_marker_names_a_server_program_and_is_touched(spool: Path) -> None:
    handler = Handler(spool)
    handler.marker.create()
    handler.advance()
    assert handler.marker.act_on_time() == float("inf")
    assert handler.path.read_text() == ""
    handler.begin()
    handler.advance(0.0)
    wait_until(lambda: "boot_id" in handler.path.read_text(), "the marker is written")
    (line,) = handler.path.read_text().split("\n")[1:-1]
    said = json.loads(line)
    assert (said["server"]["pid"], said["boot_id"]) == (os.getpid(), BOOT_ID)
    assert handler.path.stat().st_mode & 0o777 == 0o600
    os.utime(handler.path, (1, 1))
    handler.advance(TOUCH_SECS - 1)
    assert handler.path.stat().st_mtime == 1
    handler.marker.ask_to_end(5.0)
    wait_until(lambda: handler.advance(0.1) or handler.path.stat().st_mtime > 1, "the marker is touched")
    assert json.loads(handler.path.read_text().splitlines()[-1]) == {"asked_to_end": 5.0}
    size = handler.path.stat().st_size
    handler.settle()
    os.utime(handler.path, (1, 1))
    handler.advance()
    wait_until(lambda: handler.path.stat().st_mtime > 1, "the marker is touched")
    assert handler.path.stat().st_size == size
    assert handler.said == []


def test_a_marker_has_the_command_line_that_a_crash_handler_reads_by_a_helper(spool: Path) -> None:
    handler = Handler(spool)
    handler.marker.create()
    guard_reads(GuardedReader())
    try:
        handler.begin()
        handler.advance(0.0)
        wait_until(lambda: "boot_id" in handler.path.read_text(), "the marker is written")
    finally:
        guard_reads(None)
    said = json.loads(handler.path.read_text())
    command = procfs.read_cmdline(os.getpid())
    assert said["title"] == procfs.title_of(command, "")
    assert said["arguments"] == hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def test_a_marker_that_is_gone_does_not_come_back(spool: Path) -> None:
    handler = Handler(spool)
    handler.marker.create()
    handler.begin()
    handler.advance(0.0)
    handler.settle()
    shutil.rmtree(spool)
    for _ in range(3):
        handler.advance()
        handler.settle()
    assert (handler.path.exists(), handler.marker.act_on_time()) == (False, float("inf"))


def test_a_crash_folder_that_is_taken_away_is_told_once(spool: Path) -> None:
    handler = Handler(spool)
    handler.marker.create()
    handler.begin()
    shutil.rmtree(spool)
    for _ in range(4):
        handler.advance()
        handler.settle()
    assert len(handler.said) == 1
    assert "cannot be kept (No such file or directory)" in handler.said[0]


def test_a_disk_that_does_not_answer_holds_nobody_up(spool: Path) -> None:
    handler = Handler(spool)
    # Opening it waits for a reader, as for a disk.
    os.mkfifo(handler.path)
    handler.begin()
    for _ in range(4):
        began = time.monotonic()
        handler.advance()
        assert time.monotonic() - began < 1.0
    (line,) = handler.said
    assert "did not answer" in line
    # The child that still waits ends now, and not with the machine.
    reader = os.open(handler.path, os.O_RDONLY | os.O_NONBLOCK)
    handler.settle()
    os.close(reader)


def test_a_full_disk_costs_the_marker_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        handler = Handler(disk)
        handler.marker.create()
        fill(disk)
        handler.begin()
        handler.advance(0.0)
        handler.settle()
        handler.advance()
        assert len(handler.said) == 1
        for filler in disk.glob("filling-*"):
            filler.unlink()
        handler.settle()
        handler.advance()
        wait_until(lambda: markers.read_marker(disk) is not None, "the marker is written")
