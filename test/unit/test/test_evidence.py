from __future__ import annotations

import subprocess
import sys

from sglang_crashkit.kernel import procfs
from sglang_crashkit.test.evidence import Death, Survivor
from sglang_crashkit.test.fail_fast import Watcher
from unit.support.server_driver import Server
from unit.support.waiting import LONG, child, wait_until
from unit.test.conftest import Watch

GRANDCHILD = """
import subprocess, sys, time
def serve_requests():
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]).pid, flush=True)
    time.sleep(120)
serve_requests()
"""


def test_the_survivors_are_captured_and_then_killed_with_their_children(tmp_path, start):
    victim = start()
    with child("ready(); pause()") as unwatched:
        survivor = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE)
        with survivor:
            grandchild = int(survivor.stdout.readline())
            watch = Watch([("victim", victim), ("survivor", survivor)], tmp_path / "evidence")
            wait_until(lambda: Watcher.covering([victim, survivor]), "both are watched")
            victim.kill()
            death = watch.death()
            assert watch.ended.wait(LONG)
            assert survivor.wait(LONG) == -9
        assert procfs.read_stat(grandchild) is None or procfs.read_stat(grandchild).state == "Z"
        assert unwatched.poll() is None
    doing = {entry.pid: entry.doing for entry in death.survivors}
    assert {survivor.pid, grandchild} == set(doing)
    assert doing[survivor.pid][0].startswith("serve_requests (")
    assert death.folder.parent == tmp_path / "evidence"
    assert death.folder.stat().st_mode & 0o077 == 0
    texts = [path.read_text() for path in death.folder.glob("*.txt")]
    assert len(texts) == 2
    assert any("serve_requests" in text for text in texts)
    assert death.seconds < LONG
    lines = list(death.lines())
    assert lines[0] == f"victim (pid={victim.pid}) exited rc=-9"
    assert any(
        line.startswith(f"meanwhile: survivor: python -c ... (pid {survivor.pid}): serve_requests (") for line in lines
    )


def test_a_tool_that_hangs_does_not_hold_the_message_up(tmp_path, start, monkeypatch):
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sglang_crashkit.capture.pyspy.find_pyspy", lambda: str(slow))
    victim, survivor = start(), start()
    watch = Watch([("victim", victim), ("survivor", survivor)], tmp_path / "evidence")
    victim.kill()
    death = watch.death()
    assert death.seconds < LONG
    assert "did not end within" in death.survivors[0].reason


def test_the_dead_servers_own_incident_is_named(tmp_path, short_folder, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    server = Server(short_folder, crash_folder=None)
    try:
        watch = Watch([("server", server.process)], tmp_path)
        server.kill("scheduler_TP1")
        server.process.wait(LONG)
        death = watch.death()
        incident = server.wait_for_the_end()
    finally:
        server.close()
    assert death.incident.path == incident.path
    assert "scheduler_TP1" in death.verdict
    assert f"[FIXTURE FAIL-FAST] incident: {death.verdict}" in capsys.readouterr().err


def test_one_process_of_each_side_is_named_schedulers_first():
    titles = [("a", "python -m x"), ("a", "sglang::scheduler_TP0"), ("b", "python -m y"), ("a", "sglang::detokenizer")]
    survivors = [Survivor(name, pid, title, ("f (x:1)", "g (x:2)")) for pid, (name, title) in enumerate(titles)]
    lines = list(Death("c", 9, -9, 0.0, survivors=survivors).lines())
    assert [line.split(" (pid ")[0] for line in lines[1:]] == [
        "meanwhile: a: sglang::scheduler_TP0",
        "meanwhile: b: python -m y",
        "meanwhile: a: python -m x",
        "meanwhile: a: sglang::detokenizer",
    ]
    assert lines[1].endswith("): f (x:1) < g (x:2)")
